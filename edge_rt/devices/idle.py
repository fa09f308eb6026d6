"""How many cores do nothing, from the kernel's idle counters."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable

from edge_rt.devices.sysfs import SysfsRoot

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class IdleMeter:
    """Calling it gives the cores idle on average since the last reading.

    The file is read at most every interval_s (a read costs tens of microseconds); in between the last figure is given.
    None at first, where /proc/stat is missing, and after max_span_s without a call: what the neighbours did that long
    ago says nothing about now.
    """

    def __init__(
        self,
        cpus: Iterable[int],
        *,
        root: SysfsRoot | None = None,
        interval_s: float = 0.2,
        max_span_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = frozenset(f"cpu{i}" for i in cpus)
        self._root = root or SysfsRoot()
        self._interval_s = interval_s
        self._max_span_s = max_span_s
        self._clock = clock
        self._read_at_s: float | None = None
        self._idle_s: float | None = None
        self._cores: float | None = None

    def __call__(self) -> float | None:
        now_s = self._clock()
        if self._read_at_s is None or now_s - self._read_at_s >= self._interval_s:
            idle_s = self._total_idle_s()
            span_s = now_s - self._read_at_s if self._read_at_s is not None else math.inf
            if idle_s is None or self._idle_s is None or span_s > self._max_span_s:
                self._cores = None
            else:
                self._cores = max(0.0, (idle_s - self._idle_s) / span_s)
            self._read_at_s, self._idle_s = now_s, idle_s
        return self._cores

    def _total_idle_s(self) -> float | None:
        """Sum idle and iowait ticks of the CPUs: /proc/stat, columns 4 and 5 (proc_stat(5))."""
        ticks, n_found = 0, 0
        for line in (self._root.text("proc/stat").value or "").splitlines():
            words = line.split()
            if words and words[0] in self._names and len(words) > 5:
                ticks += int(words[4]) + int(words[5])
                n_found += 1
        return ticks * _TICK_S if n_found else None


def cpu_ticks(root: SysfsRoot) -> tuple[int, int] | None:
    """Give all CPUs' ticks since boot: those in which they worked, and all; None where /proc/stat does not tell.

    Its first line (proc_stat(5)): idle and iowait are the fourth and fifth number, guest time is in user's already.
    """
    words = (root.text("proc/stat").value or "").partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu" or not all(word.isdecimal() for word in words[1:9]):
        return None
    numbers = [int(word) for word in words[1:9]]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


class LoadShare:
    """Calling it gives the share of all CPUs' time that was worked since the call before; None: not known."""

    def __init__(self, root: SysfsRoot | None = None) -> None:
        self._root = root or SysfsRoot()
        self._last = cpu_ticks(self._root)

    def __call__(self) -> float | None:
        last, now = self._last, cpu_ticks(self._root)
        self._last = now
        if last is None or now is None or now[1] <= last[1]:
            return None
        return min(1.0, max(0.0, (now[0] - last[0]) / (now[1] - last[1])))
