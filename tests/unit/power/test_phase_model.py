"""The learned times t = a + b n / x."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.power import phase_model

CLOCKS = (0.4, 0.6, 0.8, 1.0)


def _prior(scale: float = 1.0) -> phase_model.Phase:
    return phase_model.fit([(x, scale * (0.03 + 0.01 / x)) for x in CLOCKS])


def test_a_fit_finds_what_points_were_made_of() -> None:
    phase = _prior()
    assert phase.a_s == pytest.approx(0.03)
    assert phase.b_s == pytest.approx(0.01)
    assert phase.seconds(0.5, n=2) == pytest.approx(0.03 + 0.01 * 2 / 0.5)


def test_one_point_alone_is_half_waiting() -> None:
    phase = phase_model.fit([(1.0, 0.04)])
    assert phase.a_s == pytest.approx(0.02)
    assert phase.seconds(1.0) == pytest.approx(0.04)


def test_it_learns_from_noisy_steps_at_several_clocks() -> None:
    rng = random.Random(1)
    phase = _prior(1.4)
    for _ in range(200):
        x = rng.choice(CLOCKS)
        phase = phase_model.observe(phase, (0.025 + 0.02 / x) * rng.gauss(1.0, 0.03), x=x)
    for x in CLOCKS:
        assert phase.seconds(x) == pytest.approx(0.025 + 0.02 / x, rel=0.05)


def test_one_clock_alone_moves_the_others_along() -> None:
    phase = _prior()
    for _ in range(50):
        phase = phase_model.observe(phase, 2 * (0.03 + 0.01 / 0.6), x=0.6)
    assert phase.seconds(0.6) == pytest.approx(2 * (0.03 + 0.01 / 0.6), rel=0.02)
    assert phase.seconds(1.0) > 1.5 * 0.04


def test_an_accident_is_ignored_and_a_new_model_is_not() -> None:
    phase = _prior()
    assert phase_model.observe(phase, 3.0, x=1.0).seconds(1.0) == phase.seconds(1.0)
    for _ in range(4):
        phase = phase_model.observe(phase, 3.0, x=1.0)
    assert phase.seconds(1.0) == pytest.approx(3.0)


def test_one_time_that_is_far_off_moves_what_is_known_by_a_part() -> None:
    phase = _prior()
    for _ in range(30):
        for x in CLOCKS:
            phase = phase_model.observe(phase, _prior().seconds(x), x=x)
    before = phase.seconds(1.0)
    after = phase_model.observe(phase, 0.3 * before, x=1.0).seconds(1.0)
    assert 0.6 * before < after < before
    # The more doubtful the time is, the less it counts.
    assert phase_model.observe(phase, 0.3 * before, x=1.0, noise=0.2).seconds(1.0) > after


def test_a_first_time_replaces_relative_ones() -> None:
    phase = phase_model.scaled(_prior(100.0), 0.08, x=0.4)
    assert phase.seconds(0.4) == pytest.approx(0.08)
    assert phase.a_s / phase.b_s == pytest.approx(3.0)


@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(min_value=-1.0, max_value=2.0),
            st.floats(min_value=0.0, max_value=64.0),
        ),
        max_size=60,
    )
)
def test_whatever_comes_times_stay_finite_and_fall_with_the_clock(seen: list[tuple[float, float, float]]) -> None:
    phase = _prior()
    for seconds, x, n in seen:
        phase = phase_model.observe(phase, seconds, x=x, n=n)
    times = [phase.seconds(x) for x in CLOCKS]
    assert all(math.isfinite(t) and t > 0 for t in times)
    assert times == sorted(times, reverse=True)
    assert min(phase.c_aa, phase.c_bb) >= 0
