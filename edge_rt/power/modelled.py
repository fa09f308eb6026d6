"""Power where no sensor tells it: by the clock and the load, from a table that was made on such a board.

    power = idle_w + (active_w(clock) - idle_w) × utilisation / the table's utilisation

active_w is the mean of prefill and decode unless it is known which of them runs. What comes out is "modelled": it knows
nothing of temperature, voltage or what hangs on the board, and it says so wherever it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.idle import cpu_ticks
from edge_rt.devices.meters import Boundary, Quality, Sample
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.calibration import CalibratedDomain, Calibration, Point
from edge_rt.power.state import Work

_POLICIES: Final = "sys/devices/system/cpu/cpufreq"
_KHZ: Final = 1e3
_MIN_TICKS: Final = 2  # of 10 ms, of all CPUs together: with fewer the last value stands
_MAX_GAIN: Final = 1.2  # beyond what the table was made with


class ModelledMeter:
    """A Meter without a sensor. work: what runs now, where somebody knows; None: not known."""

    quality: Quality = "modelled"
    interval_s = 0.2

    def __init__(
        self,
        calibration: Calibration,
        *,
        root: SysfsRoot | None = None,
        work: Callable[[], Work | None] = lambda: None,
    ) -> None:
        self.name = f"model of {calibration.board}"
        self.boundary: Boundary = calibration.boundary
        self._calibration, self._root, self._work = calibration, root or SysfsRoot(), work
        self._ticks: tuple[int, int] | None = None
        self._power_w: float | None = None
        self._at_s = 0.0

    def read(self, now_s: float) -> Reading[Sample]:
        """Give the mean power since the last read that saw the CPUs' counters move."""
        ticks = cpu_ticks(self._root)
        if ticks is None:
            self._ticks = None
            return unknown("/proc/stat", "the CPUs' load cannot be read")
        before = self._ticks
        if before is None or ticks[1] < before[1] or ticks[0] < before[0]:
            self._ticks = ticks
            return unknown(self.name, "the load shows from the second look on")
        if ticks[1] - before[1] >= _MIN_TICKS:
            self._ticks = ticks
            self._power_w = self._power((ticks[0] - before[0]) / (ticks[1] - before[1]))
            self._at_s = now_s
        if self._power_w is None:
            return unknown(self.name, "the load shows from the second look on")
        return known(Sample(power_w=self._power_w, age_s=now_s - self._at_s), self.name)

    def close(self) -> None: ...

    def _power(self, utilisation: float) -> float:
        calibration = self._calibration
        gain = min(utilisation / calibration.utilisation, _MAX_GAIN)
        active_w = max((self._active_w(domain) for domain in calibration.domains), default=calibration.idle_w)
        return calibration.idle_w + gain * (active_w - calibration.idle_w)

    def _active_w(self, domain: CalibratedDomain) -> float:
        point, work = domain.at(self._clock_hz(domain.name)), self._work()
        if work == "prefill":
            return point.prefill_w
        return point.decode_w if work == "decode" else _mean_w(point)

    def _clock_hz(self, name: str) -> float | None:
        """Give the clock of a cpufreq policy; None for other domains and where nobody tells it."""
        if not name.startswith("policy") or not name.removeprefix("policy").isdecimal():
            return None
        return self._root.scaled(f"{_POLICIES}/{name}/scaling_cur_freq", _KHZ).value


def _mean_w(point: Point) -> float:
    return (point.prefill_w + point.decode_w) / 2
