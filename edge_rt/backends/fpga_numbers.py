"""The engine's number format: INT4 weights, INT8 activations, integer scales; and what the engine computes of them.

A weight is q * scale, or (q - z) * scale with a zero point, q an INT4 in [-8, 7]. A group of 32, 64 or 128 weights of a
row shares a 16-bit field: a signed 16-bit scale in units of the row's largest, or where weights are asymmetric 8
bits of scale and 8 of zero point in sixteenths of a step. An activation is q * (16 + f) * 2^e * unit: q an INT8, f in
[0, 15] and e in [0, 7] per group of 32, unit one number per vector. All that the engine adds and multiplies is whole:

    t[n, g] = dot(q_w, q_x)                     or    16 * dot(q_w, q_x) - z * sum(q_x)
    sum[n]  = sum over g of (t[n, g] * (16 + f[g]) * scale[n, g]) << e[g]

and the host multiplies the row's and the vector's unit back in. The engine writes each sum as the nearest FLOAT32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP = 32
F_ONE = 16
E_MAX = 7
_F_ONE_LOG2 = 4
_CODE_MAX = (2 * F_ONE - 1) << E_MAX
_TINY = 1e-30
SCALE_MAX = 2**15 - 1
ASYMMETRIC_SCALE_MAX = 2**8 - 1
Z_STEPS = 16
Z_MIN, Z_MAX = -128, 127


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix of n rows in the engine's numbers.

    q           INT8 [n, k], values in [-8, 7]
    scale       INT32 [n, k / group]: in [-32767, 32767], or in [0, 255] where asymmetric
    z           INT8 [n, k / group]: sixteenths of a step in [-128, 127], zeros where symmetric
    row_unit    float64 [n]: what 1 of the row's sums is worth, before the vector's unit
    group_log2  log2 of the group's length over 32
    """

    q: NDArray[np.int8]
    scale: NDArray[np.int32]
    z: NDArray[np.int8]
    row_unit: NDArray[np.float64]
    group_log2: int
    asymmetric: bool

    @property
    def n_rows(self) -> int:
        return int(self.q.shape[0])

    @property
    def k(self) -> int:
        return int(self.q.shape[1])

    def to_float(self) -> NDArray[np.float64]:
        """Give the float64 [n, k] weights these numbers stand for."""
        group = GROUP << self.group_log2
        steps = (
            self.q.reshape(self.n_rows, -1, group).astype(np.int16) * (Z_STEPS if self.asymmetric else 1)
            - self.z[..., None]
        )
        return (steps * self.scale[..., None] * self.row_unit[:, None, None]).reshape(self.q.shape)


@dataclass(frozen=True, slots=True)
class Activations:
    """m vectors in the engine's numbers: q INT8 [m, k], f and e UINT8 [m, k / 32], unit float64 [m]."""

    q: NDArray[np.int8]
    f: NDArray[np.uint8]
    e: NDArray[np.uint8]
    unit: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, vectors: slice) -> Activations:
        return Activations(self.q[vectors], self.f[vectors], self.e[vectors], self.unit[vectors])

    def to_float(self) -> NDArray[np.float64]:
        """Give the float64 [m, k] activations these numbers stand for."""
        code = (F_ONE + self.f.astype(np.int64)) << self.e
        scaled = self.q.reshape(len(self.q), -1, GROUP) * code[..., None] * self.unit[:, None, None]
        return scaled.reshape(self.q.shape)


