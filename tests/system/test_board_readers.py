"""edge_rt's readers on the mounted boards: what they tell is what the board's model knows, or it is unknown.

The values are modelled by tests/plants; nothing here says anything about a real device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edge_rt.devices import cpufreq, devfreq
from edge_rt.devices.battery import BatteryMeter
from edge_rt.devices.meter_choice import Found, Panel, choose, find
from edge_rt.devices.powercap import EnergyMeter
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.devices.thermal import temperatures, throttle
from tests.plants.board import POLICIES
from tests.plants.fuse_board import FuseBoard, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

Mount = Callable[[str], FuseBoard]

# Meters quantise; the INA3221 in steps of 8 mV and 8 mA.
_TOLERANCE = 0.03
_POWER_FILES = ("*/hwmon/*_input", "*/energy_uj", "*/power_now")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a board whose time stands still until it is told to go on."""
    with ExitStack() as stack:
        yield lambda profile: stack.enter_context(FuseBoard(profile, tmp_path / profile, is_stepped=True))


def panel_of(board: FuseBoard) -> tuple[Panel, Found]:
    def no_program(*_: object) -> str:
        raise FileNotFoundError("vcgencmd")

    found = find(SysfsRoot(board.root), call=no_program)
    return Panel(found), found


def settle(board: FuseBoard, panel: Panel, *, n: int = 4, span_s: float = 1.0) -> None:
    """Let time pass and read, so that counters tell a power."""
    for _ in range(n):
        panel.read(board.tell("state")["now_s"])
        board.tell("advance", span_s=span_s)
    panel.read(board.tell("state")["now_s"])


@pytest.mark.parametrize(
    ("profile", "board_meter", "soc_meter"),
    [
        ("pi_5", "ina226 5V", None),
        ("orin_nano", "ina3221 VDD_IN", "VDD_CPU_GPU_CV + VDD_SOC"),
        ("x86", "rapl psys", "rapl package-0"),
    ],
)
def test_the_meters_of_each_board_tell_its_watts(
    mount: Mount, profile: str, board_meter: str, soc_meter: str | None
) -> None:
    board = mount(profile)
    board.tell("load", busy=0.7)
    board.tell("advance", span_s=600.0)  # until it is as warm as it gets
    panel, _ = panel_of(board)
    settle(board, panel)
    chosen = choose(panel.meters, panel.readings)
    truth = board.tell("state")["power_w"]
    assert chosen.board is not None
    assert board_meter in chosen.board.name
    assert panel.powers_w[chosen.board.name] == pytest.approx(truth["board"], rel=_TOLERANCE)
    if soc_meter is None:
        assert chosen.soc is None
    else:
        assert chosen.soc is not None
        assert soc_meter in chosen.soc.name
        assert panel.powers_w[chosen.soc.name] == pytest.approx(truth["soc"], rel=_TOLERANCE)
    assert panel.disagreements == ()


def test_policies_and_devices_are_read_in_hertz(mount: Mount) -> None:
    board = mount("orin_nano")
    board.tell("load", busy=1.0)
    board.write(f"{POLICIES}/policy4/scaling_max_freq", "1036800")
    root = SysfsRoot(board.root)
    big, small = cpufreq.policies(root)
    assert (big.cpus, small.cpus) == ((0, 1, 2, 3), (4, 5))
    assert big.points_hz == (729.6e6, 1036.8e6, 1267.2e6, 1510.4e6)
    assert (small.max_hz.value, small.cur_hz.value, small.ceiling_hz.value) == (1036.8e6, 1036.8e6, 1510.4e6)
    (gpu,) = devfreq.devices(root)
    assert (gpu.kind, gpu.points_hz[-1]) == ("gpu", 624.75e6)


def test_a_driver_without_a_table_gets_a_grid(mount: Mount) -> None:
    board = mount("x86")
    policies = cpufreq.policies(SysfsRoot(board.root))
    assert len(policies) == 4
    assert policies[0].is_grid
    assert (policies[0].points_hz[0], policies[0].points_hz[-1]) == (400e6, 3400e6)
    assert policies[0].epp.value == "balance_performance"


def test_heat_and_its_throttling_are_seen(mount: Mount) -> None:
    board = mount("pi_5")
    root = SysfsRoot(board.root)
    assert [(found.name, found.value_c, found.limit_c) for found in temperatures(root)] == [("cpu-thermal", 35.0, 80.0)]
    board.tell("set", temperature_c=83.0, cooling=2)
    found = throttle(root).value
    assert found is not None
    assert found.active == ("cpufreq-cpu0 at cooling state 2",)


def test_a_battery_tells_the_boards_watts_while_it_discharges(mount: Mount) -> None:
    board = mount("x86")
    meter = BatteryMeter(SysfsRoot(board.root))
    assert meter.read(0.0).value is None
    board.tell("set", is_discharging=1)
    sample = meter.read(1.0).value
    assert sample is not None
    assert sample.power_w == pytest.approx(board.tell("state")["power_w"]["board"], rel=0.001)


