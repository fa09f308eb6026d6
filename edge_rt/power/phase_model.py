"""How long a step takes at a clock: t = a + b / f for each phase, learned while the machine works. Pure.

a is waiting for memory, which no clock of the cores changes; b is computing. What is learned at one clock has to
foretell others, so a and b move together, in the proportion in which they were uncertain: recursive least squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_FORGET = 0.97  # of what was known remains with each observation: about the last 30 count
_UNSURE = 0.35  # the prior's standard deviation, relative
_NOISE = 0.05  # of a measured time, relative
_FAR = 4.0  # a time this much longer or shorter than foretold is an accident,
_N_FAR = 4  # unless so many come in a row
_ODD = 4.0  # standard deviations from what was foretold
_MIN_S, _MAX_S = 1e-7, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """t = a_s + b_s * n / x, where x is the clock relative to the highest and n the rows computed together.

    c_aa, c_ab, c_bb  their covariance
    n_far             accidents in a row, or 1 after a time that was odd
    """

    a_s: float
    b_s: float
    c_aa: float
    c_ab: float
    c_bb: float
    n_far: int = 0
    n_seen: int = 0

    def seconds(self, x: float, n: float = 1.0) -> float:
        """Foretell a step of n rows at x of the highest clock."""
        return self.a_s + self.b_s * n / x


def fit(points: Sequence[tuple[float, float]]) -> Phase:
    """Begin with what is known: seconds at clocks x of (0, 1], from a calibration or a common curve."""
    n = len(points)
    u = [1 / x for x, _ in points]
    t = [seconds for _, seconds in points]
    mean_u, mean_t = sum(u) / n, sum(t) / n
    spread = sum((value - mean_u) ** 2 for value in u)
    b = sum((p - mean_u) * (q - mean_t) for p, q in zip(u, t, strict=True)) / spread if spread > 0 else 0.5 * mean_t
    b = min(max(b, 0.02 * mean_t / mean_u), mean_t / mean_u)
    return _unsure(max(mean_t - b * mean_u, 0.0), b)


def begin(a_s: float, b_s: float) -> Phase:
    """Begin with waiting and computing that are known apart."""
    return _unsure(a_s, b_s)


def _unsure(a_s: float, b_s: float) -> Phase:
    return Phase(a_s=a_s, b_s=b_s, c_aa=(_UNSURE * (a_s + 0.1 * b_s)) ** 2, c_ab=0.0, c_bb=(_UNSURE * b_s) ** 2)


def observe(phase: Phase, seconds: float, *, x: float, n: float = 1.0, noise: float = _NOISE) -> Phase:
    """Learn from a step of n rows that took so long; what is no positive number is ignored.

    noise  how wrong seconds may be, relative
    """
    if not (_MIN_S <= seconds <= _MAX_S and 0 < x <= 1 and 0 < n < math.inf):
        return phase
    foretold = phase.seconds(x, n)
    if not foretold / _FAR <= seconds <= foretold * _FAR:
        if phase.n_far + 1 < _N_FAR:
            return replace(phase, n_far=phase.n_far + 1)
        # Another model or another machine: keep the proportion and begin again.
        scale = seconds / foretold
        return _unsure(phase.a_s * scale, phase.b_s * scale)
    u = n / x
    # The gain of a Kalman filter for y = a + b u, whose noise grows with the time that is measured.
    p_a, p_b = phase.c_aa + phase.c_ab * u, phase.c_ab + phase.c_bb * u
    spread = p_a + p_b * u + (max(noise, _NOISE) * foretold) ** 2
    error = seconds - foretold
    is_odd = error * error > _ODD**2 * spread
    if is_odd and phase.n_far:
        # Twice in a row is no accident: something has changed, and what was known counts no more than a stranger's.
        return observe(_unsure(phase.a_s, phase.b_s), seconds, x=x, n=n, noise=noise)
    k_a, k_b = p_a / spread, p_b / spread
    a, b = phase.a_s + k_a * error, phase.b_s + k_b * error
    if a < 0 or b <= 0:  # no clock makes time run backwards: keep the proportion instead, and go as far
        scale = (a + b * u) / foretold
        a, b = phase.a_s * scale, phase.b_s * scale
    c_aa = phase.c_aa - k_a * p_a
    c_ab = phase.c_ab - k_a * p_b
    c_bb = phase.c_bb - k_b * p_b
    # Forgetting grows the covariance, but never beyond what a stranger would know: so one clock for hours is harmless.
    limit = _unsure(a, b)
    grow = min(1 / _FORGET, max(1.0, min(limit.c_aa / max(c_aa, 1e-18), limit.c_bb / max(c_bb, 1e-18))))
    return Phase(
        a_s=a,
        b_s=b,
        c_aa=c_aa * grow,
        c_ab=c_ab * grow,
        c_bb=c_bb * grow,
        n_far=int(is_odd),
        n_seen=min(phase.n_seen + 1, 1_000_000),
    )


def scaled(phase: Phase, seconds: float, *, x: float) -> Phase:
    """Take over a first measured time in place of relative ones: a and b keep their proportion."""
    scale = seconds / phase.seconds(x)
    return _unsure(phase.a_s * scale, phase.b_s * scale)
