"""`edge_rt npu compile`, with the real compiler where `edge_rt npu setup rknn` has been."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifest
from edge_rt.catalog.store import Store
from edge_rt.cli import main
from edge_rt.worker.derive import derive
from tests.npu.rknn_here import environment


def run(store: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["npu", "compile", *args], env={"EDGE_RT__CATALOG__STORE_DIR": str(store)})


def pulled(store: Path, variant: str) -> Path:
    manifest = load_manifest(SHIPPED_DIR / "pcb-defect.toml")
    return Store(store, (manifest,)).pull("pcb-defect", variant, progress=lambda _: None, offline=True, derive=derive)


def test_what_is_no_form_for_rknn_is_refused_with_those_that_are(tmp_path: Path) -> None:
    done = run(tmp_path, "pcb-defect:int8")
    assert done.exit_code == 1
    assert "it is no form for RKNN (pcb-defect:npu-rknn-w8a8)" in done.stderr
    assert "the catalog has none of this model" in run(tmp_path, "pp-ocrv4-rec").stderr


def test_a_form_that_was_not_pulled_is_told(tmp_path: Path) -> None:
    assert "edge_rt models pull pcb-defect:npu-rknn-w8a8" in run(tmp_path, "pcb-defect").stderr


@pytest.mark.simulator
@pytest.mark.slow
def test_a_form_is_compiled_for_a_board_and_goes_with_the_form(tmp_path: Path) -> None:
    with environment("rknn"):
        path = pulled(tmp_path, "npu-rknn-w8a8")
        done = run(tmp_path, "pcb-defect", "--soc", "rk3576", "--json")
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        made = path.with_name("pcb-defect.rknn-w8a8.rk3576.rknn")
        assert (told["file"], told["evidence"], told["soc"]) == (str(made), "compiled only", "rk3576")
        assert made.read_bytes()[:4] == b"RKNN"
        facts = json.loads(Path(told["facts"]).read_text())  # what a board's driver checks
        assert facts["model_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert facts["sha256"] == hashlib.sha256(made.read_bytes()).hexdigest()
        manifest = load_manifest(SHIPPED_DIR / "pcb-defect.toml")
        Store(tmp_path, (manifest,)).remove("pcb-defect", "npu-rknn-w8a8")
        assert not made.exists()
        assert not Path(told["facts"]).exists()
