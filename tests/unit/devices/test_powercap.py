from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edge_rt.devices.powercap import EnergyMeter
from edge_rt.devices.sysfs import SysfsRoot

Plant = Callable[[Mapping[str, str]], SysfsRoot]

ZONE = "sys/class/powercap/intel-rapl:0"


def _one_package(energy_uj: int) -> dict[str, str]:
    return {f"{ZONE}/name": "package-0", f"{ZONE}/energy_uj": str(energy_uj), f"{ZONE}/max_energy_range_uj": "10000000"}


def test_packages_and_dram_are_summed_and_duplicates_are_not(plant: Plant, x86_server: SysfsRoot) -> None:
    meter = EnergyMeter(x86_server)
    assert meter.source == "rapl package-0 + dram + package-1 + dram"
    assert meter.read_j().value == 0
    plant({f"{ZONE}/energy_uj": "3000000", f"{ZONE}:0/energy_uj": "1500000", f"{ZONE}:1/energy_uj": "9000000"})
    assert meter.read_j().value == pytest.approx(2.5)


def test_a_wrap_is_recovered(plant: Plant) -> None:
    meter = EnergyMeter(plant(_one_package(9_000_000)))
    plant({f"{ZONE}/energy_uj": "1000000"})
    assert meter.read_j().value == pytest.approx(2.0)
    plant({f"{ZONE}/energy_uj": "1500000"})
    assert meter.read_j().value == pytest.approx(2.5)


def test_no_counter_is_a_reason(container: SysfsRoot) -> None:
    reading = EnergyMeter(container).read_j()
    assert reading.value is None
    assert "no RAPL counter" in reading.reason


def test_only_psys_is_a_reason(x86_hybrid: SysfsRoot) -> None:
    assert EnergyMeter(x86_hybrid).read_j().reason == "RAPL has psys but no package counter"


def test_a_counter_only_root_may_read_is_a_reason(plant: Plant, tmp_path: Path) -> None:
    tree = _one_package(5)
    del tree[f"{ZONE}/energy_uj"]
    root = plant(tree)
    (tmp_path / ZONE / "energy_uj").mkdir()  # root reads through mode 0400, nobody reads a directory
    reading = EnergyMeter(root).read_j()
    assert reading.value is None
    assert "energy_uj" in reading.reason


def test_a_counter_that_disappears_is_a_reason(plant: Plant, tmp_path: Path) -> None:
    meter = EnergyMeter(plant(_one_package(5)))
    (tmp_path / ZONE / "energy_uj").unlink()
    reading = meter.read_j()
    assert reading.value is None
    assert "no such file" in reading.reason
