"""Weights of GGUF and ONNX files in the engine's numbers.

Q4_0 and MatMulNBits without zero points are symmetric, Q4_1 and MatMulNBits with them asymmetric; their INT4 stay as
they are. An INT8 of Q8_0 is 16 times its upper four bits, which are symmetric, plus its lower four, which have the zero
point -8: two matrices of INT4, whose products are added. Scales and zero points are rounded as fpga_numbers says. A
group that lies so far on one side of 0 that no zero point reaches is rounded again, to 4 bits between 0 and its end.

Formats: ggml-org/ggml, src/ggml-common.h (block_q4_0, block_q4_1, block_q8_0); microsoft/onnxruntime,
docs/ContribOperators.md (com.microsoft.MatMulNBits).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_numbers import GROUP, Z_MAX, Z_MIN, Z_STEPS, Weights, encode_weights

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
BLOCK_SIZES = (32, 64, 128)
_HALF = 8  # what GGUF and ONNX add to an INT4 to store it
_TOP = 15


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights whose products belong to the rows from first_row on."""

    first_row: int
    weights: Weights

    @property
    def end_row(self) -> int:
        return self.first_row + self.weights.n_rows


@dataclass(frozen=True, slots=True)
class Matrix:
    """n_rows times k weights as a sum of pieces, each a job of the engine."""

    n_rows: int
    k: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, *weights: Weights) -> Matrix:
        """Make the matrix that is the sum of these, all of one shape."""
        return cls(weights[0].n_rows, weights[0].k, tuple(Piece(0, each) for each in weights))

    def to_float(self) -> NDArray[np.float64]:
        """Give the float64 [n_rows, k] weights these numbers stand for."""
        out = np.zeros((self.n_rows, self.k))
        for piece in self.pieces:
            out[piece.first_row : piece.end_row] += piece.weights.to_float()
        return out


