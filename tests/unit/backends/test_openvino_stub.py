"""The way to an Intel NPU, on a stub of OpenVINO that says it has one: nothing of a chip is shown."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_rt.backends.base import Absent, NpuOptions, TensorOptions
from edge_rt.backends.npu.openvino import STACK, OpenVinoBackend, OpenVinoVendor
from edge_rt.backends.npu.openvino_driver import CPU, NPU
from edge_rt.errors import BackendLoadError, NotOnAcceleratorError
from tests.npu.fake_npu import double

pytestmark = pytest.mark.stub
STUB = Path("tests/npu/openvino_stub").absolute()
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def backend(**environ: str) -> OpenVinoBackend:
    settings = [f"{name}={value}" for name, value in {"PYTHONPATH": str(STUB), **environ}.items()]
    stack = replace(STACK, python=lambda: ["env", *settings, sys.executable], installed=lambda: None)
    return OpenVinoBackend(OpenVinoVendor(stack, n_cores=lambda: 1))


def options(require: str = "npu") -> TensorOptions:
    return TensorOptions(npu=NpuOptions(require=require))  # type: ignore[arg-type]


def test_the_npu_comes_first_with_its_versions() -> None:
    made = backend()
    found = made.probe()
    assert not isinstance(found, Absent)
    assert [(device.id, device.kind) for device in found] == [(NPU, "npu"), (CPU, "cpu")]
    assert "Intel(R) AI Boost by OpenVINO 2026.4.1, compiler 458752" in found[0].detail
    assert "no NPU" not in found[1].detail


@pytest.mark.parametrize("rows", [0, 2])
def test_a_model_runs_on_it_with_fixed_shapes(tmp_path: Path, rows: int) -> None:
    made = backend()
    file = double(tmp_path / "double.onnx", rows=rows)
    session = made.load_tensor(file, options())
    np.testing.assert_array_equal(session.run({"x": X})["y"], X * 2)
    (place,) = session.info.placement
    assert (place.provider, place.kinds, place.reason) == ("OpenVINO NPU", (("Eltwise", 1),), "")
    assert session.computed_on == f"npu_openvino:{NPU}"
    target = made.openvino.target(file, made.probe()[0], options())  # type: ignore[index]
    assert (target.soc, target.versions.driver) == ("4000", "1778")
    session.close()


def test_a_device_that_tells_no_graph_is_believed_what_it_runs_on(tmp_path: Path) -> None:
    session = backend(STUB_NO_GRAPH="1").load_tensor(double(tmp_path / "double.onnx"), options())
    (place,) = session.info.placement
    assert (place.provider, place.n_nodes, place.reason) == ("OpenVINO NPU", 1, "")
    session.close()


@pytest.mark.parametrize("require", ["npu", "prefer", "any"])
def test_a_model_that_says_it_runs_on_the_cpu_is_not_on_the_npu(tmp_path: Path, require: str) -> None:
    with pytest.raises(NotOnAcceleratorError, match=r"was to run it on NPU, and says CPU"):
        backend(STUB_RUNS_ON="CPU").load_tensor(double(tmp_path / "double.onnx"), options(require))


def test_the_cpu_device_is_taken_by_its_name(tmp_path: Path) -> None:
    named = replace(options("prefer"), device=CPU)
    session = backend(STUB_RUNS_ON="CPU").load_tensor(double(tmp_path / "double.onnx"), named)
    assert session.info.placement[0].provider == "OpenVINO CPU"
    session.close()
    with pytest.raises(BackendLoadError, match=r"npu.require is npu"):
        backend().load_tensor(double(tmp_path / "double.onnx"), replace(options(), device=CPU))
