"""Whatever happens around a request, its greedy answer is the one it gets alone: schedules drawn on the null back end.

Each letter of an answer depends on all tokens before it, so that a row at a wrong place, of another prompt or left over
from a guess changes the text.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.turns import PRIORITIES
from tests.fakes import FakeClock
from tests.unit.engine.null_draft import NullDraft
from tests.unit.engine.null_engine import Answer, Bench, Recorder, Whole, complete

COMMON = ["once upon a time there was " * 3, "once upon a midnight dreary, " * 3, "x" * 70]
N_ANSWER = 24


class Paged(Recorder):
    """Keeps idle sequences in the KV, as the native engine does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caps = replace(self.caps, reads_own_cells=True)


def ids(answer: Answer) -> list[int]:
    return [token_id for chunk in answer.chunks for token_id in chunk.token_ids]


@lru_cache(maxsize=4096)
def alone(prompt: str) -> list[int]:
    bench = Bench(max_draft=0, max_prefix_bytes=0)
    answer = bench.ask(complete(prompt, max_tokens=N_ANSWER, ignore_eos=True))
    bench.run(answer)
    return ids(answer)


asks = st.tuples(
    st.just("ask"),
    st.sampled_from(COMMON),
    st.integers(0, 90),  # of it
    st.integers(0, 4),  # how it goes on
    st.integers(1, N_ANSWER),
    st.sampled_from(PRIORITIES),
    st.sampled_from("abc"),
)
plans = st.lists(
    st.one_of(
        asks,
        st.tuples(st.just("step"), st.integers(1, 15)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("rest")),
    ),
    max_size=50,
)


@pytest.mark.parametrize("session_type", [Recorder, Whole, Paged])
@settings(max_examples=60, deadline=None)
@given(
    plan=plans,
    n_ctx=st.integers(150, 400),
    n_seq_max=st.integers(1, 5),
    n_batch=st.integers(32, 128),
    max_prefix_bytes=st.sampled_from([0, 900, 5000, 10**6]),
    is_isolated=st.booleans(),
    max_draft=st.sampled_from([0, 15]),
    acceptance=st.sampled_from([None, 0.0, 0.6, 1.0]),
)
def test_each_answer_is_the_one_it_has_alone(
    session_type: type[Recorder],
    plan: list[tuple[Any, ...]],
    n_ctx: int,
    n_seq_max: int,
    n_batch: int,
    max_prefix_bytes: int,
    is_isolated: bool,
    max_draft: int,
    acceptance: float | None,
) -> None:
    def draft_model(clock: FakeClock) -> NullDraft:
        return NullDraft(clock, lambda: acceptance or 0.0, token_s=0.0005, row_s=0.0001)

    bench = Bench(
        n_ctx=n_ctx,
        n_seq_max=n_seq_max,
        n_batch=n_batch,
        session_type=session_type,
        max_prefix_bytes=max_prefix_bytes,
        isolate_prefixes=is_isolated,
        max_draft=max_draft,
        draft_model=None if acceptance is None else draft_model,
    )
    asked: list[tuple[str, int, Answer]] = []
    cancelled: set[int] = set()
    for verb, *rest in plan:
        if verb == "ask":
            text, n, tail, n_tokens, priority, tenant = rest
            prompt = text[:n] + "-+*/."[tail] * (tail + 1)
            request = complete(
                prompt, str(len(asked)), max_tokens=n_tokens, ignore_eos=True, priority=priority, tenant=tenant
            )
            asked.append((prompt, n_tokens, bench.ask(request)))
        elif verb == "cancel" and rest[0] < len(asked):
            bench.engine.cancel(str(rest[0]))
            cancelled.add(rest[0])
        elif verb == "rest":
            bench.engine._slots.save_idle(lambda: True)
        elif verb == "step":
            for _ in range(rest[0]):
                bench.engine.step()
    bench.engine.step()
    bench.run(*(answer for number, (_, _, answer) in enumerate(asked) if number not in cancelled))
    for number, (prompt, n_tokens, answer) in enumerate(asked):
        expected = alone(prompt)[:n_tokens]
        assert answer.error is None
        assert ids(answer) == (expected[: len(ids(answer))] if number in cancelled else expected)
    bench.assert_idle()
    assert bench.engine.stats().prefix_bytes <= max_prefix_bytes


def test_a_thousand_requests_with_clients_that_leave_hold_no_cell_in_the_end() -> None:
    bench = Bench(n_ctx=600, n_seq_max=4, n_batch=64, max_prefix_bytes=20_000)
    chance = random.Random(9)
    open_: dict[str, Answer] = {}
    for number in range(1000):
        text = chance.choice(COMMON)[: chance.randrange(1, 80)] + str(number % 7)
        request = complete(
            text,
            str(number),
            max_tokens=chance.randrange(1, 40),
            ignore_eos=True,
            priority=chance.choice(PRIORITIES),
            tenant=chance.choice("abcd"),
        )
        open_[request.id] = bench.ask(request)
        for _ in range(chance.randrange(4)):
            bench.engine.step()
        if chance.random() < 0.5:
            gone = chance.choice(list(open_))
            bench.engine.cancel(gone)
            del open_[gone]
        open_ = {name: answer for name, answer in open_.items() if not answer.is_over}
    bench.engine.step()
    bench.run(*open_.values())
    bench.assert_idle()
    assert all(answer.error is None for answer in open_.values())
    assert bench.engine.stats().cancelled_total > 100
    while bench.engine._slots.drop_oldest_idle():
        pass
    assert bench.session.cells_used() == 0
