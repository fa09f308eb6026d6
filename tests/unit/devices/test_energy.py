from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.energy import Curve, EnergyLog
from edge_rt.devices.meters import Sample


def power(watts: float | None, age_s: float = 0.0) -> Reading[Sample]:
    if watts is None:
        return unknown("m", "no answer")
    return known(Sample(power_w=watts, age_s=age_s), "m")


def counter(joules: float, watts: float | None = None) -> Reading[Sample]:
    return known(Sample(energy_j=joules, power_w=watts), "m")


def log_of(*values: tuple[float, Reading[Sample]], interval_s: float = 0.1) -> EnergyLog:
    log = EnergyLog(interval_s)
    for at_s, reading in values:
        log.take(reading, at_s)
    return log


def test_powers_make_trapezoids() -> None:
    log = log_of((0.0, power(2.0)), (0.1, power(4.0)), (0.2, power(4.0)))
    window = log.window(0.0, 0.2)
    assert window.energy_j == pytest.approx(0.3 + 0.4)
    assert (window.coverage, window.mean_w) == (pytest.approx(1.0), pytest.approx(3.5))


def test_a_window_between_values_takes_its_part() -> None:
    log = log_of((0.0, counter(10.0)), (0.1, counter(11.0)), (0.2, counter(11.0)))
    assert log.window(0.025, 0.075).energy_j == pytest.approx(0.5)
    assert log.window(0.05, 0.15).energy_j == pytest.approx(0.5)


def test_the_counter_is_believed_rather_than_the_power() -> None:
    log = log_of((0.0, counter(5.0, watts=100.0)), (0.1, counter(6.0, watts=100.0)))
    assert log.window(0.0, 0.1).energy_j == pytest.approx(1.0)


def test_a_gap_is_no_energy_and_no_zero() -> None:
    log = log_of((0.0, power(2.0)), (0.1, power(2.0)), (1.1, power(2.0)), (1.2, power(2.0)))
    window = log.window(0.0, 1.2)
    assert window.energy_j == pytest.approx(0.4)
    assert window.covered_s == pytest.approx(0.2)
    assert window.mean_w == pytest.approx(2.0)
    assert log.window(0.2, 1.0).mean_w is None


def test_a_counter_bridges_a_time_without_readings() -> None:
    log = log_of((0.0, counter(0.0)), (5.0, counter(10.0)))
    assert log.window(0.0, 5.0).energy_j == pytest.approx(10.0)
    log.take(counter(20.0), 100.0)  # too long to say anything of when
    assert log.window(5.0, 100.0).covered_s < 1.0


def test_a_counter_that_falls_or_jumps_is_a_gap() -> None:
    fell = log_of((0.0, counter(10.0)), (0.1, counter(1.0)), (0.2, counter(2.0)))
    assert fell.window(0.0, 0.2).energy_j == pytest.approx(1.0)
    jumped = log_of((0.0, counter(10.0)), (0.1, counter(1e9)))
    assert jumped.window(0.0, 0.1).mean_w is None


def test_a_counter_is_not_believed_over_a_failed_reading() -> None:
    log = log_of((0.0, counter(0.0)), (0.1, power(None)), (0.2, counter(1.0)), (0.3, counter(2.0)))
    window = log.window(0.0, 0.3)
    assert (window.energy_j, window.covered_s) == (pytest.approx(1.0), pytest.approx(0.1))


def test_power_is_held_for_three_periods_and_not_longer() -> None:
    log = log_of((0.0, power(2.0)), (0.1, power(2.0)))
    assert log.window(0.1, 0.3).energy_j == pytest.approx(0.4)
    assert log.window(0.0, 10.0).covered_s == pytest.approx(0.4)
    assert log.power_w(0.35) == 2.0
    assert log.power_w(0.5) is None


def test_a_meter_that_is_read_seldom_has_longer_periods() -> None:
    log = EnergyLog(0.1)
    for second in range(4):
        log.take(power(3.0), float(second), period_s=1.0)
    assert log.window(0.0, 3.0).energy_j == pytest.approx(9.0)