def encode_weights(
    q: NDArray[np.int8], scale: NDArray[np.floating], zero: NDArray[np.floating] | None, group_log2: int = 0
) -> Weights:
    """Bring weights (q - zero) * scale into the engine's numbers without changing any q.

    q is [n, k] in [-8, 7]; scale and zero, in steps of q, are [n, k / group] with groups of 32 << group_log2. With a
    zero no scale may be negative. Zeros outside [-8, 7.9375] are cut to it. Raises ValueError for what does not fit.
    """
    n, k = q.shape
    group = GROUP << group_log2
    if k % group or scale.shape != (n, k // group):
        raise ValueError(f"scales of shape {scale.shape} for weights of shape {q.shape} in groups of {group}")
    if not np.isfinite(scale).all():
        raise ValueError("a scale is not a finite number")
    if q.min(initial=0) < -8 or q.max(initial=0) > 7:
        raise ValueError("a weight is outside [-8, 7]")
    largest = np.abs(scale).max(axis=1).astype(np.float64)
    largest[largest == 0] = 1.0
    if zero is None:
        row_unit = largest / SCALE_MAX
        whole = np.rint(scale / row_unit[:, None]).astype(np.int32)
        return Weights(q, whole, np.zeros(whole.shape, np.int8), row_unit, group_log2, asymmetric=False)
    if scale.min(initial=0) < 0:
        raise ValueError("a scale is negative beside a zero point")
    row_unit = largest / ASYMMETRIC_SCALE_MAX
    whole = np.rint(scale / row_unit[:, None]).astype(np.int32)
    z = np.clip(np.rint(np.nan_to_num(zero) * Z_STEPS), Z_MIN, Z_MAX).astype(np.int8)
    return Weights(q, whole, z, row_unit / Z_STEPS, group_log2, asymmetric=True)


def encode_activations(x: NDArray[np.floating]) -> Activations:
    """Round float [m, k] vectors to the engine's numbers; k is a multiple of 32. Raises ValueError if not finite."""
    m, k = x.shape
    if k % GROUP:
        raise ValueError(f"vectors of {k} numbers, not a multiple of {GROUP}")
    groups = x.reshape(m, -1, GROUP)
    largest = np.maximum(groups.max(axis=2), -groups.min(axis=2)).astype(np.float64)
    if not np.isfinite(largest).all():
        raise ValueError("an activation is not a finite number")
    top = largest.max(axis=1, keepdims=True)
    top[top == 0] = 1.0
    unit = top / (127 * _CODE_MAX)
    # The smallest code whose 127 steps hold the group, and the next larger one: the better of both is worth 3 % of the
    # error, as the numbers of a group lie where they lie. A code's own step is 2^e.
    code = np.maximum(largest * ((1 - 1e-12) * _CODE_MAX / top), F_ONE)
    code = np.ceil(code / _code_step(code)) * _code_step(code)
    codes = np.stack([code, np.minimum(code + _code_step(code), _CODE_MAX)])
    per_step = 1.0 / (codes * unit)[..., None]
    # float32 is enough, but for numbers whose inverse leaves it.
    scaled = groups * (per_step.astype(np.result_type(x, np.float32)) if top.min() > _TINY else per_step)
    q = np.rint(scaled)
    scaled -= q
    errors = np.einsum("cmgi,cmgi->cmg", scaled, scaled) * np.square(codes)
    is_next = errors[1] < errors[0]
    q = np.where(is_next[..., None], q[1], q[0])
    fraction, exponent = np.frexp(np.where(is_next, codes[1], codes[0]))
    return Activations(
        q.reshape(m, k).astype(np.int8),
        (fraction * (2 * F_ONE) - F_ONE).astype(np.uint8),
        (exponent - _F_ONE_LOG2 - 1).astype(np.uint8),
        unit[:, 0],
    )


def _code_step(code: NDArray[np.float64]) -> NDArray[np.float64]:
    step: NDArray[np.float64] = np.ldexp(1.0, np.frexp(code)[1] - _F_ONE_LOG2 - 1)
    return step


def to_products(sums: NDArray[np.float32], row_unit: NDArray[np.float64], x: Activations) -> NDArray[np.float32]:
    """Turn FLOAT32 [n, m] sums into float32 [m, n] products."""
    return (sums.T * row_unit * x.unit[:, None]).astype(np.float32)
