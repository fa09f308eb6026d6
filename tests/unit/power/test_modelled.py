from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.calibration import CalibratedDomain
from edge_rt.power.modelled import ModelledMeter
from edge_rt.power.state import Work
from tests.unit.power.test_calibration import FOUND


class Board:
    """A tree with /proc/stat and one clock."""

    def __init__(self, path: Path, *, domain: str = "policy0", work: Work | None = None) -> None:
        self.path, self.busy, self.idle, self.now_s = path, 1000, 5000, 0.0
        (path / "proc").mkdir()
        self.clock = path / "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq"
        self.clock.parent.mkdir(parents=True)
        self.clock.write_text("2400000\n")
        self.write()
        calibration = replace(FOUND, domains=(CalibratedDomain(name=domain, points=FOUND.domains[0].points),))
        self.meter = ModelledMeter(calibration, root=SysfsRoot(path), work=lambda: work)

    def write(self) -> None:
        text = f"cpu  {self.busy} 0 0 {self.idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
        (self.path / "proc/stat").write_text(text)

    def run(self, busy: int, idle: int) -> None:
        self.busy, self.idle, self.now_s = self.busy + busy, self.idle + idle, self.now_s + 1.0
        self.write()

    def watts(self) -> float | None:
        reading = self.meter.read(self.now_s)
        return None if reading.value is None else reading.value.power_w


def test_power_follows_load_and_clock(tmp_path: Path) -> None:
    board = Board(tmp_path)
    assert board.watts() is None  # a load is a difference
    board.run(0, 200)
    assert board.watts() == pytest.approx(2.7)
    board.run(200, 0)
    assert board.watts() == pytest.approx((5.4 + 4.0) / 2)
    board.run(100, 100)
    assert board.watts() == pytest.approx((2.7 + 4.7) / 2)
    board.clock.write_text("600000")
    board.run(200, 0)
    assert board.watts() == pytest.approx((3.6 + 4.0) / 2)
    assert (board.meter.quality, board.meter.name) == ("modelled", "model of Board 5")


@pytest.mark.parametrize(("work", "watts"), [("prefill", 5.4), ("decode", 4.0), ("idle", 4.7)])
def test_what_runs_is_used_where_it_is_known(tmp_path: Path, work: Work, watts: float) -> None:
    board = Board(tmp_path, work=work)
    board.watts()
    board.run(200, 0)
    assert board.watts() == pytest.approx(watts)


@pytest.mark.parametrize("domain", ["cpu", "policy7", "policy../../x", "17000000.gpu"])
def test_an_unknown_clock_counts_as_the_highest(tmp_path: Path, domain: str) -> None:
    board = Board(tmp_path, domain=domain)
    board.watts()
    board.run(200, 0)
    assert board.watts() == pytest.approx(4.7)


def test_too_short_a_time_gives_the_value_before_and_its_age(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.watts()
    board.run(200, 0)
    board.watts()
    reading = board.meter.read(board.now_s + 0.005)
    assert reading.value is not None
    assert reading.value.age_s == pytest.approx(0.005)


@pytest.mark.parametrize("text", ["", "cpu", "cpu a b c d e f g h", "intr 1 2 3 4 5 6 7 8", "cpu 1 2 3"])
def test_a_load_that_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    board = Board(tmp_path)
    board.watts()
    (tmp_path / "proc/stat").write_text(text)
    assert board.watts() is None
    board.run(100, 100)
    assert board.watts() is None  # and begins anew
    board.run(100, 100)
    assert board.watts() is not None


def test_counters_that_fall_begin_anew(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.watts()
    board.run(-500, 0)
    assert board.watts() is None
