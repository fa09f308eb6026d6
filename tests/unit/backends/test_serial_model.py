"""Quantised ONNX graphs compiled for serial NPUs: what onnxruntime gives for them, and what is left for the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.backends.npu.serial_model import Program, compile_model
from edge_rt.backends.npu.serial_session import Tail
from edge_rt.catalog.manifest import SHIPPED_DIR
from edge_rt.convert.recipes import run_recipe

MODELS = Path(__file__).parents[3] / "models"
Values = dict[str, NDArray[Any]]


class Builder:
    """A QDQ graph, written from its input to its outputs."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, values: Any, name: str = "") -> str:
        name = name or f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        out = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [out], **attributes))
        return out

    def quantise(self, name: str, scale: float, zero: int, kind: Any = np.uint8) -> str:
        """Quantise and dequantise: what lies between two layers."""
        scale_name, zero_name = self.constant(np.float32(scale)), self.constant(kind(zero))
        quantised = self.node("QuantizeLinear", name, scale_name, zero_name)
        return self.node("DequantizeLinear", quantised, scale_name, zero_name)

    def weights(self, shape: tuple[int, ...], bits: int = 8, axis: int = 0, scale: float = 0.02) -> str:
        limit = 2 ** (bits - 1)
        values = self.rng.integers(-limit + 1, limit, shape).astype(np.int8)
        scales = (scale * 8 / bits * self.rng.uniform(0.5, 2, shape[axis])).astype(np.float32)
        name = f"w{len(self.constants)}"
        if bits == 4:
            self.constants.append(helper.make_tensor(name, TensorProto.INT4, shape, values.reshape(-1).tolist()))
        else:
            self.constant(values, name)
        return self.node("DequantizeLinear", name, self.constant(scales), axis=axis)

    def bias(self, n: int) -> str:
        return self.constant(self.rng.normal(0, 0.5, n).astype(np.float32))

    def model(self, output: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info("x", kind, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            self.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def compute(program: Program, feeds: Values, outputs: list[str]) -> Values:
    """Compute a program as a session does, with numpy in the device's place."""
    model = serial_format.unpack(program.file)
    sent = [
        np.frombuffer(port.to_device(feeds[port.name]), np.int8).reshape(port.h, port.w, port.c)
        for port in program.inputs
    ]
    found = serial_golden.run(model, sent)
    values = {port.name: port.from_device(array.tobytes()) for port, array in zip(program.outputs, found, strict=True)}
    if program.tail is not None:
        left = [name for name in outputs if name not in values]
        values |= Tail(program.tail).run({**feeds, **values}, left)
    return {name: values[name] for name in outputs}


def expected(model: onnx.ModelProto, feeds: Values) -> Values:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # each node as it is written
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def check(builder: Builder, output: str, shape: tuple[int, ...], scale: float, *, whole: bool = True) -> Program:
    """Hold a graph's output to onnxruntime's: within a step of its scale, and equal nearly everywhere."""
    model = builder.model(output, shape)
    program = compile_model(model)
    feeds = {"x": builder.rng.normal(0, 1, shape).astype(np.float32)}
    want, got = expected(model, feeds)[output], compute(program, feeds, [output])[output]
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    off = np.abs(got - want) / scale
    assert off.max() < 1.01
    assert (off < 0.01).mean() >= 0.97  # the bias is rounded to steps of the sum
    assert want.std() > 2 * scale  # it is no constant
    if whole:
        assert (program.tail, program.tail_kinds) == (None, ())
    return program


def test_nodes_may_stand_before_those_that_they_need() -> None:
    """As in files of quantisers, which append what makes weights and biases; onnxruntime sorts them too."""
    builder = Builder(3)
    x = builder.quantise("x", 0.03, 120)
    y = builder.node("Conv", x, builder.weights((5, 6, 3, 3)), builder.bias(5), kernel_shape=[3, 3])
    output = builder.quantise(y, 0.05, 100)
    in_order = compile_model(builder.model(output, (1, 6, 11, 9)))
    builder.nodes.reverse()
    assert check(builder, output, (1, 6, 11, 9), 0.05).file == in_order.file


def test_nodes_that_wait_for_one_another_are_refused() -> None:
    builder = Builder(3)
    builder.nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    with pytest.raises(ValueError, match="cycle"):
        compile_model(builder.model("b", (1, 6, 11, 9)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("out", "kernel", "attributes"),
    [
        (5, (3, 3), {"pads": [1, 1, 1, 1]}),
        (8, (1, 1), {}),
        (6, (3, 2), {"strides": [2, 1], "pads": [1, 0, 0, 1]}),
        (4, (3, 3), {"dilations": [2, 2]}),
        (6, (3, 3), {"group": 2}),
        (6, (3, 3), {"group": 6, "pads": [1, 1, 1, 1]}),
        (7, (3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ],
)
def test_convolutions(bits: int, out: int, kernel: tuple[int, int], attributes: dict[str, Any]) -> None:
    builder = Builder(bits + out)
    x = builder.quantise("x", 0.03, 120)
    weights = builder.weights((out, 6 // int(attributes.get("group", 1)), *kernel), bits)
    y = builder.node("Conv", x, weights, builder.bias(out), kernel_shape=list(kernel), **attributes)
    program = check(builder, builder.quantise(y, 0.05, 100), (1, 6, 11, 9), 0.05)
    assert program.model.layers[0].weight_bits == bits


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_activation_functions_are_limits_of_the_layer_before(kind: Any) -> None:
    builder = Builder(3)
    zero = 20 if kind is np.uint8 else -100
    x = builder.quantise("x", 0.03, 3, np.int8)
    y = builder.node("Conv", x, builder.weights((4, 2, 3, 3)), builder.bias(4))
    y = builder.quantise(builder.node("Relu", y), 0.02, zero, kind)
    low, high = builder.constant(np.float32(-0.5)), builder.constant(np.float32(0.9))
    y = builder.node("Clip", builder.node("Conv", y, builder.weights((4, 4, 1, 1), scale=0.05)), low, high)
    program = check(builder, builder.quantise(y, 0.01, zero + 50, kind), (1, 2, 8, 8), 0.01)
    assert len(program.model.layers) == 2


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("AveragePool", {"kernel_shape": [2, 3], "pads": [0, 1, 1, 0]}),
        ("GlobalAveragePool", {}),
        ("ReduceMean", {}),
        ("Relu", {}),
    ],
)
def test_layers_without_weights(op: str, attributes: dict[str, Any]) -> None:
    builder = Builder(4)
    x = builder.quantise("x", 0.03, 120)
    more = [builder.constant(np.array([2, 3]))] if op == "ReduceMean" else []
    scale = 0.00213 if op in {"GlobalAveragePool", "ReduceMean"} else 0.0253
    check(builder, builder.quantise(builder.node(op, x, *more, **attributes), scale, 110), (1, 30, 9, 10), scale)


def test_sums_joins_and_resizes() -> None:
    builder = Builder(5)
    x = builder.quantise("x", 0.03, 120)
    left = builder.quantise(builder.node("Conv", x, builder.weights((4, 3, 1, 1))), 0.02, 128)
    right = builder.quantise(builder.node("Conv", x, builder.weights((4, 3, 1, 1))), 0.05, 90)
    added = builder.quantise(builder.node("Relu", builder.node("Add", left, right)), 0.0317, 0)
    joined = builder.quantise(builder.node("Concat", added, left, axis=1), 0.0371, 60)
    scales = builder.constant(np.array([1, 1, 2, 3], np.float32))
    attributes = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": "floor"}
    wide = builder.quantise(builder.node("Resize", joined, "", scales, **attributes), 0.0371, 60)
    check(builder, wide, (1, 3, 6, 5), 0.0371)


@pytest.mark.parametrize("op", ["Gemm", "MatMul"])
def test_products_see_the_channels_as_onnx_orders_them(op: str) -> None:
    builder = Builder(6)
    x = builder.quantise("x", 0.03, 120)
    flat = builder.node("Flatten", builder.quantise(builder.node("MaxPool", x, kernel_shape=[2, 2]), 0.03, 120))
    shape, attributes, axis = ((9, 210), {"transB": 1}, 0) if op == "Gemm" else ((210, 9), {}, 1)
    inputs = [flat, builder.weights(shape, axis=axis)] + ([builder.bias(9)] if op == "Gemm" else [])
    check(builder, builder.quantise(builder.node(op, *inputs, **attributes), 0.2, 128), (1, 5, 7, 8), 0.2)


def test_what_nothing_quantises_is_left_for_the_cpu_and_named() -> None:
    builder = Builder(7)
    x = builder.quantise("x", 0.03, 120)
    y = builder.quantise(builder.node("Conv", x, builder.weights((4, 3, 3, 3))), 0.05, 128)
    z = builder.node("Conv", y, builder.weights((2, 4, 1, 1)))
    program = check(builder, builder.node("Softmax", z, axis=1), (1, 3, 8, 8), 0.05, whole=False)
    assert program.tail is not None
    assert dict(program.tail_kinds) == {"DequantizeLinear": 1, "Conv": 1, "Softmax": 1}
    assert program.tail_reason == f"Softmax {builder.nodes[-1].output[0]}: no layer of the device"
    n_nodes = sum(n for _, n in (*program.kinds, *program.tail_kinds))
    assert n_nodes == len(builder.nodes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": np.uint16}, "uint16 values"),
        ({"op": "Sigmoid"}, "no layer of the device"),
        ({"alpha": 2.0}, "its input has the shape"),
    ],
)
def test_a_graph_of_which_nothing_is_a_layer_is_refused(change: dict[str, Any], reason: str) -> None:
    builder = Builder(8)
    x = builder.quantise("x", 0.03, 3, change.get("kind", np.uint8))
    if "alpha" in change:
        x = builder.node("Reshape", x, builder.constant(np.array([1, 2, 8, 12])))
    op = change.get("op", "Conv")
    y = builder.node(op, x, *([builder.weights((4, 2, 1, 1))] if op == "Conv" else []))
    with pytest.raises(ValueError, match=f"nothing of it is a layer of the device: .*{reason}"):
        compile_model(builder.model(y, (1, 3, 8, 8)))


@pytest.mark.parametrize("name", ["pcb-defect.int8", "pcb-defect.int4", "pcb-defect-small.int8"])
def test_the_shipped_detectors_give_what_onnxruntime_does(name: str) -> None:
    """Crops of 160 × 160: the detectors' convolutions take any size."""
    model = onnx.load(MODELS / f"{name}.onnx")
    side = 160
    shapes = {value.name: (1, 1, side, side) for value in model.graph.input}
    program = compile_model(model, shapes)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim[2:]:
            dim.dim_value = side if value.name in shapes else side // 8
    rng = np.random.default_rng(1)
    pictures = (rng.random((2, 1, 1, side // 8, side // 8)) > 0.5).repeat(8, 3).repeat(8, 4) * 200 + 20
    feeds = dict(zip(shapes, pictures.astype(np.uint8), strict=True))
    want = expected(model, feeds)
    got = compute(program, feeds, list(want))
    for output, values in want.items():
        assert np.abs(got[output] - values).max() < 0.05 * np.abs(values).max(), output
        assert np.corrcoef(got[output].ravel(), values.ravel())[0, 1] > 0.9999, output
    assert dict(program.tail_kinds) == {"Conv": 3, "DequantizeLinear": 1}
    assert program.tail_reason == "Conv heat: its weights are not quantised"
    assert (4 in {layer.weight_bits for layer in program.model.layers}) == ("int4" in name)


def test_the_device_takes_what_the_compiler_makes() -> None:
    """model.c checks each field again."""
    from edge_rt.devices.serial_npu import SerialNpu
    from tests.npu.serial_firmware import FirmwareDevice
    from tests.npu.serial_wire import FakeWire

    model = onnx.load(MODELS / "pcb-defect.int4.onnx")
    program = compile_model(model, {value.name: (1, 1, 64, 64) for value in model.graph.input})
    rng = np.random.default_rng(2)
    inputs = [rng.integers(-128, 128, (port.h, port.w, port.c)).astype(np.int8) for port in program.inputs]
    want = serial_golden.run(serial_format.unpack(program.file), inputs)
    wire = FakeWire(FirmwareDevice(), bytes_hz=1e7)
    npu = SerialNpu(wire, clock=wire.clock)
    npu.open()
    npu.load(program.file, 60)
    got, _ = npu.run([values.tobytes() for values in inputs], [port.n_bytes for port in program.outputs], 60)
    assert got == [values.tobytes() for values in want]


def test_files_are_read_as_they_were_written() -> None:
    from tests.npu.serial_models import random_model

    for seed in range(20):
        model = random_model(np.random.default_rng(seed), 6)
        assert serial_format.pack(serial_format.unpack(serial_format.pack(model))) == serial_format.pack(model)
    with pytest.raises(ValueError, match="no model file"):
        serial_format.unpack(b"GGUF")


@pytest.mark.parametrize("scale", [1e-9, 0.003, 0.5, 1.0, 1.9999999999, 3e5])
def test_scales_as_integers(scale: float) -> None:
    multiplier, shift = serial_format.scale_parts(scale)
    assert 0 < multiplier < 2**31
    assert 1 <= shift <= 62
    assert multiplier / 2**shift == pytest.approx(scale, rel=1e-8 if scale > 1e-8 else 1e-4)


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**40, float("nan")])
def test_scales_that_no_integers_give_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        serial_format.scale_parts(scale)


def test_the_catalog_s_form_with_4_bit_weights_is_wholly_the_device_s(tmp_path: Path) -> None:
    path = tmp_path / "form.onnx"
    ranges = SHIPPED_DIR / "pcb-defect-npu-ranges.json"
    run_recipe("npu-w4a8", SHIPPED_DIR / "pcb-defect.int4.onnx", path, ranges)
    program = compile_model(onnx.load(path))
    assert program.tail is None
    bits = Counter(layer.weight_bits for layer in program.model.layers if layer.weights is not None)
    assert bits == {4: 7, 8: 4}  # the first layer's few weights and the heads keep 8
    assert len(program.file) < 50_000
