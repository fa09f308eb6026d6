"""Scores to probabilities by isotonic regression. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edge_rt.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Isotonic:
    """A map from scores to probabilities that never falls; straight between its points and flat beyond them."""

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        x, y = self.scores, self.probabilities
        is_sound = 0 < len(x) == len(y) and all(map(math.isfinite, (*x, *y))) and y[0] >= 0 and y[-1] <= 1
        if not is_sound or any(a >= b for a, b in pairwise(x)) or list(y) != sorted(y):
            raise InvalidRequestError(param="calibration", problem="its points must rise, with probabilities of 0 to 1")

    def __call__(self, score: float) -> float:
        x, y = self.scores, self.probabilities
        right = bisect.bisect_right(x, score)
        if right == 0 or right == len(x):
            return y[min(right, len(x) - 1)]
        share = (score - x[right - 1]) / (x[right] - x[right - 1])
        return y[right - 1] + share * (y[right] - y[right - 1])


def fit(scores: Sequence[float], outcomes: Sequence[float], *, min_rows: int = 20, max_points: int = 64) -> Isotonic:
    """Fit outcomes of 0..1 to scores.

    min_rows    of a step: what fewer rows say is averaged with their neighbours', so that no few lucky ones make a
                probability of 1; and each step is drawn half a success and half a failure towards the middle
    max_points  of the map

    Raises InvalidRequestError for no rows and for lists of unequal length.
    """
    if not len(scores) == len(outcomes) > 0:
        problem = f"{len(scores)} scores and {len(outcomes)} outcomes; need as many, and some"
        raise InvalidRequestError(param="scores", problem=problem)
    size = max(min_rows, -(-len(scores) // max_points))
    blocks: list[tuple[float, float, int]] = []  # sums of scores and outcomes, and rows
    for sum_x, sum_y, n in _pieces(sorted(zip(scores, outcomes, strict=True)), size):
        blocks.append((sum_x, sum_y, n))
        while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] >= blocks[-1][1] * blocks[-2][2]:
            right, left = blocks.pop(), blocks.pop()
            blocks.append((left[0] + right[0], left[1] + right[1], left[2] + right[2]))
    points: dict[float, float] = {}
    highest = 0.0
    for sum_x, sum_y, n in blocks:
        highest = max(highest, (sum_y + 0.5) / (n + 1))  # the half rows may turn two nearly equal steps around
        points[sum_x / n] = highest
    return Isotonic(scores=tuple(points), probabilities=tuple(points.values()))


def _pieces(rows: Sequence[tuple[float, float]], size: int) -> list[tuple[float, float, int]]:
    """Cut ranked rows into runs of at least so many; rows of equal score stay together."""
    pieces = []
    begin = 0
    while begin < len(rows):
        end = min(begin + size, len(rows))
        if len(rows) - end < size:
            end = len(rows)
        while end < len(rows) and rows[end][0] == rows[end - 1][0]:
            end += 1
        part = rows[begin:end]
        pieces.append((math.fsum(x for x, _ in part), math.fsum(y for _, y in part), len(part)))
        begin = end
    return pieces
