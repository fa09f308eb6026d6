"""QNN's compiler and the HTP's simulator: real ones, where onnxruntime-qnn is installed. Says nothing of speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu import qnn, qnn_driver
from edge_rt.backends.npu.artifacts import artifacts
from edge_rt.backends.npu.qnn import QnnBackend
from edge_rt.backends.npu.session import NpuSession
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.catalog.manifest import SHIPPED_DIR
from edge_rt.errors import BackendLoadError, InvalidRequestError, NotOnAcceleratorError
from edge_rt.tensor_types import ChipNeeds
from tests import tensor_models
from tests.npu.indexed import KINDS, TABLE, indexed, indices

pytestmark = pytest.mark.simulator


@pytest.fixture(scope="module")
def backend() -> QnnBackend:
    found = QnnBackend()
    if isinstance(absent := found.probe(), Absent):
        pytest.skip(absent.reason)
    return found


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def options(kept: Path | None = None, **npu: Any) -> TensorOptions:
    return TensorOptions(n_threads=1, npu=NpuOptions(**{"require": "npu", "artifacts": kept, **npu}))


def tiny(path: Path, weights: int = TensorProto.INT8, activations: int = TensorProto.UINT8) -> ModelFile:
    path.write_bytes(qnn_driver.tiny_model(weights, activations))
    return ModelFile(model="tiny", variant="", path=path, quant="INT8")


def x(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    return {"x": np.random.default_rng(seed).standard_normal((1, 8, 8, 8)).astype(np.float32)}


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def closed(session: NpuSession) -> Iterator[NpuSession]:
    yield session
    session.close()


def test_it_is_the_simulator_and_is_chosen_by_name_only(backend: QnnBackend) -> None:
    (device,) = backend.probe()  # type: ignore[misc]
    if device.evidence == "device":
        pytest.skip("a real NPU is here")
    assert (device.kind, device.evidence, device.reference, device.fault) == ("npu", "simulator", True, "")
    assert "simulator" in device.detail


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        (TensorProto.INT8, TensorProto.UINT8),
        (TensorProto.INT8, TensorProto.UINT16),
        (TensorProto.INT4, TensorProto.UINT16),
        (TensorProto.FLOAT, TensorProto.FLOAT),
    ],
)
def test_a_convolution_of_each_precision_is_wholly_there_and_right(
    backend: QnnBackend, tmp_path: Path, weights: int, activations: int
) -> None:
    file = tiny(tmp_path / "m.onnx", weights, activations)
    session = backend.load_tensor(file, options())
    (part,) = session.info.placement
    assert (part.provider, part.reason, dict(part.kinds)["Conv"]) == ("QNN", "", 1)
    cpu = OnnxCpuBackend().load_tensor(file, options())
    for seed in range(3):
        answer, right = session.run(x(seed))["y"], cpu.run(x(seed))["y"]
        assert cosine(answer, right) > 0.9999
    assert session.computed_on == "npu_qnn:htp"
    assert session.device_counts().n_fallbacks == 0
    session.close()
    cpu.close()


@pytest.mark.parametrize(
    ("soc", "own", "words"),
    [
        ("nonsense", {}, r"no chip 'nonsense'; npu\.soc\.npu_qnn is Qualcomm's number of it.*57:75"),
        ("99999:75", {}, "not for this chip: for 99999:75 the compiler was seen to take nothing"),
        ("", {"vtcm_mb": "x"}, "option vtcm_mb is 'x', and may be a number"),
        ("", {"rpc_control_latency": "-5"}, "option rpc_control_latency is '-5', and may be a number"),
        ("", {"htp_performance_mode": "zoom"}, "is 'zoom', and may be burst, balanced,"),
        ("", {"qnn_context_priority": "x"}, "is 'x', and may be low, normal, normal_high, high"),
        ("", {"htp_graph_finalization_optimization_mode": "9"}, "is '9', and may be 0, 1, 2, 3"),
    ],
)
@pytest.mark.parametrize("needs", [None, ChipNeeds(weight_bits=8, activation_bits=8)])
def test_a_chip_or_an_option_that_there_is_not_is_told_and_not_blamed_on_the_model(
    backend: QnnBackend, tmp_path: Path, soc: str, own: dict[str, str], words: str, needs: ChipNeeds | None
) -> None:
    chosen = {"soc": {qnn.NAME: soc}} if soc else {}
    with pytest.raises(BackendLoadError, match=words):
        backend.load_tensor(tiny(tmp_path / "m.onnx"), options(options={qnn.NAME: own}, needs=needs, **chosen))


@pytest.mark.parametrize("elem_type", [TensorProto.INT64, TensorProto.INT32])
@pytest.mark.parametrize("kind", KINDS)
def test_indices_are_onnxruntimes_or_refused_as_by_it(
    backend: QnnBackend, tmp_path: Path, kind: str, elem_type: int
) -> None:
    """QNN's own answers are others: see bounds.py."""
    if elem_type == TensorProto.INT32 and (kind.endswith("ND") or kind == "OneHot"):
        pytest.skip(f"ONNX, or onnxruntime, has no {kind} with 32-bit indices")
    file = tensor_models.saved(indexed(kind, elem_type), tmp_path / "m.onnx")
    dtype = np.int32 if elem_type == TensorProto.INT32 else np.int64
    with (
        closing(backend.load_tensor(file, options())) as session,
        closing(OnnxCpuBackend().load_tensor(file, options())) as cpu,
    ):
        (part,) = session.info.placement
        assert (part.provider, kind in dict(part.kinds)) == ("QNN", True)
        for index in (3, 15, -1, -16):
            feeds = {"i": indices(kind, index, dtype)}
            np.testing.assert_allclose(session.run(feeds)["y"], cpu.run(feeds)["y"], atol=2**-8, err_msg=str(index))
        for index in (16, 10**6, -17, -(10**6)):
            feeds = {"i": indices(kind, index, dtype)}
            if kind == "OneHot":
                np.testing.assert_allclose(session.run(feeds)["y"], cpu.run(feeds)["y"], atol=2**-8)
                continue
            for each in (session, cpu):
                with pytest.raises(InvalidRequestError):
                    each.run(feeds)
        assert (session.state(), session.device_counts().n_faults) == ("closed", 0)


