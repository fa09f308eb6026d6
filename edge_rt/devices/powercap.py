"""Energy the CPU has used, from RAPL's counters in /sys/class/powercap."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.sysfs import SysfsRoot


@dataclass(frozen=True, slots=True)
class Zone:
    """One RAPL counter. It counts up to range_j, then starts again at 0."""

    path: str
    name: str
    range_j: float


class EnergyMeter:
    """Joules since the meter was made, summed over CPU packages and their memory.

    A counter wraps after minutes to hours under load; one wrap between two reads is recovered, more are not.
    """

    def __init__(self, root: SysfsRoot | None = None) -> None:
        self._root = root or SysfsRoot()
        self._zones, self._problem = _zones(self._root)
        self._total_j = 0.0
        self._last = self._counters()
        if self._zones and self._last is None:
            self._problem = self._unreadable()
            self._zones = ()

    @property
    def source(self) -> str:
        """What is measured: "rapl package-0 + dram", or the place that has no counter."""
        return "rapl " + " + ".join(zone.name for zone in self._zones) if self._zones else "/sys/class/powercap"

    def read_j(self) -> Reading[float]:
        if not self._zones:
            return unknown(self.source, self._problem)
        counters = self._counters()
        if counters is None or self._last is None:
            return unknown(self.source, self._unreadable())
        for zone, before, now in zip(self._zones, self._last, counters, strict=True):
            self._total_j += now - before if now >= before else now - before + zone.range_j
        self._last = counters
        return known(self._total_j, self.source)

    def _counters(self) -> tuple[float, ...] | None:
        values = [self._root.scaled(f"{zone.path}/energy_uj", 1e-6).value for zone in self._zones]
        return tuple(v for v in values if v is not None) if None not in values else None

    def _unreadable(self) -> str:
        for zone in self._zones:
            reading = self._root.integer(f"{zone.path}/energy_uj")
            if reading.value is None:
                return f"{reading.source}: {reading.reason}"
        return "the counters could not be read at once"


def _zones(root: SysfsRoot) -> tuple[tuple[Zone, ...], str]:
    """Pick packages and their dram; core and uncore lie inside a package, intel-rapl-mmio repeats it."""
    found: list[Zone] = []
    names: list[str] = []
    for path in root.paths("sys/class/powercap/intel-rapl:*"):
        name = root.text(f"{path}/name").value or ""
        names.append(name)
        range_j = root.scaled(f"{path}/max_energy_range_uj", 1e-6).value
        if range_j and (name.startswith("package") or name == "dram"):
            found.append(Zone(path=path, name=name, range_j=range_j))
    if found:
        return tuple(found), ""
    if names:
        return (), f"RAPL has {', '.join(names)} but no package counter"
    return (), "no RAPL counter: neither the CPU nor the hypervisor offers one, or the intel_rapl driver is not loaded"
