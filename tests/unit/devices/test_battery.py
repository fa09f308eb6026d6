from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.devices.battery import charge, is_charging
from edge_rt.devices.sysfs import SysfsRoot


def tree(tmp_path: Path, **supplies: dict[str, str]) -> SysfsRoot:
    for name, files in supplies.items():
        folder = tmp_path / "sys/class/power_supply" / name
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(f"{text}\n")
    return SysfsRoot(tmp_path)


def test_the_mean_of_the_systems_batteries_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        AC={"type": "Mains", "online": "0"},
        BAT0={"type": "Battery", "capacity": "30", "status": "Discharging"},
        BAT1={"type": "Battery", "capacity": "50", "status": "Discharging"},
        mouse={"type": "Battery", "scope": "Device", "capacity": "99", "status": "Full"},
    )
    assert charge(root).value == pytest.approx(0.4)
    assert not is_charging(root)


@pytest.mark.parametrize("status", ["Charging", "Full"])
def test_a_battery_on_mains_is_charging(tmp_path: Path, status: str) -> None:
    assert is_charging(tree(tmp_path, BAT0={"type": "Battery", "capacity": "30", "status": status}))


@pytest.mark.parametrize("files", [{}, {"capacity": "300"}, {"capacity": "much"}])
def test_what_no_battery_tells_is_not_known(tmp_path: Path, files: dict[str, str]) -> None:
    reading = charge(tree(tmp_path, BAT0={"type": "Battery"} | files))
    assert (reading.value, reading.reason) == (None, "no battery tells its charge")
