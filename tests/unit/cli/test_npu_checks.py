"""What `edge_rt doctor` says of NPUs: stacks that fail, and compiled models that others have made."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt import config
from edge_rt.backends.base import Absent, NpuOptions, TensorOptions
from edge_rt.backends.npu.vendor import Versions
from edge_rt.cli import npu_checks
from edge_rt.cli.checks import Patient
from tests.npu.fake_npu import FakeNpu, FakeNpuBackend, double

pytestmark = pytest.mark.stub


@pytest.fixture
def npu(tmp_path: Path) -> FakeNpu:
    (tmp_path / "fake").mkdir()
    return FakeNpu(tmp_path / "fake")


def patient(store: Path, **models: config.ModelSettings) -> Patient:
    return Patient(config=config.Config(catalog=config.Catalog(store_dir=str(store)), models=models))


def nowhere() -> Absent:
    return Absent(reason="onnxruntime-fake is not installed", extra="npu-fake")


def test_nothing_is_said_of_stacks_that_nobody_has_or_wants(npu: FakeNpu, tmp_path: Path) -> None:
    assert npu_checks.npu(patient(tmp_path), every=[npu.backend(nowhere)]) is None


def test_a_stack_that_a_model_wants_and_is_not_installed_fails(
    npu: FakeNpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wanted(FakeNpuBackend):
        name = "npu_qnn"

    wanted = Wanted(npu.backend(nowhere).vendor)
    found = npu_checks.npu(patient(tmp_path, m=config.ModelSettings(backend="npu_qnn")), every=[wanted])
    assert found is not None
    assert found.status == "fail"
    assert "onnxruntime-fake is not installed: pip install 'edge_rt[npu-fake]'" in found.detail


def test_a_stack_that_answers_is_named_and_one_that_dies_fails(npu: FakeNpu, tmp_path: Path) -> None:
    found = npu_checks.npu(patient(tmp_path), every=[npu.backend()])
    assert found is not None
    assert (found.status, found.detail) == ("ok", "npu_fake: an NPU of the test")
    npu.breaks("probe", "die")
    found = npu_checks.npu(patient(tmp_path), every=[npu.backend()])
    assert found is not None
    assert found.status == "fail"
    assert "SIGSEGV" in found.detail


def test_models_compiled_by_other_versions_are_named_with_the_mend(npu: FakeNpu, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    examined = patient(tmp_path)
    assert npu_checks.compiled_models(examined, every=[npu.backend()]) is None
    kept = NpuOptions(artifacts=folder / ".m.onnx.npu")
    npu.backend().load_tensor(double(folder / "m.onnx"), TensorOptions(n_threads=1, npu=kept)).close()
    found = npu_checks.compiled_models(examined, every=[npu.backend()])
    assert found is not None
    assert found.status == "ok"
    assert "1 for NPUs" in found.detail
    (npu.folder / "version").write_text("1.1")
    updated = npu.backend()
    updated.probe()
    found = npu_checks.compiled_models(examined, every=[updated])
    assert found is not None
    assert found.status == "warn"
    assert found.detail == "tiny was compiled with compiler 1.0, here is 1.1, runtime 1.0, here is 1.1"
    assert "compiles them anew" in found.remedy


def test_only_parts_that_both_tell_of_can_differ() -> None:
    then = Versions(compiler="2.6", runtime="", driver="5.1")
    assert npu_checks.skew(then, Versions(compiler="2.7", runtime="1.32", driver="")) == "compiler 2.6, here is 2.7"
    assert npu_checks.skew(then, then) == ""


def test_every_npu_of_the_registry_is_looked_at() -> None:
    assert "npu_qnn" in {backend.name for backend in npu_checks.backends()}
