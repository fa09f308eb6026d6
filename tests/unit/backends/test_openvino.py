"""OpenVINO: its CPU device beside onnxruntime on the same files, and its NPU, which is not here, as absent."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_rt.backends.base import Absent, Device, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.bounds import read_bounds
from edge_rt.backends.npu.openvino import OpenVinoBackend, OpenVinoVendor
from edge_rt.backends.npu.openvino_driver import CPU, NPU, npu_absence
from edge_rt.backends.npu.vendor import Compiled, CompileRequest
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import BackendLoadError, InvalidRequestError
from tests import tensor_models
from tests.npu.indexed import KINDS, indexed, indices

pytest.importorskip("openvino", reason="openvino is not installed: edge_rt[npu-openvino]")

ONE = TensorOptions(n_threads=1)
PCB = ModelFile(model="pcb-defect", variant="int8", path=Path("models/pcb-defect.int8.onnx"), quant="INT8")
KIND = ModelFile(model="pcb-kind", variant="fp32", path=Path("models/pcb-kind.fp32.onnx"), quant="FP32")
MISSING = Device(id=NPU, kind="npu", detail="an NPU that is not here")


class Counting(OpenVinoVendor):
    def __init__(self) -> None:
        super().__init__(n_cores=lambda: 1)
        self.n_compiled = 0

    def compile(self, request: CompileRequest) -> Compiled:
        self.n_compiled += 1
        return super().compile(request)


@pytest.fixture(scope="module")
def backend() -> OpenVinoBackend:
    made = OpenVinoBackend(Counting())
    found = made.probe()
    assert not isinstance(found, Absent)
    if found[0].id != CPU:
        pytest.skip("an Intel NPU is here: these are about the CPU device, and about a machine without one")
    return made


def feeds_of(file: ModelFile, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds = {}
    for spec in file.onnx.inputs:
        shape = tuple(2 if size < 0 else size for size in spec.shape)
        drawn = (
            rng.integers(0, 256, shape, np.uint8)
            if spec.datatype == "UINT8"
            else rng.standard_normal(shape, np.float32)
        )
        feeds[spec.name] = drawn
    return feeds


def test_the_cpu_device_says_what_it_is_and_why_there_is_no_npu(backend: OpenVinoBackend) -> None:
    (device,) = backend.probe()  # type: ignore[misc]
    assert (device.id, device.kind, device.evidence) == (CPU, "cpu", "device")
    assert "the cores by OpenVINO" in device.detail
    assert "no NPU: " in device.detail


def test_absence_is_told_in_words(tmp_path: Path) -> None:
    package = SimpleNamespace(__file__=str(tmp_path / "openvino" / "__init__.py"))
    accel = tmp_path / "accel"
    assert "driver intel_vpu" in npu_absence(package, str(accel))
    accel.mkdir()
    (accel / "accel0").touch()
    told = npu_absence(package, str(accel))
    assert "intel-level-zero-npu" in told
    assert "no NPU compiler" in told


def test_floats_are_computed_as_floats(backend: OpenVinoBackend) -> None:
    """Left to itself OpenVINO takes bf16 where the cores can, which is a hundred times further off than this."""
    ours, theirs = OnnxCpuBackend().load_tensor(KIND, ONE), backend.load_tensor(KIND, ONE)
    feeds = feeds_of(KIND)
    for name, expected in ours.run(feeds).items():
        np.testing.assert_allclose(theirs.run(feeds)[name], expected, rtol=1e-4, atol=1e-4)
    assert theirs.computed_on == f"npu_openvino:{CPU}"
    theirs.close()


def test_an_int8_model_is_close_to_onnxruntimes_and_wholly_on_the_device(backend: OpenVinoBackend) -> None:
    ours, theirs = OnnxCpuBackend().load_tensor(PCB, ONE), backend.load_tensor(PCB, ONE)
    feeds = feeds_of(PCB)
    found = theirs.run(feeds)
    for name, expected in ours.run(feeds).items():
        cosine = float((found[name] * expected).sum() / np.linalg.norm(found[name]) / np.linalg.norm(expected))
        assert cosine > 0.9995, name
    assert theirs.device_counts().n_fallbacks == 0
    (place,) = theirs.info.placement
    assert (place.provider, place.reason) == ("OpenVINO CPU", "")
    assert dict(place.kinds)["Convolution"] == 11
    theirs.close()


def test_any_size_runs_where_the_model_takes_any(backend: OpenVinoBackend, tmp_path: Path) -> None:
    file = tensor_models.saved(tensor_models.identity(TensorProto.FLOAT, ["n", "m"]), tmp_path / "open.onnx")
    session = backend.load_tensor(file, ONE)
    for shape in ((1, 3), (4, 2), (1, 1)):
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        np.testing.assert_array_equal(session.run({"x": x})["y"], x)
    session.close()


def test_open_shapes_are_refused_on_the_npu_before_anything_is_compiled(tmp_path: Path) -> None:
    file = tensor_models.saved(tensor_models.identity(TensorProto.FLOAT, ["n", "m"]), tmp_path / "open.onnx")
    made = OpenVinoBackend(Counting())
    made._found = (MISSING,)
    assert "fixed shapes" in (made.supports_tensor(file, ONE) or "")


def test_integers_that_it_would_cut_off_are_refused(backend: OpenVinoBackend, tmp_path: Path) -> None:
    file = tensor_models.saved(tensor_models.identity(TensorProto.INT64), tmp_path / "wide.onnx")
    session = backend.load_tensor(file, ONE)
    small, wide = np.array([[1, -5]], np.int64), np.array([[2**40 + 3, 1]], np.int64)
    np.testing.assert_array_equal(session.run({"x": small})["y"], small)
    with pytest.raises(InvalidRequestError, match="the stack computes in 32 bits, the back end onnx_cpu in 64"):
        session.run({"x": wide})
    assert session.state() == "closed"  # it was the request's fault
    session.close()


@pytest.mark.parametrize("kind", KINDS)
def test_indices_are_onnxruntimes_or_refused_as_by_it(backend: OpenVinoBackend, tmp_path: Path, kind: str) -> None:
    """OpenVINO's own answers are others, and it may read or write beyond the data: see bounds.py."""
    file = tensor_models.saved(indexed(kind), tmp_path / "m.onnx")
    with closing(backend.load_tensor(file, ONE)) as session, closing(OnnxCpuBackend().load_tensor(file, ONE)) as cpu:
        for index in (3, 15, -1, -16):
            feeds = {"i": indices(kind, index)}
            np.testing.assert_allclose(session.run(feeds)["y"], cpu.run(feeds)["y"], atol=1e-6, err_msg=str(index))
        for index in (16, 10**6, -17, -(10**6)):
            feeds = {"i": indices(kind, index)}
            if kind == "OneHot":
                np.testing.assert_allclose(session.run(feeds)["y"], cpu.run(feeds)["y"], atol=1e-6)
                continue
            for each in (session, cpu):
                with pytest.raises(InvalidRequestError):
                    each.run(feeds)
        assert (session.state(), session.device_counts().n_faults) == ("closed", 0)


