from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edge_rt.devices.meters import Boundary, Sample
from edge_rt.devices.powercap import EnergyMeter
from edge_rt.devices.sysfs import SysfsRoot
from tests.device_trees import Plant, plant_files
from tests.faulty_root import FaultyRoot

ZONE = "sys/class/powercap/intel-rapl:0"


def one_package(energy_uj: int) -> dict[str, str]:
    return {
        f"{ZONE}/name": "package-0",
        f"{ZONE}/energy_uj": str(energy_uj),
        f"{ZONE}/max_energy_range_uj": "262143328850",
    }


def meter_of(root: SysfsRoot, boundary: Boundary = "soc") -> EnergyMeter:
    """Make a meter that was read first at 0 s."""
    meter = EnergyMeter(root, boundary=boundary)
    meter.read(0.0)
    return meter


def energy_j(meter: EnergyMeter, now_s: float) -> float | None:
    sample = meter.read(now_s).value
    return sample.energy_j if sample is not None else None


def test_packages_and_memory_are_summed_and_duplicates_are_not(plant: Plant, x86_server: SysfsRoot) -> None:
    meter = meter_of(x86_server)
    assert (meter.name, meter.boundary, meter.quality) == (
        "rapl package-0 + dram + package-1 + dram",
        "soc",
        "measured",
    )
    assert energy_j(meter, 1.0) == 0
    plant({f"{ZONE}/energy_uj": "3000000", f"{ZONE}:0/energy_uj": "1500000", f"{ZONE}:1/energy_uj": "9000000"})
    assert energy_j(meter, 2.0) == pytest.approx(2.5)


def test_psys_is_the_board_and_no_part_of_the_chip(plant: Plant, x86_laptop: SysfsRoot) -> None:
    board, soc = meter_of(x86_laptop, "board"), meter_of(x86_laptop)
    assert (board.name, board.boundary) == ("rapl psys", "board")
    assert (soc.name, soc.boundary) == ("rapl package-0", "soc")
    plant({"sys/class/powercap/intel-rapl:1/energy_uj": "12000000", f"{ZONE}/energy_uj": "6000000"})
    assert (energy_j(board, 1.0), energy_j(soc, 1.0)) == (pytest.approx(3.0), pytest.approx(1.0))


def test_a_memory_mapped_package_counts_where_it_is_alone(plant: Plant) -> None:
    zone = "sys/class/powercap/intel-rapl-mmio:0"
    root = plant({f"{zone}/name": "package-0", f"{zone}/energy_uj": "1", f"{zone}/max_energy_range_uj": "65532610987"})
    meter = meter_of(root)
    plant({f"{zone}/energy_uj": "2000001"})
    assert energy_j(meter, 1.0) == pytest.approx(2.0)


def test_a_wrap_is_recovered(plant: Plant) -> None:
    root = plant(one_package(262_143_000_000))
    meter = meter_of(root)
    plant({f"{ZONE}/energy_uj": "1000000"})
    assert energy_j(meter, 1.0) == pytest.approx(1.32885)
    plant({f"{ZONE}/energy_uj": "1500000"})
    assert energy_j(meter, 2.0) == pytest.approx(1.82885)


def test_without_its_range_a_counter_counts_up_and_a_step_down_is_dropped(plant: Plant, tmp_path: Path) -> None:
    root = plant(one_package(9_000_000))
    (tmp_path / ZONE / "max_energy_range_uj").unlink()
    meter = meter_of(root)
    plant({f"{ZONE}/energy_uj": "9500000"})
    assert energy_j(meter, 1.0) == pytest.approx(0.5)
    plant({f"{ZONE}/energy_uj": "100000"})
    reading = meter.read(2.0)
    assert reading.value is None
    assert "where it wraps cannot be read" in reading.reason
    plant({f"{ZONE}/energy_uj": "200000"})
    assert energy_j(meter, 3.0) == pytest.approx(0.6)


def test_the_processors_own_limit_tells_a_reset_from_a_wrap(plant: Plant, x86_laptop: SysfsRoot) -> None:
    meter = meter_of(x86_laptop)
    plant({f"{ZONE}/energy_uj": "0"})  # 5 J before: as a wrap it would be 262 kJ in a second
    reading = meter.read(1.0)
    assert reading.value is None
    assert "reset" in reading.reason


def test_a_counter_that_stands_still_grows_old_and_is_unknown_then(plant: Plant, x86_laptop: SysfsRoot) -> None:
    meter = meter_of(x86_laptop)
    assert meter.read(1.5).value == Sample(energy_j=0.0, age_s=1.5)
    reading = meter.read(5.0)
    assert reading.value is None
    assert "has stood still for 5 s" in reading.reason
    plant({f"{ZONE}/energy_uj": "7000000"})
    assert meter.read(5.1).value == Sample(energy_j=pytest.approx(2.0))


def test_no_counter_is_a_reason(container: SysfsRoot) -> None:
    meter = meter_of(container)
    assert not meter.is_here
    reading = meter.read(0.0)
    assert reading.value is None
    assert "no RAPL counter" in reading.reason


def test_only_psys_is_a_reason(x86_hybrid: SysfsRoot) -> None:
    assert meter_of(x86_hybrid).read(0.0).reason == "RAPL has psys but no package counter"
    assert EnergyMeter(x86_hybrid, boundary="board").is_here


@pytest.mark.parametrize("fault", [errno.EACCES, errno.EPERM])
def test_a_counter_only_root_may_read_is_a_reason(tmp_path: Path, fault: int) -> None:
    plant_files(tmp_path, one_package(5))
    meter = meter_of(FaultyRoot(tmp_path, {f"{ZONE}/energy_uj": fault}))
    assert meter.is_here
    reading = meter.read(1.0)
    assert reading.value is None
    assert reading.reason == f"/{ZONE}/energy_uj: only root may read it"


def test_a_counter_that_disappears_is_a_reason(plant: Plant, tmp_path: Path) -> None:
    meter = meter_of(plant(one_package(5)))
    (tmp_path / ZONE / "energy_uj").unlink()
    reading = meter.read(1.0)
    assert reading.value is None
    assert "no such file" in reading.reason


def test_one_unreadable_zone_makes_the_sum_unknown_and_loses_nothing(tmp_path: Path) -> None:
    dram = f"{ZONE}:0"
    files = one_package(1_000_000) | {
        f"{dram}/name": "dram",
        f"{dram}/energy_uj": "1000000",
        f"{dram}/max_energy_range_uj": "262143328850",
    }
    plant_files(tmp_path, files)
    root = FaultyRoot(tmp_path)
    meter = meter_of(root)
    root.faults = {f"{ZONE}/energy_uj": b"2000000", f"{dram}/energy_uj": errno.ENODATA}
    assert energy_j(meter, 1.0) is None
    root.faults = {f"{ZONE}/energy_uj": b"3000000", f"{dram}/energy_uj": b"1500000"}
    assert energy_j(meter, 2.0) == pytest.approx(2.5)


@pytest.mark.parametrize("raw", ["-1", "nan", "", "18446744073709551615", "9" * 5000, "\x00"], ids=lambda r: r[:6])
def test_hostile_counts_are_unknown(plant: Plant, raw: str) -> None:
    meter = meter_of(plant(one_package(5)))
    plant({f"{ZONE}/energy_uj": raw})
    reading = meter.read(1.0)
    assert reading.value is None
    assert reading.reason


def test_a_zone_with_a_name_for_a_terminals_ears_is_none(plant: Plant) -> None:
    root = plant(one_package(5) | {f"{ZONE}/name": "package-0\x1b[2J"})
    assert not meter_of(root).is_here
