"""IdleMeter on a made-up /proc/stat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_rt.devices.idle import IdleMeter, LoadShare
from edge_rt.devices.sysfs import SysfsRoot
from tests.fakes import FakeClock

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def write_stat(root: Path, *idle_s: float) -> None:
    (root / "proc").mkdir(exist_ok=True)
    rows = [f"cpu{i} 1 2 3 {round(s / _TICK_S)} 0 0 0 0 0 0" for i, s in enumerate(idle_s)]
    (root / "proc/stat").write_text("\n".join(["cpu  0 0 0 0 0 0 0 0 0 0", *rows, "ctxt 5"]))


def test_counts_idle_cores_among_its_own_cpus_only(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = IdleMeter((0, 1), root=SysfsRoot(tmp_path), clock=clock)
    write_stat(tmp_path, 10.0, 10.0, 10.0)
    assert meter() is None
    write_stat(tmp_path, 11.0, 10.5, 99.0)
    clock.advance(1.0)
    assert meter() == 1.5


def test_does_not_read_again_within_the_interval(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = IdleMeter((0,), root=SysfsRoot(tmp_path), clock=clock, interval_s=0.5)
    write_stat(tmp_path, 0.0)
    meter()
    write_stat(tmp_path, 1.0)
    clock.advance(0.4)
    assert meter() is None
    clock.advance(0.6)
    assert meter() == 1.0


def test_is_unknown_without_proc_stat(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = IdleMeter((0,), root=SysfsRoot(tmp_path), clock=clock)
    meter()
    clock.advance(1.0)
    assert meter() is None


def test_a_long_pause_is_no_measure_of_now(tmp_path: Path) -> None:
    clock = FakeClock()
    meter = IdleMeter((0,), root=SysfsRoot(tmp_path), clock=clock, max_span_s=2.0)
    write_stat(tmp_path, 0.0)
    meter()
    write_stat(tmp_path, 60.0)
    clock.advance(60.0)
    assert meter() is None
    write_stat(tmp_path, 60.5)
    clock.advance(1.0)
    assert meter() == 0.5


def test_the_share_that_was_worked(tmp_path: Path) -> None:
    def stat(text: str) -> None:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/stat").write_text(text)

    stat("cpu  100 0 100 800 0 0 0 0 50 0\n")
    load = LoadShare(SysfsRoot(tmp_path))
    stat("cpu  130 0 100 860 10 0 0 0 50 0\n")
    assert load() == pytest.approx(0.3)
    assert load() is None  # no time has gone by
    for text in ("", "cpu 1 2", "intr 1 2 3 4 5 6 7 8", "cpu a b c d e f g h"):
        stat(text)
        assert load() is None
    stat("cpu  130 0 100 860 10 0 0 0 50 0\n")
    assert load() is None
    stat("cpu  130 0 100 870 10 0 0 0 50 0\n")
    assert load() == 0.0