def from_gguf(data: NDArray[np.uint8], quant: str, n_rows: int, k: int) -> Matrix:
    """Read a GGUF tensor's bytes. Raises ValueError for other types, a wrong size and numbers that are none."""
    if quant not in BLOCK_BYTES:
        raise ValueError(f"weights of type {quant}: the engine takes {', '.join(BLOCK_BYTES)}")
    if k % GROUP or data.size != n_rows * k // GROUP * BLOCK_BYTES[quant]:
        raise ValueError(f"{data.size} bytes for {n_rows} rows of {k} weights in {quant}")
    blocks = data.reshape(n_rows, k // GROUP, BLOCK_BYTES[quant])
    scale = _halves(blocks, 0)
    if quant == "Q8_0":
        return _split(blocks[:, :, 2:].view(np.int8).reshape(n_rows, k), scale)
    q = _unpack(blocks, quant).reshape(n_rows, k).astype(np.int8) - np.int8(_HALF)
    if quant == "Q4_0":
        return Matrix.of(encode_weights(q, scale, None))
    return Matrix.of(_asymmetric(q, scale, _halves(blocks, 2), 0))


def dequantise(data: NDArray[np.uint8], quant: str, n_rows: int, k: int) -> NDArray[np.float32]:
    """Give the float32 [n_rows, k] that rows of a GGUF tensor stand for, without the engine's rounding."""
    blocks = data.reshape(n_rows, k // GROUP, BLOCK_BYTES[quant])
    scale = _halves(blocks, 0)[..., None]
    if quant == "Q8_0":
        return (blocks[:, :, 2:].view(np.int8) * scale).reshape(n_rows, k).astype(np.float32)
    u = _unpack(blocks, quant)
    weights = u * scale + _halves(blocks, 2)[..., None] if quant == "Q4_1" else (u.astype(np.int8) - _HALF) * scale
    return weights.reshape(n_rows, k).astype(np.float32)


def from_matmul_nbits(
    b: NDArray[np.uint8],
    scales: NDArray[np.floating],
    zero_points: NDArray[np.uint8] | None,
    *,
    n: int,
    k: int,
    bits: int,
    block_size: int,
    has_g_idx: bool = False,
) -> Matrix:
    """Read the inputs and attributes of an ONNX MatMulNBits. Raises ValueError for what the engine does not compute."""
    if has_g_idx:
        raise ValueError("a MatMulNBits whose columns are in another order (g_idx)")
    if bits != 4:
        raise ValueError(f"a MatMulNBits of {bits} bits: the engine takes 4")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"a MatMulNBits in blocks of {block_size}: the engine takes {BLOCK_SIZES}")
    if k % block_size:
        raise ValueError(f"a MatMulNBits whose {k} columns are not whole blocks of {block_size}")
    n_blocks = k // block_size
    if b.dtype != np.uint8 or b.size != n * k // 2 or scales.size != n * n_blocks:
        raise ValueError(f"a MatMulNBits of {n} x {k} with {b.size} bytes and {scales.size} scales")
    packed = b.reshape(n, k // 2)
    q = np.stack([packed & 15, packed >> 4], axis=2).reshape(n, k).astype(np.int8) - np.int8(_HALF)
    scale = scales.reshape(n, n_blocks).astype(np.float64)
    group_log2 = BLOCK_SIZES.index(block_size)
    if zero_points is None:
        return Matrix.of(encode_weights(q, scale, None, group_log2))
    row_bytes = (n_blocks + 1) // 2
    if zero_points.dtype != np.uint8 or zero_points.size != n * row_bytes:
        raise ValueError(f"a MatMulNBits with {zero_points.size} zero points of type {zero_points.dtype}")
    pairs = zero_points.reshape(n, row_bytes)
    points = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(n, -1)[:, :n_blocks]
    if (points == _HALF).all():
        return Matrix.of(encode_weights(q, scale, None, group_log2))
    return Matrix.of(_asymmetric(q, scale, points * -scale, group_log2))


def fuse(matrices: Sequence[Matrix]) -> Matrix:
    """Put matrices of one k under each other; neighbours of one kind become one piece, so one job."""
    if len({matrix.k for matrix in matrices}) != 1:
        raise ValueError(f"matrices with rows of {[matrix.k for matrix in matrices]} weights under each other")
    runs: list[list[Piece]] = []
    first_row = 0
    for matrix in matrices:
        for piece in matrix.pieces:
            moved = Piece(first_row + piece.first_row, piece.weights)
            for run in runs:
                if run[-1].end_row == moved.first_row and _kind(run[-1].weights) == _kind(moved.weights):
                    run.append(moved)
                    break
            else:
                runs.append([moved])
        first_row += matrix.n_rows
    return Matrix(first_row, matrices[0].k, tuple(Piece(run[0].first_row, _stack(run)) for run in runs))


def _kind(weights: Weights) -> tuple[int, bool]:
    return weights.group_log2, weights.asymmetric


def _stack(run: Sequence[Piece]) -> Weights:
    if len(run) == 1:
        return run[0].weights
    parts = [piece.weights for piece in run]
    return dataclasses.replace(
        parts[0],
        q=np.concatenate([part.q for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        z=np.concatenate([part.z for part in parts]),
        row_unit=np.concatenate([part.row_unit for part in parts]),
    )


def _unpack(blocks: NDArray[np.uint8], quant: str) -> NDArray[np.uint8]:
    packed = blocks[:, :, 2 if quant == "Q4_0" else 4 :]
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _halves(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float64]:
    """Read the F16 that each block has at a byte."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0].astype(np.float64)


def _split(q: NDArray[np.int8], scale: NDArray[np.float64]) -> Matrix:
    upper = encode_weights(q >> 4, scale, None)
    upper = dataclasses.replace(upper, row_unit=upper.row_unit * 16)
    lower = ((q & 15) - _HALF).astype(np.int8)
    return Matrix.of(upper, _asymmetric(lower, scale, np.zeros(scale.shape), 0))


def _asymmetric(
    q: NDArray[np.int8], scale: NDArray[np.float64], minimum: NDArray[np.float64], group_log2: int
) -> Weights:
    """Encode the weights (q + 8) * scale + minimum; scale and minimum are [n, k / group]."""
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        raise ValueError("a scale or minimum is not a finite number")
    shape = q.shape
    groups = q.reshape(*scale.shape, -1)
    # With a negative scale the steps are counted from the other end: 15 - u for u, so ~q for q.
    is_negative = scale < 0
    groups = np.where(is_negative[..., None], ~groups, groups)
    minimum = np.where(is_negative, minimum + _TOP * scale, minimum)
    scale = np.abs(scale)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where((scale == 0) & (minimum == 0), 0.0, -minimum / scale - _HALF)
    steps = np.rint(zero * Z_STEPS)
    is_far = ~((steps >= Z_MIN) & (steps <= Z_MAX))
    if is_far.any():
        weights = (groups[is_far] + _HALF) * scale[is_far, None] + minimum[is_far, None]
        low, high = np.minimum(weights.min(axis=1), 0), np.maximum(weights.max(axis=1), 0)
        scale[is_far] = (high - low) / _TOP
        zero[is_far] = -low / scale[is_far] - _HALF
        groups[is_far] = np.rint(weights / scale[is_far, None] + zero[is_far, None]).astype(np.int8)
    return encode_weights(groups.reshape(shape), scale, zero, group_log2)
