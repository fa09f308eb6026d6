"""How far joining requests pays, measured while they are served. Pure: times come in as arguments.

A model that reads its weights once a batch computes sixteen rows in little more time than one; a convolution takes for
each row as long as for one alone, and a batch of it is only an answer that comes later. Which of the two a model is,
and where between them it turns, depends on its layers, the threads, the caches and the neighbours. So the time of a
batch is kept by its number of rows, and as many rows are joined as make the most of them per second.

What is not measured is not believed: a size that has not been computed for a while is tried again, now and then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

_BETTER = 1.03  # larger batches must be so many times faster: they make the first row's answer later
_N_SAMPLES = (
    7  # of one size; their median is its time, so that a batch that was held up by something else counts little
)
_N_TRUSTED = 3
_N_FRESH = 400  # batches after which a size's time is not believed any more
_TRIAL_EVERY = 4  # of batches at most one tries a size: the others are as good as is known


class BatchCosts:
    """The time that a batch takes, by its rows: the median of the last few times."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._known: list[int] = []
        self._n_seen = 0

    def observe(self, n_rows: int, seconds: float) -> None:
        self._n_seen += 1
        if n_rows not in self._samples:
            self._samples[n_rows] = deque(maxlen=_N_SAMPLES)
            self._known = sorted(self._samples)
        self._samples[n_rows].append(seconds)
        # The lower median; the module statistics would take memory in each worker.
        self._medians[n_rows] = sorted(self._samples[n_rows])[(len(self._samples[n_rows]) - 1) // 2]
        self._seen[n_rows] = self._n_seen
        if self._n_seen % _N_FRESH == 0:
            for n in [n for n in self._known if self._n_seen - self._seen[n] >= _N_FRESH]:
                del self._samples[n], self._medians[n], self._seen[n]
            self._known = sorted(self._samples)

    @property
    def sizes(self) -> list[int]:
        """The sizes that were measured, rising."""
        return self._known

    def is_trusted(self, n_rows: int) -> bool:
        return len(self._samples.get(n_rows, ())) >= _N_TRUSTED

    def seconds(self, n_rows: int) -> float | None:
        """Tell or estimate a batch's time: on a straight line between two measured sizes, beyond them as per row of the
        nearest; None if nothing is known.
        """
        if not self._known:
            return None
        if n_rows in self._medians:
            return self._medians[n_rows]
        at = bisect_left(self._known, n_rows)
        if at in (0, len(self._known)):
            nearest = self._known[min(at, len(self._known) - 1)]
            return self._medians[nearest] * n_rows / nearest
        low, high = self._known[at - 1], self._known[at]
        low_s, high_s = self._medians[low], self._medians[high]
        return low_s + (high_s - low_s) * (n_rows - low) / (high - low)


class Joining:
    """How requests of one kind are joined. max_rows bounds a batch."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._costs = BatchCosts()
        self._best: dict[int, int] = {}  # as long as nothing new is measured: every request asks
        self._n_batches = 0
        self._trial_at = 0
        self._wait_s: float | None = None
        self._waited_at = 0

    def observe(self, n_rows: int, seconds: float) -> None:
        """Take the measured time of a batch."""
        self._costs.observe(n_rows, seconds)
        self._best.clear()

    def waited(self, seconds: float) -> None:
        """Take how long a batch was waited for while nothing was computed."""
        self._waited_at = self._n_batches
        self._wait_s = seconds if self._wait_s is None else 0.7 * self._wait_s + 0.3 * seconds

    def choose(self, n_waiting: int) -> int:
        """Give how many of the rows that wait are computed next, at least 1: as many as pay, or a size to be tried."""
        n_most = max(1, min(n_waiting, self._max_rows))
        self._n_batches += 1
        if self._n_batches >= self._trial_at and (trial := self._untried(n_most)) is not None:
            self._trial_at = self._n_batches + _TRIAL_EVERY
            return trial
        return self.best(n_most)

    def best(self, n_most: int) -> int:
        """Give the size of batches in which n_most rows are computed soonest, as far as is known; unknown, it is all.

        What remains of them behind the last whole batch counts: twelve of sixteen clients' rows leave four alone.
        """
        if (known := self._best.get(n_most)) is not None:
            return known
        best, best_s = n_most, math.inf
        for n in (*(n for n in self._costs.sizes if n < n_most), n_most):
            each_s, rest_s = self._costs.seconds(n), self._costs.seconds(n_most % n) if n_most % n else 0.0
            if each_s is None or rest_s is None:
                continue
            if (all_s := n_most // n * each_s + rest_s) * _BETTER < best_s:
                best, best_s = n, all_s
        self._best[n_most] = best
        return best

    def is_worth_waiting(self, n_rows: int, n_expected: int) -> bool:
        """Say whether a model with nothing to do shall wait for n_expected rows when n_rows are there.

        Yes where one batch of them saves more than the wait has cost of late, and where that is not known.
        """
        n_expected = min(n_expected, self._max_rows)
        if n_rows >= self.best(n_expected):
            return False
        apart = [self._costs.seconds(n) for n in (n_rows, n_expected - n_rows)]
        together = self._costs.seconds(n_expected)
        if together is None or None in apart or self._wait_s is None:
            return True
        if self._n_batches - self._waited_at >= _N_FRESH:
            return True
        return sum(s for s in apart if s is not None) - together > self._wait_s

    def _untried(self, n_most: int) -> int | None:
        known = self._costs.sizes
        if not self._costs.is_trusted(n_most) and (not known or n_most >= known[-1]):
            return n_most
        ladder = (1 << i for i in range(n_most.bit_length()))
        return next((n for n in ladder if n < n_most and not self._costs.is_trusted(n)), None)
