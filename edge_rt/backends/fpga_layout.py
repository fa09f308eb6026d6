"""Where weights and activations lie in memory, byte by byte, for an engine with ports of a given width.

A row is a sequence of superblocks: one beat of scale fields, then 8, 16 or 32 beats of weights (groups of 32, 64, 128), two
to a byte with the first in the lower half. Rows follow each other; the last block of rows is filled up with zero rows.
Vectors follow each other, each filled up to 16 beats: their INT8, then four bytes per group of 32 {sum of q: INT16, e, f}.
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

    def superblock_k(self, group_log2: int) -> int:
        """Weights of a superblock: a row is filled up to a multiple of it."""
        return self.beat_bits // 16 * GROUP << group_log2

    def n_superblocks(self, k: int, group_log2: int) -> int:
        return -(-k // self.superblock_k(group_log2))

    def n_blocks(self, n_rows: int) -> int:
        return -(-n_rows // self.block_rows)

    def row_bytes(self, k: int, group_log2: int) -> int:
        return self.n_superblocks(k, group_log2) * (1 + (8 << group_log2)) * self.beat_bits // 8

    def weight_bytes(self, n_rows: int, k: int, group_log2: int) -> int:
        """Size of a packed matrix, with its rows' and superblocks' filling."""
        return self.n_blocks(n_rows) * self.block_rows * self.row_bytes(k, group_log2)

    def vector_bytes(self, k: int, group_log2: int) -> int:
        """From one vector of activations to the next."""
        padded = self.n_superblocks(k, group_log2) * self.superblock_k(group_log2)
        return -(-(padded + padded // GROUP * 4) // self.line_bytes) * self.line_bytes

    def result_places(self, n_vectors: int) -> int:
        """FLOAT32 a row takes in the results: the next power of two."""
        return 1 << (n_vectors - 1).bit_length()


def pack_weights(weights: Weights, layout: Layout) -> NDArray[np.uint8]:
    """Give the bytes of a matrix, UINT8 [layout.weight_bytes]."""
    n = layout.n_blocks(weights.n_rows) * layout.block_rows
    n_superblocks = layout.n_superblocks(weights.k, weights.group_log2)
    k = n_superblocks * layout.superblock_k(weights.group_log2)
    q = np.zeros((n, k), np.int8)
    q[: weights.n_rows, : weights.k] = weights.q
    nibbles = (q & 15).astype(np.uint8)
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).reshape(n, n_superblocks, -1)
    n_fields = n_superblocks * layout.beat_bits // 16
    fields = np.zeros((n, n_fields), np.uint16)
    whole = weights.scale.astype(np.int64)
    if weights.asymmetric:
        whole = whole << 6 | (weights.z.astype(np.int64) & 63)
    fields[: weights.n_rows, : whole.shape[1]] = whole & 0xFFFF
    scales = fields.astype("<u2").view(np.uint8).reshape(n, n_superblocks, -1)
    return np.ascontiguousarray(np.concatenate([scales, packed], axis=2)).reshape(-1)


def unpack_weights(
    data: NDArray[np.uint8], row_unit: NDArray[np.float64], k: int, group_log2: int, asymmetric: bool, layout: Layout
) -> Weights:
    """Read a packed matrix back; the inverse of pack_weights."""
    n_rows = len(row_unit)
    n_superblocks = layout.n_superblocks(k, group_log2)
    rows = data.reshape(-1, n_superblocks, (1 + (8 << group_log2)) * layout.beat_bits // 8)[:n_rows]
    fields = np.ascontiguousarray(rows[:, :, : layout.beat_bits // 8]).view("<u2").reshape(n_rows, -1)
    packed = rows[:, :, layout.beat_bits // 8 :].reshape(n_rows, -1)
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(n_rows, -1)[:, :k]
    q = ((nibbles ^ 8).astype(np.int8) - 8).astype(np.int8)
    fields = fields[:, : k // (GROUP << group_log2)]
    if asymmetric:
        z = ((fields & 63 ^ 32).astype(np.int8) - 32).astype(np.int8)
        return Weights(q, (fields >> 6).astype(np.int32), z, row_unit, group_log2, asymmetric=True)
    scale = fields.view(np.int16).astype(np.int32)
    return Weights(q, scale, np.zeros(scale.shape, np.int8), row_unit, group_log2, asymmetric=False)


def pack_activations(x: Activations, group_log2: int, layout: Layout) -> NDArray[np.uint8]:
    """Give the bytes of m vectors, UINT8 [m * layout.vector_bytes]."""
    m, k = x.q.shape
    padded = layout.n_superblocks(k, group_log2) * layout.superblock_k(group_log2)
    out = np.zeros((m, layout.vector_bytes(k, group_log2)), np.uint8)
    out[:, :k] = x.q.view(np.uint8)
    records = out[:, padded : padded + padded // GROUP * 4].reshape(m, -1, 4)
    sums = x.q.reshape(m, -1, GROUP).sum(axis=2, dtype=np.int16)
    n_groups = k // GROUP
    records[:, :n_groups, 0] = (sums & 0xFF).astype(np.uint8)
    records[:, :n_groups, 1] = (sums >> 8 & 0xFF).astype(np.uint8)
    records[:, :n_groups, 2] = x.e
    records[:, :n_groups, 3] = x.f
    return out.reshape(-1)


def digest(data: NDArray[np.uint8]) -> str:
    """Hash packed bytes for a manifest: SHA-256, hex."""
    return hashlib.sha256(data.tobytes()).hexdigest()
