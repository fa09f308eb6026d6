"""Matrices in 8 and 4 bit behind a DequantizeLinear, with float activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge_rt.convert.bert import STATIC_N_TOKENS
from edge_rt.convert.recipes import run_recipe
from edge_rt.convert.weight_only import BLOCK, round_blocks
from edge_rt.errors import ModelFormatError

WIDTH = 64


def embedding(opset: int = 21) -> ModelProto:
    """Look up each token's vector, and multiply it with a matrix."""
    rng = np.random.default_rng(0)
    shape = [1, STATIC_N_TOKENS]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, shape)
        for n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [*shape, 32])
    constants = {
        "table": rng.standard_normal((50, WIDTH)).astype(np.float32),
        "w": rng.standard_normal((WIDTH, 32)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"], "gather"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, [output], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def computed(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(1).integers(0, 50, (1, STATIC_N_TOKENS))
    zeros = np.zeros((1, STATIC_N_TOKENS), np.int64)
    return session.run(["y"], {"input_ids": ids, "attention_mask": zeros, "token_type_ids": zeros})[0]


def ranges(folder: Path) -> Path:
    path = folder / "ranges.json"
    texts = np.random.default_rng(2).integers(0, 50, (8, 40)).tolist()
    path.write_text(f'{{"note": "n", "ranges": {{"x": [0, 1]}}, "texts": {texts}}}')
    return path


@pytest.mark.parametrize(("recipe", "error", "kind"), [("npu-w8", 0.01, "INT8"), ("minilm-l6-w4", 0.12, "UINT4")])
def test_matrices_are_packed_and_compute_nearly_the_same(recipe: str, error: float, kind: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(embedding().SerializeToString())
    beside = [ranges(tmp_path)] if recipe == "minilm-l6-w4" else []
    run_recipe(recipe, tmp_path / "m.onnx", tmp_path / "out.onnx", *beside)
    made = onnx.load(tmp_path / "out.onnx")
    types = {t.name: TensorProto.DataType.Name(t.data_type) for t in made.graph.initializer}
    assert kind in types.values()
    assert "w" not in types
    assert [node.op_type for node in made.graph.node] == ["Gather", "DequantizeLinear", "MatMul"]
    right, found = computed(tmp_path / "m.onnx"), computed(tmp_path / "out.onnx")
    assert np.linalg.norm(found - right) < error * np.linalg.norm(right)


def test_rounding_that_knows_the_inputs_gives_a_smaller_error_than_rounding_to_nearest() -> None:
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((200, WIDTH)) @ rng.standard_normal((WIDTH, WIDTH))
    weights = rng.standard_normal((WIDTH, 16))

    def error(moments: np.ndarray) -> float:
        values, scales, zeros = round_blocks(weights, moments)
        steps = values.astype(float) - np.repeat(zeros, BLOCK, axis=0)
        return float(np.linalg.norm(inputs @ (steps * np.repeat(scales, BLOCK, axis=0) - weights)))

    assert error(inputs.T @ inputs) < 0.8 * error(np.eye(WIDTH))


def test_what_has_no_matrix_or_an_old_opset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.onnx").write_bytes(embedding(opset=17).SerializeToString())
    with pytest.raises(ModelFormatError, match="opset 17, and 21 is needed"):
        run_recipe("npu-w8", tmp_path / "old.onnx", tmp_path / "out.onnx")
    bare = embedding()
    del bare.graph.node[1:]
    bare.graph.output[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, None))
    (tmp_path / "bare.onnx").write_bytes(bare.SerializeToString())
    with pytest.raises(ModelFormatError, match="no product with a constant matrix"):
        run_recipe("npu-w8", tmp_path / "bare.onnx", tmp_path / "out.onnx")
    (tmp_path / "m.onnx").write_bytes(embedding().SerializeToString())
    with pytest.raises(ModelFormatError, match="ranges with texts"):
        run_recipe("minilm-l6-w4", tmp_path / "m.onnx", tmp_path / "out.onnx")
