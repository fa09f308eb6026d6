"""How full the battery is, whether it is being charged, and what the machine takes from it: /sys/class/power_supply."""

from __future__ import annotations

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.meters import Boundary, Quality, Sample, watts
from edge_rt.devices.sysfs import SysfsRoot

_PLACE = "sys/class/power_supply"
_NONE = "there is no battery"
_ON_MAINS = ("Charging", "Full", "Not charging")


def charge(root: SysfsRoot | None = None) -> Reading[float]:
    """Give the share of the system's batteries that is left, 0..1: the mean of several. Those of mice are not meant."""
    root = root or SysfsRoot()
    shares = []
    for supply in _batteries(root):
        percent = root.integer(f"{supply}/capacity").value
        if percent is not None and 0 <= percent <= 100:
            shares.append(percent / 100)
    if not shares:
        return unknown(f"/{_PLACE}", "no battery tells its charge")
    return known(sum(shares) / len(shares), f"/{_PLACE}")


def is_charging(root: SysfsRoot | None = None) -> bool:
    """Tell whether mains power is there: an adapter says so, or a battery is charged, full, or kept as it is."""
    root = root or SysfsRoot()
    return _adapter_is_on(root) or any(root.text(f"{s}/status").value in _ON_MAINS for s in _batteries(root))


class BatteryMeter:
    """What the machine takes from its batteries, all together: the whole board, but only while nothing charges them.

    Drivers tell power, or current and voltage; some count what flows out as negative. USB ports tell what was
    negotiated there and not what flows, so they are no meters.
    """

    name = "battery"
    boundary: Boundary = "board"
    interval_s = 1.0  # the kernel keeps ACPI's answer for so long; many gauges are slower

    def __init__(self, root: SysfsRoot | None = None) -> None:
        self._root = root or SysfsRoot()
        self._batteries = _batteries(self._root)
        self.quality: Quality = "measured" if len(self._batteries) == 1 else "derived"

    @property
    def is_here(self) -> bool:
        return bool(self._batteries)

    def read(self, now_s: float) -> Reading[Sample]:  # noqa: ARG002
        source = f"/{_PLACE}"
        total_w, problems = 0.0, []
        if _adapter_is_on(self._root):
            return unknown(source, "mains power is there: the battery gives the board a part of its power at most")
        for supply in self._batteries:
            status = self._root.name(f"{supply}/status")
            if status.value is None:
                problems.append(f"{status.source}: {status.reason}")
            elif status.value in _ON_MAINS:
                return unknown(status.source, f"{status.value}: the machine does not run from the battery")
            elif status.value == "Discharging":
                power = _power(self._root, supply)
                if power.value is None:
                    problems.append(f"{power.source}: {power.reason}")
                else:
                    total_w += power.value
            else:
                problems.append(f"{status.source}: status is {status.value}")
        if problems:
            return unknown(source, problems[0])
        if total_w <= 0:
            return unknown(source, "the batteries tell 0 W while they run the machine" if self._batteries else _NONE)
        return known(Sample(power_w=total_w, age_s=0.0), source)

    def close(self) -> None: ...


def _power(root: SysfsRoot, supply: str) -> Reading[float]:
    """Read what flows out of one battery, as a positive number."""
    power = root.scaled(f"{supply}/power_now", 1e-6)
    if power.value is not None:
        return watts(abs(power.value), power.source)
    current = root.scaled(f"{supply}/current_now", 1e-6)
    if current.value is None:
        return unknown(power.source, f"{power.reason}, nor {current.source.rpartition('/')[2]}: {current.reason}")
    volts = root.scaled(f"{supply}/voltage_now", 1e-6)
    if volts.value is None:
        return volts
    if not 1.0 <= volts.value <= 100.0:
        return unknown(volts.source, f"tells {volts.value:g} V, which no battery has")
    return watts(abs(current.value) * volts.value, current.source)


def _adapter_is_on(root: SysfsRoot) -> bool:
    supplies = (
        path.removesuffix("/type") for path in root.paths(f"{_PLACE}/*/type") if root.text(path).value == "Mains"
    )
    return any(root.integer(f"{supply}/online").value == 1 for supply in supplies)


def _batteries(root: SysfsRoot) -> list[str]:
    return [
        path.removesuffix("/type")
        for path in root.paths(f"{_PLACE}/*/type")
        if root.text(path).value == "Battery" and root.text(path.replace("/type", "/scope")).value != "Device"
    ]
