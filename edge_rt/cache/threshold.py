"""How sure a semantic hit must be, so that wrong answers stay below the declared share of all requests.

One rule for all entries (pooled): what a per-entry rule would need, several verified answers of one entry, hardly ever
comes together. Every request passes through judge(), every comparison of two answers through learn(); from the outcomes
a small logistic model is kept that says how likely a match is right, and from the last requests the sureness at which
the expected errors just fit the declared share. A part of the hits is computed all the same and compared, the doubtful
ones more often; a number in 0..1 that the caller draws decides which. Pure: no clock, no randomness, no numpy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from edge_rt.errors import CacheStoreError

Decision = Literal["miss", "verify", "hit"]

_WINDOW = 1000  # requests over which errors are counted
_N_SHADOW = 1000  # requests at first of which every would-be hit is computed and compared
_MIN_LABELS = 30  # comparisons without which nothing is served
_RENEW_EVERY = 20  # requests between two settings of the threshold
_AIM = 0.8  # of the declared share: errors come in bursts, and no window may exceed it
_STOP = 0.98  # of the declared share: with so many expected errors in the last window nothing is served
_FORGET = 0.9995  # per comparison
_FORGET_BIAS = 0.99
_N_DOUBT = 6.0  # errors' worth of trust in the model before its bias is believed
_MIN_VERIFY, _MAX_VERIFY = 0.01, 0.6
# Weights of Evidence.features(), as benchmarks/cache_semantic.py --fit found them, and how far they may be off here.
_PRIOR = (0.31, 0.87, -0.29, -0.11, -1.24, 0.2, 0.58, -0.26, -0.6, 2.09, -1.8)
_PRIOR_VARIANCE = (0.2, 0.02, 0.05, 0.02, 0.05, 0.02, 0.05, 0.02, 0.1, 0.1, 0.1)
_REACH = 3.0  # log-odds beyond which a distance says no more, and comparisons beyond which their number does not


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a match: its score in log-odds, and what the entry went through.

    wrong    highest score at which the entry's answer was found wrong for another question, None if never
    right    lowest score at which it was found right
    n_wrong  how often the one, and n_right how often the other
    n_served  how often the entry was given to another question since it was last compared: what draws many questions
             is wrong for twice as many of them
    support  how likely right the best other match is whose answer is known to be the same as this one's, 0 without one
    against  the same of the best other match whose answer is known to be another
    """

    score: float
    wrong: float | None = None
    right: float | None = None
    n_wrong: int = 0
    n_right: int = 0
    n_served: int = 0
    support: float = 0.0
    against: float = 0.0

    def features(self) -> tuple[float, ...]:
        """An entry that lies close to other questions needs a better match than one that never was wrong."""
        return (
            1.0,
            self.score,
            float(self.wrong is not None),
            0.0 if self.wrong is None else _clipped(self.wrong - self.score),
            float(self.right is not None),
            0.0 if self.right is None else _clipped(self.score - self.right),
            min(self.n_right, _REACH),
            min(self.n_wrong, _REACH),
            min(self.n_served, _REACH),
            self.support,
            self.against,
        )


@dataclass(frozen=True, slots=True)
class Judgement:
    """decision, with the estimated probability that the match is right (0 where there is none).

    chance is the probability with which a match like this is computed and compared: 1 for all that are not served.
    """

    decision: Decision
    p_right: float
    chance: float = 1.0


