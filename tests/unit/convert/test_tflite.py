"""int8 TensorFlow Lite files, run by TensorFlow Lite's own interpreter beside onnxruntime on the QDQ file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge_rt.convert import npu
from edge_rt.convert.qdq import quantize_int8
from edge_rt.convert.tflite import TfliteModel, tflite_model
from edge_rt.convert.tflite_file import read_operators
from edge_rt.errors import ModelFormatError

litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed: edge_rt[dev]")
Interpreter, OpResolverType = litert.Interpreter, litert.OpResolverType

PCB = Path("models/pcb-defect.int8.onnx")
FAST, REFERENCE = OpResolverType.AUTO, OpResolverType.BUILTIN_REF
RANGE = (-4.0, 4.0)


def graph(nodes: list[Any], shape: tuple[int, ...], weights: Mapping[str, NDArray[Any]]) -> ModelProto:
    """A float model with one input x and one output y."""
    for node in nodes:
        node.name = node.name or node.output[0]
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def quantised(
    nodes: list[Any], shape: tuple[int, ...], weights: Mapping[str, NDArray[Any]], **ranges: tuple[float, float]
) -> ModelProto:
    values = {name for node in nodes for name in (*node.input, *node.output) if name} - set(weights)
    return quantize_int8(graph(nodes, shape, weights), dict.fromkeys(values, RANGE) | ranges)


def by_onnxruntime(model: ModelProto, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def by_litert(
    made: TfliteModel, model: ModelProto, feeds: Mapping[str, NDArray[Any]], kernels: Any
) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
    """Run a file; give the outputs as ONNX lays them, and the step of each, 0 for floats."""
    interpreter = Interpreter(model_content=made.data, experimental_op_resolver_type=kernels, num_threads=1)
    interpreter.allocate_tensors()
    for name, detail in zip(feeds, interpreter.get_input_details(), strict=True):
        array = feeds[name].transpose(made.orders.get(name, range(feeds[name].ndim)))
        if detail["dtype"] == np.int8:
            scale, zero = detail["quantization"]
            if array.dtype == np.uint8:
                array = (array.astype(np.int16) - 128).astype(np.int8)
            else:
                array = np.clip(np.rint(array / np.float32(scale)) + zero, -128, 127).astype(np.int8)
        interpreter.set_tensor(detail["index"], np.ascontiguousarray(array))
    interpreter.invoke()
    outputs, steps = {}, {}
    for value, detail in zip(model.graph.output, interpreter.get_output_details(), strict=True):
        array, (scale, zero) = interpreter.get_tensor(detail["index"]), detail["quantization"]
        if detail["dtype"] == np.int8:
            array = (array.astype(np.float32) - zero) * np.float32(scale)
        if value.name in made.orders:
            array = array.transpose(np.argsort(made.orders[value.name]))
        outputs[value.name], steps[value.name] = array, scale
    return outputs, steps


def off(model: ModelProto, feeds: Mapping[str, NDArray[Any]], kernels: Any) -> NDArray[Any]:
    """Give by how many steps each element of y differs."""
    expected = by_onnxruntime(model, feeds)["y"]
    made = tflite_model(model)
    found, steps = by_litert(made, model, feeds, kernels)
    assert found["y"].shape == expected.shape
    assert steps["y"] > 0, "y is no integer"
    return np.rint((found["y"] - expected) / steps["y"])


def picture(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-4, 4, shape).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_convolution_gives_the_same_integers(data: st.DataObject) -> None:
    size, stride = data.draw(st.sampled_from([1, 2, 3, 5, 6])), data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    n_in, is_depthwise = data.draw(st.integers(1, 9)), data.draw(st.booleans())
    n_out = n_in * data.draw(st.integers(1, 2)) if is_depthwise else data.draw(st.integers(1, 9))
    pads = [data.draw(st.integers(0, size - 1)) for _ in range(4)]
    rows, columns = data.draw(st.integers(size, 18)), data.draw(st.integers(size, 18))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    weights = {
        "w": rng.normal(0, 0.3, (n_out, 1 if is_depthwise else n_in, size, size)).astype(np.float32),
        "b": rng.normal(0, 0.5, n_out).astype(np.float32),
    }
    groups = n_in if is_depthwise else 1
    conv = helper.make_node(
        "Conv", ["x", "w", "b"], ["c"], kernel_shape=[size] * 2, strides=[stride] * 2, pads=pads, group=groups
    )
    relu = helper.make_node("Relu", ["c"], ["y"])
    plain = helper.make_node("Conv", ["x", "w", "b"], ["y"])
    plain.attribute.extend(conv.attribute)
    nodes = [conv, relu] if data.draw(st.booleans()) else [plain]
    model = quantised(nodes, (1, n_in, rows, columns), weights, y=(0.0, 3.0) if len(nodes) == 2 else (-3.0, 3.0))
    feeds = {"x": picture(seed, 1, n_in, rows, columns)}
    assert not off(model, feeds, FAST).any()
    assert np.abs(off(model, feeds, REFERENCE)).max() <= 1


NODE = helper.make_node
CASES: dict[str, tuple[list[Any], tuple[int, ...], dict[str, NDArray[Any]]]] = {
    "gemm": (
        [NODE("Gemm", ["x", "w", "b"], ["y"], transB=1)],
        (3, 20),
        {"w": picture(1, 7, 20) / 16, "b": picture(2, 7)},
    ),
    "matmul": ([NODE("MatMul", ["x", "w"], ["y"])], (3, 20), {"w": picture(1, 20, 7) / 16}),
    "batched-matmul": ([NODE("MatMul", ["x", "w"], ["y"])], (2, 3, 20), {"w": picture(1, 20, 7) / 16}),
    "add-itself-pooled": (
        [NODE("MaxPool", ["x"], ["m"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]), NODE("Add", ["x", "m"], ["y"])],
        (1, 3, 8, 8),
        {},
    ),
    "mean": ([NODE("GlobalAveragePool", ["x"], ["y"])], (1, 5, 7, 7), {}),
    "average": ([NODE("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2])], (1, 5, 8, 8), {}),
    "average-with-edges": (
        [NODE("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])],
        (1, 5, 8, 8),
        {},
    ),
    "concat": (
        [NODE("Concat", ["x", "x"], ["c"], axis=1), NODE("Relu", ["c"], ["y"])],
        (1, 3, 4, 5),
        {},
    ),
    "flattened": (
        [NODE("Flatten", ["x"], ["f"]), NODE("Gemm", ["f", "w"], ["y"])],
        (1, 3, 4, 4),
        {"w": picture(1, 48, 6) / 16},
    ),
    "turned": ([NODE("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]), NODE("Add", ["t", "t"], ["y"])], (1, 3, 4, 5), {}),
    "doubled": (
        [
            NODE(
                "Resize",
                ["x", "", "s"],
                ["r"],
                mode="nearest",
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            ),
            NODE("Add", ["r", "r"], ["y"]),
        ],
        (1, 3, 4, 5),
        {"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "bent": (
        [NODE("Conv", ["x", "w"], ["c"]), NODE("Clip", ["c", "lo", "hi"], ["y"])],
        (1, 3, 6, 6),
        {"w": picture(1, 4, 3, 1, 1), "lo": np.float32(0), "hi": np.float32(6)},
    ),
}


@pytest.mark.parametrize("kernels", [FAST, REFERENCE], ids=["fast", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_the_same_integers(name: str, kernels: Any) -> None:
    nodes, shape, weights = CASES[name]
    arrays = {key: np.asarray(value) for key, value in weights.items()}
    model = quantised(nodes, shape, arrays, y=(-8.0, 8.0))
    assert np.abs(off(model, {"x": picture(3, *shape)}, kernels)).max() <= 1


WHOLE: dict[str, tuple[list[Any], tuple[int, ...], dict[str, NDArray[Any]]]] = {
    "hard-sigmoid": ([NODE("HardSigmoid", ["x"], ["y"], alpha=1 / 6, beta=0.5)], (1, 3, 6, 6), {}),
    "normalised": (
        [NODE("BatchNormalization", ["x", "g", "b", "m", "v"], ["y"])],
        (1, 4, 6, 6),
        {
            "g": np.array([1, -2, 0.5, 0], np.float32),
            "b": np.array([0, 1, -1, 0.5], np.float32),
            "m": np.array([0.5, -1, 0, 2], np.float32),
            "v": np.array([1, 4, 0.25, 1], np.float32),
        },
    ),
    "divided": ([NODE("Div", ["x", "six"], ["y"])], (1, 3, 6, 6), {"six": np.float32(6)}),
    "shifted": ([NODE("Add", ["x", "c"], ["y"])], (1, 3, 6, 6), {"c": np.float32([-0.7])}),
    "hard-swish": (
        [
            NODE("Add", ["x", "three"], ["a"]),
            NODE("Clip", ["a", "zero", "six"], ["c"]),
            NODE("Mul", ["x", "c"], ["p"]),
            NODE("Div", ["p", "six"], ["y"]),
        ],
        (1, 3, 6, 6),
        {"zero": np.float32(0), "three": np.float32(3), "six": np.float32(6)},
    ),
    "transposed": (
        [NODE("ConvTranspose", ["x", "w"], ["y"], kernel_shape=[2, 2], strides=[2, 2])],
        (1, 3, 6, 5),
        {"w": picture(1, 3, 5, 2, 2) / 8},
    ),
}


@pytest.mark.parametrize("kernels", [FAST, REFERENCE], ids=["fast", "reference"])
@pytest.mark.parametrize("name", WHOLE)
def test_operators_of_wholly_quantised_models_are_a_step_off_at_most(name: str, kernels: Any) -> None:
    nodes, shape, weights = WHOLE[name]
    ranges = {"x": RANGE, "y": (-8.0, 8.0), "a": (0.0, 6.0), "c": (0.0, 6.0), "p": (-24.0, 24.0)}
    if name == "hard-sigmoid":
        ranges["y"] = (0.0, 1.0)
    float_model = graph(nodes, shape, {key: np.asarray(value) for key, value in weights.items()})
    model = npu.quantize(float_model, ranges, npu.W8A8)
    n_steps = 2 if name == "hard-swish" else 1  # which rounds three times
    assert np.abs(off(model, {"x": picture(3, *shape)}, kernels)).max() <= n_steps


def pcb_feeds(model: ModelProto) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    board = rng.integers(0, 256, (1, 1, 640, 640), dtype=np.uint8)
    other = board.copy()
    other[..., 200:240, 300:340] = 255 - other[..., 200:240, 300:340]
    return {"image": other, "golden": board}


def test_the_board_inspector_gives_what_onnxruntime_gives() -> None:
    model = onnx.load(PCB)
    made = tflite_model(model, name=PCB.name)
    feeds = pcb_feeds(model)
    expected = by_onnxruntime(model, feeds)
    found, steps = by_litert(made, model, feeds, FAST)
    assert steps == {"heat": 0, "offset": 0, "size": 0}  # the tails were kept float
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)


def test_microcontrollers_kernels_round_the_board_inspector_a_little_differently() -> None:
    model = onnx.load(PCB)
    feeds = pcb_feeds(model)
    expected = by_onnxruntime(model, feeds)
    found, _ = by_litert(tflite_model(model), model, feeds, REFERENCE)
    for name, array in expected.items():
        cosine = float((found[name] * array).sum() / np.linalg.norm(found[name]) / np.linalg.norm(array))
        assert cosine > 0.999, name


def test_the_same_model_gives_the_same_bytes() -> None:
    model = onnx.load(PCB)
    assert tflite_model(model).data == tflite_model(model).data


def test_a_files_operators_can_be_listed() -> None:
    operators = read_operators(tflite_model(onnx.load(PCB)).data)
    kinds = [each.kind for each in operators]
    assert kinds.count("CONV_2D") == 12  # the first one has a stride of 4, and becomes two
    assert kinds.count("RESIZE_NEAREST_NEIGHBOR") == 1
    assert {each.output for each in operators} >= {"heat", "offset", "size"}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_file_that_is_damaged_is_listed_or_refused(data: st.DataObject) -> None:
    whole = tflite_model(quantised(*CASES["gemm"][:2], CASES["gemm"][2])).data
    hurt = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 8))):
        hurt[data.draw(st.integers(8, len(hurt) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_operators(bytes(hurt[: data.draw(st.integers(8, len(hurt)))]))
    except ValueError:
        return


@pytest.mark.parametrize("data", [b"", b"TFL3", b"\x00" * 7 + b"TFL3", b"PK\x03\x04" + b"\x00" * 100])
def test_what_is_no_such_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no TensorFlow Lite file"):
        read_operators(data)


def test_an_operator_without_a_place_is_named() -> None:
    model = quantised(
        [NODE("Conv", ["x", "w"], ["c"]), NODE("Erf", ["c"], ["y"])], (1, 2, 3, 3), {"w": picture(1, 2, 2, 1, 1)}
    )
    with pytest.raises(ModelFormatError, match="Erf has no place"):
        tflite_model(model)


def test_a_float_model_stays_float() -> None:
    model = graph([NODE("Conv", ["x", "w"], ["y"])], (1, 2, 3, 3), {"w": picture(1, 2, 2, 1, 1)})
    made = tflite_model(model)
    feeds = {"x": picture(3, 1, 2, 3, 3)}
    found, steps = by_litert(made, model, feeds, FAST)
    assert steps["y"] == 0
    np.testing.assert_allclose(found["y"], by_onnxruntime(model, feeds)["y"], rtol=1e-4, atol=1e-5)


def test_16_bit_activations_are_refused() -> None:
    model = quantised([NODE("Conv", ["x", "w"], ["y"])], (1, 2, 3, 3), {"w": picture(1, 2, 2, 1, 1)})
    for constant in model.graph.initializer:
        if constant.name == "x_zero_point":
            constant.CopyFrom(numpy_helper.from_array(np.uint16(0), constant.name))
    with pytest.raises(ModelFormatError, match="uint16 activations"):
        tflite_model(model)
