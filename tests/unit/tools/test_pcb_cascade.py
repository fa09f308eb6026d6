"""A cascade of two detectors, on boards whose answers are made up."""

from __future__ import annotations

import numpy as np
import pytest

from tools.pcb.cascade import Side, cross_calibrated

N = 24


def answers() -> Side:
    """One flaw a board. The large one always finds it; the small one where it is sure, and else 100 pixels off."""
    marks = [np.array([(10, 10, 40, 40, i % 6)], np.float32) for i in range(N)]
    large = [np.array([(10, 10, 40, 40, 0.9, i % 6)], np.float32) for i in range(N)]
    small = [box.copy() for box in large]
    for i, found in enumerate(small):
        found[0, 4] = 0.9 if i % 3 else 0.5
        if i % 3 == 0:
            found[0, :4] += 100
    small[1] = np.concatenate([small[1], [(70, 70, 90, 90, 0.2, 1)]]).astype(np.float32)  # too low to be shown
    small[2] = small[2][:0]
    return Side(small=small, large=large, marks=marks)


def test_confidence_is_the_least_of_the_boxes_shown() -> None:
    assert answers().confidence == pytest.approx([0.5, 0.9, 1.0, 0.5, 0.9, 0.9] + [0.5, 0.9, 0.9] * 6)


def test_the_sure_boards_stop_and_cost_what_they_cost() -> None:
    side = answers()
    result = cross_calibrated(side, 0.15, seed=0, n_resamples=50)
    assert (result.n_boards, result.n_marks) == (N, N)
    assert result.thresholds == pytest.approx((0.9, 0.9))
    assert result.stopped.value == pytest.approx(16 / 24)
    assert result.large == 1.0
    # of the four boards of kind 2 one, board 2, is lost: the small one is sure that there is nothing
    assert result.cost.value == pytest.approx(1 - (5 + 3 / 4) / 6)
    assert result.cascade == pytest.approx(result.large - result.cost.value)
    assert result.cost.low <= result.cost.value <= result.cost.high
    assert result.small < result.cascade


def test_nothing_stops_when_nothing_may_be_lost_to_it() -> None:
    side = answers()
    wrong = Side(small=[found[:0] for found in side.small], large=side.large, marks=side.marks)
    result = cross_calibrated(wrong, 0.01, seed=0, n_resamples=50)
    assert result.stopped.value == 0
    assert result.cost.value == 0
