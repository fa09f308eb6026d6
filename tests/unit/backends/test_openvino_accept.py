"""The acceptance script for machines with an Intel NPU, tried on OpenVINO's CPU device and without an NPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino", reason="openvino is not installed: edge_rt[npu-openvino]")
SCRIPT = Path("hw/npu/openvino/accept.py")


def run(*args: str) -> tuple[int, dict[str, object]]:
    command = [sys.executable, str(SCRIPT), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={"PYTHONPATH": "."})
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_without_an_npu_it_says_why() -> None:
    if Path("/dev/accel").exists():
        pytest.skip("an NPU may be here")
    code, report = run()
    assert code == 1
    assert "no NPU: no /dev/accel" in str(report["failed"])


def test_the_script_compares_and_measures(tmp_path: Path) -> None:
    code, report = run("--device", "openvino-cpu", "models/pcb-kind.fp32.onnx", "--json", str(tmp_path / "report.json"))
    assert code == 0, report
    (told,) = report["models"]  # type: ignore[misc]
    assert told["cosine"] > 0.99999
    assert (told["computed_on"], told["n_cpu"]) == ("npu_openvino:openvino-cpu", 0)
    assert json.loads((tmp_path / "report.json").read_text()) == report
