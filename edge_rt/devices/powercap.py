"""Energy the CPU has used, from RAPL's counters in /sys/class/powercap."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.meters import MAX_ZONE_W, Boundary, Counter, Quality, Sample
from edge_rt.devices.sysfs import SysfsRoot

_PLACE = "sys/class/powercap"

# Since Linux 5.10 only root may read the counters, because they leak what other processes compute (CVE-2020-8694).
PERMISSION = (
    "give the counters to the group of those who may see them, at each boot: a file in /etc/tmpfiles.d with the line "
    "`z /sys/class/powercap/intel-rapl:*/energy_uj 0440 root edge_rt`, then `systemd-tmpfiles --create`"
)

_DRAM_W = 300.0  # what memory cannot take more
_STILL_S = 2.0  # a counter moves each ms
_ROOM = 2.0  # power above the processor's own highest limit that is still believed for a moment


@dataclass(frozen=True, slots=True)
class Zone:
    """One RAPL counter. It counts up to range_j, then starts again at 0; None: that cannot be read.

    max_w  what it cannot take more, by which a reset is told from a wrap
    """

    path: str
    name: str
    range_j: float | None
    max_w: float


class EnergyMeter:
    """Joules since the first reading, summed over the zones: by default the CPU packages and their memory.

    A counter wraps after minutes to hours under load; one wrap between two reads is recovered. Where there may have
    been more, or the counter was reset, that reading is unknown, and the total leaves out what was used since the last.
    """

    quality: Quality = "measured"
    interval_s = 0.05  # it steps each ms, by different amounts: more often there is more noise than news

    def __init__(self, root: SysfsRoot | None = None, *, boundary: Boundary = "soc") -> None:
        self._root = root or SysfsRoot()
        self.boundary: Boundary = boundary
        self._zones, self._problem = _zones(self._root, boundary)
        # "rapl package-0 + dram", or "rapl" where there is no counter
        self.name = " ".join(filter(None, ("rapl", " + ".join(zone.name for zone in self._zones))))
        self._counters = [Counter(zone.range_j, zone.max_w) for zone in self._zones]

    @property
    def source(self) -> str:
        """The meter's name, or the place that has no counter."""
        return self.name if self._zones else f"/{_PLACE}"

    @property
    def is_here(self) -> bool:
        """Whether there is a counter, readable or not."""
        return bool(self._zones)

    def read(self, now_s: float) -> Reading[Sample]:
        if not self._zones:
            return unknown(self.source, self._problem)
        problem = ""
        for zone, counter in zip(self._zones, self._counters, strict=True):
            energy = self._root.scaled(f"{zone.path}/energy_uj", 1e-6)
            if energy.value is None:
                problem = problem or f"{energy.source}: {energy.reason}"
            elif energy.value < 0:
                problem = problem or f"{energy.source}: tells {energy.value:g} J, which cannot be"
            elif fault := counter.update(energy.value, now_s):
                problem = problem or f"{energy.source}: {fault}"
        if problem:
            return unknown(self.source, problem)
        total_j = sum(counter.total_j for counter in self._counters)
        age_s = max(0.0, now_s - max(counter.changed_s for counter in self._counters))
        if age_s > _STILL_S:
            return unknown(self.source, f"the counter has stood still for {age_s:.0f} s, while nothing takes no power")
        return known(Sample(energy_j=total_j, age_s=age_s), self.source)

    def close(self) -> None: ...


def _zones(root: SysfsRoot, boundary: Boundary) -> tuple[tuple[Zone, ...], str]:
    """Pick packages and their memory, or for the board psys; core and uncore lie inside a package.

    Some laptops show the same package a second time, memory-mapped (intel-rapl-mmio): it counts where it is alone.
    """
    names: list[str] = []
    for driver in ("intel-rapl", "intel-rapl-mmio"):
        found: list[Zone] = []
        for path in root.paths(f"{_PLACE}/{driver}:*"):
            name = root.name(f"{path}/name").value or ""
            names.append(name)
            if name == "psys" if boundary == "board" else name.startswith("package") or name == "dram":
                found.append(_zone(root, path, name))
        if any(zone.name != "dram" for zone in found):
            return tuple(found), ""
    if names:
        wanted = "counter of the whole platform (psys)" if boundary == "board" else "package counter"
        return (), f"RAPL has {', '.join(filter(None, names)) or 'zones without names'} but no {wanted}"
    return (), "no RAPL counter: neither the CPU nor the hypervisor offers one, or the intel_rapl driver is not loaded"


def _zone(root: SysfsRoot, path: str, name: str) -> Zone:
    range_j = root.scaled(f"{path}/max_energy_range_uj", 1e-6).value
    limits_w = [
        root.scaled(f"{path}/constraint_{n}_{kind}_uw", 1e-6).value
        for n in (0, 1, 2)
        for kind in ("max_power", "power_limit")
    ]
    highest_w = max((w for w in limits_w if w is not None and w > 0), default=0.0)
    assumed_w = _DRAM_W if name == "dram" else MAX_ZONE_W
    return Zone(
        path=path,
        name=name,
        range_j=range_j if range_j is not None and range_j > 0 else None,
        max_w=min(assumed_w, max(_ROOM * highest_w, 100.0)) if highest_w else assumed_w,
    )
