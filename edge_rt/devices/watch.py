"""Readings that a control loop takes many times a second, through descriptors that are kept. Standard library only.

What to read is found by thermal.py and cpufreq.py, which look at everything, every REFIND_S; in between only the files
that had something to say are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from edge_rt.devices import thermal
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.kernel_files import DryFiles, KernelFiles
from edge_rt.devices.sysfs import SysfsRoot

REFIND_S: Final = 10.0  # sensors sleep, wake and are plugged in
_MIN_C, _MAX_C = 1.0, 126.0  # as in thermal.py: outside no sensor is connected
_STAT: Final = "proc/stat"


class HeatWatch:
    """The hottest temperature of the chip, again and again. Belongs to one thread."""

    def __init__(self, root: SysfsRoot, files: KernelFiles | DryFiles) -> None:
        self._root, self._files = root, files
        self._paths: tuple[str, ...] = ()
        self._found_s = -math.inf

    def read(self, now_s: float) -> Reading[float]:
        """Give the highest temperature in °C that any sensor tells now."""
        if now_s - self._found_s >= REFIND_S:
            self._found_s = now_s
            self._paths = tuple(found.source.lstrip("/") for found in thermal.temperatures(self._root))
        hottest_c = -math.inf
        for path in self._paths:
            try:
                value_c = int(self._files.watch(path)) / 1e3
            except (OSError, ValueError):
                continue
            if _MIN_C <= value_c <= _MAX_C:
                hottest_c = max(hottest_c, value_c)
        if not self._paths:
            return unknown("/sys/class/thermal, /sys/class/hwmon", "no CPU temperature sensor is visible")
        if hottest_c == -math.inf:
            return unknown(f"/{self._paths[0]}", "no sensor of the chip answers now")
        return known(hottest_c, f"/{self._paths[0]}")


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
            if not words[0][3:].isdecimal() or len(words) < 6 or not all(word.isdecimal() for word in words[1:9]):
                continue
            cpu, times = int(words[0][3:]), [int(word) for word in words[1:9]]
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
