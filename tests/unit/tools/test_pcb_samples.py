"""What training sees: turning and cutting keep marks on their flaws, and targets name the cells they should."""

from __future__ import annotations

import numpy as np
import pytest

from tools.pcb.boards import KINDS, Board
from tools.pcb.drawn import draw_boards
from tools.pcb.samples import SIZE_UNIT, Sample, cropped, draw_sample, inverted, targets, turned


def board_with(*marks: tuple[int, int, int, int, int], side: int = 96) -> Board:
    """A white board whose marks are black rectangles."""
    picture = np.full((side, side), 255, np.uint8)
    for x1, y1, x2, y2, _ in marks:
        picture[y1:y2, x1:x2] = 0
    golden = np.full((side, side), 255, np.uint8)
    return Board(name="b", picture=picture, golden=golden, marks=np.array(marks, np.float32).reshape(-1, 5))


def marks_fit(sample: Sample) -> bool:
    """Whether black is exactly what the marks enclose."""
    inside = np.zeros(sample.picture.shape, bool)
    for x1, y1, x2, y2, _ in sample.marks.astype(int):
        inside[y1:y2, x1:x2] = True
    return np.array_equal(sample.picture == 0, inside)


@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("n_quarters", range(4))
def test_marks_turn_with_the_picture(n_quarters: int, is_mirrored: bool) -> None:
    whole = cropped(board_with((10, 20, 40, 30, 0), (60, 50, 70, 90, 3)), 0, 0, 96)
    assert marks_fit(turned(whole, n_quarters, is_mirrored=is_mirrored))


def test_a_crop_keeps_what_it_shows_most_of() -> None:
    board = board_with((10, 20, 30, 40, 1), (50, 20, 90, 40, 2))
    left = cropped(board, 0, 0, 64)  # shows 14 of the second's 40 columns
    assert left.marks.tolist() == [[10, 20, 30, 40, 1]]
    right = cropped(board, 16, 10, 64)  # 14 of the first's 20 columns, 30 of the second's 40
    assert right.marks.tolist() == [[0, 10, 14, 30, 1], [34, 10, 64, 30, 2]]
    assert marks_fit(right)


def test_the_golden_picture_moves_and_ends_at_its_edge() -> None:
    board = Board(
        name="b",
        picture=np.zeros((8, 8), np.uint8),
        golden=np.arange(64, dtype=np.uint8).reshape(8, 8),
        marks=np.zeros((0, 5), np.float32),
    )
    assert cropped(board, 2, 3, 4, shift=(1, -2)).golden.tolist() == [
        [8 * y + x for x in range(3, 7)] for y in range(1, 5)
    ]
    assert cropped(board, 4, 0, 4, shift=(2, 0)).golden[0].tolist() == [6, 7, 7, 7]


def test_inverting_swaps_copper_and_what_is_called_after_it() -> None:
    whole = cropped(board_with(*((10 * k, 10, 10 * k + 5, 20, k) for k in range(6))), 0, 0, 96)
    names = [KINDS[int(kind)] for kind in inverted(whole).marks[:, 4]]
    assert names == ["short", "open", "spur", "mousebite", "pin-hole", "copper"]
    assert np.array_equal(inverted(inverted(whole)).marks, whole.marks)
    assert np.array_equal(inverted(whole).picture, 255 - whole.picture)


def test_targets_by_hand() -> None:
    # middle (44, 28): cell 5, 3 and half a cell into it; 16 × 64 pixels
    made = targets(np.array([(36, -4, 52, 60, 2)], np.float32), 12, 12)
    assert np.argwhere(made.heat == 1).tolist() == [[2, 3, 5]]
    assert made.heat[[0, 1, 3, 4, 5]].sum() == 0
    assert made.heat[2, 4, 5] > made.heat[2, 3, 6]  # taller than wide, so it falls off slower downwards
    assert np.argwhere(made.is_near).tolist() == [[y, x] for y in (2, 3, 4) for x in (4, 5, 6)]
    assert made.box[:, 3, 5] == pytest.approx([0, 0, np.log(16 / SIZE_UNIT), np.log(64 / SIZE_UNIT)])
    assert made.box[:2, 2, 4] == pytest.approx([1, 1])


def test_the_smaller_of_two_close_marks_has_the_cell() -> None:
    small, large = (32, 32, 48, 48, 0), (8, 8, 72, 72, 1)
    for order in ((small, large), (large, small)):
        made = targets(np.array(order, np.float32), 12, 12)
        assert made.box[2, 5, 5] == pytest.approx(np.log(16 / SIZE_UNIT))


def test_drawn_boards_are_the_seeds_and_show_what_they_are_marked_with() -> None:
    boards = draw_boards(5, seed=5, side=320)
    again = draw_boards(5, seed=5, side=320)
    assert all(np.array_equal(a.picture, b.picture) for a, b in zip(boards, again, strict=True))
    assert not np.array_equal(boards[0].picture, draw_boards(1, seed=6, side=320)[0].picture)
    right = []
    for board in boards:
        assert set(np.unique(board.picture)) == {0, 255}
        for x1, y1, x2, y2, kind in board.marks.astype(int):
            copper, golden = (np.count_nonzero(p[y1:y2, x1:x2] == 0) for p in (board.picture, board.golden))
            gains = KINDS[kind] in ("short", "spur", "copper")
            right.append((KINDS[kind], (copper > golden) == gains))
    assert {kind for kind, _ in right} == set(KINDS)
    assert (
        np.mean([is_right for _, is_right in right]) > 0.9
    )  # a small one can be less than how far the boards are apart


def test_samples_are_the_seeds_and_have_marks_in_them() -> None:
    boards = draw_boards(2, seed=5, side=320)
    drawn = [[draw_sample(boards, 128, np.random.default_rng(3)) for _ in range(2)] for _ in range(2)]
    assert np.array_equal(drawn[0][0].picture, drawn[1][0].picture)
    rng = np.random.default_rng(4)
    samples = [draw_sample(boards, 128, rng) for _ in range(40)]
    assert {s.picture.shape for s in samples} == {s.golden.shape for s in samples} == {(128, 128)}
    assert sum(len(s.marks) > 0 for s in samples) > 30
    for sample in samples:
        assert (sample.marks[:, :4] >= 0).all()
        assert (sample.marks[:, :4] <= 128).all()
        assert (sample.marks[:, 2:4] > sample.marks[:, :2]).all()
