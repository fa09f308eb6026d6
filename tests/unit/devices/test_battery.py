from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.devices.battery import BatteryMeter, charge, is_charging
from edge_rt.devices.meters import Sample
from edge_rt.devices.sysfs import SysfsRoot

RUNS = {"type": "Battery", "status": "Discharging"}


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


@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging"])
def test_a_battery_on_mains_is_charging(tmp_path: Path, status: str) -> None:
    assert is_charging(tree(tmp_path, BAT0={"type": "Battery", "capacity": "30", "status": status}))


@pytest.mark.parametrize(("online", "is_there"), [("1", True), ("0", False), ("x", False)])
def test_an_adapter_that_is_on_is_mains_power(tmp_path: Path, online: str, is_there: bool) -> None:
    assert is_charging(tree(tmp_path, AC={"type": "Mains", "online": online}, BAT0=RUNS)) is is_there


def test_a_battery_that_helps_a_weak_adapter_is_not_the_boards_power(tmp_path: Path) -> None:
    root = tree(tmp_path, AC={"type": "Mains", "online": "1"}, BAT0=RUNS | {"power_now": "3000000"})
    reading = BatteryMeter(root).read(0.0)
    assert reading.value is None
    assert "mains power is there" in reading.reason


@pytest.mark.parametrize("files", [{}, {"capacity": "300"}, {"capacity": "much"}])
def test_what_no_battery_tells_is_not_known(tmp_path: Path, files: dict[str, str]) -> None:
    reading = charge(tree(tmp_path, BAT0={"type": "Battery"} | files))
    assert (reading.value, reading.reason) == (None, "no battery tells its charge")


def test_a_battery_that_runs_the_machine_measures_the_board(tmp_path: Path) -> None:
    meter = BatteryMeter(tree(tmp_path, BAT0=RUNS | {"power_now": "7350000"}))
    assert (meter.boundary, meter.quality) == ("board", "measured")
    assert meter.read(0.0).value == Sample(power_w=7.35)


@pytest.mark.parametrize("current", ["480000", "-480000"])
def test_current_and_voltage_do_as_well_and_the_sign_is_the_drivers_own(tmp_path: Path, current: str) -> None:
    meter = BatteryMeter(tree(tmp_path, BAT0=RUNS | {"current_now": current, "voltage_now": "15000000"}))
    assert meter.read(0.0).value == Sample(power_w=pytest.approx(7.2))


def test_two_batteries_are_added(tmp_path: Path) -> None:
    meter = BatteryMeter(tree(tmp_path, BAT0=RUNS | {"power_now": "5000000"}, BAT1=RUNS | {"power_now": "-1500000"}))
    assert meter.quality == "derived"
    assert meter.read(0.0).value == Sample(power_w=pytest.approx(6.5))


@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging"])
def test_on_mains_a_battery_tells_nothing_of_the_board(tmp_path: Path, status: str) -> None:
    meter = BatteryMeter(tree(tmp_path, BAT0={"type": "Battery", "status": status, "power_now": "20000000"}))
    reading = meter.read(0.0)
    assert reading.value is None
    assert "does not run from the battery" in reading.reason


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"power_now": "0"},
        {"power_now": "nan"},
        {"power_now": "99999999999999999"},
        {"current_now": "480000"},
        {"current_now": "480000", "voltage_now": "0"},
        {"current_now": "480000", "voltage_now": "15000000000"},
        {"status": "Unknown", "power_now": "1000000"},
        {"status": "\x1b[2J", "power_now": "1000000"},
    ],
)
def test_what_a_battery_does_not_tell_is_unknown_and_never_zero(tmp_path: Path, files: dict[str, str]) -> None:
    reading = BatteryMeter(tree(tmp_path, BAT0=RUNS | files)).read(0.0)
    assert reading.value is None
    assert reading.reason


def test_a_usb_ports_negotiated_power_is_none(tmp_path: Path) -> None:
    port = {"type": "USB", "online": "1", "voltage_now": "5000000", "current_now": "3000000"}
    meter = BatteryMeter(tree(tmp_path, **{"ucsi-source-psy-1": port}))
    assert not meter.is_here
    assert meter.read(0.0).reason == "there is no battery"


def test_a_battery_that_is_taken_out_is_unknown(tmp_path: Path) -> None:
    meter = BatteryMeter(tree(tmp_path, BAT0=RUNS | {"power_now": "5000000"}))
    for file in (tmp_path / "sys/class/power_supply/BAT0").iterdir():
        file.unlink()
    reading = meter.read(1.0)
    assert reading.value is None
    assert "no such file" in reading.reason