def test_a_model_that_could_be_made_to_go_beyond_its_memory_is_refused(
    backend: OpenVinoBackend, tmp_path: Path
) -> None:
    model = indexed("ScatterElements")
    model.graph.node[0].name, model.graph.node[0].input[1] = "rows", "j"
    model.graph.node.insert(0, helper.make_node("Add", ["i", "i"], ["j"]))
    with pytest.raises(BackendLoadError, match="rows takes indices from what a request holds"):
        backend.load_tensor(tensor_models.saved(model, tmp_path / "m.onnx"), ONE)


def test_more_positions_than_a_table_has_are_refused(backend: OpenVinoBackend, tmp_path: Path) -> None:
    """Row n of x gets row n of a table of 5; OpenVINO's own answer for more rows has zeros."""
    nodes = [
        helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
        helper.make_node("Squeeze", ["n", "zero"], ["rows"]),
        helper.make_node("Range", ["zero_n", "rows", "one_n"], ["positions"]),
        helper.make_node("Gather", ["w", "positions"], ["table"]),
        helper.make_node("Add", ["x", "table"], ["y"]),
    ]
    weights = {
        "w": np.arange(10, dtype=np.float32).reshape(5, 2),
        "zero": np.zeros(1, np.int64),
        "zero_n": np.array(0),
        "one_n": np.array(1),
    }
    value = ("x", TensorProto.FLOAT, ["n", 2])
    file = tensor_models.saved(tensor_models.make(nodes, [value], [("y", *value[1:])], weights), tmp_path / "p.onnx")
    assert read_bounds(file.path, file.onnx.inputs, {"Gather"}).sizes == {("x", 0): 5}
    sessions = (backend.load_tensor(file, ONE), OnnxCpuBackend().load_tensor(file, ONE))
    for session in sessions:
        np.testing.assert_array_equal(session.run({"x": np.zeros((5, 2), np.float32)})["y"], weights["w"])
        with pytest.raises(InvalidRequestError):
            session.run({"x": np.zeros((6, 2), np.float32)})
        session.close()


