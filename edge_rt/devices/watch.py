"""Readings that a control loop takes many times a second, through descriptors that are kept. Standard library only.

What to read is found by thermal.py and cpufreq.py, which look at everything, every REFIND_S; in between only the files
that had something to say are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from edge_rt.devices import thermal
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.kernel_files import DryFiles, KernelFiles
from edge_rt.devices.sysfs import SysfsRoot

REFIND_S: Final = 10.0  # sensors sleep, wake and are plugged in
_MIN_C, _MAX_C = 1.0, 126.0  # as in thermal.py: outside no sensor is connected
_STAT: Final = "proc/stat"


class HeatWatch:
    """The hottest temperature of the chip, again and again. Belongs to one thread.

    clock  by which it sees how long each sensor takes; None: no time at all
    """

    def __init__(
        self, root: SysfsRoot, files: KernelFiles | DryFiles, clock: Callable[[], float] | None = None
    ) -> None:
        self._root, self._files, self._clock = root, files, clock
        self._paths: tuple[str, ...] = ()
        self._last: tuple[str, ...] = ()  # that were found the last time
        self._read_s: dict[str, float] = {}  # of each path, the last time
        self._found_s = -math.inf

    def read(self, now_s: float) -> Reading[float]:
        """Give the highest temperature in °C that any sensor tells now."""
        if now_s - self._found_s >= REFIND_S:
            self._found_s = now_s
            found = tuple(one.source.lstrip("/") for one in thermal.temperatures(self._root))
            # One that says nothing just now may speak again at once, and is left out only the next time.
            self._paths, self._last = tuple(dict.fromkeys((*found, *self._last))), found
        hottest_c = -math.inf
        begun_s = self._clock() if self._clock is not None else 0.0
        for path in self._paths:
            hottest_c = max(hottest_c, temperature_c(self._files, path))
            if self._clock is not None:
                ended_s = self._clock()
                self._read_s[path] = ended_s - begun_s
                begun_s = ended_s
        if not self._paths:
            return unknown("/sys/class/thermal, /sys/class/hwmon", "no CPU temperature sensor is visible")
        if hottest_c == -math.inf:
            return unknown(f"/{self._paths[0]}", "no sensor of the chip answers now")
        return known(hottest_c, f"/{self._paths[0]}")

    def quick(self, budget_s: float) -> tuple[str, ...]:
        """Give the sensors that can be read together within a time, the quickest first, by what each took last."""
        found, left_s = [], budget_s
        for path in sorted(self._paths, key=lambda path: self._read_s.get(path, math.inf)):
            left_s -= self._read_s.get(path, math.inf)
            if left_s < 0:
                break
            found.append(path)
        return tuple(found)


def temperature_c(files: KernelFiles | DryFiles, path: str) -> float:
    """Read a sensor in °C; minus infinity where it tells nothing that can be."""
    try:
        value_c = int(files.watch(path)) / 1e3
    except (OSError, ValueError):
        return -math.inf
    return value_c if _MIN_C <= value_c <= _MAX_C else -math.inf


class LoadWatch:
    """How busy groups of CPUs were since the last reading. Belongs to one thread."""

    def __init__(self, files: KernelFiles | DryFiles) -> None:
        self._files = files
        self._last: dict[int, tuple[int, int]] = {}

    def read(self, groups: Mapping[str, Sequence[int]]) -> Reading[float]:
        """Give the share of its time, 0..1, in which the busiest group computed. The first reading is unknown.

        /proc/stat is read up to its first 4 kB, which hold some 55 CPUs.
        """
        try:
            text = self._files.watch(_STAT)
        except OSError as exc:
            return unknown(f"/{_STAT}", exc.strerror or str(exc))
        shares: dict[int, float] = {}
        for line in text.split("\n"):
            if not line.startswith("cpu"):
                break
            words = line.split()
            try:
                cpu, times = int(words[0][3:]), list(map(int, words[1:9]))
            except ValueError:  # the line of all CPUs, or nothing of the kernel's
                continue
            if len(times) < 5:
                continue
            total, idle = sum(times), times[3] + times[4]
            before = self._last.get(cpu)
            self._last[cpu] = (total, idle)
            if before is not None and total > before[0]:
                shares[cpu] = min(max(1.0 - (idle - before[1]) / (total - before[0]), 0.0), 1.0)
        found = [
            sum(shares[cpu] for cpu in cpus if cpu in shares) / n
            for cpus in groups.values()
            if (n := sum(cpu in shares for cpu in cpus))
        ]
        return known(max(found), f"/{_STAT}") if found else unknown(f"/{_STAT}", "no two readings to compare yet")
