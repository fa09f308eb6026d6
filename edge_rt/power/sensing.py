"""What the governor knows of the machine: each source read as often as it has news, and no older than it says.

A value that is older than three of its intervals is unknown. The policy knows what to do then; nothing is made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edge_rt.devices import battery, thermal
from edge_rt.devices.energy import EnergyLog
from edge_rt.devices.kernel_files import DryFiles, KernelFiles
from edge_rt.devices.meters import Meter
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.devices.watch import HeatWatch, LoadWatch
from edge_rt.power.state import Hint, Observation, Power

STALE_INTERVALS: Final = 3
_HEAT_S: Final = 0.25  # chips warm up within seconds
_LOAD_S: Final = 0.25
_THROTTLE_S: Final = 2.0
_BATTERY_S: Final = 5.0
_SPAN_S: Final = 0.1  # over which a counter's joules are made watts: RAPL steps each ms
_MAX_DOUBT: Final = 0.05  # of a power, by not knowing exactly when its joules were counted


@dataclass(slots=True)
class _Kept:
    """A value, and when it is due again."""

    value: float | None = None
    due_s: float = -math.inf

    n_missed: int = 0  # readings since then that gave nothing

    def fresh(self) -> float | None:
        """Give the value, unless it is older than STALE_INTERVALS readings: the idle loop reads more seldom."""
        return self.value if self.n_missed < STALE_INTERVALS else None


class PowerReader:
    """Watts from a meter that tells watts or joules. Belongs to one thread.

    clock  by which it sees how long a reading took; None: no time at all
    """

    def __init__(self, meter: Meter, clock: Callable[[], float] | None = None) -> None:
        self.meter, self._clock = meter, clock
        self.reason = "not read yet"
        self._power: Power | None = None
        self._at_s = self._due_s = -math.inf
        self._last: tuple[float, float, float] | None = None  # s, J, s that the moment is uncertain by
        self._asked_s = -math.inf
        self.log = EnergyLog(meter.interval_s)

    def read(self, now_s: float) -> Power:
        """Give the power as of now_s; its age counts from when the meter had it."""
        if now_s >= self._due_s:
            self._due_s = now_s + self.meter.interval_s * 0.9
            self._take(now_s)
        if self._power is None or now_s - self._at_s > STALE_INTERVALS * max(self.meter.interval_s, _SPAN_S):
            age_s = now_s - self._at_s if math.isfinite(self._at_s) else math.inf
            return Power(power_w=None, boundary=self.meter.boundary, quality=self.meter.quality, age_s=age_s)
        age_s = self._power.age_s + now_s - self._at_s
        return Power(power_w=self._power.power_w, boundary=self.meter.boundary, quality=self.meter.quality, age_s=age_s)

    def _take(self, now_s: float) -> None:
        begun_s = self._clock() if self._clock is not None else now_s
        reading = self.meter.read(begun_s)
        ended_s = self._clock() if self._clock is not None else now_s
        read_s = (begun_s + ended_s) / 2
        self.log.take(reading, read_s, period_s=read_s - self._asked_s if math.isfinite(self._asked_s) else 0.0)
        self._asked_s = read_s
        sample = reading.value
        if sample is None:
            self.reason, self._last = f"{reading.source}: {reading.reason}", None
            return
        if sample.power_w is not None:
            self._set(sample.power_w, sample.age_s, now_s)
        elif sample.energy_j is not None:
            # A slow bus, or a process that had to wait for its turn: when within that time the counter stood so?
            doubt_s = (ended_s - begun_s) / 2
            self._take_energy((begun_s + ended_s) / 2 - sample.age_s, sample.energy_j, doubt_s, sample.age_s, now_s)

    def _take_energy(self, at_s: float, energy_j: float, doubt_s: float, age_s: float, now_s: float) -> None:
        last = self._last
        if last is None or energy_j < last[1] or at_s - last[0] > 10.0:
            self._last = (at_s, energy_j, doubt_s)
        elif at_s - last[0] >= max(_SPAN_S, (doubt_s + last[2]) / _MAX_DOUBT):
            self._set((energy_j - last[1]) / (at_s - last[0]), age_s, now_s)
            self._last = (at_s, energy_j, doubt_s)
        elif doubt_s < last[2]:
            self._last = (at_s, energy_j, doubt_s)  # a better one to begin with

    def _set(self, power_w: float, age_s: float, now_s: float) -> None:
        if not math.isfinite(power_w) or power_w < 0:
            self.reason = f"{self.meter.name} tells {power_w:g} W, which cannot be"
            return
        meter, self.reason = self.meter, ""
        self._power = Power(power_w=power_w, boundary=meter.boundary, quality=meter.quality, age_s=age_s)
        self._at_s = now_s


class Sensing:
    """All sensors of one machine. Belongs to one thread.

    groups  the CPUs of each CPU domain
    meter   None: there is none, or it is not wanted
    """

    def __init__(
        self,
        root: SysfsRoot,
        files: KernelFiles | DryFiles,
        meter: Meter | None,
        groups: Mapping[str, Sequence[int]],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.groups = groups
        self.power = PowerReader(meter, clock) if meter is not None else None
        self._root = root
        self._heat, self._load = HeatWatch(root, files), LoadWatch(files)
        self._temperature, self._utilisation = _Kept(), _Kept()
        self._throttled, self._throttled_due_s, self._events = False, -math.inf, -1
        self._on_battery: bool | None = None
        self._charge: float | None = None
        self._battery_due_s = -math.inf

    def observe(self, now_s: float, hint: Hint | None, max_hz: Mapping[str, float]) -> Observation:
        """Read what is due and give what is known."""
        self._read_heat(now_s)
        self._read_load(now_s)
        self._read_throttle(now_s)
        self._read_battery(now_s)
        return Observation(
            now_s=now_s,
            hint=hint,
            power=self.power.read(now_s) if self.power is not None else None,
            temperature_c=self._temperature.fresh(),
            throttled=self._throttled,
            utilisation=self._utilisation.value,
            is_on_battery=self._on_battery,
            battery=self._charge,
            max_hz=max_hz,
        )

    def close(self) -> None:
        if self.power is not None:
            self.power.meter.close()

    def _read_heat(self, now_s: float) -> None:
        if now_s < self._temperature.due_s:
            return
        self._temperature.due_s = now_s + _HEAT_S
        found = self._heat.read(now_s).value
        if found is not None:
            self._temperature.value, self._temperature.n_missed = found, 0
        else:
            self._temperature.n_missed += 1

    def _read_load(self, now_s: float) -> None:
        if now_s >= self._utilisation.due_s:
            self._utilisation.due_s = now_s + _LOAD_S
            self._utilisation.value = self._load.read(self.groups).value

    def _read_throttle(self, now_s: float) -> None:
        if now_s < self._throttled_due_s:
            return
        self._throttled_due_s = now_s + _THROTTLE_S
        found = thermal.throttle(self._root).value
        if found is None:
            self._throttled = False
            return
        events = found.events if found.events is not None else -1
        self._throttled = bool(found.active) or (self._events >= 0 and events > self._events)
        self._events = events

    def _read_battery(self, now_s: float) -> None:
        if now_s < self._battery_due_s:
            return
        self._battery_due_s = now_s + _BATTERY_S
        self._charge = battery.charge(self._root).value
        self._on_battery = None if self._charge is None else not battery.is_charging(self._root)
