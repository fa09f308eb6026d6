"""Layers with weights, and pools: convolutions, depthwise ones, products with a matrix, averages and maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import tflite
from numpy.typing import NDArray
from onnx import NodeProto

from edge_rt.convert.qdq_graph import QdqGraph, attribute
from edge_rt.convert.tflite_file import Quant, TfliteWriter
from edge_rt.convert.tflite_values import CHANNELS_LAST, Sink, Value, Values

_PADDINGS: Final = {"SAME": tflite.Padding.SAME, "VALID": tflite.Padding.VALID}
_NO_PADS: Final = (0, 0, 0, 0)
_MAX_STRIDE: Final = 3  # of Ethos-U
_MAX_BIAS: Final = 2**30
_LEAST_SCALE: Final = 1e-30
Pads = tuple[int, int, int, int]  # top, left, bottom, right


class Layers:
    """Writes layers into a file."""

    def __init__(self, graph: QdqGraph, writer: TfliteWriter, values: Values) -> None:
        self._graph, self._writer, self._values = graph, writer, values

    def conv(self, node: NodeProto) -> None:
        shape = self._graph.shape(node.output[0])
        if len(shape) != 4:
            self._graph.refuse(node.name, f"a Conv of {len(shape) - 2} dimensions")
        value, is_integer = self._input(node)
        value = self._values.moved(value, CHANNELS_LAST)
        groups, n_channels = attribute(node, "group", 1), value.shape[1]
        is_depthwise = groups > 1 and groups == n_channels
        if groups > 1 and not is_depthwise:
            self._graph.refuse(node.name, f"{groups} groups of {n_channels} channels")
        weights, scales = self._weights(node.input[1], is_integer)
        strides, dilations = attribute(node, "strides", [1, 1]), attribute(node, "dilations", [1, 1])
        edges: Pads | None = None
        if is_integer and not is_depthwise and list(dilations) == [1, 1]:
            while max(strides) > _MAX_STRIDE and all(stride % 2 == 0 for stride in strides):
                edges = self._edges(node, value, weights.shape[2:], strides) if edges is None else _NO_PADS
                value = self._gathered(f"{node.output[0]}/{value.index}", value, weights.shape[2:], edges)
                weights, strides = _by_fours(weights), [stride // 2 for stride in strides]
        padding = "VALID"
        if edges is None:
            padding, value = self._padded(node, value, weights.shape[2:], strides, dilations)
        laid, axis = (weights.transpose(1, 2, 3, 0), 3) if is_depthwise else (weights.transpose(0, 2, 3, 1), 0)
        constants = self._constants(node, value, laid, scales, axis)
        sink = self._values.sink(node, may_quantize=value.quant is not None)
        made = self._values.result(sink.value, shape, CHANNELS_LAST, sink.quant)
        self._convolution(
            [value.index, *constants],
            made,
            strides=strides,
            dilations=dilations,
            padding=padding,
            multiplier=weights.shape[0] // n_channels if is_depthwise else 0,
            activation=self._activation(node, sink),
        )

    def transposed_conv(self, node: NodeProto) -> None:
        value, is_integer = self._input(node)
        value = self._values.moved(value, CHANNELS_LAST)
        weights, scales = self._weights(node.input[1], is_integer)
        plain = {"dilations": [1, 1], "group": 1, "output_padding": [0, 0], "auto_pad": b"NOTSET", "pads": [0, 0, 0, 0]}
        strange = [name for name, usual in plain.items() if attribute(node, name, usual) != usual]
        if weights.ndim != 4 or strange:
            self._graph.refuse(node.name, f"a ConvTranspose with {', '.join(strange) or 'another rank'}")
        shape = self._graph.shape(node.output[0])
        strides = attribute(node, "strides", [1, 1])
        size = [shape[axis] for axis in CHANNELS_LAST]
        wanted = self._writer.constant(f"{node.output[0]}/size", np.array(size, np.int32))
        laid, bias = self._constants(node, value, weights.transpose(1, 2, 3, 0), scales, 0)
        sink = self._values.sink(node, may_quantize=value.quant is not None)
        made = self._values.result(sink.value, shape, CHANNELS_LAST, sink.quant)
        self._writer.operator(
            "TRANSPOSE_CONV",
            [wanted, laid, value.index, bias],
            [made.index],
            version=3,
            options_kind="TransposeConvOptions",
            Padding=_PADDINGS["VALID"],
            StrideH=strides[0],
            StrideW=strides[1],
            FusedActivationFunction=self._activation(node, sink),
        )

    def affine(self, node: NodeProto) -> None:
        """BatchNormalization and HardSigmoid in integers: gain and offset, as a depthwise convolution of one point."""
        value = self._values.integer(node.input[0]) if self._values.will_quantize(node) else None
        if value is None or len(value.shape) != 4:
            self._graph.refuse(node.name, f"a {node.op_type} in float, or of something else than a picture")
        value = self._values.moved(value, CHANNELS_LAST)
        n_channels = value.shape[1]
        sink = self._values.sink(node, may_quantize=True)
        if node.op_type == "HardSigmoid":
            gains, offsets = (
                np.full(n_channels, attribute(node, name, usual)) for name, usual in (("alpha", 0.2), ("beta", 0.5))
            )
            sink = replace(sink, low=max(sink.low, 0.0), high=min(sink.high, 1.0))
        else:
            told = [self._values.constant(name) for name in node.input[1:5]]
            if any(each is None for each in told):
                self._graph.refuse(node.name, "a BatchNormalization by what is computed")
            scale, bias, mean, variance = (np.asarray(each, np.float64).reshape(-1) for each in told)
            gains = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
            offsets = bias - mean * gains
        assert value.quant is not None
        step = value.quant.scales[0]
        scales = np.maximum(np.maximum(np.abs(gains) / 127, np.abs(offsets) / (step * _MAX_BIAS)), _LEAST_SCALE)
        zeros = (0,) * n_channels
        weights = np.rint(gains / scales).astype(np.int8).reshape(1, 1, 1, n_channels)
        whole = np.rint(offsets / (step * scales)).astype(np.int32)
        name = f"{node.output[0]}/{value.index}"
        constants = [
            self._writer.constant(f"{name}/gain", weights, Quant(tuple(scales.tolist()), zeros, 3)),
            self._writer.constant(f"{name}/offset", whole, Quant(tuple((step * scales).tolist()), zeros, 0)),
        ]
        made = self._values.result(sink.value, value.shape, CHANNELS_LAST, sink.quant)
        self._convolution([value.index, *constants], made, multiplier=1, activation=self._activation(node, sink))

    def _edges(self, node: NodeProto, value: Value, size: Sequence[int], strides: Sequence[int]) -> Pads:
        """Give the edges that a layer wants around its input, SAME's too."""
        padding, pads = self._padding(node, value, size, strides, [1, 1])
        if padding == "VALID":
            return pads
        (top, bottom), (left, right) = (_same(length, size[n], strides[n]) for n, length in enumerate(value.shape[2:]))
        return top, left, bottom, right

    def _gathered(self, name: str, value: Value, size: Sequence[int], edges: Pads) -> Value:
        """Lay each four neighbours behind one another as channels, by a convolution that only picks.

        Ethos-U takes strides up to 3. A longer one is half as long on what this gives, and the products are the same.
        """
        lengths = [value.shape[2] + edges[0] + edges[2], value.shape[3] + edges[1] + edges[3]]
        # An odd last row is met by kernels of odd size only; then one more of zeros makes its pair.
        more = [length % 2 and reach % 2 for length, reach in zip(lengths, size, strict=True)]
        value = self._edged(name, value, (edges[0], edges[1], edges[2] + more[0], edges[3] + more[1]))
        assert value.quant is not None
        n_channels = value.shape[1]
        picks = np.zeros((4 * n_channels, 2, 2, n_channels), np.int8)
        for part in range(4):
            for channel in range(n_channels):
                picks[part * n_channels + channel, part // 2, part % 2, channel] = 1
        ones, zeros = (1.0,) * len(picks), (0,) * len(picks)
        steps = (value.quant.scales[0],) * len(picks)
        constants = [
            self._writer.constant(f"{name}/picks", picks, Quant(ones, zeros, 0)),
            self._writer.constant(f"{name}/no_bias", np.zeros(len(picks), np.int32), Quant(steps, zeros, 0)),
        ]
        shape = (value.shape[0], len(picks), value.shape[2] // 2, value.shape[3] // 2)
        made = self._values.result(f"{name}/fours", shape, CHANNELS_LAST, value.quant)
        self._convolution([value.index, *constants], made, strides=(2, 2))
        return made

    def dense(self, node: NodeProto) -> None:
        """Gemm, and MatMul with a constant."""
        if node.op_type == "Gemm" and (
            attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1 or attribute(node, "transA", 0)
        ):
            self._graph.refuse(node.name, "a Gemm with alpha, beta or transA")
        value, is_integer = self._input(node)
        value = self._values.moved(value, range(len(value.shape)))
        weights, scales = self._weights(node.input[1], is_integer)
        if weights.ndim != 2:
            self._graph.refuse(node.name, f"a product with {weights.ndim} dimensions of weights")
        if not (node.op_type == "Gemm" and attribute(node, "transB", 0)):
            weights = weights.T
        shape = self._graph.shape(node.output[0])
        constants = self._constants(node, value, weights, scales, 0)
        sink = self._values.sink(node, may_quantize=value.quant is not None)
        made = self._values.result(sink.value, shape, range(len(shape)), sink.quant)
        self._writer.operator(
            "FULLY_CONNECTED",
            [value.index, *constants],
            [made.index],
            version=4,
            options_kind="FullyConnectedOptions",
            FusedActivationFunction=self._activation(node, sink),
            KeepNumDims=len(shape) != 2,
        )

    def _input(self, node: NodeProto) -> tuple[Value, bool]:
        """Give what a layer reads, as integers where all of it is computed in them."""
        whole = self._values.integer(node.input[0]) if self._values.will_quantize(node) else None
        if whole is not None and self._values.stored(node.input[1]) is not None:
            return whole, True
        return self._values.real(node.input[0]), False

    def _weights(self, name: str, is_integer: bool) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        if is_integer:
            stored = self._values.stored(name)
            assert stored is not None
            if stored.zero:
                self._graph.refuse(name, f"weights around {stored.zero}; they are needed around 0")
            return stored.array, stored.scales
        array = self._values.constant(name)
        if array is None:
            self._graph.refuse(name, "weights that are computed")
        return array.astype(np.float32), None

    def _constants(
        self, node: NodeProto, value: Value, weights: NDArray[Any], scales: NDArray[np.float32] | None, axis: int
    ) -> list[int]:
        """Write weights and bias; the bias' step is that of the products."""
        name = node.input[1]
        bias = self._values.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if len(node.input) > 2 and node.input[2] and bias is None:
            self._graph.refuse(node.name, "a bias that is computed")
        if scales is None:
            n_outputs = weights.shape[axis]
            floats = np.zeros(n_outputs, np.float32) if bias is None else bias.reshape(-1).astype(np.float32)
            return [self._writer.constant(name, weights), self._writer.constant(f"{node.output[0]}/bias", floats)]
        assert value.quant is not None
        n_outputs = weights.shape[axis]
        steps = np.float32(value.quant.scales[0]) * scales
        stored = self._values.stored(node.input[2]) if bias is not None else None
        if stored is not None and stored.array.dtype == np.int32:
            whole = stored.array.reshape(-1)
            if not np.allclose(stored.scales, steps, rtol=1e-3):
                self._graph.refuse(node.name, "the bias' scale is not the input's times the weights'")
        elif bias is not None:
            whole = np.clip(np.rint(bias.reshape(-1).astype(np.float64) / steps), -(2**31), 2**31 - 1).astype(np.int32)
        else:
            whole = np.zeros(n_outputs, np.int32)
        zeros = (0,) * len(scales)
        return [
            self._writer.constant(name, weights, Quant(tuple(map(float, scales)), zeros, axis)),
            self._writer.constant(f"{node.output[0]}/bias", whole, Quant(tuple(map(float, steps)), zeros, 0)),
        ]

    def _convolution(
        self,
        inputs: list[int],
        made: Value,
        *,
        strides: Sequence[int] = (1, 1),
        dilations: Sequence[int] = (1, 1),
        padding: str = "VALID",
        multiplier: int = 0,
        activation: int = tflite.ActivationFunctionType.NONE,
    ) -> None:
        """Write a convolution, depthwise where a channel has a multiplier of outputs."""
        kind = "DepthwiseConv2DOptions" if multiplier else "Conv2DOptions"
        self._writer.operator(
            "DEPTHWISE_CONV_2D" if multiplier else "CONV_2D",
            inputs,
            [made.index],
            version=3,
            options_kind=kind,
            Padding=_PADDINGS[padding],
            StrideH=strides[0],
            StrideW=strides[1],
            DilationHFactor=dilations[0],
            DilationWFactor=dilations[1],
            FusedActivationFunction=activation,
            **({"DepthMultiplier": multiplier} if multiplier else {}),
        )

    def _activation(self, node: NodeProto, sink: Sink) -> int:
        name = sink.activation()
        if name is None:
            self._graph.refuse(node.name, f"bounds from {sink.low:g} to {sink.high:g} behind it")
        number: int = getattr(tflite.ActivationFunctionType, name)
        return number

    def pool(self, node: NodeProto) -> None:
        size = tuple(attribute(node, "kernel_shape", []))
        if len(size) != 2 or attribute(node, "ceil_mode", 0) or attribute(node, "dilations", [1, 1]) != [1, 1]:
            self._graph.refuse(node.name, "a pool that is not two-dimensional, rounds up or is dilated")
        is_average = node.op_type == "AveragePool"
        whole = self._values.integer(node.input[0])
        is_integer = whole is not None and (not is_average or self._values.will_quantize(node))
        value = whole if whole is not None and is_integer else self._values.real(node.input[0])
        value = self._values.moved(value, CHANNELS_LAST)
        strides = attribute(node, "strides", [1, 1])
        padding, pads = self._padding(node, value, size, strides, [1, 1])
        if pads != _NO_PADS or (padding == "SAME" and is_average and attribute(node, "count_include_pad", 0)):
            self._graph.refuse(node.name, "a pool with edges that TensorFlow Lite does not have")
        shape = self._graph.shape(node.output[0])
        made = self._values.result(
            f"{node.output[0]}" if not is_average else f"{node.output[0]}/mean", shape, CHANNELS_LAST, value.quant
        )
        self._writer.operator(
            "AVERAGE_POOL_2D" if is_average else "MAX_POOL_2D",
            [value.index],
            [made.index],
            version=2,
            options_kind="Pool2DOptions",
            Padding=_PADDINGS[padding],
            StrideH=strides[0],
            StrideW=strides[1],
            FilterHeight=size[0],
            FilterWidth=size[1],
        )
        if is_average:
            self._finish(node, made)

    def _finish(self, node: NodeProto, made: Value) -> None:
        """Give a result that has its input's scale the one that the model wants."""
        sink = self._values.sink(node, may_quantize=made.quant is not None)
        self._activation(node, sink)
        self._values.rename(sink.value, made if sink.quant is None else self._values.fitting(made, sink.quant))

    def mean(self, node: NodeProto) -> None:
        whole = self._values.integer(node.input[0]) if self._values.will_quantize(node) else None
        value = self._values.moved(whole or self._values.real(node.input[0]), CHANNELS_LAST)
        sink = self._values.sink(node, may_quantize=whole is not None)
        made = self._values.result(sink.value, self._graph.shape(node.output[0]), CHANNELS_LAST, sink.quant)
        axes = self._writer.constant(f"{node.output[0]}/axes", np.array([1, 2], np.int32))
        self._writer.operator(
            "MEAN", [value.index, axes], [made.index], version=2, options_kind="ReducerOptions", KeepDims=True
        )

    def _padded(
        self, node: NodeProto, value: Value, size: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
    ) -> tuple[str, Value]:
        """Choose a padding; edges that are neither of TensorFlow Lite's two are put around the input."""
        padding, pads = self._padding(node, value, size, strides, dilations)
        return padding, self._edged(node.output[0], value, pads)

    def _edged(self, name: str, value: Value, pads: Pads) -> Value:
        """Put zeros around a picture."""
        if pads == _NO_PADS:
            return value
        top, left, bottom, right = pads
        edges = np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32)
        wanted = self._writer.constant(f"{name}/edges", edges)
        rows, columns = value.shape[2] + top + bottom, value.shape[3] + left + right
        made = self._values.result(f"{name}/padded", (*value.shape[:2], rows, columns), CHANNELS_LAST, value.quant)
        self._writer.operator("PAD", [value.index, wanted], [made.index], version=2, options_kind="PadOptions")
        return made

    def _padding(
        self, node: NodeProto, value: Value, size: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
    ) -> tuple[str, Pads]:
        """Give SAME or VALID, and the edges that are to be put around the input before: top, left, bottom, right."""
        auto = attribute(node, "auto_pad", b"NOTSET").decode()
        if auto in ("SAME_UPPER", "VALID"):
            return auto.partition("_")[0], _NO_PADS
        if auto != "NOTSET":
            self._graph.refuse(node.name, f"auto_pad {auto}")
        top, left, bottom, right = attribute(node, "pads", list(_NO_PADS))
        if (top, left, bottom, right) == _NO_PADS:
            return "VALID", _NO_PADS
        rows, columns = (
            _same(length, (size[n] - 1) * dilations[n] + 1, strides[n]) for n, length in enumerate(value.shape[2:])
        )
        if (rows, columns) == ((top, bottom), (left, right)):
            return "SAME", _NO_PADS
        return "VALID", (top, left, bottom, right)


def _same(length: int, reach: int, stride: int) -> tuple[int, int]:
    """Give the edges that SAME puts before and behind."""
    total = max((math.ceil(length / stride) - 1) * stride + reach - length, 0)
    return total // 2, total - total // 2


def _by_fours(weights: NDArray[Any]) -> NDArray[Any]:
    """Rearrange weights [outputs, channels, rows, columns] for what _gathered gives."""
    n_outputs, n_channels, *size = weights.shape
    rows, columns = (-(-length // 2) for length in size)
    whole = np.zeros((n_outputs, n_channels, 2 * rows, 2 * columns), weights.dtype)
    whole[:, :, : size[0], : size[1]] = weights
    parts = whole.reshape(n_outputs, n_channels, rows, 2, columns, 2)
    return parts.transpose(0, 3, 5, 1, 2, 4).reshape(n_outputs, 4 * n_channels, rows, columns)
