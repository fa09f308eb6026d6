"""Log-odds that two questions want the same answer, from the measures of similarity.py and what the judge says.

Thirty numbers of a logistic regression, fitted by `benchmarks/cache_semantic.py --fit` on a stream of the development
part of Quora's question pairs, on pairs that the guard lets pass. They are where the controller starts from; what it
learns on the device corrects them.
"""

from __future__ import annotations

from collections.abc import Sequence

WEIGHTS = (
    3.8274, -0.3226, 0.5336, 2.6572, 0.0433, 0.0461, 0.0032, 1.4461, -0.5563, -0.6441, 0.0574, 0.0378, 3.491, 1.1114,
    0.0079, -0.0301, -0.2805, -0.2277, 0.4173,
)  # fmt: skip
BIAS = -6.3191


def log_odds(measures: Sequence[float]) -> float:
    return BIAS + sum(weight * value for weight, value in zip(WEIGHTS, measures, strict=True))
