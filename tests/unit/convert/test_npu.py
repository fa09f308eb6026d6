"""Whole models in integers for NPUs: near their float parents, in the bits asked for, with no float node between."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.errors import ModelFormatError
from edge_rt.worker.recipe import apply

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from edge_rt.convert.gptq import round_matrix, second_moments  # noqa: E402
from edge_rt.convert.npu import W4A16, W8A8, W8A16, Precision, prepare, quantize  # noqa: E402
from edge_rt.convert.qdq import RangesFile, quantize_int8  # noqa: E402
from edge_rt.convert.rounding import int4_scales, keep_sums  # noqa: E402
from edge_rt.convert.static_shapes import make_static  # noqa: E402
from edge_rt.convert.unquantized import unquantize  # noqa: E402
from tests.unit.convert.test_qdq import inputs, random_model, ranges, run  # noqa: E402


def encoder(n_rows: Any = 4) -> Any:
    """A matrix, a normalisation, a Sigmoid and a second matrix over [1, rows, 8]."""
    rng = np.random.default_rng(3)
    constants = {
        "w": rng.normal(0, 0.4, (8, 8)),
        "v": rng.normal(0, 0.4, (8, 6)),
        "gain": rng.uniform(0.5, 1.5, 8),
        "shift": rng.normal(0, 0.2, 8),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("LayerNormalization", ["a", "gain", "shift"], ["n"], "norm", axis=-1),
        helper.make_node("Sigmoid", ["n"], ["s"], "gate"),
        helper.make_node("MatMul", ["s", "v"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, n_rows, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, n_rows, 6])],
        [numpy_helper.from_array(value.astype("f"), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


ENCODER_RANGES = {"x": (-1.0, 1.0), "a": (-4.0, 4.0), "n": (-4.0, 4.0), "s": (0.0, 1.0), "y": (-3.0, 3.0)}


def rows(seed: int = 5) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (1, 4, 8)).astype("f")


def types(model: Any) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


@pytest.mark.parametrize(("precision", "error"), [(W8A8, 0.06), (W8A16, 0.02), (W4A16, 0.2)])
def test_each_precision_is_near_float(precision: Precision, error: float) -> None:
    model = encoder()
    quantized = quantize(model, ENCODER_RANGES, precision)
    expected, found = run(model, rows()), run(quantized, rows(), exactly=True)
    assert np.abs(found - expected).max() < error * np.abs(expected).max()
    stored = types(quantized)
    assert stored["w_quantized"] == (TensorProto.INT4 if precision.weight_bits == 4 else TensorProto.INT8)
    scale = "x_zero_point"
    assert stored[scale] == (TensorProto.UINT8 if precision.activation_bits == 8 else TensorProto.UINT16)
    floats = {name for name, kind in stored.items() if kind == TensorProto.FLOAT and not name.endswith("_scale")}
    assert floats == set()


def test_16_bits_have_what_an_npu_asks_for() -> None:
    """A normalisation's gain in 8 bit, a Sigmoid's own scale: seen on Qualcomm's compiler."""
    quantized = quantize(encoder(), ENCODER_RANGES, W8A16)
    assert types(quantized)["gain_quantized"] == TensorProto.UINT8
    scales = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    assert scales["s_scale"] == np.float32(1 / 65536)


def test_some_weights_keep_eight_bits_and_some_nodes_float() -> None:
    quantized = quantize(encoder(), ENCODER_RANGES, W4A16, int8_nodes=["second"])
    assert (types(quantized)["w_quantized"], types(quantized)["v_quantized"]) == (TensorProto.INT4, TensorProto.INT8)
    partly = quantize(encoder(), ENCODER_RANGES, W8A8, float_nodes=["second"])
    assert types(partly)["v"] == TensorProto.FLOAT