class ErrorController:
    """Keeps wrong semantic answers below max_error of all requests; verify_share of would-be hits are computed."""

    def __init__(self, max_error: float, verify_share: float, *, n_shadow: int = _N_SHADOW) -> None:
        self.max_error = max_error
        self.verify_share = verify_share
        self._n_shadow = n_shadow
        self._mean = list(_PRIOR)
        self._cov = [[v if i == j else 0.0 for j in range(len(_PRIOR))] for i, v in enumerate(_PRIOR_VARIANCE)]
        self._n_requests = 0
        self._n_labels = 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)  # p_right of each request's best match, 0 without one
        self._spent: deque[float] = deque(maxlen=_WINDOW)  # expected errors of each request
        self._spent_sum = 0.0
        self._wrong_seen = self._wrong_expected = _N_DOUBT
        self._threshold = 1.0
        self._verify_scale = 1.0

    @property
    def threshold(self) -> float:
        """Probability of being right from which a match is served; 1 while learning."""
        return self._threshold

    @property
    def bias(self) -> float:
        """Errors found by verifying, over those expected."""
        return self._wrong_seen / self._wrong_expected

    def probability(self, evidence: Evidence) -> float:
        return sigmoid(sum(m * x for m, x in zip(self._mean, evidence.features(), strict=True)))

    def judge(self, evidence: Evidence | None, draw: float, *, may_serve: bool = True) -> Judgement:
        """Decide one request; evidence is None where nothing comes near. Every request must pass here.

        may_serve False is shadow mode: what would be a hit is to be verified.
        """
        judgement = Judgement("miss", 0.0) if evidence is None else self._decide(evidence, draw, may_serve)
        expected = min((1 - judgement.p_right) * self.bias, 1.0) if judgement.decision == "hit" else 0.0
        if len(self._spent) == _WINDOW:
            self._spent_sum -= self._spent[0]
        self._spent.append(expected)
        self._spent_sum += expected
        self._recent.append(judgement.p_right)
        self._n_requests += 1
        if self._n_requests % _RENEW_EVERY == 0:
            self._renew()
        return judgement

    def learn(self, evidence: Evidence, is_right: bool, *, chance: float = 1.0) -> None:
        """Take in that a match's answer was compared; chance is its judgement's."""
        p_right = self.probability(evidence)
        if p_right >= self._threshold:  # of would-be hits only: how far the model is off where it matters
            weight = self.verify_share / chance
            wrong, expected = self._wrong_seen - _N_DOUBT, self._wrong_expected - _N_DOUBT
            self._wrong_seen = _N_DOUBT + wrong * _FORGET_BIAS + (not is_right) * weight
            self._wrong_expected = _N_DOUBT + expected * _FORGET_BIAS + (1 - p_right) * weight
        self._update(evidence.features(), is_right, p_right)
        self._n_labels += 1

    def state(self) -> dict[str, Any]:
        """All that was learned, and the last window, as plain JSON."""
        return {
            "mean": list(self._mean),
            "cov": [list(row) for row in self._cov],
            "n_requests": self._n_requests,
            "n_labels": self._n_labels,
            "seen": self._wrong_seen,
            "expected": self._wrong_expected,
            "recent": [round(p, 4) for p in self._recent],
            "threshold": self._threshold,
            "verify_scale": self._verify_scale,
            "spent": [round(e, 4) for e in self._spent],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a state(). Raises CacheStoreError where it is none, and is then as before."""
        with reading_state():
            n = len(_PRIOR)
            mean = [_finite(m) for m in state["mean"]]
            cov = [[_finite(c) for c in row] for row in state["cov"]]
            recent, spent = ([_share(p) for p in state[name]] for name in ("recent", "spent"))
            counts = [int(state[name]) for name in ("n_requests", "n_labels")]
            seen, expected = (_finite(state[name]) for name in ("seen", "expected"))
            threshold, verify_scale = _share(state["threshold"]), _finite(state["verify_scale"])
            if len(mean) != n or [len(row) for row in cov] != [n] * n or len(recent) != len(spent):
                raise ValueError("parts of other sizes")
            if (
                min(*counts, *(cov[i][i] for i in range(n))) < 0
                or min(seen, expected) < _N_DOUBT - 1e-9
                or verify_scale < 0
            ):
                raise ValueError("a negative count or variance")
        self._mean, self._cov, self._wrong_seen, self._wrong_expected = mean, cov, seen, expected
        self._n_requests, self._n_labels = counts
        self._recent, self._spent = deque(recent, _WINDOW), deque(spent, _WINDOW)
        self._spent_sum = sum(self._spent)
        self._threshold, self._verify_scale = threshold, verify_scale

    def _decide(self, evidence: Evidence, draw: float, may_serve: bool) -> Judgement:
        p_right = self.probability(evidence)
        is_sure = p_right >= self._threshold and self._n_labels >= _MIN_LABELS and self._n_requests >= self._n_shadow
        if not is_sure:
            return Judgement("miss", p_right)
        if not may_serve:
            return Judgement("verify", p_right)
        if self._spent_sum + (1 - p_right) * self.bias > self.max_error * _STOP * _WINDOW:
            return Judgement("miss", p_right)
        chance = min(self._verify_probability(p_right) * _eagerness(evidence), _MAX_VERIFY)
        return Judgement("verify" if draw < chance else "hit", p_right, chance)

    def _verify_probability(self, p_right: float) -> float:
        """Doubtful ones more often: the error of the estimate falls fastest so, and so do the errors."""
        return min(max(self._verify_scale * math.sqrt(p_right * (1 - p_right)), _MIN_VERIFY), _MAX_VERIFY)

    def _renew(self) -> None:
        """Set the threshold to where the expected errors of the last window's matches fit the declared share."""
        ranked = sorted((p for p in self._recent if p > 0.5), reverse=True)
        allowed = self.max_error * _AIM * len(self._recent) / max(self.bias, 0.5)
        threshold, errors, doubt, n_hits = 1.0, 0.0, 0.0, 0
        for p_right in ranked:
            errors += (1 - p_right) * (1 - self._verify_probability(p_right))
            if errors > allowed:
                break
            threshold, n_hits = p_right, n_hits + 1
            doubt += math.sqrt(p_right * (1 - p_right))
        self._threshold = threshold
        if doubt > 0:
            self._verify_scale = self.verify_share * n_hits / doubt

    def _update(self, x: Sequence[float], is_right: bool, p_right: float) -> None:
        """One step of Bayesian logistic regression, in which old comparisons fade."""
        n = len(x)
        cov = [
            [min(self._cov[i][j] / _FORGET, _PRIOR_VARIANCE[i]) if i == j else self._cov[i][j] for j in range(n)]
            for i in range(n)
        ]
        cx = [sum(cov[i][j] * x[j] for j in range(n)) for i in range(n)]
        weight = max(p_right * (1 - p_right), 1e-4)
        scale = weight / (1 + weight * sum(a * b for a, b in zip(cx, x, strict=True)))
        self._cov = [[cov[i][j] - scale * cx[i] * cx[j] for j in range(n)] for i in range(n)]
        gain = [sum(self._cov[i][j] * x[j] for j in range(n)) for i in range(n)]
        self._mean = [m + g * (is_right - p_right) for m, g in zip(self._mean, gain, strict=True)]


def _eagerness(evidence: Evidence) -> float:
    """Compare an entry that goes on serving sooner than others, or one wrong answer becomes a burst of them."""
    if evidence.n_served:
        return 1 + min(evidence.n_served, _REACH)
    return 0.5 if evidence.n_right >= 2 else 1.0


def _clipped(distance: float) -> float:
    return min(max(distance, -_REACH), _REACH)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-min(max(z, -30.0), 30.0)))


@contextmanager
def reading_state() -> Iterator[None]:
    """Turn what a damaged state raises into CacheStoreError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise CacheStoreError(path="state of the semantic cache", problem=f"cannot be read: {exc!r}"[:200]) from exc


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _share(value: Any) -> float:
    if not 0 <= _finite(value) <= 1:
        raise ValueError(f"{value!r} is not in 0..1")
    return float(value)
