from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.base import known, unknown
from edge_rt.devices.hwmon import Channel, ChannelMeter, channels, shunt_faults
from edge_rt.devices.iio import channels as iio_channels
from edge_rt.devices.meters import Sample
from edge_rt.devices.sysfs import SysfsRoot
from tests.device_trees import Plant, ina3221, plant_files
from tests.faulty_root import FaultyRoot

CHIP = "sys/class/hwmon/hwmon7"
INA226 = {
    f"{CHIP}/name": "ina226",
    f"{CHIP}/device": "link:../../1-0041",
    f"{CHIP}/in0_input": "12",
    f"{CHIP}/in1_input": "5100",
    f"{CHIP}/curr1_input": "800",
    f"{CHIP}/power1_input": "4075000",
    f"{CHIP}/shunt_resistor": "20000",
    f"{CHIP}/update_interval": "35",
}


def power_w(root: SysfsRoot, channel: Channel) -> float | None:
    sample = ChannelMeter(root, channel).read(0.0).value
    return sample.power_w if sample is not None else None


def test_an_ina3221_has_no_power_file_so_it_is_volts_times_amperes(orin_nano: SysfsRoot) -> None:
    found = channels(orin_nano)
    assert [(c.chip, c.device, c.number, c.label) for c in found] == [
        ("ina3221", "1-0040", 1, "VDD_IN"),
        ("ina3221", "1-0040", 2, "VDD_CPU_GPU_CV"),
        ("ina3221", "1-0040", 3, "VDD_SOC"),
    ]  # neither the sums, channel 4 and 7, nor the USB port's second entry
    assert [power_w(orin_nano, c) for c in found] == [
        pytest.approx(5.016 * 1.2),
        pytest.approx(5.016 * 0.4),
        pytest.approx(5.008 * 0.28),
    ]


@pytest.mark.parametrize("number", [0, 5, 12])
def test_chips_are_known_by_name_whatever_number_a_boot_gives_them(plant: Plant, number: int) -> None:
    other = f"sys/class/hwmon/hwmon{number + 1}"
    root = plant(ina3221(number, "1-0040", {1: ("VDD_IN", 5000, 1000)}) | {f"{other}/name": "nvme"})
    (channel,) = channels(root)
    assert channel.name == "ina3221 VDD_IN"
    assert power_w(root, channel) == pytest.approx(5.0)


@pytest.mark.parametrize("chip", ["ina219", "ina226", "ina238"])
def test_a_power_file_is_taken_before_volts_times_amperes(plant: Plant, chip: str) -> None:
    (channel,) = channels(plant(INA226 | {f"{CHIP}/name": chip}))
    assert channel.name == f"{chip} 1-0041 channel 1"
    assert channel.interval_s == pytest.approx(0.035)
    assert power_w(plant({}), channel) == pytest.approx(4.075)


def test_a_chip_of_the_family_without_a_power_file_is_volts_times_amperes(plant: Plant) -> None:
    (channel,) = channels(plant({k: v for k, v in INA226.items() if "power1" not in k}))
    assert power_w(plant({}), channel) == pytest.approx(5.1 * 0.8)


def test_volts_and_amperes_of_an_unknown_chip_are_not_multiplied(plant: Plant) -> None:
    root = plant({f"{CHIP}/name": "nct6775", f"{CHIP}/in1_input": "1000", f"{CHIP}/curr1_input": "1000"})
    assert channels(root) == ()


def test_the_acpi_meter_has_no_name_and_its_files_lie_below_device(plant: Plant) -> None:
    root = plant(
        {
            "sys/devices/ACPI000D:00/power1_average": "5929000",
            "sys/devices/ACPI000D:00/power1_average_interval": "2000",
            "sys/devices/ACPI000D:00/measures/LNXCPU:00": "",
            f"{CHIP}/device": "link:../../../devices/ACPI000D:00",
        }
    )
    (channel,) = channels(root)
    assert (channel.name, channel.interval_s, channel.note) == (
        "power_meter ACPI000D:00 channel 1",
        2.0,
        "measures LNXCPU:00",
    )
    reading = ChannelMeter(root, channel, "board").read(0.0)
    assert reading.value == Sample(power_w=pytest.approx(5.929), age_s=1.0)  # a mean of the last two seconds


