"""What training sees of the boards - crops, turned, inverted, shifted - and what the detector should say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.pcb.boards import KINDS, Board, Marks, Picture

STRIDE = 8  # pixels a cell of the detector's output
SIZE_UNIT = 32.0  # pixels: sizes are regressed as the logarithm of this many
INVERTED = (
    1,
    0,
    3,
    2,
    5,
    4,
)  # with copper and bare board exchanged, an open is a short, a bite a spur, a hole an island

_MIN_SEEN = 0.6  # of a mark's area, for a crop to show what kind it is
_NEAR_CELLS = 1  # cells around a mark's middle that learn its box


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    picture: Picture
    golden: Picture
    marks: Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """For rows × columns of cells. box: offset of the middle in cells, log of the size; it counts where is_near."""

    heat: NDArray[np.float32]  # [kinds, rows, columns]: 1 in the middle's cell, falling off around it
    box: NDArray[np.float32]  # [4, rows, columns]
    is_near: NDArray[np.bool_]  # [rows, columns]


def draw_sample(boards: Sequence[Board], side: int, rng: np.random.Generator) -> Sample:
    """Take a square of a random board, four times in five around one of its marks."""
    board = boards[int(rng.integers(len(boards)))]
    height, width = board.picture.shape
    if len(board.marks) and rng.random() < 0.8:
        x1, y1, x2, y2, _ = board.marks[rng.integers(len(board.marks))]
        left = int(rng.integers(int(x2) - side, int(x1) + 1)) if x2 - x1 < side else int(x1)
        top = int(rng.integers(int(y2) - side, int(y1) + 1)) if y2 - y1 < side else int(y1)
    else:
        left, top = int(rng.integers(width)), int(rng.integers(height))
    left, top = (int(np.clip(v, 0, size - side)) for v, size in ((left, width), (top, height)))
    crop = cropped(board, left, top, side, shift=_misalignment(rng))
    crop = turned(crop, int(rng.integers(4)), is_mirrored=bool(rng.integers(2)))
    return inverted(crop) if rng.random() < 0.4 else crop


def cropped(board: Board, left: int, top: int, side: int, *, shift: tuple[int, int] = (0, 0)) -> Sample:
    """Cut a square out; shift moves the golden picture below it. Marks that are mostly outside are left out."""
    height, width = board.golden.shape
    rows = np.clip(np.arange(top, top + side) + shift[1], 0, height - 1)
    columns = np.clip(np.arange(left, left + side) + shift[0], 0, width - 1)
    marks = board.marks.copy()
    area = np.prod(marks[:, 2:4] - marks[:, :2], axis=1)
    marks[:, 0:4:2] = np.clip(marks[:, 0:4:2] - left, 0, side)
    marks[:, 1:4:2] = np.clip(marks[:, 1:4:2] - top, 0, side)
    seen = np.prod(marks[:, 2:4] - marks[:, :2], axis=1)
    return Sample(
        picture=board.picture[top : top + side, left : left + side],
        golden=board.golden[np.ix_(rows, columns)],
        marks=marks[seen >= _MIN_SEEN * area],
    )


def turned(sample: Sample, n_quarters: int, *, is_mirrored: bool) -> Sample:
    """Mirror left to right, then turn counterclockwise by quarters; the sample is square."""
    side = sample.picture.shape[0]
    x1, y1, x2, y2, kind = sample.marks.T
    if is_mirrored:
        x1, x2 = side - x2, side - x1
    for _ in range(n_quarters):
        x1, y1, x2, y2 = y1, side - x2, y2, side - x1
    picture, golden = (np.fliplr(p) if is_mirrored else p for p in (sample.picture, sample.golden))
    return Sample(
        picture=np.rot90(picture, n_quarters),
        golden=np.rot90(golden, n_quarters),
        marks=np.stack([x1, y1, x2, y2, kind], axis=1),
    )


def inverted(sample: Sample) -> Sample:
    marks = sample.marks.copy()
    marks[:, 4] = np.array(INVERTED)[marks[:, 4].astype(int)]
    return Sample(picture=255 - sample.picture, golden=255 - sample.golden, marks=marks)


def targets(marks: Marks, n_rows: int, n_columns: int) -> Targets:
    heat = np.zeros((len(KINDS), n_rows, n_columns), np.float32)
    box = np.zeros((4, n_rows, n_columns), np.float32)
    is_near = np.zeros((n_rows, n_columns), bool)
    rows, columns = np.mgrid[:n_rows, :n_columns]
    for x1, y1, x2, y2, kind in marks[np.argsort(-np.prod(marks[:, 2:4] - marks[:, :2], axis=1))]:  # small ones on top
        x, y, width, height = (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1
        column, row = min(int(x / STRIDE), n_columns - 1), min(int(y / STRIDE), n_rows - 1)
        spread = [max(0.6, size / STRIDE / 6) for size in (width, height)]
        fall = np.exp(-(((columns - column) / spread[0]) ** 2 + ((rows - row) / spread[1]) ** 2) / 2)
        here = heat[int(kind)]
        np.maximum(here, fall, out=here)
        near = (abs(columns - column) <= _NEAR_CELLS) & (abs(rows - row) <= _NEAR_CELLS)
        is_near |= near
        box[0][near] = (x / STRIDE - columns - 0.5)[near]
        box[1][near] = (y / STRIDE - rows - 0.5)[near]
        box[2][near] = np.log(width / SIZE_UNIT)
        box[3][near] = np.log(height / SIZE_UNIT)
    return Targets(heat=heat, box=box, is_near=is_near)


def _misalignment(rng: np.random.Generator) -> tuple[int, int]:
    """A camera does not find the board where the golden one lay."""
    if rng.random() < 0.5:
        return (0, 0)
    return (int(rng.integers(-2, 3)), int(rng.integers(-2, 3)))
