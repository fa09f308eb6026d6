"""Weights of ONNX Runtime's MatMulNBits as blocks of GGUF: the same 4-bit numbers in another order.

MatMulNBits keeps s * (q - z) for blocks of 32, 64 or 128 columns, two neighbours a byte; GGUF has blocks of 32, with
columns j and j + 16 in a byte: Q4_0 is d * (q - 8), Q4_1 is d * q + m. A wide block becomes several with one scale.
Only rounding s and m to F16 changes a weight: by |s| * (|q - z| + |z|) * 2^-11 at most, and nothing where s is F16
already and z is 8.
Format: microsoft/onnxruntime, docs/ContribOperators.md; ggml-org/ggml, src/ggml-common.h (block_q4_0, block_q4_1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
BLOCK_SIZES = (32, 64, 128)
_SYMMETRIC = 8.0
_CHUNK_ROWS = 4096  # a vocabulary's matrix is not taken apart all at once


@dataclass(frozen=True, slots=True)
class NBits:
    """A matrix of n_cols columns. quants: bytes [rows, blocks, block_size / 2]; scales, zero_points: [rows, blocks]."""

    n_cols: int
    quants: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.float32] | None

    def rows(self, which: slice) -> NBits:
        zeros = None if self.zero_points is None else self.zero_points[which]
        return NBits(self.n_cols, self.quants[which], self.scales[which], zeros)


def unpack_zero_points(packed: NDArray[np.uint8], n_rows: int, n_blocks: int) -> NDArray[np.float32]:
    """Take 4-bit zero points apart: two a byte, low half first, each row from a new byte on."""
    pairs = packed.reshape(n_rows, (n_blocks + 1) // 2)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(n_rows, -1)[:, :n_blocks].astype(np.float32)


def is_symmetric(zero_points: NDArray[np.float32] | None) -> bool:
    return zero_points is None or bool((zero_points == _SYMMETRIC).all())


def reblock(matrix: NBits, quant: str) -> NDArray[np.uint8]:
    """Give the bytes of the matrix's rows in Q4_0, for symmetric ones, or Q4_1. Raises OverflowError.

    n_cols must be a multiple of 32; what the last block has beyond it is left out.
    """
    n_rows, block_bytes = len(matrix.quants), 18 if quant == "Q4_0" else 20
    out = np.empty((n_rows, matrix.n_cols // BLOCK * block_bytes), np.uint8)
    for start in range(0, n_rows, _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        out[rows] = _chunk(matrix.rows(rows), quant)
    return out


def _chunk(matrix: NBits, quant: str) -> NDArray[np.uint8]:
    n_rows, _, half = matrix.quants.shape
    n_blocks, per_block = matrix.n_cols // BLOCK, 2 * half // BLOCK
    nibbles = np.stack([matrix.quants & 15, matrix.quants >> 4], axis=-1).reshape(n_rows, -1)
    q = nibbles[:, : matrix.n_cols].reshape(n_rows, n_blocks, BLOCK)
    d = _half(matrix.scales)
    fields: list[NDArray[Any]] = [d]
    if quant == "Q4_1":
        zeros = np.float32(_SYMMETRIC) if matrix.zero_points is None else matrix.zero_points
        # Of the rounded scale, so that q = z stays as near to 0 as F16 allows.
        fields.append(_half(-(d.astype(np.float32) * zeros)))
    parts = [np.repeat(f, per_block, axis=1)[:, :n_blocks].astype("<f2")[..., None].view(np.uint8) for f in fields]
    return np.concatenate([*parts, q[..., :16] | q[..., 16:] << 4], axis=-1).reshape(n_rows, -1)


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        worst = float(values.ravel()[np.argmin(np.isfinite(rounded.ravel()))])
        raise OverflowError(f"a scale or minimum of {worst:g} does not fit F16")
    return rounded
