"""Average precision against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tools.pcb.average_precision import area_under_precision, iou, mean_average_precision


def boxes(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 6)


def marks(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 5)


def test_iou_by_hand() -> None:
    a = np.array([(0, 0, 10, 10), (5, 5, 5, 9)], np.float32)
    b = np.array([(0, 0, 10, 10), (5, 0, 15, 10), (20, 20, 30, 30)], np.float32)
    assert iou(a, b) == pytest.approx(np.array([(1, 50 / 150, 0), (0, 0, 0)]))


@pytest.mark.parametrize(
    ("hits", "n_marks", "area"),
    [
        ([True, True], 2, 1.0),
        ([True, False, True], 2, (1 + 2 / 3) / 2),
        ([False, True, True], 2, 2 / 3),  # precision 1/2 at the first mark, but 2/3 further on: the envelope counts
        ([True], 4, 0.25),
        ([False, False], 3, 0.0),
        ([], 3, 0.0),
    ],
)
def test_area_by_hand(hits: list[bool], n_marks: int, area: float) -> None:
    assert area_under_precision(np.array(hits, bool), n_marks) == pytest.approx(area)


def test_boxes_of_all_boards_are_ranked_together() -> None:
    truth = [marks((0, 0, 10, 10, 0)), marks((0, 0, 10, 10, 0))]
    found = [boxes((0, 0, 10, 10, 0.5, 0), (50, 50, 60, 60, 0.9, 0)), boxes((0, 0, 10, 10, 0.7, 0))]
    # ranked: wrong 0.9, right 0.7, right 0.5: precisions 0, 1/2, 2/3
    result = mean_average_precision(found, truth, n_kinds=1)
    assert result.mean == pytest.approx(2 / 3)
    assert (result.n_boards, result.n_marks) == (2, 2)


def test_a_second_box_on_the_same_mark_is_wrong() -> None:
    truth = [marks((0, 0, 10, 10, 0), (40, 0, 50, 10, 0))]
    found = [boxes((0, 0, 10, 10, 0.6, 0), (0, 0, 10, 9, 0.9, 0), (40, 0, 50, 10, 0.3, 0))]
    # right 0.9, wrong 0.6 (taken), right 0.3: (1 + 2/3) / 2
    assert mean_average_precision(found, truth, n_kinds=1).mean == pytest.approx(5 / 6)


def test_the_kind_must_agree_and_absent_kinds_do_not_count() -> None:
    truth = [marks((0, 0, 10, 10, 0), (20, 20, 30, 30, 1))]
    found = [boxes((0, 0, 10, 10, 0.9, 1), (20, 20, 30, 30, 0.8, 1))]
    result = mean_average_precision(found, truth, n_kinds=3)
    assert result.by_kind[:2] == pytest.approx((0.0, 0.5))
    assert np.isnan(result.by_kind[2])
    assert result.mean == pytest.approx(0.25)


@pytest.mark.parametrize(("shift", "mean"), [(5.0, 1.0), (5.2, 0.0)])
def test_iou_of_a_third_is_enough(shift: float, mean: float) -> None:
    truth = [marks((0, 0, 10, 10, 0))]
    found = [boxes((shift, 0, 10 + shift, 10, 0.9, 0))]  # (10 - shift) / (10 + shift): 0.333 and 0.316
    assert mean_average_precision(found, truth, n_kinds=1).mean == mean


def test_the_same_number_of_boards_is_needed() -> None:
    with pytest.raises(ValueError, match="boxes of 1 boards, marks of 2"):
        mean_average_precision([boxes()], [marks(), marks()])
