"""A 64-bit difference hash of a picture in a tensor, for camera frames that differ by noise only.

In pure Python, as the front process has no numpy: a grid of 9 x 8 cells, of each of which a few hundred elements are
added up by strided slices of the tensor's bytes. A bit says whether a cell is darker than its right neighbour. Two
views of one scene differ in few bits, whatever the exposure; the number of bits is the distance.
"""

from __future__ import annotations

from typing import Final

from edge_rt.tensor_types import Tensor

N_BITS: Final = 64

_COLUMNS: Final = 9
_ROWS: Final = 8
_ROWS_IN_CELL: Final = 6
_SAMPLES_IN_ROW: Final = 24
_CHANNELS: Final = frozenset({1, 3, 4})


def frame_hash(tensor: Tensor) -> int | None:
    """Hash a picture: UINT8 or FP32, [1,] height, width, channels or [1,] channels, height, width.

    None for what is none, is too small for the grid, or lies in shared memory.
    """
    layout = _layout(tensor.shape)
    if layout is None or tensor.datatype not in ("UINT8", "FP32") or tensor.region is not None:
        return None
    height, width, pixel, row = layout
    view = memoryview(tensor.data)
    elements: memoryview[int] | memoryview[float] = view if tensor.datatype == "UINT8" else view.cast("f")
    bits = 0
    for cell_row in range(_ROWS):
        top, bottom = cell_row * height // _ROWS, (cell_row + 1) * height // _ROWS
        lines = range(top, bottom, max(1, (bottom - top) // _ROWS_IN_CELL))
        means = []
        for column in range(_COLUMNS):
            left, right = column * width // _COLUMNS, (column + 1) * width // _COLUMNS
            step = max(1, (right - left) // _SAMPLES_IN_ROW)
            total = 0.0
            for line in lines:
                start = line * row + left * pixel
                total += sum(elements[start : start + (right - left) * pixel : step * pixel])
            means.append(total / (len(lines) * len(range(left, right, step))))
        for column in range(_COLUMNS - 1):
            bits = bits << 1 | (means[column] < means[column + 1])
    return bits


def distance(a: int, b: int) -> int:
    """Count the bits in which two hashes differ."""
    return (a ^ b).bit_count()


def _layout(shape: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """Give height, width, and how many elements lie from pixel to pixel and from row to row of the first channel."""
    if len(shape) == 4 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 3:
        return None
    if shape[2] in _CHANNELS:
        height, width, n_channels = shape
        pixel = n_channels
    elif shape[0] in _CHANNELS:
        _, height, width = shape
        pixel = 1
    else:
        return None
    if height < 2 * _ROWS or width < 2 * _COLUMNS:
        return None
    return height, width, pixel, width * pixel
