"""What `edge_rt doctor` says of NPUs: stacks that fail, and compiled models that others have made."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from edge_rt import config
from edge_rt.backends.base import Absent, NpuOptions, TensorOptions
from edge_rt.backends.npu.artifacts import DESCRIPTION, FORMAT, Description, File
from edge_rt.backends.npu.vendor import Compiled, Target, Versions
from edge_rt.cli import npu_checks
from edge_rt.cli.checks import Patient
from edge_rt.tensor_types import NodePlacement
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


def test_a_driver_that_was_updated_is_named_though_only_a_look_at_the_device_tells_of_it(
    npu: FakeNpu, tmp_path: Path
) -> None:
    keep(tmp_path, "npu_fake", Versions(compiler="1.0", runtime="1.0", driver="6.1"))
    (npu.folder / "driver").write_text("6.6")
    found = npu_checks.compiled_models(patient(tmp_path), every=[npu.backend()])
    assert found is not None
    assert (found.status, found.detail) == ("warn", "tiny:v for npu_fake was compiled with driver 6.1, here is 6.6")


def test_parts_of_a_stack_that_do_not_belong_together_are_a_warning(npu: FakeNpu, tmp_path: Path) -> None:
    (npu.folder / "skew").write_text("libFake 1 and libFakeDriver 2: update the driver")
    found = npu_checks.npu(patient(tmp_path), every=[npu.backend()])
    assert found is not None
    assert found.status == "warn"
    assert found.detail == "npu_fake: libFake 1 and libFakeDriver 2: update the driver; npu_fake: an NPU of the test"


def keep(store: Path, vendor: str, versions: Versions) -> None:
    """Put a compiled model into a store, as another machine or an older stack has made it."""
    key, none = "0" * 64, hashlib.sha256(b"").hexdigest()
    folder = store / "models" / "tiny" / ".m.onnx.npu" / key
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"")
    placement = (NodePlacement(provider="NPU", n_nodes=1, kinds=(("Conv", 1),)),)
    description = Description(
        format=FORMAT,
        key=key,
        model="tiny",
        variant="v",
        model_sha256=none,
        target=Target(vendor=vendor, soc="", versions=versions),
        rows=0,
        compiled=Compiled(files=("model.bin",), placement=placement),
        files=(File(name="model.bin", size_bytes=0, sha256=none),),
        compile_s=1.0,
    )
    (folder / DESCRIPTION).write_bytes(msgspec.json.encode(description))


@pytest.mark.parametrize("vendor", ["npu_qnn", "npu_openvino", "npu_rknn", "npu_serial"])
def test_each_vendors_own_versions_are_compared(tmp_path: Path, vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stacks that are here; where one is not, that is what a kept model waits for."""
    for name in ("EDGE_RT_CONFIG", "EDGE_RT__NPU__SERIAL_PORTS"):
        monkeypatch.delenv(name, raising=False)
    keep(tmp_path, vendor, Versions(compiler="0.0.1", runtime="", driver=""))
    found = npu_checks.compiled_models(patient(tmp_path))
    assert found is not None
    assert found.status == "warn"
    backend = next(backend for backend in npu_checks.backends() if backend.name == vendor)
    if isinstance(absent := backend.probe(), Absent):
        assert f"tiny:v for {vendor} waits for a stack that is not here: {absent.reason}" in found.detail
    else:
        now = backend.vendor.versions().compiler
        assert found.detail == f"tiny:v for {vendor} was compiled with compiler 0.0.1, here is {now}"


def test_only_parts_that_both_tell_of_can_differ() -> None:
    then = Versions(compiler="2.6", runtime="", driver="5.1")
    assert npu_checks.skew(then, Versions(compiler="2.7", runtime="1.32", driver="")) == "compiler 2.6, here is 2.7"
    assert npu_checks.skew(then, then) == ""


def test_every_npu_of_the_registry_is_looked_at() -> None:
    assert "npu_qnn" in {backend.name for backend in npu_checks.backends()}
