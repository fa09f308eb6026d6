"""How good a router is: the curve of quality over the share of requests that go to the cloud, and figures of it.

Pure. A router is a score for each request; those with the highest score go to the cloud first. weak and strong are what
the device's and the cloud's answer to each request are worth, 0..1. As in RouteLLM:

    PGR(share)  share of the gap between the device alone and the cloud alone that is recovered
    APGR        its mean over all shares: 0.5 at random, above 1 where each model can do what the other cannot
    CPT(x)      the smallest share of cloud calls that recovers x of the gap: CPT50, CPT80
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_rt.errors import InvalidRequestError

Numbers = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Recovered share of the gap over the share of cloud calls, from (0, 0) to (1, 1), straight between the points."""

    shares: tuple[float, ...]
    recovered: tuple[float, ...]
    weak: float
    strong: float

    @property
    def apgr(self) -> float:
        return _area(self.shares, self.recovered)

    def recovered_at(self, share: float) -> float:
        """Give PGR at a share of cloud calls, 0..1."""
        for left in range(len(self.shares) - 1):
            x0, x1 = self.shares[left], self.shares[left + 1]
            if share <= x1:
                y0, y1 = self.recovered[left], self.recovered[left + 1]
                return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
        return self.recovered[-1]

    def share_for(self, recovered: float) -> float:
        """Give CPT: the share of cloud calls at which the curve first reaches so much of the gap, 0..1."""
        for left in range(len(self.shares) - 1):
            y0, y1 = self.recovered[left], self.recovered[left + 1]
            if y0 < recovered <= y1:
                x0, x1 = self.shares[left], self.shares[left + 1]
                return x0 + (x1 - x0) * (recovered - y0) / (y1 - y0)
        return 1.0 if self.recovered[0] < recovered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A router's figures; low and high bound the APGR's 95 % bootstrap interval."""

    n: int
    weak: float
    strong: float
    apgr: float
    low: float
    high: float
    cpt50: float
    cpt80: float
    pgr40: float


def curve(scores: Numbers, weak: Numbers, strong: Numbers) -> Curve:
    """Draw a router's curve; straight where requests have equal scores and so go in random order.

    Raises InvalidRequestError for lists of unequal length, no rows, scores that are no numbers, or no gap.
    """
    groups = _groups(scores, weak, strong)
    return _curve(groups, [1] * len(scores))


def evaluate(scores: Numbers, weak: Numbers, strong: Numbers, *, n_resamples: int = 1000, seed: int = 0) -> Quality:
    """Give all figures of a router, with the interval from resampled rows. Raises as curve does."""
    groups = _groups(scores, weak, strong)
    own = _curve(groups, [1] * len(scores))
    low, high = _interval(groups, len(scores), n_resamples, seed) if n_resamples else (own.apgr, own.apgr)
    return Quality(
        n=len(scores),
        weak=own.weak,
        strong=own.strong,
        apgr=own.apgr,
        low=low,
        high=high,
        cpt50=own.share_for(0.5),
        cpt80=own.share_for(0.8),
        pgr40=own.recovered_at(0.4),
    )


def oracle(weak: Numbers, strong: Numbers) -> list[float]:
    """Score as somebody would who knows both answers' worth."""
    return [s - w for w, s in zip(weak, strong, strict=True)]


def random_scores(n: int, seed: int) -> list[float]:
    rng = random.Random(seed)  # noqa: S311  no secret
    return [rng.random() for _ in range(n)]


def mean_random(weak: Numbers, strong: Numbers, *, n_routers: int = 100, seed: int = 0) -> Quality:
    """Give the mean figures of random routers, and the range that 95 % of their APGRs lie in."""
    found = [evaluate(random_scores(len(weak), seed + i), weak, strong, n_resamples=0) for i in range(n_routers)]
    areas = sorted(each.apgr for each in found)
    mean: Callable[[Callable[[Quality], float]], float] = lambda pick: math.fsum(map(pick, found)) / n_routers  # noqa: E731
    return Quality(
        n=len(weak),
        weak=found[0].weak,
        strong=found[0].strong,
        apgr=mean(lambda q: q.apgr),
        low=areas[int(0.025 * (n_routers - 1))],
        high=areas[math.ceil(0.975 * (n_routers - 1))],
        cpt50=mean(lambda q: q.cpt50),
        cpt80=mean(lambda q: q.cpt80),
        pgr40=mean(lambda q: q.pgr40),
    )


