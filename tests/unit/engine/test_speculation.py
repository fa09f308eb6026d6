"""share and StepCosts: how many guesses a step checks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.speculation import StepCosts, share

falling = st.lists(st.floats(0.02, 0.99), max_size=15).map(lambda each: sorted(each, reverse=True))


def linear(step_s: float, row_s: float):  # type: ignore[no-untyped-def]
    return lambda n_rows: step_s + n_rows * row_s


@given(st.lists(falling, min_size=1, max_size=8), st.integers(-3, 60), st.floats(0.0, 0.02), st.floats(0.0, 0.02))
def test_the_choice_is_the_best_of_all_shares(
    chances: list[list[float]], n_max: int, step_s: float, row_s: float
) -> None:
    n_rows, seconds = len(chances), linear(step_s, row_s)
    chosen = share(chances, n_rows=n_rows, n_max=n_max, seconds=seconds)
    assert all(0 <= n <= len(each) for n, each in zip(chosen, chances, strict=True))
    assert sum(chosen) <= max(n_max, 0)
    if seconds(n_rows) <= 0:
        assert sum(chosen) == 0
        return

    def rate(ns: list[int]) -> float:
        gained = sum(sum(each[:n]) for n, each in zip(ns, chances, strict=True))
        return (n_rows + gained) / seconds(n_rows + sum(ns))

    assert not sum(chosen) or rate(chosen) >= 1.03 * rate([0] * n_rows)
    for i in range(n_rows):  # one more or one less of any sequence is no better
        for n in (chosen[i] - 1, chosen[i] + 1):
            other = [*chosen[:i], n, *chosen[i + 1 :]]
            if (
                0 <= n <= len(chances[i])
                and sum(other) <= n_max
                and (sum(chosen) or rate(other) >= 1.03 * rate(chosen))
            ):
                assert rate(other) <= rate(chosen) * (1 + 1e-9)


def test_guesses_that_cost_nothing_are_all_checked() -> None:
    assert share([[0.9, 0.5, 0.1]], n_rows=1, n_max=10, seconds=linear(0.01, 0.0)) == [3]


def test_a_guess_must_bring_more_than_its_row_costs() -> None:
    seconds = linear(0.0, 0.01)  # a row costs as much as a step of its own
    assert share([[0.99, 0.98]], n_rows=1, n_max=10, seconds=seconds) == [0]
    assert share([[0.5, 0.2]], n_rows=1, n_max=10, seconds=linear(0.01, 0.004)) == [1]


def test_in_a_full_step_guesses_are_left_out() -> None:
    seconds = linear(0.01, 0.002)
    chances = [[0.7, 0.5]]
    assert sum(share(chances, n_rows=1, n_max=99, seconds=seconds)) > 0
    assert sum(share(chances * 32, n_rows=32, n_max=99, seconds=seconds)) == 0


def test_the_likeliest_guesses_get_the_room() -> None:
    assert share([[0.3, 0.2], [0.9, 0.8, 0.7]], n_rows=2, n_max=3, seconds=linear(0.01, 0.0)) == [0, 3]


def test_nothing_is_guessed_before_a_step_was_measured() -> None:
    assert share([[0.9]], n_rows=1, n_max=9, seconds=StepCosts().seconds) == [0]


def test_costs_lie_on_straight_lines_between_what_was_measured() -> None:
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.row_s = 0.002
    assert costs.seconds(1) == 0.010
    assert costs.seconds(5) == pytest.approx(0.018)
    costs.observe(9, 0.026)
    costs.observe(3, 0.011)
    assert costs.seconds(2) == pytest.approx(0.0105)
    assert costs.seconds(6) == pytest.approx(0.0185)
    assert costs.seconds(11) == pytest.approx(0.030)


def test_one_step_that_was_held_up_hardly_counts() -> None:
    costs = StepCosts()
    for seconds in [0.01] * 5 + [1.0]:
        costs.observe(1, seconds)
    assert costs.seconds(1) == pytest.approx(0.012)
    for _ in range(40):
        costs.observe(1, 0.02)
    assert costs.seconds(1) == pytest.approx(0.02, rel=0.01)


def test_what_was_measured_long_ago_is_forgotten_and_tried_again() -> None:
    costs = StepCosts()
    costs.observe(1, 0.01)
    costs.observe(4, 1.0)  # in bad company
    costs.row_s = 0.001
    chances = [[0.8, 0.7, 0.6]]
    assert share(chances, n_rows=1, n_max=3, seconds=costs.seconds) == [0]
    for _ in range(320):
        costs.observe(1, 0.01)
    assert share(chances, n_rows=1, n_max=3, seconds=costs.seconds) == [3]
