from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.meters import MAX_W, Counter, Sample, mean_w, watts

RANGE_J = 262_143.32885


def test_a_total_starts_at_zero_wherever_the_counter_stands() -> None:
    counter = Counter(RANGE_J)
    assert counter.update(123_456.0, 0.0) == ""
    assert counter.total_j == 0
    assert counter.update(123_466.0, 1.0) == ""
    assert counter.total_j == pytest.approx(10.0)


def test_a_wrap_is_recovered() -> None:
    counter = Counter(RANGE_J)
    counter.update(RANGE_J - 4.0, 0.0)
    assert counter.update(6.0, 1.0) == ""
    assert counter.total_j == pytest.approx(10.0)


def test_where_the_range_is_not_known_a_step_down_is_dropped_and_counting_goes_on() -> None:
    counter = Counter(None)
    counter.update(50.0, 0.0)
    assert "cannot be read" in counter.update(2.0, 1.0)
    assert counter.update(5.0, 2.0) == ""
    assert counter.total_j == pytest.approx(3.0)


def test_a_reset_is_no_wrap() -> None:
    counter = Counter(RANGE_J)
    counter.update(100_000.0, 0.0)
    assert "reset" in counter.update(1.0, 1.0)
    assert counter.update(11.0, 2.0) == ""
    assert counter.total_j == pytest.approx(10.0)


def test_a_jump_up_is_no_energy() -> None:
    counter = Counter(RANGE_J)
    counter.update(1.0, 0.0)
    assert "reset, or is wrong" in counter.update(200_000.0, 1.0)
    assert counter.total_j == 0


def test_a_gap_in_which_it_may_have_wrapped_twice_is_dropped() -> None:
    counter = Counter(RANGE_J, max_w=100.0)
    counter.update(10.0, 0.0)
    assert "more than once" in counter.update(20.0, 3600.0)
    assert counter.update(30.0, 3601.0) == ""
    assert counter.total_j == pytest.approx(10.0)


def test_a_counter_that_stands_still_is_dated() -> None:
    counter = Counter(RANGE_J)
    for now_s, value_j in ((0.0, 1.0), (1.0, 2.0), (2.0, 2.0), (9.0, 2.0)):
        assert counter.update(value_j, now_s) == ""
    assert counter.changed_s == 1.0


def test_a_clock_that_goes_back_gives_no_energy_away() -> None:
    counter = Counter(RANGE_J)
    counter.update(1.0, 100.0)
    assert counter.update(2.0, 50.0) == ""
    assert counter.total_j == pytest.approx(1.0)


@given(
    start=st.floats(0, RANGE_J, exclude_max=True),
    steps=st.lists(st.tuples(st.floats(0.01, 60.0), st.floats(0.0, 900.0)), max_size=40),
)
def test_whatever_is_used_is_counted_over_any_number_of_wraps(start: float, steps: list[tuple[float, float]]) -> None:
    counter = Counter(RANGE_J, max_w=1000.0)
    now_s, used_j = 0.0, 0.0
    counter.update(start, now_s)
    for span_s, power_w in steps:
        now_s, used_j = now_s + span_s, used_j + span_s * power_w
        assert counter.update((start + used_j) % RANGE_J, now_s) == ""
    assert counter.total_j == pytest.approx(used_j, abs=1e-3)


@given(
    range_j=st.none() | st.floats(1.0, 1e6),
    readings=st.lists(st.tuples(st.floats(0.0, 1e12), st.floats(-10.0, 1e6)), max_size=40),
)
def test_whatever_a_counter_tells_the_total_never_falls_nor_passes_what_power_allows(
    range_j: float | None, readings: list[tuple[float, float]]
) -> None:
    counter = Counter(range_j, max_w=1000.0)
    total_j, last_s = 0.0, None
    for value_j, now_s in readings:
        counter.update(value_j, now_s)
        assert counter.total_j >= total_j
        if last_s is not None:
            allowed_j = 1000.0 * (max(0.0, now_s - last_s) + 0.1)
            assert counter.total_j - total_j <= allowed_j * (1 + 1e-9) + 1e-3
        total_j, last_s = counter.total_j, now_s


@given(st.floats(-1e12, 1e12))
def test_a_power_is_between_nothing_and_what_a_machine_can_take_or_unknown(power_w: float) -> None:
    reading = watts(power_w, "/x")
    if reading.value is None:
        assert reading.reason
        assert not -0.05 <= power_w <= MAX_W
    else:
        assert reading.value == max(0.0, power_w)


def test_mean_power_is_the_counters_where_there_is_one() -> None:
    assert mean_w(Sample(energy_j=10.0), Sample(energy_j=25.0), 5.0) == pytest.approx(3.0)
    assert mean_w(Sample(power_w=2.0), Sample(power_w=4.0), 5.0) == pytest.approx(3.0)
    assert mean_w(Sample(energy_j=1.0), Sample(energy_j=1.0), 0.0) is None
    assert mean_w(Sample(energy_j=1.0), Sample(energy_j=1.0, power_w=2.0), 0.0) == 2.0
    assert mean_w(Sample(energy_j=1.0), Sample(power_w=2.0), 1.0) == 2.0
    assert mean_w(Sample(power_w=2.0), Sample(energy_j=1.0), 1.0) is None


def test_a_counter_that_stands_still_tells_no_power() -> None:
    assert mean_w(Sample(energy_j=10.0), Sample(energy_j=10.0), 5.0) is None
