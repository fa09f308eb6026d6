"""Patches of pictures as vectors, block by block: what turns a convolution into products of a matrix (im2col)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_REACH = 1024  # of a window, with its dilation
MAX_TAPS = 1024
MAX_BLOCK_BYTES = 2**22
_LEAST_VECTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a convolution looks at, in two dimensions; one of rank 1 has a height of 1.

    pads  (before, after) of each dimension
    auto  NOTSET takes pads as they are; VALID, SAME_UPPER and SAME_LOWER as ONNX has them
    """

    rank: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]
    auto: str = "NOTSET"

    def reach(self, dim: int) -> int:
        return self.dilations[dim] * (self.kernel[dim] - 1) + 1

    def geometry(self, dim: int, size: int) -> tuple[int, int]:
        """Give the number of outputs in a dimension of so many inputs, and the pad before them."""
        stride = self.strides[dim]
        if self.auto in ("SAME_UPPER", "SAME_LOWER"):
            n_out = -(-size // stride)
            pad = max(0, (n_out - 1) * stride + self.reach(dim) - size)
            return n_out, pad // 2 if self.auto == "SAME_UPPER" else pad - pad // 2
        before, after = self.pads[dim]
        return (size + before + after - self.reach(dim)) // stride + 1, before


@dataclass(frozen=True, slots=True)
class Block:
    """Vectors of the outputs in rows [top, bottom) and columns [left, right): [outputs, k]."""

    top: int
    bottom: int
    left: int
    right: int
    vectors: NDArray[Any]


def blocks(
    picture: NDArray[Any], window: Window, fill: int, k: int, max_bytes: int = MAX_BLOCK_BYTES
) -> Iterator[Block]:
    """Take a picture [height, width, channels] apart into vectors of k, in the order kernel row, column, channel.

    fill stands outside the picture, and behind what a vector needs. A block takes at most max_bytes, or 64 vectors.
    """
    height, width, n_channels = picture.shape
    (n_down, pad_top), (n_across, pad_left) = window.geometry(0, height), window.geometry(1, width)
    n_most = max(_LEAST_VECTORS, max_bytes // (k * picture.itemsize))
    n_columns = min(n_across, n_most)
    n_rows = min(n_down, max(1, n_most // max(1, n_across)))
    is_single = window.kernel == window.strides == (1, 1) and (pad_top, pad_left) == (0, 0)
    is_plain = is_single and k == n_channels and (n_down, n_across) == (height, width)
    for top in range(0, n_down, max(1, n_rows)):
        bottom = min(n_down, top + n_rows)
        for left in range(0, n_across, n_columns):
            right = min(n_across, left + n_columns)
            if is_plain:
                yield Block(top, bottom, left, right, picture[top:bottom, left:right].reshape(-1, k))
                continue
            out = np.full((bottom - top, right - left, k), fill, picture.dtype)
            for tap in range(window.kernel[0] * window.kernel[1]):
                i, j = divmod(tap, window.kernel[1])
                to_rows, from_rows = _overlap(window, 0, i, pad_top, height, top, bottom)
                to_columns, from_columns = _overlap(window, 1, j, pad_left, width, left, right)
                channels = slice(tap * n_channels, (tap + 1) * n_channels)
                out[to_rows, to_columns, channels] = picture[from_rows, from_columns]
            yield Block(top, bottom, left, right, out.reshape(-1, k))


def _overlap(window: Window, dim: int, tap: int, pad: int, size: int, first: int, end: int) -> tuple[slice, slice]:
    """Say which outputs of [first, end) find the tap in the picture, counted from first, and where in it."""
    stride, shift = window.strides[dim], tap * window.dilations[dim] - pad
    begin = max(first, -(shift // stride))  # the first output at which shift + output * stride >= 0
    stop = min(end, (size - 1 - shift) // stride + 1)
    if begin >= stop:
        return slice(0, 0), slice(0, 0)
    start = begin * stride + shift
    return slice(begin - first, stop - first), slice(start, start + (stop - begin - 1) * stride + 1, stride)
