from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.board_table import parse
from edge_rt.devices.meter_choice import Found, Panel, Source, choose, disagreements, find
from edge_rt.devices.meters import Boundary, Meter, Quality, Sample
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from tests.device_trees import Plant, ina3221, plant_files
from tests.faulty_root import FaultyRoot


class FakeMeter:
    """Tells what it is given, one a reading, the last one again and again."""

    def __init__(
        self,
        name: str,
        *samples: Sample | None,
        boundary: Boundary = "board",
        quality: Quality = "measured",
        interval_s: float = 0.1,
    ) -> None:
        self.name = name
        self.boundary: Boundary = boundary
        self.quality: Quality = quality
        self.interval_s = interval_s
        self.closed = False
        self._samples = list(samples)

    def read(self, now_s: float) -> Reading[Sample]:
        sample = self._samples.pop(0) if len(self._samples) > 1 else self._samples[0]
        return known(sample, self.name) if sample is not None else unknown(self.name, "gone")

    def close(self) -> None:
        self.closed = True


def names(found: Found) -> list[tuple[str, str, str]]:
    return [(s.meter.name, s.meter.boundary, s.meter.quality) for s in found.sources]


def powers(found: Found) -> dict[str, float]:
    panel = Panel(found)
    panel.read(0.0)
    return panel.powers_w


def test_an_orin_nanos_total_is_one_rail_and_its_chip_two(orin_nano: SysfsRoot) -> None:
    found = find(orin_nano)
    assert names(found) == [
        ("ina3221 VDD_IN", "board", "measured"),
        ("ina3221 VDD_CPU_GPU_CV + VDD_SOC", "soc", "derived"),
        ("ina3221 VDD_CPU_GPU_CV", "rail", "measured"),
        ("ina3221 VDD_SOC", "rail", "measured"),
    ]
    told = powers(found)
    assert told["ina3221 VDD_IN"] == pytest.approx(5.016 * 1.2)
    assert told["ina3221 VDD_CPU_GPU_CV + VDD_SOC"] == pytest.approx(5.016 * 0.4 + 5.008 * 0.28)
    assert "carrier" in found.sources[0].note
    assert {a.kind for a in found.absent} == {"rapl", "battery"}


def agx_orin(plant: Plant) -> SysfsRoot:
    first = {1: ("VDD_GPU_SOC", 5000, 1000), 2: ("VDD_CPU_CV", 5000, 500), 3: ("VIN_SYS_5V0", 5000, 800)}
    second = {1: ("NC", 0, 0), 2: ("VDDQ_VDD2_1V8AO", 5000, 200)}
    tree = {"proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0000\0nvidia,p3701-0000\0"}
    return plant(tree | ina3221(3, "1-0040", first, shunt_uohm=2000) | ina3221(4, "1-0041", second, shunt_uohm=2000))


def test_an_agx_orins_total_is_no_single_rail_and_no_rail_is_counted_twice(plant: Plant) -> None:
    found = find(agx_orin(plant))
    told = powers(found)
    # VDDQ_VDD2_1V8AO is fed by VIN_SYS_5V0: all four would be 12.5 W.
    assert told["ina3221 VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"] == pytest.approx(11.5)
    assert told["ina3221 VDD_GPU_SOC + VDD_CPU_CV"] == pytest.approx(7.5)
    assert found.sources[0].meter.quality == "derived"


def test_a_total_with_an_unreadable_part_is_unknown(plant: Plant, tmp_path: Path) -> None:
    agx_orin(plant)
    root = FaultyRoot(tmp_path)
    found = find(root)
    root.faults["sys/class/hwmon/hwmon3/curr2_input"] = errno.EAGAIN
    reading = found.sources[0].meter.read(0.0)
    assert reading.value is None
    assert reading.reason.startswith("ina3221 VDD_CPU_CV: ")


def test_a_total_whose_parts_are_not_all_here_is_none(plant: Plant) -> None:
    root = plant(
        {"proc/device-tree/compatible": "nvidia,p3701-0000\0"}
        | ina3221(3, "1-0040", {1: ("VDD_GPU_SOC", 5000, 1000), 2: ("VDD_CPU_CV", 5000, 500)}, shunt_uohm=2000)
    )
    assert [n for n in names(find(root)) if n[1] == "board"] == []


def test_a_driver_with_another_shunt_than_the_boards_tells_no_watts(plant: Plant) -> None:
    tree = {"proc/device-tree/compatible": "nvidia,p3767-0005\0"}
    root = plant(tree | ina3221(3, "1-0040", {1: ("VDD_IN", 5000, 1000)}, shunt_uohm=10_000))
    reading = find(root).sources[0].meter.read(0.0)
    assert reading.value is None
    assert "shunt of 10 mΩ and the board has 5 mΩ" in reading.reason


