from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge_rt.convert.round_weights import Energy, find_layers, input_rows, made_up, round_model, round_rows
from edge_rt.errors import ModelFormatError
from tests.npu.picture_model import picture_model
from tools.round_weights import main


def energy(inputs: NDArray[np.float64]) -> Energy:
    products = inputs.T @ inputs / len(inputs)
    return Energy(products, inputs.mean(axis=0), products)


def nearest(rows: NDArray[np.float64], group: int) -> NDArray[np.float64]:
    """Round as a compiler does: each group by its largest weight."""
    rounded = np.empty_like(rows)
    size = group or rows.shape[1]
    for begin in range(0, rows.shape[1], size):
        part = rows[:, begin : begin + size]
        scales = np.maximum(np.abs(part).max(axis=1, keepdims=True) / 7, 1e-30)
        rounded[:, begin : begin + size] = np.rint(part / scales) * scales
    return rounded


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 70), st.sampled_from([0, 16, 32]))
def test_a_compiler_that_scales_by_the_largest_keeps_every_weight(seed: int, n_out: int, n_in: int, group: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_out, n_in)) * (rng.random((n_out, n_in)) < 0.8)
    inputs = rng.standard_normal((40, n_in)) * (rng.random(n_in) < 0.9)
    rounded = round_rows(rows, energy(inputs), group)
    np.testing.assert_allclose(nearest(rounded, group), rounded, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("group", [0, 32])
def test_products_change_less_than_by_rounding_to_nearest(group: int) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((16, 64))
    inputs = rng.standard_normal((500, 12)) @ rng.standard_normal((12, 64)) + 0.1 * rng.standard_normal((500, 64))
    errors = [
        float(((inputs @ (rows - each).T) ** 2).mean())
        for each in (round_rows(rows, energy(inputs), group), nearest(rows, group))
    ]
    assert errors[0] < errors[1] / 4


def test_weights_make_up_for_what_has_happened_to_their_inputs() -> None:
    rng = np.random.default_rng(5)
    before = rng.standard_normal((2000, 8))
    now = 0.5 * before + 0.05 * rng.standard_normal((2000, 8))
    rows = rng.standard_normal((4, 8))
    told = Energy(now.T @ now / len(now), now.mean(axis=0), before.T @ now / len(now))
    errors = [float(((before @ rows.T - now @ each.T) ** 2).mean()) for each in (made_up(rows, told), rows)]
    assert errors[0] < errors[1] / 5
    np.testing.assert_allclose(made_up(rows, energy(now)), rows)


def computed(model: ModelProto, x: NDArray[np.uint8]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"image": row[None]})[0] for row in x])


def pictures(n: int, seed: int) -> NDArray[np.uint8]:
    """Give pictures whose neighbours are alike, as those of photographs are."""
    coarse = np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), np.uint8)
    return coarse.repeat(4, axis=1).repeat(4, axis=2)


def test_a_model_s_outputs_change_less() -> None:
    model = picture_model()
    rounded = round_model(model, [{"image": each[None]} for each in pictures(32, seed=1)])
    plain = ModelProto()
    plain.CopyFrom(model)
    for layer in find_layers(model):
        tensor = next(t for t in plain.graph.initializer if t.name == layer.weights)
        tensor.CopyFrom(numpy_helper.from_array(layer.as_stored(nearest(layer.rows, 0)), layer.weights))
    x = pictures(50, seed=2)
    right = computed(model, x)
    errors = [float(np.abs(computed(each, x) - right).mean()) for each in (rounded, plain)]
    assert errors[0] < errors[1]
    assert [node.op_type for node in rounded.graph.node] == [node.op_type for node in model.graph.node]


def test_named_layers_stay_as_they_are() -> None:
    model = picture_model()
    rounded = round_model(model, [{"image": pictures(4, seed=1)[:1]}], but=frozenset(["first"]))
    was, now = ({t.name: t.raw_data for t in each.graph.initializer} for each in (model, rounded))
    assert was["w1"] == now["w1"]
    assert was["w2"] != now["w2"]


@pytest.mark.parametrize(
    ("strides", "dilations", "edges"),
    [
        ((1, 1), (1, 1), {"pads": (0, 0, 0, 0)}),
        ((2, 1), (1, 2), {"pads": (1, 2, 0, 1)}),
        ((2, 3), (1, 1), {"auto_pad": "SAME_UPPER"}),
        ((2, 1), (1, 1), {"auto_pad": "SAME_LOWER"}),
        ((1, 2), (1, 1), {"auto_pad": "VALID"}),
    ],
)
def test_rows_times_weights_are_the_convolution(
    strides: tuple[int, ...], dilations: tuple[int, ...], edges: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((5, 3, 3, 2)).astype(np.float32)
    x = rng.standard_normal((2, 3, 9, 8)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], "c", strides=strides, dilations=dilations, **edges)
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph([node], "g", values[:1], values[1:], [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (layer,) = find_layers(model)
    np.testing.assert_array_equal(layer.as_stored(layer.rows), weights)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (right,) = session.run(None, {"x": x})
    found = (input_rows(layer, x) @ layer.rows.T).reshape(2, *right.shape[2:], 5)
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), right, atol=1e-4)


def test_a_model_that_onnxruntime_does_not_take_is_refused_by_name() -> None:
    model = picture_model()
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    conv.attribute.append(helper.make_attribute("auto_pad", "AROUND"))
    with pytest.raises(ModelFormatError, match=r"^m\.onnx: graph: onnxruntime says: .*AutoPadType"):
        round_model(model, [{"image": pictures(1, seed=1)}], name="m.onnx")


def test_the_command_writes_the_rounded_model(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(picture_model().SerializeToString())
    np.savez(tmp_path / "ranges.npz", image=pictures(4, seed=1))
    main([str(tmp_path / name) for name in ("m.onnx", "rounded.onnx", "ranges.npz")])
    rounded = onnx.load(str(tmp_path / "rounded.onnx"))
    (layer, *_) = find_layers(rounded)
    np.testing.assert_allclose(nearest(layer.rows, 0), layer.rows, atol=1e-6)
    with pytest.raises(SystemExit, match="round_weights: "):
        main([str(tmp_path / name) for name in ("m.onnx", "rounded.onnx", "nothing.npz")])
