from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_rt.power.clock_sweep import ClockSweep
from tests.device_trees import Plant, cpufreq_policy, plant
from tests.fakes import FakeClock

__all__ = ["plant"]


@pytest.fixture
def sweep(plant: Plant, tmp_path: Path) -> ClockSweep:
    plant(cpufreq_policy(0, "0-3", khz="600000 1500000 2400000", floor=600_000, ceiling=2_400_000))
    return make(tmp_path)


def make(tmp_path: Path) -> ClockSweep:
    clock = FakeClock()
    return ClockSweep(str(tmp_path), snapshot_file=str(tmp_path / "snapshot"), now=clock, sleep=clock.advance)


def max_khz(tmp_path: Path) -> str:
    return (tmp_path / "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq").read_text().strip()


def test_clocks_are_set_and_put_back(sweep: ClockSweep, tmp_path: Path) -> None:
    assert (sweep.problem, sweep.points_hz) == ("", {"policy0": (6e8, 1.5e9, 2.4e9)})
    before = max_khz(tmp_path)
    for hz in (2.4e9, 1.5e9, 6e8):
        sweep.set("policy0", hz)
        assert max_khz(tmp_path) == f"{hz / 1e3:.0f}"
    assert (tmp_path / "snapshot").exists()
    assert sweep.restore() == []
    assert max_khz(tmp_path) == before
    assert not (tmp_path / "snapshot").exists()


def test_a_clock_that_the_kernel_does_not_take_is_an_error(sweep: ClockSweep) -> None:
    with pytest.raises(OSError, match="does not take 9000 MHz"):
        sweep.set("policy0", 9e9)


def test_what_another_process_holds_is_left_alone(sweep: ClockSweep, tmp_path: Path) -> None:
    sweep.set("policy0", 6e8)
    other = make(tmp_path)
    assert "powerd holds the clocks" in other.problem
    assert other.points_hz == {}


def test_without_clocks_there_is_nothing_to_set(tmp_path: Path) -> None:
    found = make(tmp_path)
    assert (found.problem, found.points_hz) == ("this machine lets nobody set a clock", {})
    assert found.restore() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_who_may_not_write_sets_no_clock(sweep: ClockSweep, tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq").chmod(0o444)
    assert make(tmp_path).problem == "only root may set the clock of policy0"