def test_rails_without_labels_are_known_by_chip_address_and_number(plant: Plant) -> None:
    chip = ina3221(3, "1-0040", {1: ("x", 5000, 1000), 2: ("x", 5000, 500)})
    root = plant({k: v for k, v in chip.items() if not k.endswith("_label")})
    board = parse(
        'name = "b"\nsource = "s"\nboard = ["IN"]\n[match]\nmodel = ["m"]\n'
        '[[rail]]\nname = "IN"\nchip = "ina3221"\ndevice = "1-0040"\nnumber = 2\n',
        "/f",
    )
    found = find(root, board=board)
    assert names(found) == [("ina3221 IN", "board", "measured"), ("ina3221 1-0040 channel 1", "rail", "measured")]
    assert powers(found)["ina3221 IN"] == pytest.approx(2.5)


@pytest.mark.parametrize("milliamperes", [0, -3])
def test_a_total_of_nothing_is_not_believed(plant: Plant, milliamperes: int) -> None:
    rails = {1: ("VDD_IN", 5000, milliamperes), 2: ("VDD_CPU_GPU_CV", 5000, 0), 3: ("VDD_SOC", 5000, 0)}
    root = plant({"proc/device-tree/compatible": "nvidia,p3767-0005\0"} | ina3221(3, "1-0040", rails))
    readings = {s.meter.name: s.meter.read(0.0) for s in find(root).sources}
    board, soc = readings["ina3221 VDD_IN"], readings["ina3221 VDD_CPU_GPU_CV + VDD_SOC"]
    assert (board.value, board.reason) == (None, "tells 0 W for a board that runs")
    assert (soc.value, soc.reason) == (None, "tells 0 W for a soc that runs")
    assert readings["ina3221 VDD_SOC"].value == Sample(power_w=0.0)  # one rail may be off


def test_a_rail_without_a_label_on_a_chip_of_another_address_is_not_guessed(plant: Plant) -> None:
    chip = ina3221(3, "1-0041", {1: ("x", 5000, 1000)})
    tree = {"proc/device-tree/compatible": "nvidia,p3767-0005\0"}
    root = plant(tree | {k: v for k, v in chip.items() if not k.endswith("_label")})
    assert names(find(root)) == [("ina3221 1-0041 channel 1", "rail", "measured")]


def test_jetpack_4_rails_are_totals_too(plant: Plant) -> None:
    device = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    files = {"proc/device-tree/compatible": "nvidia,p3450-0000\0"}
    for number, (name, milliwatts) in enumerate((("POM_5V_IN", 4000), ("POM_5V_GPU", 500), ("POM_5V_CPU", 900))):
        files |= {f"{device}/rail_name_{number}": name, f"{device}/in_power{number}_input": f"{milliwatts}"}
    told = powers(find(plant(files)))
    assert told["ina3221 POM_5V_IN"] == pytest.approx(4.0)
    assert told["ina3221 POM_5V_GPU + POM_5V_CPU"] == pytest.approx(1.4)


def test_a_pi_5_asks_its_power_chip(raspberry_pi_5: SysfsRoot) -> None:
    rails = "".join(f"R{i}_A current({i})=0.5A\nR{i}_V volt({i})=1.0V\n" for i in range(12))
    found = find(raspberry_pi_5, call=lambda arguments: rails)
    assert names(found) == [("pmic", "board", "derived")]
    assert powers(found)["pmic"] == pytest.approx(1.1451 * 6.0 + 0.5879)


def test_no_program_is_started_where_the_board_has_no_power_chip(bare_vm: SysfsRoot, rk3588: SysfsRoot) -> None:
    def never(arguments: tuple[str, ...]) -> str:
        raise AssertionError(arguments)

    for root in (bare_vm, rk3588):
        powers(find(root, call=never))


def test_a_laptop_on_battery_has_two_meters_of_the_board(x86_laptop: SysfsRoot) -> None:
    found = find(x86_laptop)
    assert names(found) == [
        ("rapl psys", "board", "measured"),
        ("rapl package-0", "soc", "measured"),
        ("battery", "board", "measured"),
    ]


def test_a_machine_with_nothing_says_why(bare_vm: SysfsRoot) -> None:
    found = find(bare_vm)
    assert found.sources == ()
    assert {a.kind: a.reason for a in found.absent} == {
        "rapl": (
            "no RAPL counter: neither the CPU nor the hypervisor offers one, or the intel_rapl driver is not loaded"
        ),
        "battery": "there is no battery",
        "hwmon": "no chip below /sys/class/hwmon measures power",
    }
    panel = Panel(found)
    panel.read(0.0)
    choice = choose(panel.meters, panel.readings)
    assert (choice.board, choice.soc, choice.used) == (None, None, None)


