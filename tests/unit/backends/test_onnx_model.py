"""What is refused of an ONNX file before onnxruntime sees it."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import ModelProto, TensorProto, helper  # noqa: E402

from edge_rt.backends import onnx_model  # noqa: E402
from edge_rt.backends.onnx_model import read_model  # noqa: E402
from edge_rt.backends.onnx_scan import MAX_STRUCTURE_BYTES, structure_bytes  # noqa: E402
from edge_rt.errors import ModelFormatError  # noqa: E402
from edge_rt.tensor_types import TensorSpec  # noqa: E402
from tests import tensor_models  # noqa: E402
from tests.tensor_models import conv, identity, int4, make, nested, rows, saved, with_external_data  # noqa: E402


def refusal(model: ModelProto | bytes, folder: Path) -> ModelFormatError:
    path = folder / "m.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    with pytest.raises(ModelFormatError) as refused:
        read_model(path)
    assert refused.value.path == str(path)
    return refused.value


def test_the_facts_of_a_sound_model(tmp_path: Path) -> None:
    model = saved(conv(), tmp_path / "m.onnx").onnx
    assert model.inputs == (TensorSpec(name="x", datatype="FP32", shape=(-1, 3, -1, -1)),)
    assert model.outputs == (TensorSpec(name="y", datatype="FP32", shape=(-1, 8, -1, -1)),)
    assert model.kinds == (("Conv", 2), ("Relu", 1))
    assert model.is_dynamic
    assert model.file_bytes == (tmp_path / "m.onnx").stat().st_size
    assert (model.external_bytes, model.custom_domains, model.n_slow) == (0, (), 0)


def test_an_initializer_that_is_also_an_input_is_none(tmp_path: Path) -> None:
    model = rows()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))
    assert [spec.name for spec in saved(model, tmp_path / "m.onnx").onnx.inputs] == ["x"]


def test_an_output_of_unknown_rank_and_a_model_in_subgraphs_are_taken(tmp_path: Path) -> None:
    model = make([helper.make_node("Relu", ["x"], ["y"])], [("x", 1, [2])], [("y", 1, None)])
    assert saved(model, tmp_path / "m.onnx").onnx.outputs[0].shape == (-1,)
    assert dict(saved(nested(onnx_model.MAX_DEPTH), tmp_path / "n.onnx").onnx.kinds)["If"] == onnx_model.MAX_DEPTH


def test_slow_matmulnbits_are_counted(tmp_path: Path) -> None:
    counts = [saved(int4(level), tmp_path / "m.onnx").onnx.n_slow for level in (None, 0, 1, 4)]
    assert counts == [1, 1, 1, 0]


def test_unknown_domains_are_told_and_a_models_own_functions_are_not(tmp_path: Path) -> None:
    node = helper.make_node("Twice", ["x"], ["y"], domain="acme")
    model = make([node], [("x", 1, [2])], [("y", 1, [2])])
    model.opset_import.append(helper.make_opsetid("acme", 1))
    assert saved(model, tmp_path / "m.onnx").onnx.custom_domains == ("acme",)
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    model.functions.append(helper.make_function("acme", "Twice", ["a"], ["b"], body, model.opset_import[:1]))
    assert saved(model, tmp_path / "m.onnx").onnx.custom_domains == ()


# -- lies about size -----------------------------------------------------------------------------------------------


def test_a_declared_tensor_of_2_gb_in_a_small_file_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    model = rows()
    model.graph.initializer[0].dims[:] = [2**29]
    assert len(model.SerializeToString()) < 1000
    tracemalloc.start()
    error = refusal(model, tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.field == "initializer 'w'"
    assert f"{4 * 2**29} bytes, 16 are there" in error.problem
    assert peak_bytes < 2**20


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.dims.__setitem__(slice(None), [-1]), "shape [-1]"),
        (lambda t: t.dims.__setitem__(slice(None), [0, 2**60]), "shape [0, 1152921504606846976]"),
        (lambda t: t.dims.__setitem__(slice(None), [2**30, 2**30]), "shape [1073741824, 1073741824]"),
        (lambda t: t.dims.__setitem__(slice(None), [1] * 17), "17 dimensions, the limit is 16"),
        (lambda t: t.dims.__setitem__(slice(None), [5]), "needs 20 bytes, 16 are there"),
        (lambda t: t.dims.__setitem__(slice(None), [3]), "needs 12 bytes, 16 are there"),
        (lambda t: setattr(t, "raw_data", b""), "needs 16 bytes, 0 are there"),
        (lambda t: t.ClearField("raw_data"), "needs 4 elements, 0 are there"),
        (lambda t: t.float_data.extend([1.0]), "raw data beside"),
        (lambda t: setattr(t, "data_type", TensorProto.STRING), "raw data beside or in place"),
        (lambda t: setattr(t, "data_type", TensorProto.COMPLEX64), "type COMPLEX64 is not supported"),
        (lambda t: setattr(t, "data_type", 99), "type number 99 is not supported"),
        (lambda t: setattr(t.segment, "begin", 1), "segments"),
    ],
)
def test_a_weight_that_is_not_what_it_says(
    change: Callable[[TensorProto], object], problem: str, tmp_path: Path
) -> None:
    model = rows()
    change(model.graph.initializer[0])
    error = refusal(model, tmp_path)
    assert error.field == "initializer 'w'"
    assert problem in error.problem


def test_elements_in_the_field_of_another_type(tmp_path: Path) -> None:
    model = rows()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.int64_data.extend([1, 2, 3, 4])
    assert "it has int64_data, its type FLOAT goes with float_data" in refusal(model, tmp_path).problem


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("ConstantOfShape", ["s"], ["y"], name="huge"),
        helper.make_node("Expand", ["x", "s"], ["y"], name="huge"),
        helper.make_node("Tile", ["x", "s"], ["y"], name="huge"),
        helper.make_node("RandomNormal", [], ["y"], name="huge", shape=[2**20, 2**20]),
    ],
    ids=lambda node: node.op_type,
)
def test_nodes_that_would_make_huge_tensors_of_written_down_shapes(node: onnx.NodeProto, tmp_path: Path) -> None:
    model = make([node], [("x", 1, [1, 1])], [("y", 1, [None, None])], {"s": np.array([2**20, 2**20])})
    error = refusal(model, tmp_path)
    assert error.field == "node 'huge'"
    assert f"{2**40} elements" in error.problem


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    model = rows()
    values, indices = model.graph.initializer[0], helper.make_tensor("i", TensorProto.INT64, [4], [0, 1, 2, 3])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2**40]))
    assert "sparse" in refusal(model, tmp_path).problem


# -- external data -------------------------------------------------------------------------------------------------


def test_external_data_inside_the_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    model = with_external_data(conv(), tmp_path, "sub/weights.bin")
    found = saved(model, tmp_path / "m.onnx").onnx
    assert found.external_bytes == (tmp_path / "sub/weights.bin").stat().st_size


@pytest.mark.parametrize(
    "location",
    [
        "",
        "/etc/passwd",
        "../weights.bin",
        "sub/../../weights.bin",
        "./w.bin",
        "a//b",
        "..",
        "C:\\w",
        "w\0.bin",
        "w" * 2000,
    ],
)
def test_external_data_elsewhere_is_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = with_external_data(rows(), tmp_path)
    model.graph.initializer[0].external_data[0].value = location
    error = refusal(model, folder)
    assert error.field == "initializer 'w'"
    assert "no plain path inside the model's folder" in error.problem


def test_links_that_lead_out_pipes_and_what_is_not_there_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = with_external_data(rows(), tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(tmp_path / "weights.bin")
    (folder / "outside").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    for location, problem in (
        ("link", "leads out"),
        ("outside/weights.bin", "leads out"),
        ("pipe", "no regular file"),
        ("absent", "No such file"),
        ("loop", "cannot be read"),
    ):
        model.graph.initializer[0].external_data[0].value = location
        assert problem in refusal(model, folder).problem


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("offset", "1", "ends at 17, its file has 16 bytes"),
        ("offset", "-1", "offset '-1' is no number"),
        ("offset", "9" * 40, "is no number"),
        ("offset", "1e3", "is no number"),
        ("length", "15", "needs 16 bytes, 15 are there"),
        ("length", "99999999999", "needs 16 bytes, 99999999999 are there"),
    ],
)
def test_external_data_outside_its_file_is_refused(key: str, value: str, problem: str, tmp_path: Path) -> None:
    model = with_external_data(rows(), tmp_path)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    assert problem in refusal(model, tmp_path).problem


# -- structure -----------------------------------------------------------------------------------------------------


def _with_bf16(name: str) -> ModelProto:
    kind = {"bf16": TensorProto.BFLOAT16, "int4": TensorProto.INT4, "fp8": TensorProto.FLOAT8E4M3FN}[name]
    return identity(kind)


def _sequence() -> ModelProto:
    model = rows()
    inner = helper.make_tensor_type_proto(TensorProto.FLOAT, [1])
    model.graph.input[0].type.CopyFrom(helper.make_sequence_type_proto(inner))
    return model


def _changed(change: Callable[[ModelProto], object]) -> ModelProto:
    model = rows()
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "field", "problem"),
    [
        (_with_bf16("bf16"), "input 'x'", "type BFLOAT16 is not supported"),
        (_with_bf16("int4"), "input 'x'", "type INT4 is not supported"),
        (_with_bf16("fp8"), "input 'x'", "type FLOAT8E4M3FN is not supported"),
        (_sequence(), "input 'x'", "it is a sequence, not a tensor"),
        (identity(1, None), "input 'x'", "its number of dimensions is not known"),
        (identity(1, [2**31]), "value 'x'", "a dimension of 2147483648"),
        (identity(1, [-5]), "value 'x'", "a dimension of -5"),
        (identity(1, [1] * 17), "value 'x'", "17 dimensions"),
        (_changed(lambda m: m.graph.input.append(m.graph.input[0])), "input 'x'", "is there twice"),
        (_changed(lambda m: m.graph.initializer.append(m.graph.initializer[0])), "initializer 'w'", "is there twice"),
        (_changed(lambda m: m.graph.ClearField("output")), "graph.output", "no outputs"),
        (_changed(lambda m: setattr(m, "ir_version", 0)), "ir_version", "0 is not in 3.."),
        (_changed(lambda m: setattr(m, "ir_version", 999)), "ir_version", "999 is not in 3.."),
        (_changed(lambda m: m.ClearField("opset_import")), "opset_import", "missing"),
        (_changed(lambda m: setattr(m.opset_import[0], "version", 6)), "opset_import", "opset 6 is not in 7.."),
        (_changed(lambda m: setattr(m.opset_import[0], "version", 999)), "opset_import", "opset 999 is not in 7.."),
        (_changed(lambda m: m.opset_import.append(m.opset_import[0])), "opset_import", "twice"),
        (_changed(lambda m: setattr(m.graph.node[0], "op_type", "")), "node", "has no operator"),
        (_changed(lambda m: setattr(m.graph.node[0], "name", "n" * 5000)), "graph", "a name of 5000 characters"),
        (nested(onnx_model.MAX_DEPTH + 1), "_branch", "nested more than 8 deep"),
        (b"", "ir_version", "0 is not in"),
        (b"GGUF" + bytes(100), "protobuf", "no ONNX model"),
        (rows().SerializeToString()[:-7], "protobuf", "cut"),
    ],
)
def test_what_else_is_refused(model: ModelProto | bytes, field: str, problem: str, tmp_path: Path) -> None:
    error = refusal(model, tmp_path)
    assert field in error.field
    assert problem in error.problem


def test_a_program_for_another_device_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context="../../secret")
    model = make([node], [("x", 1, [2])], [("y", 1, [2])], microsoft=True)
    assert "EPContext is not supported" in refusal(model, tmp_path).problem


def test_a_file_of_too_many_nodes_is_refused(tmp_path: Path) -> None:
    model = rows()
    model.graph.node.extend([onnx.NodeProto(op_type="Relu")] * onnx_model.MAX_NODES)
    assert f"more than {onnx_model.MAX_NODES} nodes" in refusal(model, tmp_path).problem


def field(number: int, content: bytes) -> bytes:
    """Write a field of bytes as protobuf does."""
    size, out = len(content), bytes([number << 3 | 2])
    while size > 0x7F:
        out, size = out + bytes([size & 0x7F | 0x80]), size >> 7
    return out + bytes([size]) + content


@pytest.mark.parametrize("graph", [b"\x0a\x02\x2a\x00", b"\x62\x00"])
def test_a_file_that_unfolds_to_a_hundred_times_its_size_is_refused_unparsed(graph: bytes, tmp_path: Path) -> None:
    bomb = field(7, graph * (MAX_STRUCTURE_BYTES // len(graph) + 1))
    assert "neither weights nor text" in refusal(bomb, tmp_path).problem


def test_weights_and_texts_are_not_counted_as_structure() -> None:
    model = rows()
    n_bytes = structure_bytes(model.SerializeToString())
    assert n_bytes < 500
    model.graph.initializer[0].raw_data = bytes(MAX_STRUCTURE_BYTES + 1)
    model.graph.node[0].doc_string = "x" * MAX_STRUCTURE_BYTES
    model.graph.node[0].attribute.append(helper.make_attribute("s", b"x" * MAX_STRUCTURE_BYTES))
    assert structure_bytes(model.SerializeToString()) < n_bytes + 50


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "pipe", "."):
        with pytest.raises(ModelFormatError) as refused:
            read_model(tmp_path / name)
        assert refused.value.field == "file"
    with (tmp_path / "big").open("wb") as file:
        file.truncate(onnx_model.MAX_FILE_BYTES + 1)
    with pytest.raises(ModelFormatError, match="the limit is 2147483647"):
        read_model(tmp_path / "big")


def test_every_datatype_has_a_name(tmp_path: Path) -> None:
    for name, elem_type in tensor_models.ELEM_TYPES.items():
        assert saved(identity(elem_type), tmp_path / "m.onnx").onnx.inputs[0].datatype == name


def test_an_input_that_no_request_can_fill_is_refused(tmp_path: Path) -> None:
    model = rows()
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_value = 2**31 - 1
    assert "it makes a tensor of 4611686014132420609 elements" in refusal(model, tmp_path).problem
