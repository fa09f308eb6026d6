"""Where weights and activations lie in memory, byte by byte, for an engine with ports of a given width.

A row is a sequence of superblocks: one beat of scale fields, then the weights of as many groups, two to a byte with the
first in the lower half; the last superblock of a row has the weights that are left. Rows follow each other without a
gap; the last block of rows is filled up with zero rows. Vectors follow each other, each filled up to 16 beats: their
INT8, then four bytes per group of 32 {-sum of q: INT16, e, f}: negative, so that the engine's multiplier may add.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_numbers import GROUP, Activations, Weights

LINE_BEATS = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """beat_bits is a port's width, 64 or 128; block_rows how many rows a port gets at a time: 4, 8 or 16."""

    beat_bits: int
    block_rows: int = 4

    @property
    def line_bytes(self) -> int:
        """What weights and activations are aligned to: 16 beats."""
        return LINE_BEATS * self.beat_bits // 8

    def n_blocks(self, n_rows: int) -> int:
        return -(-n_rows // self.block_rows)

    def row_bytes(self, k: int, group_log2: int) -> int:
        return self.n_scale_beats(k, group_log2) * self.beat_bits // 8 + k // 2

    @property
    def fields(self) -> int:
        """Scale fields of a beat."""
        return self.beat_bits // 16

    def n_scale_beats(self, k: int, group_log2: int) -> int:
        return -(-(k // (GROUP << group_log2)) // self.fields)

    def scale_bytes(self, k: int, group_log2: int) -> NDArray[np.bool_]:
        """Say of each byte of a row whether it belongs to a beat of scale fields."""
        beat = self.beat_bits // 8
        superblock = beat + self.fields * (GROUP // 2 << group_log2)
        return np.arange(self.row_bytes(k, group_log2)) % superblock < beat

    def weight_bytes(self, n_rows: int, k: int, group_log2: int) -> int:
        """Size of a packed matrix, with the rows that fill its last block."""
        return self.n_blocks(n_rows) * self.block_rows * self.row_bytes(k, group_log2)

    def vector_bytes(self, k: int) -> int:
        """From one vector of activations to the next."""
        return -(-(k + k // GROUP * 4) // self.line_bytes) * self.line_bytes

    def result_places(self, n_vectors: int) -> int:
        """FLOAT32 a row takes in the results: the next power of two."""
        return 1 << (n_vectors - 1).bit_length()


def pack_weights(weights: Weights, layout: Layout) -> NDArray[np.uint8]:
    """Give the bytes of a matrix, UINT8 [layout.weight_bytes]."""
    n = layout.n_blocks(weights.n_rows) * layout.block_rows
    whole = weights.scale.astype(np.int64)
    if weights.asymmetric:
        whole = whole << 8 | (weights.z.astype(np.int64) & 255)
    fields = np.zeros((n, layout.n_scale_beats(weights.k, weights.group_log2) * layout.fields), np.uint16)
    fields[: weights.n_rows, : whole.shape[1]] = whole & 0xFFFF
    q = np.zeros((n, weights.k), np.uint8)
    q[: weights.n_rows] = weights.q & 15
    rows = np.zeros((n, layout.row_bytes(weights.k, weights.group_log2)), np.uint8)
    is_scale = layout.scale_bytes(weights.k, weights.group_log2)
    rows[:, is_scale] = fields.astype("<u2").view(np.uint8)
    rows[:, ~is_scale] = q[:, 0::2] | q[:, 1::2] << 4
    return rows.reshape(-1)


def unpack_weights(
    data: NDArray[np.uint8], row_unit: NDArray[np.float64], k: int, group_log2: int, asymmetric: bool, layout: Layout
) -> Weights:
    """Read a packed matrix back; the inverse of pack_weights."""
    n_rows = len(row_unit)
    rows = data.reshape(-1, layout.row_bytes(k, group_log2))[:n_rows]
    is_scale = layout.scale_bytes(k, group_log2)
    fields = np.ascontiguousarray(rows[:, is_scale]).view("<u2")[:, : k // (GROUP << group_log2)]
    packed = rows[:, ~is_scale]
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(n_rows, -1)
    q = ((nibbles ^ 8).astype(np.int8) - 8).astype(np.int8)
    if asymmetric:
        z = (fields & 255).astype(np.uint8).view(np.int8)
        return Weights(q, (fields >> 8).astype(np.int32), z, row_unit, group_log2, asymmetric=True)
    scale = fields.view(np.int16).astype(np.int32)
    return Weights(q, scale, np.zeros(scale.shape, np.int8), row_unit, group_log2, asymmetric=False)


def pack_activations(x: Activations, layout: Layout) -> NDArray[np.uint8]:
    """Give the bytes of m vectors, UINT8 [m * layout.vector_bytes]."""
    m, k = x.q.shape
    out = np.zeros((m, layout.vector_bytes(k)), np.uint8)
    out[:, :k] = x.q.view(np.uint8)
    records = out[:, k : k + k // GROUP * 4].reshape(m, -1, 4)
    minus = -x.q.reshape(m, -1, GROUP).sum(axis=2, dtype=np.int16)
    records[:, :, 0] = (minus & 0xFF).astype(np.uint8)
    records[:, :, 1] = (minus >> 8 & 0xFF).astype(np.uint8)
    records[:, :, 2] = x.e
    records[:, :, 3] = x.f
    return out.reshape(-1)


def unpack_activations(data: NDArray[np.uint8], k: int, layout: Layout) -> Activations:
    """Read packed vectors back, each in units of 1: the vectors' units are the host's and not among the bytes."""
    rows = data.reshape(-1, layout.vector_bytes(k))
    records = rows[:, k : k + k // GROUP * 4].reshape(len(rows), -1, 4)
    q = np.ascontiguousarray(rows[:, :k]).view(np.int8)
    return Activations(q, records[:, :, 3].copy(), records[:, :, 2].copy(), np.ones(len(rows)))


def digest(data: NDArray[np.uint8]) -> str:
    """Hash packed bytes for a manifest: SHA-256, hex."""
    return hashlib.sha256(data.tobytes()).hexdigest()
