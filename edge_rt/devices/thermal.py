"""Temperatures and signs of throttling, from thermal zones, hwmon chips and the firmware's flags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.sysfs import SysfsRoot

# Below and above this a sensor is not connected or asleep: drivers report -273, 0 or 127 then.
_MIN_C, _MAX_C = 1.0, 126.0

# hwmon chips inside the CPU or SoC; others (NVMe, Wi-Fi, VRM) say nothing about the cores. AMD has only hwmon.
_CPU_CHIPS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "cpu-thermal", "scpi_sensors"})

# Zones that are not the chip.
_FOREIGN_ZONES = ("acpitz", "iwlwifi", "nvme", "bat", "pch_", "int3400", "int340")

# The Raspberry Pi firmware's get_throttled bits for "now"; bits 16-19 are the same since boot.
_PI_NOW = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "soft temperature limit"}


@dataclass(frozen=True, slots=True)
class Temperature:
    """One sensor. limit_c is where the kernel starts to slow the chip down, None where it does not say."""

    name: str
    value_c: float
    limit_c: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Throttle:
    """Signs of throttling at one moment.

    events  the kernel's running count of thermal throttle events over all cores; None where it keeps none
    active  what slows the chip down right now, in words
    past    what has done so since boot, where the firmware remembers
    """

    events: int | None
    active: tuple[str, ...]
    past: tuple[str, ...] = ()


def temperatures(root: SysfsRoot | None = None) -> tuple[Temperature, ...]:
    """Read every sensor of the CPU or SoC that answers."""
    root = root or SysfsRoot()
    return (*_zones(root), *_hwmon(root))


def peak_c(root: SysfsRoot | None = None) -> Reading[float]:
    """Give the hottest CPU or SoC temperature."""
    found = temperatures(root)
    if not found:
        return unknown(
            "/sys/class/thermal, /sys/class/hwmon",
            "no CPU temperature sensor is visible (virtual machine or container?)",
        )
    hottest = max(found, key=lambda t: t.value_c)
    return known(hottest.value_c, f"{hottest.source} ({hottest.name})")


def throttle(root: SysfsRoot | None = None) -> Reading[Throttle]:
    """Read the throttle counters and flags; unknown where the platform has none of them."""
    root = root or SysfsRoot()
    sources: list[str] = []
    events = _events(root, sources)
    cooling = _cooling(root, sources)
    firmware = _raspberry_pi(root, sources)
    if not sources:
        return unknown("/sys", "no throttle counter, CPU cooling device or firmware flag is visible")
    return known(Throttle(events, (*cooling, *firmware.active), firmware.past), ", ".join(sources))


def pi_throttle(bits: int) -> Throttle:
    """Read the Raspberry Pi firmware's get_throttled: four signs for now, and the same four since boot."""
    return Throttle(
        events=None,
        active=tuple(words for bit, words in _PI_NOW.items() if bits >> bit & 1),
        past=tuple(words for bit, words in _PI_NOW.items() if bits >> (bit + 16) & 1),
    )


def throttled_between(before: Reading[Throttle], after: Reading[Throttle]) -> Reading[bool]:
    """Tell whether the chip was throttled at either end of a span or counted an event within it."""
    if before.value is None or after.value is None:
        missing = after if after.value is None else before
        return unknown(missing.source, missing.reason)
    counted = (after.value.events or 0) > (before.value.events or 0)
    return known(counted or bool(before.value.active) or bool(after.value.active), after.source)


def _zones(root: SysfsRoot) -> list[Temperature]:
    found: list[Temperature] = []
    for zone in root.paths("sys/class/thermal/thermal_zone*"):
        name = root.name(f"{zone}/type").value or zone.rpartition("/")[2]
        reading = root.scaled(f"{zone}/temp", 1e-3)
        if reading.value is None or not _MIN_C <= reading.value <= _MAX_C or name.lower().startswith(_FOREIGN_ZONES):
            continue
        found.append(Temperature(name, reading.value, _passive_c(root, zone), reading.source))
    return found


def _passive_c(root: SysfsRoot, zone: str) -> float | None:
    limits = [
        root.scaled(path.replace("_type", "_temp"), 1e-3).value
        for path in root.paths(f"{zone}/trip_point_*_type")
        if root.text(path).value == "passive"
    ]
    return min((limit for limit in limits if limit is not None and limit >= _MIN_C), default=None)


def _hwmon(root: SysfsRoot) -> list[Temperature]:
    found: list[Temperature] = []
    for chip in root.paths("sys/class/hwmon/hwmon*"):
        name = root.text(f"{chip}/name").value
        if name not in _CPU_CHIPS:
            continue
        for path in root.paths(f"{chip}/temp*_input"):
            reading = root.scaled(path, 1e-3)
            label = root.name(path.replace("_input", "_label")).value
            if reading.value is None or not _MIN_C <= reading.value <= _MAX_C:
                continue
            limit = root.scaled(path.replace("_input", "_max"), 1e-3).value
            found.append(Temperature(f"{name} {label}" if label else name, reading.value, limit, reading.source))
    # k10temp's Tctl is offset on some parts to please fan curves; Tdie is the silicon.
    dies = [t for t in found if t.name == "k10temp Tdie"]
    return [t for t in found if not (dies and t.name == "k10temp Tctl")]


def _events(root: SysfsRoot, sources: list[str]) -> int | None:
    """Sum the cores' counters and each package's once (every core of a package shows the package's)."""
    total, n_read = 0, 0
    packages: dict[int, int] = {}
    for path in root.paths("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle"):
        if (core := root.integer(f"{path}/core_throttle_count").value) is not None:
            total, n_read = total + core, n_read + 1
        package = root.integer(f"{path}/package_throttle_count").value
        package_id = root.integer(f"{path.rpartition('/')[0]}/topology/physical_package_id").value
        if package is not None:
            packages[package_id or 0] = package
    if not n_read and not packages:
        return None
    sources.append("cpu*/thermal_throttle")
    return total + sum(packages.values())


def _cooling(root: SysfsRoot, sources: list[str]) -> tuple[str, ...]:
    active: list[str] = []
    for device in root.paths("sys/class/thermal/cooling_device*"):
        kind = root.name(f"{device}/type").value or ""
        state = root.integer(f"{device}/cur_state").value
        # Fans are cooling devices too, and a turning fan is no throttling.
        if state is None or not ("cpufreq" in kind or kind == "Processor"):
            continue
        sources.append(f"/{device}")
        if state > 0:
            active.append(f"{kind} at cooling state {state}")
    return tuple(active)


def _raspberry_pi(root: SysfsRoot, sources: list[str]) -> Throttle:
    text = root.text("sys/devices/platform/soc/soc:firmware/get_throttled")
    told = Throttle(None, ())
    if text.value is not None and (bits := _hex(text.value)) is not None:
        sources.append(text.source)
        told = pi_throttle(bits)
    active = list(told.active)
    for chip in root.paths("sys/class/hwmon/hwmon*"):
        if root.text(f"{chip}/name").value != "rpi_volt":
            continue
        alarm = root.integer(f"{chip}/in0_lcrit_alarm")
        if alarm.value is not None:
            sources.append(alarm.source)
            if alarm.value and "under-voltage" not in active:
                active.append("under-voltage")
    return Throttle(None, tuple(active), told.past)


def _hex(text: str) -> int | None:
    return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text) else None
