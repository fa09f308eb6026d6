"""Vela's report on files for Ethos-U. Nothing of them runs: what is compared is where Vela places which operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.convert.tflite import convert_tflite
from edge_rt.convert.tflite_file import read_operators
from edge_rt.convert.vela import ACCELERATORS, compile_for_ethos
from edge_rt.errors import BackendLoadError, ModelFormatError

pytest.importorskip("ethosu.vela", reason="ethos-u-vela is not installed: edge_rt[npu-vela]")

PCB = Path("models/pcb-defect.int8.onnx")


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vela") / "pcb.tflite"
    convert_tflite(PCB, path)
    return path


@pytest.mark.parametrize("accelerator", ["ethos-u55-256", "ethos-u65-256", "ethos-u85-256"])
def test_the_board_inspectors_operators_are_placed(board: Path, tmp_path: Path, accelerator: str) -> None:
    report = compile_for_ethos(board, tmp_path / "out.tflite", accelerator)
    assert report.evidence == "compiled only"
    assert (report.n_npu, report.n_operators) == (19, 23)
    assert report.n_operators == len(read_operators(board.read_bytes()))
    reasons = {each.output: each.reason for each in report.cpu}
    assert len(report.cpu) == report.n_operators - report.n_npu
    assert "Float32" in reasons["heat"]
    assert set(reasons) == {"neck.0_DequantizeLinear_Output/float", "heat", "offset", "size"}  # what was kept float
    assert report.n_cycles > 1e6
    assert report.inference_s == pytest.approx(report.n_cycles / report.clock_hz, rel=0.01)
    assert report.sram_bytes > 0
    kinds = [each.kind for each in read_operators(report.file.read_bytes())]
    assert "ethos-u" in kinds
    assert [path.name for path in tmp_path.iterdir()] == ["out.tflite"]


def test_what_vela_cannot_read_is_refused_with_its_words(tmp_path: Path) -> None:
    path = tmp_path / "broken.tflite"
    path.write_bytes(b"\x1c\x00\x00\x00TFL3" + b"\x00" * 200)
    with pytest.raises((ModelFormatError, BackendLoadError), match=r"broken\.tflite"):
        compile_for_ethos(path, tmp_path / "out.tflite", "ethos-u55-128")
    assert [each.name for each in tmp_path.iterdir()] == ["broken.tflite"]


def test_an_accelerator_that_there_is_not(board: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendLoadError, match="ethos-u55-32, ethos-u55-64"):
        compile_for_ethos(board, tmp_path / "out.tflite", "ethos-u99")
    assert len(ACCELERATORS) == 11


def test_a_compiler_that_takes_too_long_is_ended(board: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendLoadError, match="not finished"):
        compile_for_ethos(board, tmp_path / "out.tflite", "ethos-u55-128", time_limit_s=0.01)
    assert list(tmp_path.iterdir()) == []
