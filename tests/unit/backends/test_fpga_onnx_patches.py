"""Patches of pictures, held to the definition of a convolution's window, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_rt.backends.fpga_onnx_patches import Window, blocks

PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))
PADS = st.tuples(st.integers(0, 3), st.integers(0, 3))
FILL = 77


@st.composite
def windows(draw: st.DrawFn) -> Window:
    auto = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    return Window(
        rank=2,
        kernel=draw(PAIRS),
        strides=draw(PAIRS),
        dilations=draw(PAIRS) if auto == "NOTSET" else (1, 1),
        pads=draw(st.tuples(PADS, PADS)) if auto == "NOTSET" else ((0, 0), (0, 0)),
        auto=auto,
    )


def points(**facts: Any) -> Window:
    """Give a window of one element."""
    return Window(rank=2, kernel=(1, 1), dilations=(1, 1), **facts)


def wanted(picture: np.ndarray[Any, Any], window: Window, k: int) -> np.ndarray[Any, Any]:
    height, width, n_channels = picture.shape
    (n_down, top), (n_across, left) = window.geometry(0, height), window.geometry(1, width)
    out = np.full((n_down, n_across, k), FILL, picture.dtype)
    for row, column, i, j in np.ndindex(n_down, n_across, *window.kernel):
        y = row * window.strides[0] + i * window.dilations[0] - top
        x = column * window.strides[1] + j * window.dilations[1] - left
        if 0 <= y < height and 0 <= x < width:
            at = (i * window.kernel[1] + j) * n_channels
            out[row, column, at : at + n_channels] = picture[y, x]
    return out


@given(windows(), st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)), st.integers(0, 5), st.booleans())
@example(points(strides=(1, 2), pads=((0, 0), (1, 0))), (1, 1, 4), 0, False)  # as many outputs as inputs, but others
@example(points(strides=(1, 2), pads=((0, 0), (0, 1))), (1, 2, 4), 0, False)
@settings(max_examples=300, deadline=None)
def test_patches_are_what_the_window_looks_at(
    window: Window, shape: tuple[int, int, int], n_behind: int, small: bool
) -> None:
    if any(window.reach(dim) > shape[dim] + sum(window.pads[dim]) for dim in range(2)):
        return
    picture = np.random.default_rng(0).integers(-50, 50, shape).astype(np.int16)
    k = window.kernel[0] * window.kernel[1] * shape[2] + n_behind
    expected = wanted(picture, window, k)
    seen = np.zeros(expected.shape[:2], int)
    for block in blocks(picture, window, FILL, k, 1 if small else 2**22):
        part = slice(block.top, block.bottom), slice(block.left, block.right)
        assert np.array_equal(block.vectors.reshape(expected[part].shape), expected[part])
        seen[part] += 1
    assert (seen == 1).all()
