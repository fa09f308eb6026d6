"""Whether the requests are still those that the router was calibrated on, by the histogram of its scores. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

_N_BINS = 10
_ALARM = 0.25  # the usual bound of the population stability index: below 0.1 nothing, above 0.25 another population


@dataclass(slots=True)
class Drift:
    """Compares the newest scores with those before them.

    n_reference  scores that the reference is made of, the first ones since it was set
    n_recent     newest scores that are compared with it
    """

    n_reference: int = 500
    n_recent: int = 300
    _reference: list[float] = field(default_factory=list)
    _recent: deque[float] = field(default_factory=deque)

    def add(self, score: float) -> None:
        if len(self._reference) < self.n_reference:
            self._reference.append(score)
            if len(self._reference) == self.n_reference:
                self._reference.sort()
            return
        self._recent.append(score)
        if len(self._recent) > self.n_recent:
            self._recent.popleft()

    def reset(self) -> None:
        """Begin a new reference: after a refit, scores mean something else."""
        self._reference.clear()
        self._recent.clear()

    @property
    def index(self) -> float | None:
        """The population stability index; None until there are scores enough."""
        if len(self._reference) < self.n_reference or len(self._recent) < self.n_recent:
            return None
        edges = sorted({self._reference[i * self.n_reference // _N_BINS] for i in range(1, _N_BINS)})
        return _index(_shares(self._reference, edges), _shares(self._recent, edges))

    @property
    def is_alarming(self) -> bool:
        return (index := self.index) is not None and index > _ALARM


def _shares(scores: list[float] | deque[float], edges: list[float]) -> list[float]:
    counts = [0.5] * (len(edges) + 1)  # an empty bin is rare, not impossible
    for score in scores:
        counts[sum(score >= edge for edge in edges)] += 1
    return [n / sum(counts) for n in counts]


def _index(a: list[float], b: list[float]) -> float:
    return math.fsum((y - x) * math.log(y / x) for x, y in zip(a, b, strict=True))