@pytest.mark.parametrize(
    ("told", "field"),
    [({"ranges": {"x": (0.0, 1.0)}}, "a"), ({"float_nodes": ["third"]}, "third"), ({"int8_nodes": ["third"]}, "third")],
)
def test_what_does_not_fit_the_model_is_named(told: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        quantize(encoder(), **{"ranges": ENCODER_RANGES, "precision": W8A8, **told})
    assert caught.value.field == field


def test_a_quantised_model_goes_back_to_float() -> None:
    """Weights as its integers say, and its Relu there again, which the range had stood for."""
    model = random_model()
    again = unquantize(quantize_int8(model, ranges()))
    assert not any("Quantize" in node.op_type for node in again.graph.node)
    assert "Relu" in {node.op_type for node in again.graph.node}
    expected, found = run(model, inputs()), run(again, inputs())
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


def test_bytes_that_are_joined_are_dequantised_first() -> None:
    """Concat of two pictures' bytes, then their DequantizeLinear: the same values, and nothing but floats is joined."""
    nodes = [
        helper.make_node("Concat", ["a", "b"], ["pair"], "pair", axis=1),
        helper.make_node("DequantizeLinear", ["pair", "scale", "zero"], ["y"], "pixels"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.UINT8, [1, 2]) for name in "ab"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        [
            numpy_helper.from_array(np.array(0.5, "f"), "scale"),
            numpy_helper.from_array(np.array(3, np.uint8), "zero"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    prepared = prepare(model, RangesFile(note="", ranges={"y": (0.0, 1.0)}))
    assert [node.op_type for node in prepared.graph.node] == ["DequantizeLinear", "DequantizeLinear", "Concat"]
    feed = {"a": np.array([[0, 9]], np.uint8), "b": np.array([[255, 3]], np.uint8)}
    import onnxruntime

    session = onnxruntime.InferenceSession(prepared.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, feed)[0], [[-1.5, 3, 126, 0]])


def test_shapes_are_fixed_and_misfits_named() -> None:
    fixed = make_static(encoder("rows"), {"x": (1, 4, 8)})
    assert [d.dim_value for d in fixed.graph.input[0].type.tensor_type.shape.dim] == [1, 4, 8]
    np.testing.assert_allclose(run(fixed, rows()), run(encoder(), rows()), rtol=1e-5)
    for shapes in ({"z": (1,)}, {"x": (1, 4)}, {"x": (1, 4, 9)}):
        with pytest.raises(ModelFormatError):
            make_static(encoder("rows"), shapes)


def test_the_recipe_writes_the_same_bytes_in_a_process_of_its_own(tmp_path: Any) -> None:
    source, told = tmp_path / "m.onnx", tmp_path / "ranges.json"
    source.write_bytes(encoder("rows").SerializeToString())
    told.write_bytes(msgspec.json.encode(RangesFile(note="a test", ranges=ENCODER_RANGES, shapes={"x": (1, 4, 8)})))
    made = [tmp_path / "one.onnx", tmp_path / "two.onnx"]
    for path in made:
        apply("npu-w8a16", source, path, told)
    assert made[0].read_bytes() == made[1].read_bytes()
    assert np.abs(run(onnx.load(made[0]), rows()) - run(encoder(), rows())).max() < 0.05


def test_int4_rounding_for_known_inputs_beats_rounding_alone() -> None:
    """Inputs that go together leave errors that others can put right."""
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(24, 24)) * np.linspace(0.1, 2, 24)
    seen = rng.normal(size=(500, 24)) @ mixing
    weights = rng.normal(0, 0.3, (24, 16))
    moments = seen.T @ seen
    found, scales = round_matrix(weights, moments)
    plain_scales = int4_scales(weights.T)
    plain = np.clip(np.rint(weights / plain_scales), -8, 7) * plain_scales

    def error(rounded: Any) -> float:
        return float((((weights - rounded).T @ moments) * (weights - rounded).T).sum())

    assert error(found) < 0.6 * error(plain)
    levels = np.rint(found / scales)
    np.testing.assert_allclose(found, levels * scales, atol=1e-9)
    assert levels.min() >= -8
    assert levels.max() <= 7


def test_rows_that_fill_up_are_not_counted() -> None:
    model = encoder()
    feed = {"x": rows()}
    node = model.graph.node[0]
    found = second_moments(model, [node], [(feed, 2)])["x"]
    np.testing.assert_allclose(found, feed["x"][0, :2].T @ feed["x"][0, :2], rtol=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 25), st.sampled_from([(-127, 127), (-8, 7)]))
def test_filters_keep_their_sums(seed: int, n_weights: int, ends: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.uniform(ends[0] + 1, ends[1] - 1, (6, n_weights))
    rounded = keep_sums(steps, *ends)
    np.testing.assert_array_equal(rounded, np.rint(rounded))
    assert np.abs(rounded - steps).max() < 1 + 1e-9
    assert np.abs((rounded - steps).sum(axis=1)).max() <= 0.5 + 1e-9
    assert ends[0] <= rounded.min() <= rounded.max() <= ends[1]


def test_sums_that_the_ends_do_not_allow_are_met_as_far_as_they_go() -> None:
    np.testing.assert_array_equal(keep_sums(np.array([[7.4, 7.4, 7.4]]), -8, 7), [[7, 7, 7]])


def pixels() -> Any:
    """Bytes [1, 4, 4, 3] that are turned, dequantised, filtered channel by channel, and summed up."""
    rng = np.random.default_rng(8)
    nodes = [
        helper.make_node("Transpose", ["image"], ["turned"], "turn", perm=[0, 3, 1, 2]),
        helper.make_node("DequantizeLinear", ["turned", "step", "middle"], ["normal"], "normal"),
        helper.make_node("Conv", ["normal", "filters"], ["filtered"], "filter", group=3, pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["filtered"], ["y"], "pool"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, [1, 4, 4, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 1, 1])],
        [
            numpy_helper.from_array(np.array(1 / 64, "f"), "step"),
            numpy_helper.from_array(np.array(127, np.uint8), "middle"),
            numpy_helper.from_array(rng.normal(0.5, 0.3, (3, 1, 3, 3)).astype("f"), "filters"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


PIXEL_RANGES = {"normal": (-2.0, 2.0), "filtered": (-10.0, 10.0), "y": (-10.0, 10.0)}


def test_filters_of_a_quantised_model_keep_their_sums() -> None:
    """Rounding to nearest would leave each sum off by up to a step and a half here, and every output of its channel."""
    told = {t.name: numpy_helper.to_array(t) for t in quantize(pixels(), PIXEL_RANGES, W8A8).graph.initializer}
    scales = told["filters_scale"][:, None]
    was = numpy_helper.to_array(next(t for t in pixels().graph.initializer if t.name == "filters")).reshape(3, -1)
    now = told["filters_quantized"].reshape(3, -1) * scales
    assert (np.abs((now - was).sum(axis=1)) <= 0.5001 * scales[:, 0]).all()
    assert (np.abs((np.rint(was / scales) * scales - was).sum(axis=1)) > 0.5001 * scales[:, 0]).any()


def test_bytes_become_16_bits_before_a_layer_that_computes_in_them() -> None:
    """Qualcomm's compiler takes no layer of 8-bit inputs and 16-bit outputs. Nothing is rounded on the way."""
    import onnxruntime

    narrow, wide = (quantize(pixels(), PIXEL_RANGES, precision) for precision in (W8A8, W8A16))
    producer = {output: node for node in wide.graph.node for output in node.output}
    zeros = {t.name: t.data_type for t in wide.graph.initializer}
    source = producer[next(n for n in wide.graph.node if n.op_type == "Conv").input[0]]
    assert zeros[source.input[2]] == TensorProto.UINT16
    assert [n.op_type for n in narrow.graph.node].count("QuantizeLinear") + 1 == [
        n.op_type for n in wide.graph.node
    ].count("QuantizeLinear")
    wide.graph.output.append(helper.make_tensor_value_info(source.output[0], TensorProto.FLOAT, [1, 3, 4, 4]))
    feed = {"image": np.random.default_rng(1).integers(0, 256, (1, 4, 4, 3), np.uint8)}
    session = onnxruntime.InferenceSession(wide.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run([source.output[0]], feed)[0]
    right = (feed["image"].astype("f") - 127) / 64
    np.testing.assert_allclose(found, right.transpose(0, 3, 1, 2), atol=1e-6)
