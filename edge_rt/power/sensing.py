"""What the governor knows of the machine: each source read as often as it has news, and no older than it says.

A value that is older than three of its intervals is unknown. The policy knows what to do then; nothing is made up. What
takes long to read is read beside the loop (source.py), so that the cap is held at its rate by what is quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from edge_rt.devices import battery, thermal
from edge_rt.devices.base import Reading
from edge_rt.devices.energy import EnergyLog
from edge_rt.devices.kernel_files import DryFiles, KernelFiles
from edge_rt.devices.meters import Meter, Sample
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.devices.thermal import Throttle
from edge_rt.devices.watch import HeatWatch, LoadWatch, temperature_c
from edge_rt.power.source import SLOW_S, Source, Took
from edge_rt.power.state import NO_ADVICE, Advice, Hint, Observation, Power

STALE_INTERVALS: Final = 3
_HEAT_S: Final = 0.25  # chips warm up within seconds
_LOAD_S: Final = 0.25
_THROTTLE_S: Final = 2.0
_BATTERY_S: Final = 5.0
_SPAN_S: Final = 0.1  # over which a counter's joules are made watts: RAPL steps each ms
_MAX_DOUBT: Final = 0.05  # of a power, by not knowing exactly when its joules were counted
_QUICK_S: Final = SLOW_S / 4  # that the temperatures read in the loop may take together, where others are slow


class PowerReader:
    """Watts from a meter that tells watts or joules. Belongs to one thread.

    clock   by which it sees how long a reading took; None: no time at all
    source  where its readings come from
    """

    def __init__(self, meter: Meter, clock: Callable[[], float] | None = None) -> None:
        self.meter = meter
        self.source = Source(meter.read, meter.interval_s * 0.9, clock, close=meter.close)
        self.reason = "not read yet"
        self._power: Power | None = None
        self._at_s = -math.inf
        self._last: tuple[float, float, float] | None = None  # s, J, s that the moment is uncertain by
        self._asked_s = -math.inf
        self.log = EnergyLog(meter.interval_s)

    def read(self, now_s: float) -> Power:
        """Give the power as of now_s; its age counts from when the meter had it."""
        if (took := self.source.poll(now_s)) is not None:
            self._take(took)
        age_s = self.age_s(now_s)
        if self._power is None or self._is_stale(now_s, age_s):
            return Power(power_w=None, boundary=self.meter.boundary, quality=self.meter.quality, age_s=age_s)
        age_s += self._power.age_s
        return Power(power_w=self._power.power_w, boundary=self.meter.boundary, quality=self.meter.quality, age_s=age_s)

    def age_s(self, now_s: float) -> float:
        """Tell how long ago the last reading that gave a power was made."""
        return max(now_s - self._at_s, 0.0)

    def _is_stale(self, now_s: float, age_s: float) -> bool:
        if self.source.is_slow and self.reason == "":
            return self.source.is_late(now_s, STALE_INTERVALS)  # a slow meter's value is as old as it tells
        return age_s > STALE_INTERVALS * max(self.meter.interval_s, _SPAN_S)

    def _take(self, took: Took[Reading[Sample]]) -> None:
        reading, read_s = took.value, (took.begun_s + took.ended_s) / 2
        self.log.take(reading, read_s, period_s=read_s - self._asked_s if math.isfinite(self._asked_s) else 0.0)
        self._asked_s = read_s
        sample = reading.value
        if sample is None:
            self.reason, self._last = f"{reading.source}: {reading.reason}", None
            return
        if sample.power_w is not None:
            self._set(sample.power_w, sample.age_s, read_s)
        elif sample.energy_j is not None:
            # A slow bus, or a process that had to wait for its turn: when within that time the counter stood so?
            self._take_energy(read_s - sample.age_s, sample.energy_j, took.read_s / 2, sample.age_s, read_s)

    def _take_energy(self, at_s: float, energy_j: float, doubt_s: float, age_s: float, read_s: float) -> None:
        last = self._last
        if last is None or energy_j < last[1] or at_s - last[0] > 10.0:
            self._last = (at_s, energy_j, doubt_s)
        elif at_s - last[0] >= max(_SPAN_S, (doubt_s + last[2]) / _MAX_DOUBT):
            self._set((energy_j - last[1]) / (at_s - last[0]), age_s, read_s)
            self._last = (at_s, energy_j, doubt_s)
        elif doubt_s < last[2]:
            self._last = (at_s, energy_j, doubt_s)  # a better one to begin with

    def _set(self, power_w: float, age_s: float, read_s: float) -> None:
        if not math.isfinite(power_w) or power_w < 0:
            self.reason = f"{self.meter.name} tells {power_w:g} W, which cannot be"
            return
        meter, self.reason = self.meter, ""
        self._power = Power(power_w=power_w, boundary=meter.boundary, quality=meter.quality, age_s=age_s)
        self._at_s = read_s


class HeatReader:
    """The hottest temperature of the chip. Belongs to one thread.

    Where a sensor is slow, all are read beside the loop, and those that are quick in the loop too.

    files  gives files below the same root, which each thread has its own of; None: the kernel's
    """

    def __init__(
        self, root: SysfsRoot, clock: Callable[[], float] | None, files: Callable[[], KernelFiles] | None = None
    ) -> None:
        files = files or (lambda: KernelFiles(str(root.path(""))))
        beside = files()
        self._watch = HeatWatch(root, beside, clock)
        self.source = Source(self._watch.read, _HEAT_S, clock, close=beside.close)
        self._clock = clock
        self._value_c: float | None = None
        self._n_missed = 0  # readings since then that gave nothing: the idle loop reads more seldom
        self._at_s = -math.inf
        self._files = files()
        self._quick: Source[float] | None = None  # once the others are slow
        self._quick_c = -math.inf

    def read(self, now_s: float) -> float | None:
        """Give it in °C, None where it is not known."""
        was_slow = self.source.is_slow
        if (took := self.source.poll(now_s)) is not None:
            if took.value.value is not None:
                self._value_c, self._n_missed, self._at_s = took.value.value, 0, took.begun_s
            else:
                self._n_missed += 1
        if self.source.is_slow and not was_slow:
            paths = self._watch.quick(_QUICK_S)
            self._quick = Source(lambda _: self._read_quick(paths), _HEAT_S, self._clock)
        elif not self.source.is_slow:
            self._quick = None
        found_c = -math.inf
        if self._quick is not None:
            if (quick := self._quick.poll(now_s)) is not None:
                self._quick_c = quick.value
            found_c = self._quick_c
        is_known = self._n_missed < STALE_INTERVALS and not self.source.is_late(now_s, STALE_INTERVALS)
        if self._value_c is not None and is_known:
            found_c = max(found_c, self._value_c)
        return found_c if found_c > -math.inf else None

    def age_s(self, now_s: float) -> float:
        """Tell how old what all sensors say is."""
        return max(now_s - self._at_s, 0.0)

    def close(self) -> None:
        self.source.close()
        if self._quick is not None:
            self._quick.close()
        self._files.close()

    def _read_quick(self, paths: Sequence[str]) -> float:
        return max((temperature_c(self._files, path) for path in paths), default=-math.inf)


class Sensing:
    """All sensors of one machine. Belongs to one thread.

    groups  the CPUs of each CPU domain
    meter   None: there is none, or it is not wanted
    clock   by which it sees what is slow; None: nothing is
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
        self._heat, self._load = HeatReader(root, clock), LoadWatch(files)
        self._throttle = Source(lambda _: thermal.throttle(root).value, _THROTTLE_S, clock)
        self._battery = Source(lambda _: _supply(root), _BATTERY_S, clock)
        self._utilisation: float | None = None
        self._load_due_s = -math.inf
        self._throttled, self._events = False, -1
        self._charge: float | None = None
        self._on_battery: bool | None = None

    def observe(
        self, now_s: float, hint: Hint | None, max_hz: Mapping[str, float], advice: Advice = NO_ADVICE
    ) -> Observation:
        """Read what is due and give what is known."""
        if now_s >= self._load_due_s:
            self._load_due_s = now_s + _LOAD_S
            self._utilisation = self._load.read(self.groups).value
        if (throttle := self._throttle.poll(now_s)) is not None:
            self._take_throttle(throttle.value)
        if (supply := self._battery.poll(now_s)) is not None:
            self._charge, self._on_battery = supply.value
        return Observation(
            now_s=now_s,
            hint=hint,
            power=self.power.read(now_s) if self.power is not None else None,
            temperature_c=self._heat.read(now_s),
            throttled=self._throttled,
            utilisation=self._utilisation,
            is_on_battery=self._on_battery,
            battery=self._charge,
            max_hz=max_hz,
            advice=advice,
        )

    def slow(self, now_s: float) -> dict[str, dict[str, float]]:
        """Give what is slow: how long its last reading took, and for power and heat how old that is now."""
        found = {}
        if self.power is not None and self.power.source.is_slow:
            found["power"] = {"read_s": self.power.source.read_s, "age_s": self.power.age_s(now_s)}
        if self._heat.source.is_slow:
            found["heat"] = {"read_s": self._heat.source.read_s, "age_s": self._heat.age_s(now_s)}
        for name, source in (("throttle", self._throttle), ("battery", self._battery)):
            if source.is_slow:
                found[name] = {"read_s": source.read_s}
        return {name: {key: round(min(s, 1e6), 3) for key, s in times.items()} for name, times in found.items()}

    def close(self) -> None:
        for source in (self._heat, self._throttle, self._battery):
            source.close()
        if self.power is not None:
            self.power.source.close()

    def _take_throttle(self, found: Throttle | None) -> None:
        if found is None:
            self._throttled = False
            return
        events = found.events if found.events is not None else -1
        self._throttled = bool(found.active) or (self._events >= 0 and events > self._events)
        self._events = events


def _supply(root: SysfsRoot) -> tuple[float | None, bool | None]:
    """Give the battery's charge, and whether the machine lives on it; None where there is none."""
    charge = battery.charge(root).value
    return charge, None if charge is None else not battery.is_charging(root)
