"""Log-odds that two questions want the same answer, from the measures of similarity.py.

Nineteen numbers of a logistic regression, fitted by `benchmarks/cache_semantic.py --fit` on streams of the development
part of Quora's question pairs, on pairs that the guard lets pass. They are where the controller starts from; what it
learns on the device corrects them.
"""

from __future__ import annotations

from collections.abc import Sequence

WEIGHTS = (
    18.6938, -6.171, 2.585, 3.2031, -0.0593, 0.0208, 0.0101, 1.709, 1.1004, -0.5512, 0.0795, -0.1508, 3.4974, 0.3197,
    0.0789, -0.0066, -0.4464, -0.1013,
)  # fmt: skip
BIAS = -18.0606


def log_odds(measures: Sequence[float]) -> float:
    return BIAS + sum(weight * value for weight, value in zip(WEIGHTS, measures, strict=True))