def test_a_board_that_measures_nothing_says_what_helps(rk3588: SysfsRoot) -> None:
    assert any("USB meter" in absent.reason for absent in find(rk3588).absent)


def test_an_unreadable_counter_stays_listed_with_what_to_do(tmp_path: Path) -> None:
    zone = "sys/class/powercap/intel-rapl:0"
    plant_files(tmp_path, {f"{zone}/name": "package-0", f"{zone}/max_energy_range_uj": "1000000"})
    (source,) = find(FaultyRoot(tmp_path, {f"{zone}/energy_uj": errno.EACCES})).sources
    assert "only root may read it" in source.meter.read(0.0).reason
    assert "tmpfiles.d" in source.remedy


def test_two_chips_of_one_kind_have_two_names(plant: Plant) -> None:
    files = {}
    for number in (0, 1):
        chip = f"sys/class/hwmon/hwmon{number}"
        files |= {f"{chip}/name": "scmi_sensors", f"{chip}/power1_input": "1000000"}
    found = [s.meter.name for s in find(plant(files)).sources]
    assert found == ["scmi_sensors channel 1", "scmi_sensors channel 1 #2"]


W = Sample(power_w=5.0)


def chosen(meters: list[Meter], setting: str = "auto") -> tuple[str | None, str | None, str | None]:
    readings = {meter.name: meter.read(0.0) for meter in meters}
    choice = choose(meters, readings, setting, origin="/etc/edge_rt/config.toml")
    board, soc, used = (m.name if m is not None else None for m in (choice.board, choice.soc, choice.used))
    return board, soc, used


def test_the_better_quality_wins_then_the_shorter_interval_then_the_first() -> None:
    model = FakeMeter("model", W, quality="modelled", interval_s=0.01)
    pmic = FakeMeter("pmic", W, quality="derived", interval_s=0.05)
    slow, fast, second = FakeMeter("slow", W, interval_s=1.0), FakeMeter("fast", W), FakeMeter("second", W)
    assert chosen([model]) == ("model", None, "model")
    assert chosen([model, pmic]) == ("pmic", None, "pmic")
    assert chosen([model, pmic, slow, fast, second]) == ("fast", None, "fast")


def test_what_cannot_be_read_is_not_chosen() -> None:
    assert chosen([FakeMeter("gone", None), FakeMeter("model", W, quality="modelled")]) == ("model", None, "model")


def test_the_chips_meter_is_used_where_the_board_has_none() -> None:
    meters: list[Meter] = [FakeMeter("rail", W, boundary="rail"), FakeMeter("rapl", W, boundary="soc")]
    assert chosen(meters) == (None, "rapl", "rapl")
    assert chosen([*meters, FakeMeter("plug", W)]) == ("plug", "rapl", "plug")


def test_a_named_meter_is_used_whatever_else_is_here() -> None:
    meters: list[Meter] = [
        FakeMeter("plug", W),
        FakeMeter("battery", None),
        FakeMeter("rapl", W, boundary="soc"),
        FakeMeter("VDD", W, boundary="rail"),
    ]
    assert chosen(meters, "battery") == ("battery", "rapl", "battery")
    assert chosen(meters, "rapl") == ("plug", "rapl", "rapl")
    assert chosen(meters, "VDD") == ("plug", "rapl", "VDD")
    assert chosen(meters, "none") == (None, None, None)


def test_a_name_that_no_meter_has_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError) as caught:
        chosen([FakeMeter("plug", W)], "plugg")
    assert str(caught.value) == (
        "power.meter: is 'plugg', which is no meter here; there are: plug (from /etc/edge_rt/config.toml)"
    )


@pytest.mark.parametrize(
    ("a_w", "b_w", "agree"),
    [(5.0, 5.9, True), (5.0, 6.3, False), (0.1, 0.3, True), (10.0, 7.9, False), (0.0, 0.2, True)],
)
def test_two_of_one_boundary_agree_within_a_fifth(a_w: float, b_w: float, agree: bool) -> None:
    meters: list[Meter] = [FakeMeter("a", W), FakeMeter("b", W)]
    found = disagreements({"a": a_w, "b": b_w}, meters)
    assert (found == ()) is agree
    if not agree:
        assert str(found[0]) == f"a tells {a_w:.2f} W and b tells {b_w:.2f} W for the same board: one of them is wrong"


