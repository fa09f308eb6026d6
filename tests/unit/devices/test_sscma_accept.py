"""The acceptance script for boards, on a stub of one: what it writes, not what a board is."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from edge_rt.devices.sscma import Sscma
from tests.sscma_board import Board, Firmware
from tests.unit.devices.test_sscma import Line

pytestmark = pytest.mark.stub
SCRIPT = Path("hw/npu/ethos-u/accept.py")


def test_a_report_tells_the_board_its_model_and_its_times(tmp_path: Path) -> None:
    board = Board(Firmware())
    try:
        report_file = tmp_path / "report.json"
        command = [sys.executable, str(SCRIPT), "--port", board.path, "--runs", "3", "--json", str(report_file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": "."})
    finally:
        board.unplug()
    assert done.returncode == 0, done.stderr
    report = json.loads(report_file.read_text())
    assert report["board"]["name"] == "Grove Vision AI (WE2)"
    assert report["running"]["id"] == 2
    assert (report["n_runs"], report["by_the_board_s"]["median"]) == (3, 0.365)


def test_a_board_that_says_nothing_is_a_report_too() -> None:
    line = Line()
    report = runpy.run_path(str(SCRIPT))["examine"](Sscma(line, clock=line.clock), 3)
    assert "has not answered ID" in report["failed"]
    assert report["n_runs"] == 0
