from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edge_rt.devices import thermal
from edge_rt.devices.sysfs import SysfsRoot
from tests.device_trees import Plant, plant_files
from tests.faulty_root import FaultyRoot


def test_server_ignores_what_is_not_the_cpu(x86_server: SysfsRoot) -> None:
    assert [t.name for t in thermal.temperatures(x86_server)] == ["x86_pkg_temp", "coretemp Package id 0"]
    peak = thermal.peak_c(x86_server)
    assert peak.value == pytest.approx(57.5)
    assert "hwmon0/temp1_input" in peak.source


def test_server_counts_each_package_once(x86_server: SysfsRoot) -> None:
    state = thermal.throttle(x86_server).value
    assert state is not None
    assert state.events == 8 * 1 + 10 + 11
    assert state.active == ()


def test_pi_names_the_set_bits_and_the_passive_trip(raspberry_pi_5: SysfsRoot) -> None:
    state = thermal.throttle(raspberry_pi_5).value
    assert state is not None
    assert state.events is None
    assert state.active == ("under-voltage", "throttled")
    (zone,) = thermal.temperatures(raspberry_pi_5)
    assert zone.value_c == pytest.approx(61.75)
    assert zone.limit_c == pytest.approx(80.0)


def test_a_broken_firmware_flag_is_unknown(plant: Plant) -> None:
    root = plant({"sys/devices/platform/soc/soc:firmware/get_throttled": "error\n"})
    assert thermal.throttle(root).value is None


def test_big_little_cooling_state_means_throttled(rk3588: SysfsRoot) -> None:
    state = thermal.throttle(rk3588).value
    assert state is not None
    assert state.active == ("cpufreq-cpu4 at cooling state 2",)
    assert thermal.peak_c(rk3588).value == pytest.approx(42.0)


def test_a_turning_fan_is_no_throttling(x86_hybrid: SysfsRoot) -> None:
    state = thermal.throttle(x86_hybrid).value
    assert state is not None
    assert state.active == ()


def test_container_has_reasons(container: SysfsRoot) -> None:
    assert thermal.peak_c(container).value is None
    assert "no CPU temperature sensor" in thermal.peak_c(container).reason
    assert thermal.throttle(container).value is None


@pytest.mark.parametrize("raw", ["-273150", "0", "127000", "", "junk"])
def test_a_sensor_that_sleeps_is_left_out(plant: Plant, raw: str) -> None:
    root = plant({"sys/class/thermal/thermal_zone0/type": "cpu-thermal", "sys/class/thermal/thermal_zone0/temp": raw})
    assert thermal.temperatures(root) == ()


@pytest.mark.parametrize("fault", [errno.EAGAIN, errno.ENODATA, errno.EIO, errno.ENODEV])
def test_a_zone_that_does_not_answer_hides_no_other(tmp_path: Path, fault: int) -> None:
    zone = "sys/class/thermal/thermal_zone"
    files = {f"{zone}{i}/type": f"{name}-thermal" for i, name in enumerate(("pmic", "cpu"))}
    plant_files(tmp_path, files | {f"{zone}0/temp": "50000", f"{zone}1/temp": "48000"})
    root = FaultyRoot(tmp_path, {f"{zone}0/temp": fault})
    assert [(t.name, t.value_c) for t in thermal.temperatures(root)] == [("cpu-thermal", pytest.approx(48.0))]


@pytest.mark.parametrize(
    ("bit", "words"),
    [(0, "under-voltage"), (1, "frequency capped"), (2, "throttled"), (3, "soft temperature limit")],
)
def test_each_of_the_firmwares_bits_has_its_meaning_now_and_since_boot(bit: int, words: str) -> None:
    assert thermal.pi_throttle(1 << bit) == thermal.Throttle(None, (words,), ())
    assert thermal.pi_throttle(1 << (bit + 16)) == thermal.Throttle(None, (), (words,))


def test_amd_takes_the_die_and_not_the_offset_control_value(plant: Plant) -> None:
    chip = "sys/class/hwmon/hwmon0"
    root = plant(
        {
            f"{chip}/name": "k10temp",
            f"{chip}/temp1_input": "75000",
            f"{chip}/temp1_label": "Tctl",
            f"{chip}/temp2_input": "48000",
            f"{chip}/temp2_label": "Tdie",
        }
    )
    assert thermal.peak_c(root).value == pytest.approx(48.0)


def test_throttled_between(plant: Plant, x86_server: SysfsRoot) -> None:
    before = thermal.throttle(x86_server)
    assert thermal.throttled_between(before, before).value is False
    root = plant({"sys/devices/system/cpu/cpu3/thermal_throttle/core_throttle_count": "2\n"})
    assert thermal.throttled_between(before, thermal.throttle(root)).value is True


def test_throttled_between_is_unknown_where_either_end_is(plant: Plant) -> None:
    nothing = thermal.throttle(plant({}))
    something = thermal.throttle(plant({"sys/devices/platform/soc/soc:firmware/get_throttled": "0"}))
    for before, after in ((nothing, something), (something, nothing)):
        reading = thermal.throttled_between(before, after)
        assert reading.value is None
        assert reading.reason == nothing.reason
    assert thermal.throttled_between(something, something).value is False
