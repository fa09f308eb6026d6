"""Log-odds that two questions want the same answer, from the measures of similarity.py.

Nineteen numbers of a logistic regression, fitted by `benchmarks/cache_semantic.py --fit` on streams of the development
part of Quora's question pairs, on pairs that the guard lets pass. They are where the controller starts from; what it
learns on the device corrects them.
"""

from __future__ import annotations

from collections.abc import Sequence

WEIGHTS = (
    21.9229, -7.8928, 2.2673, 2.9056, -0.0524, 0.0126, 0.0095, 2.857, 0.225, -0.2086, 0.1026, -0.0818, 3.0226, 0.1097,
    0.1031, -0.1189, -0.5663, -0.1242,
)  # fmt: skip
BIAS = -19.3361


def log_odds(measures: Sequence[float]) -> float:
    return BIAS + sum(weight * value for weight, value in zip(WEIGHTS, measures, strict=True))
