"""Round weights to integers of few bits so that what they give changes least.

round_rows is GPTQ: one input's weights after the other are rounded, those that count most first; what that makes wrong
is put right, as far as it goes, by the weights that are still to come. How inputs go together is their second moment
over some samples. After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SHRINK = np.linspace(1.0, 0.5, 26)  # of a row's scale, tried for the least squared error
_DAMPING = 0.01  # of the mean second moment, for inputs that the samples hardly move
_TINY = float(np.finfo(np.float32).tiny)

Rows = NDArray[np.float64]  # [outputs, inputs]


def choose_scales(rows: Rows, importance: NDArray[np.float64], least: int, most: int) -> NDArray[np.float64]:
    """Choose a scale for each row of integers from least to most, for the least squared error.

    importance  of each input: its mean square
    """
    widest = np.maximum(np.abs(rows).max(axis=1) / most, _TINY)
    best, smallest = widest, np.full(len(rows), np.inf)
    for shrink in _SHRINK:
        scales = widest * shrink
        rounded = np.clip(np.rint(rows / scales[:, None]), least, most) * scales[:, None]
        error = ((rows - rounded) ** 2) @ importance
        best, smallest = np.where(error < smallest, scales, best), np.minimum(error, smallest)
    return np.asarray(best)


def int4_scales(rows: Rows, importance: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Choose a scale for each row in INT4, -8 to 7; without importance all inputs count alike."""
    return choose_scales(rows, np.ones(rows.shape[1]) if importance is None else importance, -8, 7)


def damped(moments: Rows) -> Rows:
    """Give second moments that can be inverted: inputs that the samples hardly move are made to move a little."""
    least = _DAMPING * max(float(np.mean(np.diag(moments))), _TINY)
    return np.asarray(moments + least * np.eye(len(moments)))


def round_rows(
    rows: Rows, moments: Rows, scales: Rows, least: int, most: int, *, fixed: NDArray[np.bool_] | None = None
) -> Rows:
    """Round rows to multiples of scales, from least to most, and give them as numbers. Pure.

    moments  second moments of the inputs, which damped has made invertible
    scales   of each weight
    fixed    weights that become most or least by their sign, whatever others' errors have added to them
    """
    order = np.argsort(-np.diag(moments), kind="stable")
    # The rows of this factor say how an input's error is made up for by those that come later.
    factor = np.linalg.cholesky(np.linalg.inv(moments[np.ix_(order, order)])).T
    rest, steps_of = rows[:, order].copy(), scales[:, order]
    ends = None if fixed is None else np.where(fixed, np.where(rows < 0, -most, most), 0)[:, order]
    values = np.empty_like(rest)
    for i in range(rest.shape[1]):
        steps = np.clip(np.rint(rest[:, i] / steps_of[:, i]), least, most)
        if ends is not None:
            steps = np.where(ends[:, i] != 0, ends[:, i], steps)
        values[:, i] = steps * steps_of[:, i]
        error = (rest[:, i] - values[:, i]) / factor[i, i]
        rest[:, i + 1 :] -= np.outer(error, factor[i, i + 1 :])
    found = np.empty_like(values)
    found[:, order] = values
    return found


def keep_sums(steps: Rows, least: int, most: int) -> Rows:
    """Round numbers of steps so that the sum of each row changes by half a step at most, where the ends allow it. Pure.

    Those next to a half are rounded the other way.
    """
    rounded = np.clip(np.rint(steps), least, most)
    left = steps - rounded
    for row, rest in zip(rounded, left, strict=True):
        missing = int(np.rint(rest.sum()))
        sign = 1 if missing > 0 else -1
        order = np.argsort(-rest * sign, kind="stable")
        can = order[(row[order] + sign >= least) & (row[order] + sign <= most)]
        row[can[: abs(missing)]] += sign
    return np.asarray(rounded)
