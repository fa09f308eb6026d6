"""How full the battery is, and whether it is being charged, from /sys/class/power_supply."""

from __future__ import annotations

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.sysfs import SysfsRoot

_PLACE = "sys/class/power_supply"


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
    """Tell whether mains power is there: a battery is charged, or is full."""
    root = root or SysfsRoot()
    return any(root.text(f"{supply}/status").value in ("Charging", "Full") for supply in _batteries(root))


def _batteries(root: SysfsRoot) -> list[str]:
    return [
        path.removesuffix("/type")
        for path in root.paths(f"{_PLACE}/*/type")
        if root.text(path).value == "Battery" and root.text(path.replace("/type", "/scope")).value != "Device"
    ]