def test_joules_are_counted_over_a_wrap_and_a_reset_is_not_taken_for_one(mount: Mount) -> None:
    board = mount("x86")
    board.tell("load", busy=1.0)
    board.tell("set_counter", zone="intel-rapl:0", value_uj=262_143_000_000)

    def now_s() -> float:
        return float(board.tell("state")["now_s"])

    meter = EnergyMeter(SysfsRoot(board.root))
    before = meter.read(now_s()).value
    before_j = board.tell("state")["energy_j"]["soc"]
    board.tell("advance", span_s=5.0)
    after = meter.read(now_s()).value
    assert before is not None
    assert after is not None
    assert after.energy_j is not None
    assert before.energy_j is not None
    used_j = board.tell("state")["energy_j"]["soc"] - before_j
    assert after.energy_j - before.energy_j == pytest.approx(used_j, abs=0.001)
    board.tell("set_counter", zone="intel-rapl:0", value_uj=0)
    board.tell("advance", span_s=1.0)
    reset = meter.read(now_s())
    assert reset.value is None
    assert reset.reason


@pytest.mark.parametrize("profile", ["pi_5", "orin_nano", "x86"])
def test_no_fault_of_a_sensor_becomes_a_watt(mount: Mount, profile: str) -> None:
    board = mount(profile)
    board.tell("load", busy=0.5)
    panel, _ = panel_of(board)
    for name in ("EAGAIN", "EIO", "ENODATA", "ENODEV", "EPERM", "EACCES", "ENXIO", "ETIMEDOUT"):
        settle(board, panel)
        for pattern in (*_POWER_FILES, "*/temp"):
            board.tell("add_fault", pattern=pattern, errno_name=name)
        settle(board, panel, n=1)
        assert panel.powers_w == {}, name
        assert all(reading.value is None and reading.reason for reading in panel.readings.values()), name
        assert temperatures(SysfsRoot(board.root)) == ()
        board.tell("clear_faults")
        settle(board, panel, n=2)
        truth = board.tell("state")["power_w"]["board"]
        meter = choose(panel.meters, panel.readings).board
        assert meter is not None, name
        assert panel.powers_w[meter.name] == pytest.approx(truth, rel=_TOLERANCE), name


@pytest.mark.parametrize("profile", ["pi_5", "orin_nano", "x86"])
def test_no_garbage_becomes_a_watt(mount: Mount, profile: str) -> None:
    board = mount(profile)
    board.tell("load", busy=0.5)
    panel, _ = panel_of(board)
    settle(board, panel)
    for text in ("", "\n", "-1000000", "nan", "1e3", "99999999999999999999", "\x00\x01\x7f", "12 13", "0x", "no"):
        board.tell("clear_faults")
        for pattern in _POWER_FILES:
            board.tell("add_fault", pattern=pattern, text=text)
        settle(board, panel, n=2)
        assert panel.powers_w == {}, text


@pytest.mark.parametrize("profile", ["pi_5", "orin_nano"])
def test_nought_is_no_power_of_a_board_that_runs(mount: Mount, profile: str) -> None:
    board = mount(profile)
    panel, _ = panel_of(board)
    board.tell("add_fault", pattern="*/hwmon/*_input", text="0\n")
    settle(board, panel)
    assert not any(panel.powers_w.get(meter.name) == 0 for meter in panel.meters if meter.boundary == "board")


def test_a_counter_that_stands_still_tells_no_watts(mount: Mount) -> None:
    board = mount("x86")
    board.tell("load", busy=0.5)
    panel, _ = panel_of(board)
    settle(board, panel)
    board.tell("add_fault", pattern="*/energy_uj", is_frozen=True)
    settle(board, panel)
    assert all(not 0.0 <= power_w < 1.0 for power_w in panel.powers_w.values())


def test_a_chip_that_comes_back_under_another_number_is_found_again(mount: Mount) -> None:
    board = mount("orin_nano")
    panel, _ = panel_of(board)
    at = "sys/devices/platform/bus@0/c240000.i2c/i2c-1/1-0040/hwmon/hwmon1"
    board.tell("unplug", top=at)
    settle(board, panel)
    assert panel.powers_w == {}
    assert not any(meter.boundary == "board" for meter in panel_of(board)[0].meters)
    board.tell("plug", top=at, as_top=at.replace("hwmon1", "hwmon7"))
    again, _ = panel_of(board)
    settle(board, again)
    truth = board.tell("state")["power_w"]["board"]
    assert again.powers_w["ina3221 VDD_IN"] == pytest.approx(truth, rel=_TOLERANCE)


def test_a_dead_bus_leaves_everything_unknown(mount: Mount) -> None:
    board = mount("orin_nano")
    root = SysfsRoot(board.root)
    panel, _ = panel_of(board)
    board.kill()
    panel.read(time.monotonic())
    assert panel.powers_w == {}
    assert all(reading.value is None and reading.reason for reading in panel.readings.values())
    assert (cpufreq.policies(root), devfreq.devices(root), temperatures(root)) == ((), (), ())
    assert find(root).sources == ()


def test_a_slow_sensor_tells_the_truth_late(mount: Mount) -> None:
    board = mount("pi_5")
    panel, _ = panel_of(board)
    board.tell("add_fault", pattern="*/power1_input", delay_s=0.2)
    panel.read(board.tell("state")["now_s"])
    meter = choose(panel.meters, panel.readings).board
    assert meter is not None
    truth = board.tell("state")["power_w"]["board"]
    assert panel.powers_w[meter.name] == pytest.approx(truth, rel=_TOLERANCE)
