"""The products of a matrix in the engine's numbers, computed on the CPU where the engine cannot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_numbers import GROUP, Z_STEPS, Activations, Weights, encode_activations
from edge_rt.backends.fpga_pack import Matrix

_WEIGHTS_AT_ONCE = 2**18  # float32 of them stay in a cache


def multiply(matrix: Matrix, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]:
    """Multiply vectors [m, k], as floats or in the engine's numbers, with a matrix: float32 [m, n_rows].

    Floats are rounded as for the engine, sums in float32 and not in whole numbers. Raises ValueError for vectors that
    are not finite.
    """
    encoded = x if isinstance(x, Activations) else encode_activations(x)
    rounded = encoded.to_float().astype(np.float32)
    out = np.zeros((len(x), matrix.n_rows), np.float32)
    n_rows = max(1, _WEIGHTS_AT_ONCE // matrix.k)
    for piece in matrix.pieces:
        for first in range(0, piece.weights.n_rows, n_rows):
            part = _floats(piece.weights, slice(first, first + n_rows))
            at = piece.first_row + first
            out[:, at : at + len(part)] += rounded @ part.T
    return out


def _floats(weights: Weights, rows: slice) -> NDArray[np.float32]:
    """Give the float32 [n, k] that these rows stand for."""
    steps = Z_STEPS if weights.asymmetric else 1
    scale = (weights.scale[rows] * weights.row_unit[rows, None] * steps).astype(np.float32)
    q = weights.q[rows].reshape(*scale.shape, GROUP << weights.group_log2).astype(np.float32)
    if weights.asymmetric:
        q -= (weights.z[rows].astype(np.float32) / Z_STEPS)[..., None]
    q *= scale[..., None]
    return q.reshape(len(scale), -1)
