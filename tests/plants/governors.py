"""Linux' cpufreq governors, as events: each says when it would look again, and never looks while nothing can change.

All CPUs share one clock and the engine's threads load all of them alike, so one utilisation stands for every CPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

NEVER = math.inf
_PELT_S = 0.032 / math.log(2)  # half-life 32 ms
_HEADROOM = 1.25


class Governor(Protocol):
    """point is the index of the clock it asks for; next_s when it looks again."""

    point: int
    next_s: float

    def load(self, now_s: float, *, is_busy: bool, running: int) -> None:
        """Hear that the CPUs become busy or idle; running is the point that is in force."""
        ...

    def look(self, now_s: float, *, running: int) -> None: ...


class Fixed:
    """performance, powersave, or any clock in between."""

    def __init__(self, point: int) -> None:
        self.point = point
        self.next_s = NEVER

    def load(self, now_s: float, *, is_busy: bool, running: int) -> None:
        pass

    def look(self, now_s: float, *, running: int) -> None:
        pass


class Schedutil:
    """1.25 x utilisation, which PELT tracks invariant of the clock, with util_est and a rate limit.

    A task that always runs nears utilisation 1, the slower the lower the clock. util_est remembers what a task had when
    it last slept and counts as soon as it wakes, as kernels since 4.17 do. In idle the clock follows the decay, though
    a kernel whose CPUs all sleep would not look: that favours this governor.
    """

    def __init__(self, points_hz: Sequence[float], *, rate_limit_s: float = 0.010, has_util_est: bool = True) -> None:
        self._points_hz = points_hz
        self._rate_limit_s = rate_limit_s
        self._has_util_est = has_util_est
        self._util = self._estimated = 0.0
        self._at_s = 0.0
        self._is_busy = False
        self._changed_s = -math.inf
        self.point = 0
        self.next_s = NEVER

    def load(self, now_s: float, *, is_busy: bool, running: int) -> None:
        self._track(now_s, running)
        if self._is_busy and not is_busy:
            # Grows at once, forgets a quarter of the difference each time.
            grown = self._util > self._estimated
            self._estimated = self._util if grown else self._estimated + (self._util - self._estimated) / 4
        self._is_busy = is_busy
        self.next_s = max(now_s, self._changed_s + self._rate_limit_s)

    def look(self, now_s: float, *, running: int) -> None:
        self._track(now_s, running)
        util = self._util
        if self._is_busy and self._has_util_est:
            util = max(util, self._estimated)
        wanted = min(bisect_left(self._points_hz, _HEADROOM * util * self._points_hz[-1]), len(self._points_hz) - 1)
        if wanted != self.point:
            self.point, self._changed_s = wanted, now_s
        at_end = self.point == (len(self._points_hz) - 1 if self._is_busy else 0)
        self.next_s = NEVER if at_end else now_s + self._rate_limit_s

    def _track(self, now_s: float, running: int) -> None:
        passed_s = now_s - self._at_s
        self._at_s = now_s
        if self._is_busy:
            passed_s *= self._points_hz[running] / self._points_hz[-1]
            self._util = 1 - (1 - self._util) * math.exp(-passed_s / _PELT_S)
        else:
            self._util *= math.exp(-passed_s / _PELT_S)


class _Sampling:
    """What ondemand and conservative share: the busy share of the last period."""

    def __init__(self, points_hz: Sequence[float], period_s: float) -> None:
        self._points_hz = points_hz
        self._period_s = period_s
        self._is_busy = False
        self._since_s = self._start_s = 0.0
        self._busy_s = 0.0
        self.point = 0
        self.next_s = NEVER

    def load(self, now_s: float, *, is_busy: bool, running: int) -> None:
        if self._is_busy:
            self._busy_s += now_s - self._since_s
        self._is_busy, self._since_s = is_busy, now_s
        if self.next_s == NEVER:
            # The timer's periods go on in idle, unseen.
            n_periods = math.floor((now_s - self._start_s) / self._period_s)
            self._start_s += n_periods * self._period_s
            self._busy_s = 0.0
            self.next_s = self._start_s + self._period_s

    def look(self, now_s: float, *, running: int) -> None:
        if self._is_busy:
            self._busy_s += now_s - self._since_s
            self._since_s = now_s
        share = self._busy_s / max(now_s - self._start_s, 1e-9)
        self._start_s, self._busy_s = now_s, 0.0
        self._choose(min(share, 1.0))
        at_end = self.point == (len(self._points_hz) - 1 if self._is_busy else 0)
        self.next_s = NEVER if at_end else now_s + self._period_s

    def _choose(self, share: float) -> None:
        raise NotImplementedError


class Ondemand(_Sampling):
    """The highest clock above 80 % load, else in proportion; every 10 ms."""

    def __init__(self, points_hz: Sequence[float]) -> None:
        super().__init__(points_hz, 0.010)

    def _choose(self, share: float) -> None:
        low_hz, high_hz = self._points_hz[0], self._points_hz[-1]
        wanted_hz = high_hz if share > 0.8 else low_hz + share * (high_hz - low_hz)
        self.point = min(bisect_left(self._points_hz, wanted_hz), len(self._points_hz) - 1)


class Conservative(_Sampling):
    """A twentieth of the highest clock up above 80 % load and down below 20 %; every 20 ms."""

    def __init__(self, points_hz: Sequence[float]) -> None:
        super().__init__(points_hz, 0.020)
        self._hz = points_hz[0]

    def _choose(self, share: float) -> None:
        step_hz = 0.05 * self._points_hz[-1]
        if share > 0.8:
            self._hz = min(self._hz + step_hz, self._points_hz[-1])
        elif share < 0.2:
            self._hz = max(self._hz - step_hz, self._points_hz[0])
        self.point = min(bisect_left(self._points_hz, self._hz), len(self._points_hz) - 1)