def test_the_cpu_device_is_no_npu(backend: OpenVinoBackend) -> None:
    with pytest.raises(BackendLoadError, match=r"npu.require is npu"):
        backend.load_tensor(PCB, TensorOptions(npu=NpuOptions(require="npu")))


@pytest.mark.parametrize(
    ("options", "words"), [({"device": "AUTO"}, "no option device"), ({"precision": "f8"}, "no precision f8")]
)
def test_options_that_there_are_not(backend: OpenVinoBackend, options: dict[str, str], words: str) -> None:
    with pytest.raises(BackendLoadError, match=words):
        backend.load_tensor(PCB, TensorOptions(n_threads=1, npu=NpuOptions(options={"npu_openvino": options})))


def test_another_chip_than_the_one_that_is_here_is_refused(backend: OpenVinoBackend) -> None:
    here = backend.openvino.soc(backend._device(TensorOptions()))
    backend.load_tensor(PCB, TensorOptions(n_threads=1, npu=NpuOptions(soc={"npu_openvino": here}))).close()
    with pytest.raises(BackendLoadError) as refused:
        backend.load_tensor(PCB, TensorOptions(n_threads=1, npu=NpuOptions(soc={"npu_openvino": "4000"})))
    assert f"npu.soc.npu_openvino is '4000', and OpenVINO compiles for the device that is here, {here}" in str(
        refused.value
    )


def test_a_model_is_compiled_once_and_then_kept(tmp_path: Path) -> None:
    made = OpenVinoBackend(Counting())
    made.probe()
    options = TensorOptions(n_threads=1, npu=NpuOptions(artifacts=tmp_path / "kept"))
    answers = []
    for _ in range(2):
        session = made.load_tensor(PCB, options)
        answers.append(session.run(feeds_of(PCB))["heat"])
        session.close()
    assert isinstance(made.openvino, Counting)
    assert made.openvino.n_compiled == 1
    np.testing.assert_array_equal(*answers)


def test_compiling_for_an_npu_that_is_not_here_says_what_is_missing(backend: OpenVinoBackend, tmp_path: Path) -> None:
    vendor = backend.openvino
    request = CompileRequest(
        file=PCB, device=MISSING, target=vendor.target(PCB, MISSING, TensorOptions()), folder=tmp_path
    )
    with pytest.raises(BackendLoadError, match=r"compiler cannot be loaded|no NPU answers"):
        vendor.compile(request)


def test_its_precisions_were_tried(backend: OpenVinoBackend) -> None:
    (device,) = backend.probe()  # type: ignore[misc]
    told = backend.openvino.capabilities(device)
    assert told.is_confirmed
    assert not told.is_static
    assert {(32, 32), (4, 32), (8, 32)} <= {(each.weight_bits, each.activation_bits) for each in told.precisions}


def test_a_damaged_file_is_no_end_of_ours(backend: OpenVinoBackend, tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor("w", TensorProto.FLOAT, [2, 7, 1, 1], [0.0] * 14)],
    )
    path = tmp_path / "wrong.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    assert onnx.load(path).graph.node[0].op_type == "Conv"
    with pytest.raises(BackendLoadError, match="wrong"):
        backend.load_tensor(ModelFile(model="wrong", variant="", path=path, quant=""), ONE)