def calibration_error(probabilities: Numbers, outcomes: Numbers, *, n_bins: int = 10) -> float:
    """Give the expected calibration error: |mean probability - mean outcome| in bins of as many rows each."""
    ranked = sorted(zip(probabilities, outcomes, strict=True), key=lambda pair: pair[0])
    total = 0.0
    for i in range(n_bins):
        part = ranked[i * len(ranked) // n_bins : (i + 1) * len(ranked) // n_bins]
        total += abs(math.fsum(p - o for p, o in part))
    return total / len(ranked)


def log_loss(probabilities: Numbers, outcomes: Numbers) -> float:
    """Give the mean negative log likelihood, in nats, with probabilities kept 0.001 away from 0 and 1."""
    total = 0.0
    for p, outcome in zip(probabilities, outcomes, strict=True):
        kept = min(max(p, 1e-3), 1 - 1e-3)
        total -= outcome * math.log(kept) + (1 - outcome) * math.log(1 - kept)
    return total / len(probabilities)


_Group = list[tuple[int, float, float]]  # (row, weak, gain) of the requests with one score


def _groups(scores: Numbers, weak: Numbers, strong: Numbers) -> list[_Group]:
    if not len(scores) == len(weak) == len(strong) > 0:
        raise InvalidRequestError(
            param="scores",
            problem=f"{len(scores)} scores, {len(weak)} weak and {len(strong)} strong labels; need as many",
        )
    if not all(map(math.isfinite, scores)):
        raise InvalidRequestError(param="scores", problem="not all are finite numbers")
    groups: list[_Group] = []
    last: float | None = None
    for row in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if scores[row] != last:
            groups.append([])
            last = scores[row]
        groups[-1].append((row, weak[row], strong[row] - weak[row]))
    return groups


def _curve(groups: list[_Group], counts: Sequence[int]) -> Curve:
    shares, gains = _sums(groups, counts)
    n, gap = shares[-1], gains[-1]
    if gap == 0:
        raise InvalidRequestError(param="strong", problem="both models are equally good on these rows: there is no gap")
    weak = math.fsum(w * counts[row] for group in groups for row, w, _ in group) / n
    return Curve(
        shares=tuple(x / n for x in shares),
        recovered=tuple(y / gap for y in gains),
        weak=weak,
        strong=weak + gap / n,
    )


def _sums(groups: list[_Group], counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Add up rows and gains in the order of the scores; counts says how often each row is in a resample."""
    shares, gains = [0.0], [0.0]
    n = gain = 0.0
    for group in groups:
        for row, _, own in group:
            n += counts[row]
            gain += own * counts[row]
        if n > shares[-1]:
            shares.append(n)
            gains.append(gain)
    return shares, gains


def _area(shares: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum((shares[i + 1] - shares[i]) * (values[i + 1] + values[i]) / 2 for i in range(len(shares) - 1))


def _interval(groups: list[_Group], n: int, n_resamples: int, seed: int) -> tuple[float, float]:
    rng = random.Random(seed)  # noqa: S311  no secret
    areas = []
    for _ in range(n_resamples):
        counts = [0] * n
        for row in rng.choices(range(n), k=n):
            counts[row] += 1
        shares, gains = _sums(groups, counts)
        if gains[-1] != 0:
            areas.append(_area(shares, gains) / (shares[-1] * gains[-1]))
    areas.sort()
    return areas[int(0.025 * (len(areas) - 1))], areas[math.ceil(0.975 * (len(areas) - 1))]