def test_a_value_that_is_not_new_changes_nothing() -> None:
    log = log_of((0.0, power(2.0)), (0.1, power(2.0)))
    log.take(power(9.0, age_s=0.05), 0.1)  # it is from before the last one
    log.take(power(9.0), 0.05)  # a clock that went back
    assert log.window(0.0, 0.1).energy_j == pytest.approx(0.2)


def test_a_value_counts_from_when_it_was_measured() -> None:
    log = log_of((0.2, power(2.0, age_s=0.2)), (0.3, power(2.0, age_s=0.2)))
    assert log.window(0.0, 0.1).energy_j == pytest.approx(0.2)


@pytest.mark.parametrize(
    "sample",
    [
        Sample(),
        Sample(power_w=-1.0),
        Sample(power_w=math.nan),
        Sample(power_w=1e9),
        Sample(energy_j=math.inf),
        Sample(power_w=1.0, age_s=-1.0),
        Sample(power_w=1.0, age_s=math.nan),
    ],
)
def test_what_cannot_be_is_as_good_as_nothing(sample: Sample) -> None:
    log = log_of((0.0, power(2.0)), (0.1, power(2.0)))
    log.take(known(sample, "m"), 0.2)
    assert log.reason.startswith("m: ")
    assert log.window(0.0, 0.1).energy_j == pytest.approx(0.2)
    log.take(power(2.0), 0.3)
    assert log.reason == ""


def test_the_reason_why_nothing_is_known_is_kept() -> None:
    assert log_of((0.0, power(None))).reason == "m: no answer"


steps = st.floats(1e-3, 5.0)
readings = st.one_of(
    st.tuples(st.just("w"), st.floats(0.0, 50.0)),
    st.tuples(st.just("j"), st.floats(-5.0, 100.0)),
    st.tuples(st.just("?"), st.just(0.0)),
)


@given(st.lists(st.tuples(steps, readings), max_size=60), st.lists(st.floats(-1.0, 320.0), min_size=3, max_size=3))
def test_windows_add_up_and_are_never_negative(
    values: list[tuple[float, tuple[str, float]]], moments: list[float]
) -> None:
    log, now_s, total_j = EnergyLog(0.5), 0.0, 0.0
    for step_s, (kind, value) in values:
        now_s += step_s
        if kind == "j":  # counters that fall too
            total_j += value
            log.take(counter(total_j), now_s)
        else:
            log.take(power(value if kind == "w" else None), now_s)
    a, b, c = sorted(moments)
    whole, first, second = log.window(a, c), log.window(a, b), log.window(b, c)
    assert whole.energy_j == pytest.approx(first.energy_j + second.energy_j, abs=1e-6)
    assert whole.covered_s == pytest.approx(first.covered_s + second.covered_s, abs=1e-6)
    for window in (whole, first, second):
        assert window.energy_j >= 0
        assert -1e-9 <= window.covered_s <= window.span_s + 1e-6
        assert 0 <= window.coverage <= 1


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.floats(0.0, 9.0)), min_size=1, max_size=400))
def test_a_curve_forgets_knots_and_no_joules(steps: list[tuple[float, float]]) -> None:
    thin, whole, now_s = Curve(max_knots=16), Curve(max_knots=10_000), 0.0
    for step_s, amount in steps:
        now_s += step_s
        thin.add(now_s, amount)
        whole.add(now_s, amount)
        assert len(thin) <= 16
    assert thin.total == pytest.approx(whole.total)
    assert thin.at(math.inf) == pytest.approx(whole.at(math.inf))
    assert thin.at(0.0) == pytest.approx(whole.at(0.0))
    for early, late in pairwise(sorted(now_s * i / 7 for i in range(8))):
        assert thin.between(early, late) >= 0


def test_a_curve_keeps_knots_apart() -> None:
    curve = Curve(min_step_s=0.1)
    for step in range(100):
        curve.add(step * 0.01, 1.0)
    assert len(curve) < 15
    assert curve.total == 100.0
