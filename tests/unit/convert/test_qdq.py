from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.errors import ModelFormatError
from edge_rt.worker.recipe import apply

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edge_rt.convert.qdq import quantize_int8, read_ranges  # noqa: E402

RANGES = {"x": (-1.0, 1.0), "c": (-4.0, 4.0), "r": (0.0, 4.0), "y": (-20.0, 20.0)}


def small_model(weights: NDArray[Any], bias: NDArray[Any], classes: NDArray[Any]) -> Any:
    """A 1 × 1 convolution of [1, inputs, 2, 2], a Relu and a classifier of its average."""
    constants = {"w": weights, "b": bias, "k": classes}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", kernel_shape=[1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat", axis=1),
        helper.make_node("Gemm", ["f", "k"], ["y"], "gemm", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, weights.shape[1], 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, len(classes)])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def random_model(n_inputs: int = 16) -> Any:
    rng = np.random.default_rng(0)
    return small_model(
        rng.normal(0, 0.3, size=(8, n_inputs, 1, 1)).astype("f"),
        rng.normal(size=8).astype("f"),
        rng.normal(size=(5, 8)).astype("f"),
    )


def ranges() -> dict[str, tuple[float, float]]:
    return {**RANGES, "p": RANGES["r"], "f": RANGES["r"]}


def run(model: Any, x: NDArray[Any], *, exactly: bool = False) -> NDArray[Any]:
    """exactly: node by node in float, as the graph is written, without the CPU's integer kernels."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if exactly:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0])


def inputs(n_inputs: int = 16) -> NDArray[Any]:
    return np.random.default_rng(1).uniform(-1, 1, size=(1, n_inputs, 2, 2)).astype("f")


def test_eight_bits_are_near_the_float_model() -> None:
    model = random_model()
    quantized = quantize_int8(model, ranges())
    expected, found = run(model, inputs()), run(quantized, inputs())
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    assert (found != expected).any()
    stored = {t.name: t.data_type for t in quantized.graph.initializer}
    assert stored["w_quantized"] == TensorProto.INT8
    assert "w" not in stored


def test_named_nodes_stay_float() -> None:
    quantized = quantize_int8(random_model(), ranges(), float_nodes={"conv", "relu"})
    stored = {t.name: t.data_type for t in quantized.graph.initializer}
    assert stored["w"] == TensorProto.FLOAT
    assert stored["k_quantized"] == TensorProto.INT8


def test_large_neighbours_do_not_saturate_any_cpu() -> None:
    """Two neighbours of the greatest weight meet the greatest inputs: 2 × 255 × 127 is more than 16 bits hold."""
    weights = np.full((4, 16, 1, 1), 0.01, "f")
    weights[0, 0:2] = 1.0  # a pair
    weights[1, 1:3] = 1.0  # of two pairs one each
    weights[2, 4:6] = -1.0
    weights[3, 0], weights[3, 1] = 1.0, -1.0
    model = small_model(weights, np.zeros(4, "f"), np.eye(4, dtype="f"))
    quantized = quantize_int8(model, ranges())
    constants = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    stored = constants["w_quantized"].reshape(4, 8, 2).astype(int)
    for sign in (1, -1):
        assert (np.maximum(sign * stored, 0).sum(axis=2) * 255).max() <= 2**15 - 1
    assert np.abs(stored).max(axis=(1, 2)).tolist() == [64, 126, 64, 127]  # only channels that need it are coarser
    x = np.sign(weights[:1]).reshape(1, 16, 1, 1) * np.ones((1, 16, 2, 2), "f")
    np.testing.assert_allclose(run(quantized, x), run(quantized, x, exactly=True), atol=0.06)
    np.testing.assert_allclose(run(quantized, x), run(model, x), atol=0.15)


def test_a_float_layer_between_integer_ones_is_left_alone() -> None:
    """onnxruntime would quantise it with one scale, in which all weights but the greatest are nothing."""
    rng = np.random.default_rng(0)
    middle = rng.normal(size=(4, 4, 1, 1)).astype("f")
    middle[3, 0] = 1000
    constants = {
        "w": rng.normal(0, 0.3, (4, 16, 1, 1)).astype("f"),
        "m": middle,
        "k": np.diag([1, 1, 1, 0]).astype("f").reshape(4, 4, 1, 1),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "first"),
        helper.make_node("Conv", ["c", "m"], ["d"], "middle"),
        helper.make_node("Conv", ["d", "k"], ["e"], "last"),
        helper.make_node("GlobalAveragePool", ["e"], ["y"], "pool"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 1, 1])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    spread = {"x": (-1.0, 1.0), "c": (-4.0, 4.0), "d": (-8.0, 8.0), "e": (-8.0, 8.0), "y": (-8.0, 8.0)}
    quantized = quantize_int8(model, spread, float_nodes={"middle"})
    expected = run(model, inputs())
    np.testing.assert_allclose(run(quantized, inputs()), run(quantized, inputs(), exactly=True), atol=0.1)
    np.testing.assert_allclose(run(quantized, inputs()), expected, atol=0.12)
    assert np.abs(expected[0, :3]).max() > 0.2


def test_a_dead_channel_keeps_its_bias() -> None:
    weights = np.full((2, 16, 1, 1), 0.1, "f")
    weights[1] = 1e-12
    model = small_model(weights, np.array([0, 3], "f"), np.eye(2, dtype="f"))
    found = run(quantize_int8(model, ranges()), inputs())
    assert found[0, 1] == pytest.approx(3, abs=0.1)


def test_every_activation_needs_a_range() -> None:
    missing = {name: value for name, value in ranges().items() if name != "p"}
    with pytest.raises(ModelFormatError, match="p: has no range"):
        quantize_int8(random_model(), missing)


def test_nodes_need_names() -> None:
    model = random_model()
    model.graph.node[0].name = ""
    with pytest.raises(ModelFormatError, match="names of their own"):
        quantize_int8(model, ranges())


def test_the_recipe_is_deterministic_and_wants_ranges(tmp_path: Path) -> None:
    src, beside = tmp_path / "m.onnx", tmp_path / "r.json"
    src.write_bytes(random_model().SerializeToString())
    beside.write_text(json.dumps({"note": "n", "ranges": ranges()}))
    for name in "ab":
        apply("qdq-int8", src, tmp_path / name, beside)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(ModelFormatError, match="derive_with"):
        apply("qdq-int8", src, tmp_path / "c")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "\udcff",
        '{"note": "", "ranges": {}}',
        '{"note": "", "ranges": {"x": [1]}}',
        '{"note": "", "ranges": {"x": [1, 0]}}',
        '{"note": "", "ranges": {"x": [0, 1e39]}}',
        '{"note": "", "ranges": {"x": ["a", 1]}}',
    ],
)
def test_other_files_are_no_ranges(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ModelFormatError):
        read_ranges(path)
