"""The products of a matrix in the engine's numbers, computed on the CPU where the engine cannot: the same bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_numbers import F_ONE, GROUP, Z_STEPS, Activations, Weights, encode_activations, to_products
from edge_rt.backends.fpga_pack import Matrix

_WEIGHTS_AT_ONCE = 2**18  # float32 of them stay in a cache


def multiply(matrix: Matrix, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]:
    """Multiply vectors [m, k], as floats or in the engine's numbers, with a matrix: float32 [m, n_rows].

    Raises ValueError for vectors that are not finite.
    """
    encoded = x if isinstance(x, Activations) else encode_activations(x)
    out = np.zeros((len(encoded), matrix.n_rows), np.float32)
    groups = encoded.q.reshape(len(encoded), -1, GROUP).transpose(1, 2, 0).astype(np.float32)
    code = ((F_ONE + encoded.f.astype(np.int64)) << encoded.e).T.astype(np.float64)
    n_rows = max(1, _WEIGHTS_AT_ONCE // matrix.k)
    for piece in matrix.pieces:
        for first in range(0, piece.weights.n_rows, n_rows):
            rows = slice(first, first + n_rows)
            sums = _sums(piece.weights, rows, groups, code).astype(np.float32)
            at = piece.first_row + first
            out[:, at : at + len(sums)] += to_products(sums, piece.weights.row_unit[rows], encoded)
    return out


def _sums(weights: Weights, rows: slice, groups: NDArray[np.float32], code: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute [rows, m] sums from groups [k / 32, 32, m] of INT8 and their codes [k / 32, m].

    All numbers are whole: those of a group stay below 2^24, sums below 2^53, so no order of adding rounds anything.
    """
    q = weights.q[rows]
    t = np.matmul(q.reshape(len(q), -1, GROUP).transpose(1, 0, 2).astype(np.float32), groups).astype(np.float64)
    repeat = 1 << weights.group_log2
    if weights.asymmetric:
        z = np.repeat(weights.z[rows], repeat, axis=1).T.astype(np.float64)
        t *= Z_STEPS
        t -= z[:, :, None] * groups.sum(axis=1)[:, None, :]
    t *= np.repeat(weights.scale[rows], repeat, axis=1).T[:, :, None]
    t *= code[:, None, :]
    found: NDArray[np.float64] = t.sum(axis=0)
    return found
