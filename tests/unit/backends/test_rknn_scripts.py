"""hw/npu/rknn's scripts, with the real toolkit and its simulator where `edge_rt npu setup rknn` has been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.npu.picture_model import picture_model
from tests.npu.rknn_here import environment

pytestmark = [pytest.mark.simulator, pytest.mark.slow]
SCRIPTS = Path("hw/npu/rknn")


@pytest.fixture(autouse=True)
def _toolkit() -> Iterator[None]:
    with environment("rknn"):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "picture.onnx"
    path.write_bytes(picture_model().SerializeToString())
    np.savez(tmp_path / "ranges.npz", image=np.random.default_rng(9).integers(0, 256, (8, 16, 16, 3), np.uint8))
    return path


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    environ = {**os.environ, "PYTHONPATH": "."}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environ)


def test_a_model_is_converted_and_what_was_tried_is_told(model: Path) -> None:
    dataset = str(model.with_name("ranges.npz"))
    done = run("convert.py", str(model), "--soc", "rk3588", "--dtype", "w8a8", "--dataset", dataset, "--tries", "3")
    assert done.returncode == 0, done.stderr
    written = model.with_name("picture.rk3588.rknn")
    told = json.loads(model.with_name("picture.rk3588.rknn.json").read_text())
    assert written.read_bytes()[:4] == b"RKNN"
    assert (told["soc"], told["compiler"]) == ("rk3588", "2.5.0")
    assert told["facts"]["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [1, 16, 16, 3]}]
    assert "simulator: logits: cosine" in done.stdout
    assert "the file itself has run nowhere yet" in done.stdout


def test_a_chip_without_a_precision_is_told(model: Path) -> None:
    dataset = str(model.with_name("ranges.npz"))
    done = run("convert.py", str(model), "--soc", "rk3588", "--dtype", "w4a16", "--dataset", dataset)
    assert done.returncode == 1
    assert "'w4a16' not support in 'rk3588'" in done.stderr


def test_the_report_names_the_simulator(model: Path) -> None:
    done = run("accept.py", str(model), "--runs", "3", "--soc", "rk3588")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["device"]["evidence"] == "simulator"
    (way,) = report["ways"]
    assert way["run_s"]["n"] == 3
    assert way["cosine_least"]["logits"] > 0.999