def test_indices_of_a_quantised_table_are_checked(backend: QnnBackend, tmp_path: Path) -> None:
    """As of a text encoder whose words are quantised."""
    model = indexed("Gather")
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["tq", "s", "z"], ["td"]))
    model.graph.node[1].input[0] = "td"
    quantised = np.round(TABLE * 64).astype(np.uint8)
    weights = {"tq": quantised, "s": np.array(1 / 64, np.float32), "z": np.array(0, np.uint8)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    file = tensor_models.saved(model, tmp_path / "m.onnx")
    with closing(backend.load_tensor(file, options(require="prefer"))) as session:
        answer = session.run({"i": indices("Gather", -1)})["y"]
        np.testing.assert_allclose(answer, TABLE[[0, 1, 2, -1]], atol=2**-6)
        with pytest.raises(InvalidRequestError, match="holds 16, and may hold -16 to 15"):
            session.run({"i": indices("Gather", 16)})


def test_capabilities_are_what_a_compiler_took(backend: QnnBackend) -> None:
    told = backend.vendor.capabilities(backend._device(options()))
    assert told.is_confirmed
    assert {(p.weight_bits, p.activation_bits) for p in told.precisions} == {(8, 8), (8, 16), (4, 16), (16, 16)}
    assert told.datatypes == qnn.DATATYPES


def test_what_is_kept_holds_no_model_and_is_loaded_again(backend: QnnBackend, tmp_path: Path, kept: Path) -> None:
    file = tiny(tmp_path / "m.onnx")
    first = backend.load_tensor(file, options(kept))
    answer = first.run(x())["y"]
    first.close()
    (made,) = artifacts(kept)
    assert sorted(path.name for path in made.folder.iterdir()) == ["artifact.json", "model.onnx", "model_qnn.bin"]
    assert made.description.target.soc == qnn_driver.SIMULATED_SOC
    context = onnx.load(made.folder / "model.onnx")
    assert {node.op_type for node in context.graph.node} == {"EPContext"}
    file.path.with_name("m.onnx").touch()
    second = backend.load_tensor(file, options(kept))
    np.testing.assert_array_equal(second.run(x())["y"], answer)
    second.close()
    assert len(artifacts(kept)) == 1


def test_another_chip_is_another_artefact(backend: QnnBackend, tmp_path: Path, kept: Path) -> None:
    file = tiny(tmp_path / "m.onnx")
    for soc in ("57:75", "43:73"):
        backend.load_tensor(file, options(kept, soc={"npu_qnn": soc})).close()
    assert {a.description.target.soc for a in artifacts(kept)} == {"57:75", "43:73"}


def test_a_context_binary_that_is_none_is_compiled_once_more(backend: QnnBackend, tmp_path: Path, kept: Path) -> None:
    """With a description that fits: only QNN's loader can tell."""
    import hashlib

    import msgspec

    file = tiny(tmp_path / "m.onnx")
    backend.load_tensor(file, options(kept)).close()
    (made,) = artifacts(kept)
    bad = b"\0" * 1000
    (made.folder / "model_qnn.bin").write_bytes(bad)
    sha256 = hashlib.sha256(bad).hexdigest()
    files = tuple(
        msgspec.structs.replace(f, sha256=sha256, size_bytes=1000) if f.name == "model_qnn.bin" else f
        for f in made.description.files
    )
    lying = msgspec.structs.replace(made.description, files=files)
    (made.folder / "artifact.json").write_bytes(msgspec.json.encode(lying))
    session = backend.load_tensor(file, options(kept))
    assert session.run(x())["y"].shape == (1, 8, 8, 8)
    session.close()
    assert (made.folder / "model_qnn.bin").stat().st_size != 1000


def test_models_with_metadata_and_symbolic_rows_are_taken(backend: QnnBackend, tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.onnx")
    model = onnx.load(file.path)
    model.metadata_props.add(key="author", value="x")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(model, file.path)
    session = backend.load_tensor(file, options())
    assert session.inputs[0].shape == (-1, 8, 8, 8)
    both = np.concatenate([x(1)["x"], x(2)["x"]])
    answer = session.run({"x": both})["y"]
    np.testing.assert_array_equal(answer[1:], session.run(x(2))["y"])
    session.close()


def test_weights_in_a_file_beside_the_model_are_taken(backend: QnnBackend, tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.onnx", TensorProto.FLOAT, TensorProto.FLOAT)
    model = onnx.load(file.path)
    onnx.save(model, file.path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert file.onnx.external == ("w.bin",)
    session = backend.load_tensor(file, options())
    assert session.run(x())["y"].shape == (1, 8, 8, 8)
    session.close()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("saver", "computes nothing and gives back memory as it was"),
        ("ir", "cannot run it"),
        ("cpu", "no libQnnCpu.so on Linux"),
        ("gpu", "no NPU"),
        ("htp2", "no such back end"),
    ],
)
def test_what_computes_nothing_is_not_run(backend: QnnBackend, tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(BackendLoadError, match=words):
        backend.load_tensor(tiny(tmp_path / "m.onnx"), options(options={"npu_qnn": {"backend_type": kind}}))


def test_an_option_that_is_none_is_told_with_those_there_are(backend: QnnBackend, tmp_path: Path) -> None:
    with pytest.raises(BackendLoadError, match=r"option htp_speed is not known; there are .*vtcm_mb"):
        backend.load_tensor(tiny(tmp_path / "m.onnx"), options(options={"npu_qnn": {"htp_speed": "9"}}))


def partly() -> onnx.ModelProto:
    """A model of which QNN has the product, and not the determinant."""
    w = numpy_helper.from_array(np.eye(4, dtype=np.float32) * 2, "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Det", ["m"], ["y"])]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 4]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1]),
    ]
    graph = helper.make_graph(nodes, "partly", values[:1], values[1:], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_nodes_that_qnn_has_not_are_told_and_refused_where_it_is_required(backend: QnnBackend, tmp_path: Path) -> None:
    file = tensor_models.saved(partly(), tmp_path / "m.onnx")
    session = backend.load_tensor(file, options(require="prefer"))
    assert {part.provider: (part.n_nodes, part.reason) for part in session.info.placement} == {
        "QNN": (1, ""),
        "CPUExecutionProvider": (1, qnn_driver.NOT_TAKEN),
    }
    answer = session.run({"x": np.eye(4, dtype=np.float32)[None]})["y"]
    np.testing.assert_allclose(answer, [16.0], rtol=1e-2)
    session.close()
    with pytest.raises(NotOnAcceleratorError, match="1 of tiny's 2 nodes to the CPU: Det"):
        backend.load_tensor(file, options())


def table() -> onnx.ModelProto:
    """A model that takes rows of a table of ten, by INT64 indices."""
    rows = numpy_helper.from_array(np.arange(40, dtype=np.float32).reshape(10, 4), "rows")
    twice = numpy_helper.from_array(np.float32(2), "two")
    nodes = [helper.make_node("Gather", ["rows", "x"], ["g"]), helper.make_node("Mul", ["g", "two"], ["y"])]
    values = [
        helper.make_tensor_value_info("x", TensorProto.INT64, [2]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4]),
    ]
    graph = helper.make_graph(nodes, "table", values[:1], values[1:], [rows, twice])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_indices_beyond_a_table_are_refused_and_the_npu_is_not_blamed(backend: QnnBackend, tmp_path: Path) -> None:
    session = backend.load_tensor(tensor_models.saved(table(), tmp_path / "m.onnx"), options(require="prefer"))
    for index in (10, -11, 2**33 + 1):  # the last is 1 in 32 bits
        with pytest.raises(InvalidRequestError, match="may hold -10 to 9"):
            session.run({"x": np.array([0, index])})
    np.testing.assert_allclose(session.run({"x": np.array([1, -1])})["y"][:, 0], [8.0, 72.0], rtol=1e-2)
    assert session.state() == "closed"
    session.close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("[ONNXRuntimeError] : 11 : EP_FAIL : ... QNN_COMMON_ERROR_MEM_ALLOC", "memory"),
        ("std::bad_alloc", "memory"),
        ("Node 'c_token_3' OpType:Conv with domain:x was inserted using the NHWC format as requested", "unsupported"),
        ("graph finalize failed 1002", "failed"),
    ],
)
def test_errors_are_told_by_kind(said: str, kind: str) -> None:
    assert qnn_driver.QnnError(said).kind == kind


def test_a_convolution_of_floats_by_quantised_weights_is_refused_by_name(backend: QnnBackend) -> None:
    """What `pcb-defect:int8` has behind a Concat whose output is not quantised again."""
    path = SHIPPED_DIR / "pcb-defect.int8.onnx"
    with pytest.raises(BackendLoadError, match=r"does not take fine\.0\.conv\w* \(Conv\) as the file has it"):
        backend.load_tensor(ModelFile(model="m", variant="", path=path, quant="INT8"), options(require="prefer"))


def test_what_the_frame_says_and_the_driver_gives_are_the_same_datatypes() -> None:
    assert set(qnn_driver.DATATYPES) == qnn.DATATYPES
