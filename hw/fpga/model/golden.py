"""The engine's arithmetic in numpy, bit for bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_numbers import F_ONE, GROUP, Z_STEPS, Activations, Weights


def multiply(weights: Weights, x: Activations) -> NDArray[np.int64]:
    """Compute INT64 [n, m] sums; as FLOAT32 they are bit for bit what the engine writes."""
    n, m = weights.n_rows, len(x.q)
    q_w = weights.q.reshape(n, -1, GROUP).transpose(1, 0, 2).astype(np.float32)
    q_x = x.q.reshape(m, -1, GROUP).transpose(1, 2, 0).astype(np.float32)
    # Sums of 32 products of INT4 and INT8 are exact in float32, whose matrix product is the fast one.
    t = np.matmul(q_w, q_x).astype(np.int64)
    repeat = 1 << weights.group_log2
    if weights.asymmetric:
        z = np.repeat(weights.z, repeat, axis=1).T.astype(np.int64)
        t = Z_STEPS * t - z[:, :, None] * q_x.sum(axis=1).astype(np.int64)[:, None, :]
    scale = np.repeat(weights.scale, repeat, axis=1).T.astype(np.int64)
    code = ((F_ONE + x.f.astype(np.int64)) << x.e).T
    sums: NDArray[np.int64] = np.einsum("gnm,gn,gm->nm", t, scale, code, optimize=True)
    return sums