def test_meters_of_two_boundaries_and_rails_are_never_compared() -> None:
    meters: list[Meter] = [
        FakeMeter("board", W),
        FakeMeter("soc", W, boundary="soc"),
        FakeMeter("r1", W, boundary="rail"),
        FakeMeter("r2", W, boundary="rail"),
    ]
    assert disagreements({"board": 10.0, "soc": 5.0, "r1": 1.0, "r2": 3.0}, meters) == ()


def panel_of(*meters: Meter) -> Panel:
    return Panel(Found(board=None, sources=tuple(Source(meter=m) for m in meters), absent=()))


def test_a_panel_gives_a_counters_power_from_its_second_reading_on() -> None:
    panel = panel_of(FakeMeter("rapl", Sample(energy_j=10.0), Sample(energy_j=16.0), boundary="soc"))
    panel.read(0.0)
    assert panel.powers_w == {}
    panel.read(2.0)
    assert panel.powers_w == {"rapl": pytest.approx(3.0)}


def test_joules_that_are_old_when_they_are_read_make_no_wrong_watts() -> None:
    """powerd's meter without work: it looks once a second, and is asked twice."""
    samples = [
        Sample(energy_j=10.0, power_w=2.5, age_s=0.8),
        Sample(energy_j=12.5, power_w=2.5, age_s=0.3),
        Sample(energy_j=12.5, power_w=2.5, age_s=0.8),
        Sample(energy_j=16.5, power_w=4.0, age_s=0.3),
    ]
    panel = panel_of(FakeMeter("powerd's", *samples, boundary="soc"))
    told = []
    for i in range(4):
        panel.read(0.5 * i)
        told.append(panel.powers_w["powerd's"])
    assert told == pytest.approx([2.5, 2.5, 2.5, 4.0])


def test_a_counter_that_does_not_move_is_no_zero() -> None:
    panel = panel_of(FakeMeter("rapl", Sample(energy_j=10.0), boundary="soc"))
    for now_s in (0.0, 1.0):
        panel.read(now_s)
    assert panel.power_w("rapl").value is None
    assert "has not moved" in panel.power_w("rapl").reason


def test_over_a_gap_a_panel_tells_no_power() -> None:
    samples = (Sample(energy_j=10.0), None, Sample(energy_j=16.0), Sample(energy_j=18.0))
    panel = panel_of(FakeMeter("rapl", *samples, boundary="soc"))
    told = []
    for now_s in range(4):
        panel.read(float(now_s))
        told.append(panel.powers_w.get("rapl"))
    assert told == [None, None, None, pytest.approx(2.0)]


def test_a_disagreement_is_logged_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    five, nine = Sample(power_w=5.0), Sample(power_w=9.0)
    panel = panel_of(FakeMeter("a", five), FakeMeter("b", nine, nine, nine, five, five, five, nine, nine, nine))
    with caplog.at_level(logging.WARNING):
        counts = []
        for now_s in range(9):
            panel.read(float(now_s))
            counts.append(len(caplog.records))
    assert counts == [1, 1, 1, 1, 1, 1, 2, 2, 2]


def test_extra_meters_come_first_and_all_are_closed(bare_vm: SysfsRoot) -> None:
    meter = FakeMeter("tc66", W)
    found = find(bare_vm, extra=[meter])
    assert [s.meter.name for s in found.sources] == ["tc66"]
    found.close()
    assert meter.closed


ERRNOS = (errno.ENODEV, errno.ENOENT, errno.ENODATA, errno.EACCES)
JUNK = (b"", b"nan", b"-", b"\xff\xfe\x00", b"9" * 5000, b"1 2", b"\x1b[2J")


@pytest.mark.parametrize("tree", ["orin_nano", "x86_laptop", "raspberry_pi_5"])
def test_whatever_one_file_does_no_watt_is_wrong(request: pytest.FixtureRequest, tmp_path: Path, tree: str) -> None:
    request.getfixturevalue(tree)
    rails = "".join(f"R{i}_A current({i})=0.5A\nR{i}_V volt({i})=1.0V\n" for i in range(12))
    root = FaultyRoot(tmp_path)
    told = set(powers(find(root, call=lambda arguments: rails)).values())
    assert told
    for path in sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()):
        for fault in (*ERRNOS, *JUNK):
            root.faults = {path: fault}
            found = find(root, call=lambda arguments: rails)
            panel = Panel(found)
            panel.read(0.0)
            assert set(panel.powers_w.values()) <= told, (path, fault)
            for name, reading in panel.readings.items():
                assert (reading.value is None) == bool(reading.reason), (path, fault, name)
            choose(panel.meters, panel.readings)
