"""How far joining pays: the choice comes to what the costs say, follows them, and waits only for a gain."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.batcher import Batcher
from edge_rt.engine.joining import BatchCosts, Joining

MAX_ROWS = 16

Cost = Callable[[int], float]


def linear(fixed_s: float, row_s: float) -> Cost:
    return lambda n_rows: fixed_s + row_s * n_rows


def served(joining: Joining, cost_s: Cost, n_batches: int, n_waiting: int = MAX_ROWS) -> list[int]:
    """Let a full queue be computed for a while; give the sizes of the batches."""
    sizes = []
    for _ in range(n_batches):
        sizes.append(joining.choose(n_waiting))
        joining.observe(sizes[-1], cost_s(sizes[-1]))
    return sizes


def row_s(sizes: list[int], cost_s: Cost) -> float:
    return sum(map(cost_s, sizes)) / sum(sizes)


fixed = st.floats(0.0, 0.01)
rows = st.floats(1e-5, 0.01)


def test_what_is_not_known_is_joined_whole() -> None:
    joining = Joining(MAX_ROWS)
    assert joining.choose(5) == 5
    assert Joining(MAX_ROWS).choose(99) == MAX_ROWS
    assert Joining(MAX_ROWS).is_worth_waiting(1, 8)


@given(fixed, rows)
def test_it_comes_to_the_size_that_computes_the_most_rows_a_second(fixed_s: float, each_s: float) -> None:
    cost_s, joining = linear(fixed_s, each_s), Joining(MAX_ROWS)
    served(joining, cost_s, 100)
    best = min(cost_s(n) / n for n in range(1, MAX_ROWS + 1))
    assert row_s(served(joining, cost_s, 400), cost_s) <= 1.1 * best


@given(
    st.lists(st.floats(1e-4, 1e-2), min_size=MAX_ROWS, max_size=MAX_ROWS), st.sampled_from([1, 2, 4, 8, MAX_ROWS, 40])
)
def test_any_costs_any_queue_it_takes_what_is_there_and_not_much_worse_than_all_of_it(
    costs_s: list[float], n_waiting: int
) -> None:
    joining = Joining(MAX_ROWS)

    def cost_s(n_rows: int) -> float:
        return costs_s[n_rows - 1]

    served(joining, cost_s, 150, n_waiting)
    sizes = served(joining, cost_s, 400, n_waiting)
    n_most = min(n_waiting, MAX_ROWS)
    assert all(1 <= size <= n_most for size in sizes)
    ladder = {n_most} | {1 << i for i in range(n_most.bit_length())}
    best = min(cost_s(n) / n for n in ladder)
    settled = [size for size in sizes if sizes.count(size) > 20]  # the others are trials
    assert row_s(settled, cost_s) <= 1.04 * best


def test_what_remains_behind_a_batch_counts() -> None:
    joining = Joining(MAX_ROWS)
    for n_rows, seconds in ((4, 0.023), (12, 0.032), (16, 0.048)):
        joining.observe(n_rows, seconds)
    assert joining.best(12) == 12
    assert joining.best(16) == 16  # twelve go faster for each, but four alone take half as long again


@given(fixed, rows, st.floats(0.2, 0.9))
def test_a_batch_that_was_held_up_changes_nothing(fixed_s: float, each_s: float, where: float) -> None:
    cost_s, joining = linear(fixed_s, each_s), Joining(MAX_ROWS)
    served(joining, cost_s, 200)
    size = joining.best(MAX_ROWS)
    joining.observe(max(1, int(where * MAX_ROWS)), 100.0)
    joining.observe(size, 100.0)
    assert joining.best(MAX_ROWS) == size


def test_when_rows_become_dear_it_stops_joining_and_when_they_become_cheap_it_joins_again() -> None:
    pays, does_not, joining = linear(0.01, 0.0001), linear(0.0, 0.001), Joining(MAX_ROWS)
    served(joining, pays, 200)
    assert joining.best(MAX_ROWS) == MAX_ROWS
    served(joining, does_not, 1200)
    assert joining.best(MAX_ROWS) == 1
    served(joining, pays, 1200)
    assert joining.best(MAX_ROWS) == MAX_ROWS


@given(rows, st.integers(1, MAX_ROWS), st.integers(1, 40))
def test_nobody_is_waited_for_where_joining_does_not_pay(each_s: float, n_rows: int, n_expected: int) -> None:
    joining = Joining(MAX_ROWS)
    served(joining, linear(0.0, each_s), 100)
    assert not joining.is_worth_waiting(n_rows, n_expected)


def test_a_wait_is_worth_what_the_larger_batch_saves() -> None:
    joining = Joining(MAX_ROWS)
    served(joining, linear(0.003, 0.0001), 100)
    joining.waited(0.002)
    assert joining.is_worth_waiting(1, 8)  # one batch instead of two saves 3 ms
    assert not joining.is_worth_waiting(8, 8)
    for _ in range(10):
        joining.waited(0.005)
    assert not joining.is_worth_waiting(1, 8)
    served(joining, linear(0.003, 0.0001), 400)
    assert joining.is_worth_waiting(1, 8)  # the wait is tried again


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = BatchCosts()
    assert costs.seconds(3) is None
    costs.observe(2, 0.25)
    costs.observe(6, 0.5)
    assert costs.seconds(4) == 0.375
    assert costs.seconds(1) == 0.125
    assert costs.seconds(12) == 1.0
    for _ in range(800):
        costs.observe(2, 0.25)
    assert costs.sizes == [2]  # what has not been seen for long is forgotten


def test_a_queue_learns_from_its_batches_not_to_wait() -> None:
    queue: Batcher[int] = Batcher(max_batch=8, max_delay_s=0.01)
    now_s = 0.0
    for _ in range(60):
        for i in range(8):
            queue.add(i, key="k", n_rows=1, now_s=now_s)
        while (batch := queue.take(now_s)) is not None or len(queue):
            assert batch is not None  # they are all here
            now_s += 0.001 * batch.n_rows
            queue.finished(batch, now_s, compute_s=0.001 * batch.n_rows)
    queue.add(0, key="k", n_rows=1, now_s=now_s)
    assert queue.wait_s(now_s) == 0.0  # the seven others that are due are not waited for
    batch = queue.take(now_s)
    assert batch is not None
    assert batch.items == [0]
