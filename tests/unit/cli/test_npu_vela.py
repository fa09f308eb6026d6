from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.cli import main
from edge_rt.convert.tflite_file import read_operators
from tests.npu.picture_model import picture_model

pytest.importorskip("ethosu.vela", reason="ethos-u-vela is not installed: edge_rt[npu-vela]")

PCB = "models/pcb-defect.int8.onnx"


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["npu", "vela", *args])


def test_a_model_is_compiled_and_its_placement_shown(tmp_path: Path) -> None:
    compiled, given = tmp_path / "out.tflite", tmp_path / "in.tflite"
    done = run(PCB, "-a", "ethos-u55-128", "-o", str(compiled), "--tflite", str(given))
    assert done.exit_code == 0, done.output
    assert "ethos-u55-128  19 of 23" in done.stdout
    assert "compiled only: all but the placement is its estimate" in done.stdout
    assert "on the CPU: CONV_2D heat: " in done.stdout
    assert len(read_operators(given.read_bytes())) == 23
    assert "ethos-u" in {each.kind for each in read_operators(compiled.read_bytes())}
    (report,) = json.loads(run(str(given), "-a", "ethos-u55-128", "--json").stdout)
    assert (report["n_npu"], report["evidence"]) == (19, "compiled only")


def test_one_file_holds_one_accelerators_program(tmp_path: Path) -> None:
    done = run(PCB, "-a", "ethos-u55-128", "-a", "ethos-u85-256", "-o", str(tmp_path / "x.tflite"))
    assert done.exit_code == 2
    assert "name one --accelerator" in done.stderr


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"nothing")
    assert run(str(path)).exit_code == 1


def test_a_float_model_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "float.onnx"
    path.write_bytes(picture_model().SerializeToString())
    done = run(str(path))
    assert done.exit_code == 1
    assert "it is not quantised" in done.stderr
