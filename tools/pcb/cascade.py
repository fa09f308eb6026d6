"""The small detector first, the large one for boards it is not sure of: from which confidence on, and what that costs.

A board's confidence is what edge_rt's cascade takes with `confidence = "least"`: the lowest score among the boxes of at
least MIN_SHOWN, 1 where there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tools.calibrate_cascade import Share, choose_threshold, wilson
from tools.pcb.average_precision import FoundBoxes, mean_average_precision
from tools.pcb.boards import Marks
from tools.pcb.detect import MIN_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Both detectors' answers for the same boards."""

    small: Sequence[FoundBoxes]
    large: Sequence[FoundBoxes]
    marks: Sequence[Marks]

    def take(self, index: NDArray[np.intp]) -> Side:
        return Side(
            small=[self.small[i] for i in index],
            large=[self.large[i] for i in index],
            marks=[self.marks[i] for i in index],
        )

    def quality(self, stopped: NDArray[np.bool_]) -> float:
        """Mean average precision where the stopped boards have the small one's boxes."""
        mixed = [s if stop else b for s, b, stop in zip(self.small, self.large, stopped, strict=True)]
        return mean_average_precision(mixed, self.marks).mean

    @property
    def confidence(self) -> NDArray[np.float64]:
        scores = [found[found[:, 4] >= MIN_SHOWN, 4] for found in self.small]
        return np.array([float(s.min()) if len(s) else 1.0 for s in scores])


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardsOutcome:
    """thresholds: of the two halves, each chosen on the other; cost: of mean average precision, with its interval."""

    n_boards: int
    n_marks: int
    thresholds: tuple[float, float]
    stopped: Share
    small: float
    large: float
    cascade: float
    cost: Share


def cross_calibrated(side: Side, max_loss: float, seed: int, *, n_resamples: int = 400) -> BoardsOutcome:
    """Choose on one half of the boards, measure on the other, and the other way round: each board counts once."""
    order = np.random.default_rng(seed).permutation(len(side.marks))
    halves = np.sort(order[::2]), np.sort(order[1::2])
    stopped = np.zeros(len(side.marks), bool)
    thresholds = []
    for chosen_on, used_on in (halves, halves[::-1]):
        known = side.take(chosen_on)
        never = known.quality(np.zeros(len(chosen_on), bool))
        loss = partial(_loss, known, never)
        thresholds.append(choose_threshold(known.confidence, loss, max_loss))
        stopped[used_on] = side.take(used_on).confidence >= thresholds[-1]
    none, everything = np.zeros(len(stopped), bool), np.ones(len(stopped), bool)
    large, cascade = side.quality(none), side.quality(stopped)
    low, high = _interval(side, stopped, seed, n_resamples)
    return BoardsOutcome(
        n_boards=len(stopped),
        n_marks=sum(map(len, side.marks)),
        thresholds=(thresholds[0], thresholds[1]),
        stopped=wilson(int(stopped.sum()), len(stopped)),
        small=side.quality(everything),
        large=large,
        cascade=cascade,
        cost=Share(value=large - cascade, low=low, high=high),
    )


def _loss(side: Side, never: float, stopped: NDArray[np.bool_]) -> float:
    return never - side.quality(stopped)


def _interval(side: Side, stopped: NDArray[np.bool_], seed: int, n_resamples: int) -> tuple[float, float]:
    """95 % of what the cost would be on other boards like these: resampled with replacement."""
    rng = np.random.default_rng(seed)
    costs = []
    for _ in range(n_resamples):
        index = rng.integers(len(stopped), size=len(stopped))
        drawn = side.take(index)
        costs.append(drawn.quality(np.zeros(len(index), bool)) - drawn.quality(stopped[index]))
    low, high = np.quantile(costs, (0.025, 0.975))
    return float(low), float(high)