def test_a_named_acpi_meter_of_newer_kernels_is_found_too(plant: Plant) -> None:
    root = plant({f"{CHIP}/name": "power_meter", f"{CHIP}/power1_average": "3000000"})
    (channel,) = channels(root)
    assert power_w(root, channel) == 3.0


def test_a_battery_is_no_second_meter(x86_laptop: SysfsRoot) -> None:
    assert channels(x86_laptop) == ()


@pytest.mark.parametrize("files", [{f"{CHIP}/in1_enable": "0"}, {f"{CHIP}/in1_label": "NC"}])
def test_channels_that_are_off_or_not_connected_are_left_out(plant: Plant, files: dict[str, str]) -> None:
    assert channels(plant(ina3221(7, "1-0040", {1: ("A", 5000, 100)}) | files)) == ()


def test_an_energy_counter_counts_from_its_first_reading(plant: Plant) -> None:
    files = {f"{CHIP}/name": "amd_energy", f"{CHIP}/energy1_label": "Esocket0", f"{CHIP}/energy1_input": "5000000"}
    root = plant(files)
    (channel,) = channels(root)
    meter = ChannelMeter(root, channel)
    assert meter.read(0.0).value == Sample(energy_j=0.0)
    plant({f"{CHIP}/energy1_input": "8000000"})
    assert meter.read(1.0).value == Sample(energy_j=3.0)
    assert meter.read(4.0).value == Sample(energy_j=3.0, age_s=3.0)
    plant({f"{CHIP}/energy1_input": "1000000"})
    assert meter.read(5.0).value is None
    plant({f"{CHIP}/energy1_input": "-1"})
    assert meter.read(6.0).value is None


BAD = ["-5000000000", "99999999999999999999", "nan", "", "0x", "\x00\x01\x02", "9" * 5000]


@pytest.mark.parametrize("raw", BAD, ids=lambda raw: repr(raw[:10]))
@pytest.mark.parametrize("file", ["in1_input", "curr1_input"])
def test_hostile_volts_and_amperes_are_unknown_and_never_zero(plant: Plant, file: str, raw: str) -> None:
    root = plant(ina3221(7, "1-0040", {1: ("VDD_IN", 5000, 100)}))
    (channel,) = channels(root)
    plant({f"{CHIP}/{file}": raw})
    reading = ChannelMeter(root, channel).read(0.0)
    assert reading.value is None
    assert reading.reason
    assert file in reading.source


@pytest.mark.parametrize("raw", [*BAD, "-1000000"], ids=lambda raw: repr(raw[:10]))
def test_hostile_watts_are_unknown_and_never_zero(plant: Plant, raw: str) -> None:
    (channel,) = channels(plant(INA226 | {f"{CHIP}/power1_input": raw}))
    assert power_w(plant({}), channel) is None


def test_a_rail_without_volts_is_unknown_and_one_without_current_takes_nothing(plant: Plant) -> None:
    root = plant(ina3221(7, "1-0040", {1: ("OFF", 0, 0), 2: ("IDLE", 5000, 0), 3: ("OFFSET", 5000, -4)}))
    assert [power_w(root, c) for c in channels(root)] == [None, 0.0, 0.0]


def test_nothing_is_not_believed_of_a_whole_board(plant: Plant) -> None:
    root = plant(ina3221(7, "1-0040", {1: ("VDD_IN", 5000, 0)}))
    reading = ChannelMeter(root, channels(root)[0], "board").read(0.0)
    assert (reading.value, reading.reason) == (None, "tells 0 W for a board that runs")


