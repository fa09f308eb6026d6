"""Write a quantised ONNX model (QDQ) as an int8 TensorFlow Lite file, for microcontrollers and Ethos-U.

Every number stays what it is: scales, zero points, weights and biases are the ONNX file's, uint8 becomes int8 by
subtracting 128. Inputs and outputs are the integers themselves where the model quantises them; pictures have their
channels last, and the tensors tell scale and zero point. Layers that were kept float stay float. What differs is how
kernels round: onnxruntime's in float, TensorFlow Lite's in 32-bit integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import tflite
from onnx import ModelProto, NodeProto

from edge_rt.convert.qdq_graph import QdqGraph, attribute
from edge_rt.convert.tflite_file import Quant, TfliteWriter
from edge_rt.convert.tflite_layers import Layers
from edge_rt.convert.tflite_values import CHANNELS_LAST, Value, Values

_RANKED: Final = Quant((1 / 256,), (-128,))  # what TensorFlow Lite's Softmax and Logistic give
_BINARY: Final = {"Add": ("ADD", "AddOptions"), "Sub": ("SUB", "SubOptions"), "Mul": ("MUL", "MulOptions")}
_RESHAPES: Final = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


@dataclass(frozen=True, slots=True, kw_only=True)
class TfliteModel:
    """A file, and what became of the model's parts.

    kinds    operators with their counts, as TensorFlow Lite names them
    orders   of each input and output that is a picture: which ONNX axis is where in the file
    """

    data: bytes
    kinds: tuple[tuple[str, int], ...]
    orders: dict[str, tuple[int, ...]]


def convert_tflite(src: Path, dst: Path, _beside: Path | None = None) -> TfliteModel:
    """Write src, a checked ONNX file, as dst. Raises ModelFormatError for what has no place in TensorFlow Lite."""
    made = tflite_model(onnx.load(src), name=src.name)
    dst.write_bytes(made.data)
    return made


def tflite_model(model: ModelProto, *, name: str = "model", rows: int = 1) -> TfliteModel:
    """Convert a model; rows: what first dimensions that take any size become. Raises ModelFormatError."""
    return _Converter(QdqGraph(model, name=name, rows=rows)).run()


class _Converter:
    def __init__(self, graph: QdqGraph) -> None:
        self._graph = graph
        self._writer = TfliteWriter()
        self._values = Values(graph, self._writer)
        layers = Layers(graph, self._writer, self._values)
        self._makers: dict[str, Callable[[NodeProto], None]] = {
            "Conv": layers.conv,
            "Gemm": layers.dense,
            "MatMul": layers.dense,
            "AveragePool": layers.pool,
            "MaxPool": layers.pool,
            "GlobalAveragePool": layers.mean,
            "ConvTranspose": layers.transposed_conv,
            "BatchNormalization": layers.affine,
            "HardSigmoid": layers.affine,
            "Div": self._divided,
            "QuantizeLinear": self._quantize,
            "DequantizeLinear": self._dequantize,
            "Clip": self._clip,
            "Relu": self._clip,
            "Softmax": self._ranked,
            "Sigmoid": self._ranked,
            "Concat": self._concat,
            "Resize": self._resize,
            "Transpose": self._transpose,
            "Identity": lambda node: self._values.rename(node.output[0], self._values.any(node.input[0])),
            "Constant": lambda _: None,
        }
        self._makers |= dict.fromkeys(_BINARY, self._binary) | dict.fromkeys(_RESHAPES, self._reshape)

    def run(self) -> TfliteModel:
        graph = self._graph
        inputs = {name: self._values.given(name) for name in graph.inputs}
        for node in graph.nodes:
            if id(node) in self._values.done:
                continue
            maker = self._makers.get(node.op_type)
            if maker is None or node.domain not in ("", "ai.onnx"):
                graph.refuse(node.name or node.op_type, f"{node.op_type} has no place in an int8 TensorFlow Lite file")
            maker(node)
        outputs = {name: self._values.any(name) for name in graph.outputs}
        data = self._writer.finish(
            [value.index for value in inputs.values()],
            [value.index for value in outputs.values()],
            description=f"{graph.name}, by edge_rt",
        )
        both = {**inputs, **outputs}
        return TfliteModel(
            data=data,
            kinds=tuple(Counter(self._writer.kinds).most_common()),
            orders={name: value.order for name, value in both.items() if len(value.shape) == 4},
        )

    def _quantize(self, node: NodeProto) -> None:
        quant = self._graph.quant_of(node)
        whole = self._values.integer(node.input[0])
        if whole is not None:  # from one scale to another
            self._values.rename(node.output[0], self._values.fitting(whole, quant))
            return
        value = self._values.real(node.input[0])
        made = self._values.result(node.output[0], value.shape, value.order, quant)
        self._writer.operator("QUANTIZE", [value.index], [made.index], options_kind="QuantizeOptions")

    def _dequantize(self, node: NodeProto) -> None:
        if node.input[0] not in self._graph.constants:
            self._values.alias(node.output[0], node.input[0])

    def _clip(self, node: NodeProto) -> None:
        low, high = self._values.bounds(node)
        if (low, high) == (-float("inf"), float("inf")):
            whole = self._values.integer(node.input[0])
            if whole is not None:
                self._values.rename(node.output[0], whole)
            else:
                self._values.rename(node.output[0], self._values.real(node.input[0]))
            return
        code = {(0.0, float("inf")): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}.get((low, high))
        if code is None:
            self._graph.refuse(node.name, f"a Clip from {low:g} to {high:g} that is no part of a layer")
        self._through(node, code, version=2)

    def _ranked(self, node: NodeProto) -> None:
        """Softmax and Sigmoid, whose integers always have the same scale."""
        is_softmax = node.op_type == "Softmax"
        value = self._values.integer(node.input[0]) if self._values.will_quantize(node) else None
        value = value or self._values.real(node.input[0])
        if is_softmax:
            axis = attribute(node, "axis", -1) % len(value.shape)
            value = self._values.moved(value, [*(each for each in value.order if each != axis), axis])
        sink = self._values.sink(node, may_quantize=value.quant is not None)
        given = _RANKED if sink.quant is not None else None
        made = self._values.result(f"{sink.value}/ranked" if given else sink.value, value.shape, value.order, given)
        if is_softmax:
            self._writer.operator(
                "SOFTMAX", [value.index], [made.index], version=2, options_kind="SoftmaxOptions", Beta=1.0
            )
        else:
            self._writer.operator("LOGISTIC", [value.index], [made.index], version=2)
        if sink.quant is not None:
            self._values.rename(sink.value, self._values.fitting(made, sink.quant))

    def _divided(self, node: NodeProto) -> None:
        """Multiply by one divided by a constant."""
        divisor = self._values.constant(node.input[1])
        if divisor is None or divisor.size != 1 or not divisor.any():
            self._graph.refuse(node.name, "a Div by what is computed, or by more than one number")
        share = 1 / float(divisor.reshape(()))
        quant = Quant((abs(share) / 127,), (0,))
        index = self._writer.constant(f"{node.output[0]}/share", np.array([np.sign(share) * 127], np.int8), quant)
        whole = self._values.integer(node.input[0])
        if whole is None or not self._values.will_quantize(node):
            self._graph.refuse(node.name, "a Div in float")
        self._binary(node, [whole, Value(index=index, shape=(1,), order=(0,), quant=quant)], "Mul")

    def _binary(self, node: NodeProto, wholes: list[Value | None] | None = None, kind: str = "") -> None:
        wholes = wholes or [self._operand(name) for name in node.input]
        is_integer = None not in wholes and self._values.will_quantize(node)
        found = [w for w in wholes if w is not None] if is_integer else [self._values.real(n) for n in node.input]
        first, second = found
        if len(first.shape) < len(second.shape):
            order = second.order
        else:
            order = first.order
        smaller = min(first, second, key=lambda value: len(value.shape))
        if len(first.shape) != len(second.shape) and math.prod(smaller.shape) > 1 and order != tuple(range(len(order))):
            self._graph.refuse(node.name, "operands of different ranks, one of them a picture")
        if len(first.shape) == len(second.shape):
            first, second = self._values.moved(first, order), self._values.moved(second, order)
        sink = self._values.sink(node, may_quantize=is_integer)
        activation = sink.activation()
        if activation is None:
            self._graph.refuse(node.name, f"bounds from {sink.low:g} to {sink.high:g} behind it")
        shape = tuple(np.broadcast_shapes(first.shape, second.shape))
        made = self._values.result(sink.value, shape, order, sink.quant)
        code, options = _BINARY[kind or node.op_type]
        self._writer.operator(
            code,
            [first.index, second.index],
            [made.index],
            version=2,
            options_kind=options,
            FusedActivationFunction=getattr(tflite.ActivationFunctionType, activation),
        )

    def _operand(self, name: str) -> Value | None:
        if (whole := self._values.integer(name)) is not None:
            return whole
        stored = self._values.stored(name)
        if stored is None or stored.scales.size > 1 or stored.array.dtype != np.int8:
            return None
        quant = Quant((float(stored.scales[0]),), (stored.zero,))
        index = self._writer.constant(name, stored.array, quant)
        return Value(index=index, shape=stored.array.shape, order=tuple(range(stored.array.ndim)), quant=quant)

    def _concat(self, node: NodeProto) -> None:
        values = [self._values.any(name) for name in node.input]
        is_integer = all(value.quant is not None for value in values)
        if not is_integer:
            values = [self._values.real(name) for name in node.input]
        order = values[0].order
        values = [self._values.moved(value, order) for value in values]
        quant: Quant | None = None
        name = node.output[0]
        if is_integer:
            sink = self._values.sink(node, may_quantize=True)
            name, quant = sink.value, sink.quant or values[0].quant
            assert quant is not None
            values = [self._values.fitting(value, quant) for value in values]
        axis = attribute(node, "axis", 0) % len(order)
        shape = list(values[0].shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        made = self._values.result(name, shape, order, quant)
        self._writer.operator(
            "CONCATENATION",
            [value.index for value in values],
            [made.index],
            version=2,
            options_kind="ConcatenationOptions",
            Axis=order.index(axis),
        )

    def _resize(self, node: NodeProto) -> None:
        value = self._values.moved(self._values.any(node.input[0]), CHANNELS_LAST)
        shape = self._graph.shape(node.output[0])
        mode = attribute(node, "mode", b"nearest").decode()
        where = attribute(node, "coordinate_transformation_mode", b"half_pixel").decode()
        rounding = attribute(node, "nearest_mode", b"round_prefer_floor").decode()
        whole = all(out % size == 0 for out, size in zip(shape[2:], value.shape[2:], strict=True))
        if mode == "nearest" and (where, rounding) == ("asymmetric", "floor"):
            code, halves, corners = "RESIZE_NEAREST_NEIGHBOR", False, False
        elif mode == "nearest" and where == "half_pixel" and whole:
            code, halves, corners = "RESIZE_NEAREST_NEIGHBOR", True, False
        elif mode == "linear" and where in ("half_pixel", "asymmetric", "align_corners"):
            code, halves, corners = "RESIZE_BILINEAR", where == "half_pixel", where == "align_corners"
        else:
            self._graph.refuse(node.name, f"Resize {mode}, {where}, {rounding}")
        size = self._writer.constant(f"{node.output[0]}/size", np.array(shape[2:], np.int32))
        made = self._values.result(node.output[0], shape, value.order, value.quant)
        self._writer.operator(
            code,
            [value.index, size],
            [made.index],
            version=3,
            options_kind="ResizeNearestNeighborOptions" if mode == "nearest" else "ResizeBilinearOptions",
            AlignCorners=corners,
            HalfPixelCenters=halves,
        )

    def _transpose(self, node: NodeProto) -> None:
        value = self._values.any(node.input[0])
        axes = attribute(node, "perm", list(range(len(value.shape)))[::-1])
        shape = tuple(value.shape[axis] for axis in axes)
        order = tuple(list(axes).index(axis) for axis in value.order)  # nothing moves, axes get other names
        self._values.rename(node.output[0], Value(index=value.index, shape=shape, order=order, quant=value.quant))

    def _reshape(self, node: NodeProto) -> None:
        value = self._values.any(node.input[0])
        value = self._values.moved(value, range(len(value.shape)))
        shape = self._graph.shape(node.output[0])
        made = self._values.result(node.output[0], shape, range(len(shape)), value.quant)
        self._values.reshape(value, made)

    def _through(self, node: NodeProto, code: str, *, version: int, **options: Any) -> None:
        """An operator with one input, in integers where its result becomes integers."""
        whole = self._values.integer(node.input[0]) if self._values.will_quantize(node) else None
        value = whole or self._values.real(node.input[0])
        sink = self._values.sink(node, may_quantize=whole is not None)
        made = self._values.result(sink.value, value.shape, value.order, sink.quant)
        self._writer.operator(code, [value.index], [made.index], version=version, **options)
