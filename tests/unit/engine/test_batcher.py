"""Micro-batching: who is joined with whom, who is waited for, and that nobody is lost."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.batcher import Batcher

DELAY_S = 0.01


def batcher(max_batch: int = 4) -> Batcher[str]:
    return Batcher(max_batch=max_batch, max_delay_s=DELAY_S)


def taken(queue: Batcher[str], now_s: float) -> list[str]:
    batch = queue.take(now_s)
    return batch.items if batch is not None else []


def after_a_crowd(n: int, max_batch: int = 4) -> Batcher[str]:
    """Give a queue, empty at 0 s, that has seen n requests together."""
    queue = batcher(max_batch)
    for i in range(n):
        queue.add(f"old{i}", key="k", n_rows=1, now_s=-1.0)
    while (batch := queue.take(-1.0)) is not None:
        queue.finished(batch, -1.0)
    return queue


def test_a_lone_client_never_waits() -> None:
    queue = batcher()
    for i in range(5):
        queue.add(f"{i}", key="k", n_rows=1, now_s=i * 1e-4)
        batch = queue.take(i * 1e-4)
        assert batch is not None
        assert batch.items == [f"{i}"]
        queue.finished(batch, i * 1e-4)


def test_what_gathers_while_the_model_computes_goes_together() -> None:
    queue = batcher()
    for name in "abc":
        queue.add(name, key="k", n_rows=1, now_s=0.0)
    assert taken(queue, 0.0) == ["a", "b", "c"]
    assert queue.take(0.0) is None
    assert queue.wait_s(0.0) is None


def test_a_crowd_that_was_here_is_waited_for_and_no_longer_once_it_is_complete() -> None:
    queue = after_a_crowd(3)
    queue.add("a", key="k", n_rows=1, now_s=0.0)
    assert queue.take(0.0) is None
    assert queue.wait_s(0.004) == 0.006
    queue.add("b", key="k", n_rows=1, now_s=0.005)
    assert queue.take(0.005) is None
    queue.add("c", key="k", n_rows=1, now_s=0.006)
    assert taken(queue, 0.006) == ["a", "b", "c"]


def test_whoever_stays_away_is_waited_for_once() -> None:
    queue = after_a_crowd(3)
    queue.add("a", key="k", n_rows=1, now_s=0.0)
    assert queue.take(0.009) is None
    batch = queue.take(0.01)
    assert batch is not None
    assert batch.items == ["a"]
    queue.finished(batch, 0.01)
    queue.add("b", key="k", n_rows=1, now_s=0.02)
    assert taken(queue, 0.02) == ["b"]


def test_who_has_little_patience_is_not_made_to_wait_longer() -> None:
    queue = after_a_crowd(3)
    queue.add("a", key="k", n_rows=1, now_s=0.0)
    queue.add("b", key="k", n_rows=1, now_s=0.001, patience_s=0.002)
    assert queue.take(0.002) is None
    assert queue.wait_s(0.002) == 0.001
    assert taken(queue, 0.003) == ["a", "b"]


def test_a_request_that_computes_is_not_waited_for() -> None:
    queue = after_a_crowd(2)
    queue.add("a", key="k", n_rows=1, now_s=0.0)
    assert taken(queue, 0.01) == ["a"]
    queue.add("b", key="k", n_rows=1, now_s=0.02)  # with a, which still computes, these are two again
    assert taken(queue, 0.02) == ["b"]


def test_a_full_batch_waits_for_nobody() -> None:
    queue = after_a_crowd(8, max_batch=4)
    for name in "abcde":
        queue.add(name, key="k", n_rows=1, now_s=0.0)
    assert taken(queue, 0.0) == ["a", "b", "c", "d"]
    assert queue.take(0.0) is None
    assert taken(queue, 0.01) == ["e"]


def test_rows_count_not_requests_and_order_is_kept() -> None:
    queue = batcher(max_batch=4)
    for name, n_rows in (("a", 2), ("b", 3), ("c", 1), ("large", 9), ("d", 2)):
        queue.add(name, key="k", n_rows=n_rows, now_s=0.0)
    batches = []
    while (batch := queue.take(0.0)) is not None:
        batches.append((batch.items, batch.n_rows))
    assert (["large"], 9) in batches
    assert [batch for batch in batches if batch[0] != ["large"]] == [(["a"], 2), (["b", "c"], 4), (["d"], 2)]


def test_the_oldest_comes_first_whatever_its_key() -> None:
    queue = batcher()
    queue.add("b1", key="b", n_rows=1, now_s=0.0)
    queue.add("alone", key=None, n_rows=1, now_s=0.001)
    queue.add("a1", key="a", n_rows=1, now_s=0.002)
    queue.add("b2", key="b", n_rows=1, now_s=0.003)
    assert [taken(queue, 0.003) for _ in range(4)] == [["b1", "b2"], ["alone"], ["a1"], []]


def test_a_key_that_waits_holds_up_no_other_and_is_not_starved() -> None:
    queue = after_a_crowd(3)
    queue.add("a", key="k", n_rows=1, now_s=0.0)
    order = []
    for i in range(1, 30):
        queue.add(f"other{i}", key="other", n_rows=4, now_s=i * 0.001)
        order += taken(queue, i * 0.001)
    assert order[0] == "other1"
    assert order.index("a") <= 11


def test_removed_requests_are_gone() -> None:
    queue = batcher()
    for name in "abc":
        queue.add(name, key="k", n_rows=1, now_s=0.0)
    queue.add("d", key=None, n_rows=1, now_s=0.0)
    assert queue.remove(lambda name: name in "bd") == ["d", "b"]
    assert len(queue) == 2
    assert taken(queue, 0.0) == ["a", "c"]
    assert (len(queue), queue.wait_s(0.0)) == (0, None)


def test_ten_thousand_shapes_are_not_remembered() -> None:
    queue = batcher()
    for i in range(10_000):
        queue.add("x", key=i, n_rows=1, now_s=0.0)
        if (batch := queue.take(0.0)) is not None:
            queue.finished(batch, 0.0)
    assert len(queue._kinds) <= 64
    assert not queue._queues
    assert not queue._computing


@dataclass(frozen=True)
class Step:
    pause_s: float
    key: str | None
    n_rows: int
    runs: int  # batches that may be computed after it
    cancels: int | None


STEPS = st.builds(
    Step,
    pause_s=st.sampled_from([0.0, 0.001, 0.004, 0.02]),
    key=st.sampled_from(["a", "b", None]),
    n_rows=st.integers(1, 6),
    runs=st.integers(0, 2),
    cancels=st.none() | st.integers(0, 40),
)


@given(st.lists(STEPS, max_size=40), st.integers(1, 5), st.booleans())
def test_nothing_is_lost_nothing_comes_twice_and_order_holds(
    steps: list[Step], max_batch: int, is_parallel: bool
) -> None:
    queue: Batcher[tuple[int, Step]] = Batcher(max_batch=max_batch, max_delay_s=DELAY_S)
    now_s, seen, cancelled, came_s = 0.0, [], set[int](), dict[int, float]()
    open_batches = []

    def run(now_s: float) -> bool:
        batch = queue.take(now_s)
        if batch is None:
            assert queue.wait_s(now_s) != 0.0
            return False
        assert sum(step.n_rows for _, step in batch.items) == batch.n_rows
        assert len(batch.items) == 1 or batch.n_rows <= max_batch
        assert len(batch.items) == 1 or {step.key for _, step in batch.items} == {batch.key}
        assert batch.key is not None or len(batch.items) == 1
        seen.extend(number for number, _ in batch.items)
        open_batches.append(batch)
        if not is_parallel or len(open_batches) > 2:
            queue.finished(open_batches.pop(0), now_s)
        return True

    for number, step in enumerate(steps):
        now_s += step.pause_s
        came_s[number] = now_s
        queue.add((number, step), key=step.key, n_rows=step.n_rows, now_s=now_s)
        if step.cancels is not None:
            cancelled |= {n for n, _ in queue.remove(lambda item, step=step: item[0] == step.cancels)}
        for _ in range(step.runs):
            run(now_s)
    while (wait_s := queue.wait_s(now_s)) is not None:
        assert wait_s <= DELAY_S + 1e-9
        now_s += wait_s
        assert run(now_s + 1e-12)
    assert sorted([*seen, *cancelled]) == list(range(len(steps)))
    assert len(queue) == 0
    for key in ("a", "b"):  # within a key what can be joined keeps its order
        of_key = [n for n in seen if steps[n].key == key and steps[n].n_rows < max_batch]
        assert of_key == sorted(of_key)