@pytest.mark.parametrize("fault", [errno.ENODEV, errno.EAGAIN, errno.ENODATA, errno.EIO, errno.ENXIO])
def test_a_chip_that_does_not_answer_is_unknown_and_may_come_back(tmp_path: Path, fault: int) -> None:
    plant_files(tmp_path, ina3221(7, "1-0040", {1: ("VDD_IN", 5000, 1000)}))
    root = FaultyRoot(tmp_path)
    meter = ChannelMeter(root, channels(root)[0])
    root.faults[f"{CHIP}/curr1_input"] = fault
    reading = meter.read(0.0)
    assert reading.value is None
    assert reading.reason
    root.faults.clear()
    assert meter.read(1.0).value == Sample(power_w=5.0)


def test_a_chip_that_is_unplugged_between_two_readings_is_unknown(plant: Plant, tmp_path: Path) -> None:
    root = plant(ina3221(7, "1-0040", {1: ("VDD_IN", 5000, 1000)}))
    meter = ChannelMeter(root, channels(root)[0])
    assert meter.read(0.0).value == Sample(power_w=5.0)
    (tmp_path / CHIP / "in1_input").unlink()
    reading = meter.read(1.0)
    assert reading.value is None
    assert "no such file" in reading.reason


@pytest.mark.parametrize(
    ("told_ohm", "board_ohm", "problem", "note"),
    [
        (0.005, 0.005, "", ""),
        (0.0052, 0.005, "", ""),
        (0.01, 0.005, "the true watts are 2 times", ""),
        (0.01, None, "", "default shunt"),
        (0.02, None, "", ""),
        (0.0, None, "cannot be", ""),
        (5.0, 0.005, "cannot be", ""),
    ],
)
def test_a_shunt_that_is_not_the_boards_is_a_fault(
    told_ohm: float, board_ohm: float | None, problem: str, note: str
) -> None:
    found = shunt_faults(known(told_ohm, "/shunt"), board_ohm)
    assert problem in found[0]
    assert note in found[1]
    assert bool(found[0]) == bool(problem)
    assert bool(found[1]) == bool(note)


def test_a_shunt_that_nobody_tells_is_no_fault() -> None:
    assert shunt_faults(unknown("/shunt", "no such file"), 0.005) == ("", "")


def test_with_a_wrong_shunt_no_watt_is_told(plant: Plant) -> None:
    root = plant(ina3221(7, "1-0040", {1: ("VDD_IN", 5000, 1000)}, shunt_uohm=10_000))
    channel = channels(root)[0].checked(root, 0.005)
    reading = ChannelMeter(root, channel).read(0.0)
    assert reading.value is None
    assert "Set shunt-resistor in the device tree" in reading.reason


@given(millivolts=st.integers(1, 100_000), milliamperes=st.integers(0, 50_000))
def test_millivolts_times_milliamperes_are_microwatts(millivolts: int, milliamperes: int) -> None:
    root = MemoryRoot({"v": millivolts, "i": milliamperes})
    channel = Channel(chip="ina3221", device="1-0040", number=1, voltage="v", current="i")
    assert power_w(root, channel) == pytest.approx(millivolts * milliamperes * 1e-6)


class MemoryRoot(SysfsRoot):
    """Files that are numbers in memory."""

    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__()
        self._numbers = numbers

    def read_bytes(self, path: str) -> bytes:
        return str(self._numbers[path]).encode()


def test_jetpack_4_shows_rails_as_iio_devices_in_milliwatts(plant: Plant) -> None:
    device = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    root = plant(
        {
            f"{device}/rail_name_0": "POM_5V_IN",
            f"{device}/in_power0_input": "3456",
            f"{device}/rail_name_1": "NC",
            f"{device}/in_power1_input": "1",
            f"{device}/rail_name_2": "POM_5V_CPU",
            f"{device}/in_power2_input": "1200",
            "sys/bus/i2c/drivers/ina3221x/6-0040/iio_device": "link:iio:device0",
        }
    )
    found = iio_channels(root)
    assert [(c.name, c.device, c.number) for c in found] == [
        ("ina3221 POM_5V_IN", "6-0040", 1),
        ("ina3221 POM_5V_CPU", "6-0040", 3),
    ]
    assert [power_w(root, c) for c in found] == [pytest.approx(3.456), pytest.approx(1.2)]
