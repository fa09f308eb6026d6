"""RowCosts: what is learned from steps of known cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.backends.base import SeqRows
from edge_rt.engine.row_costs import RowCosts


def step(start: int, n: int) -> list[SeqRows]:
    return [SeqRows(0, start, [1] * n, want_logits=False)]


def seconds(start: int, n: int, flat: float, slope: float) -> float:
    return sum(flat + slope * (start + i + 0.5) for i in range(n))


@given(st.floats(1e-4, 1e-2), st.floats(0, 1e-5), st.integers(64, 512))
def test_both_parts_are_told_apart_and_the_next_step_is_expected(flat: float, slope: float, n: int) -> None:
    costs = RowCosts()
    for start in range(0, 4000, n):
        costs.observe(step(start, n), seconds(start, n, flat, slope))
    assert costs.seconds(n, 4000) == pytest.approx(seconds(4000, n, flat, slope), rel=0.02)
    assert costs.seconds(n, 0) == pytest.approx(seconds(0, n, flat, slope), rel=0.1)


@given(st.floats(1e-4, 1e-2), st.floats(0, 1e-5), st.floats(0.05, 2.0), st.integers(0, 8000))
def test_as_many_rows_as_take_the_limit(flat: float, slope: float, limit_s: float, start: int) -> None:
    costs = RowCosts()
    for at in range(0, 4000, 256):
        costs.observe(step(at, 256), seconds(at, 256, flat, slope))
    n = costs.rows_within(limit_s, start)
    assert n is not None
    assert costs.seconds(n, start) <= limit_s * 1.0001
    assert costs.seconds(n + 1, start) >= limit_s * 0.9999


def test_rows_deep_in_a_prompt_are_fewer() -> None:
    costs = RowCosts()
    for at in range(0, 4000, 256):
        costs.observe(step(at, 256), seconds(at, 256, 1e-3, 1e-6))
    near, far = costs.rows_within(0.15, 0), costs.rows_within(0.15, 4000)
    assert near is not None
    assert far is not None
    assert far < near / 3


def test_nothing_is_known_before_a_step_that_tells() -> None:
    costs = RowCosts()
    assert costs.rows_within(0.15, 0) is None
    costs.observe(step(0, 8), 1.0)  # so few rows cost what reading the weights costs
    assert costs.rows_within(0.15, 0) is None
    assert costs.seconds(100, 0) == 0.0


def test_a_step_that_was_held_up_does_not_halt_prompts() -> None:
    costs = RowCosts()
    for at in range(0, 2000, 200):
        costs.observe(step(at, 200), 0.2)
    before = costs.rows_within(0.15, 0)
    costs.observe(step(0, 200), 60.0)
    after = costs.rows_within(0.15, 0)
    assert before is not None
    assert after is not None
    assert after >= before / 4
