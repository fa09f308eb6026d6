"""Walks a quantised ONNX graph, node by node, and gives each the layer of the serial NPU that it is.

What lies between a DequantizeLinear and a QuantizeLinear becomes one layer of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_rt.backends.npu.serial_format import Model
from edge_rt.backends.npu.serial_layers import (
    Pending,
    Quantised,
    UnsupportedError,
    Weights,
    Window,
    add_tensor,
    added,
    joined,
    pooled,
    rectified,
    resized,
    weighted,
)

_INT8: dict[int, bool] = {TensorProto.UINT8: False, TensorProto.INT8: True}  # whether signed
_PASSED = {"Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Dropout"}


@dataclass(slots=True)
class Graph:
    """What is known of the graph's tensors while it is walked."""

    model: Model = field(default_factory=Model)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    weights: dict[str, Weights] = field(default_factory=dict)
    quantised: dict[str, Quantised] = field(default_factory=dict)
    dequantised: dict[str, Quantised] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    int4: set[str] = field(default_factory=set)
    int8: dict[str, bool] = field(default_factory=dict)  # types of graph inputs
    float_inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ports: dict[int, tuple[str, bool]] = field(default_factory=dict)  # tensors that are inputs: name, whether float
    reasons: dict[str, str] = field(default_factory=dict)  # by node output


def keep_constant(graph: Graph, name: str, tensor: TensorProto) -> None:
    values = numpy_helper.to_array(tensor)
    if tensor.data_type in {TensorProto.INT4, TensorProto.UINT4}:
        graph.int4.add(name)
        values = values.astype(np.int8)
    graph.constants[name] = values


def take_input(graph: Graph, value: onnx.ValueInfoProto, shapes: Mapping[str, Sequence[int]]) -> None:
    kind = value.type.tensor_type
    shape = tuple(shapes.get(value.name, [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]))
    if kind.elem_type == TensorProto.FLOAT and min(shape, default=-1) > 0:
        graph.float_inputs[value.name] = shape
    elif kind.elem_type in _INT8 and min(shape, default=-1) > 0:
        is_signed = _INT8[kind.elem_type]
        try:
            tensor = _add_input(graph, value.name, shape, 0 if is_signed else -128, is_float=False)
        except UnsupportedError:
            return
        graph.quantised[value.name] = Quantised(tensor, None, 0, is_signed, shape)


def _add_input(graph: Graph, name: str, shape: tuple[int, ...], zero: int, *, is_float: bool) -> int:
    if not 2 <= len(shape) <= 4 or shape[0] != 1:
        raise UnsupportedError(f"an input of shape {list(shape)}; one image is (1, channels, height, width)")
    c, h, w = (*shape[1:], 1, 1)[:3]
    tensor = add_tensor(graph.model, h, w, c, zero)
    graph.model.inputs.append(tensor)
    graph.ports[tensor] = (name, is_float)
    return tensor


class Walker:
    """One node of the graph."""

    def __init__(self, graph: Graph, node: onnx.NodeProto) -> None:
        self._graph, self._node = graph, node
        self._attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}

    def walk(self) -> None:
        graph, node, out = self._graph, self._node, self._node.output[0]
        if node.domain not in {"", "ai.onnx"}:
            raise UnsupportedError("an operator that is not ONNX's")
        if node.op_type == "Constant" and isinstance(self._attributes.get("value"), TensorProto):
            keep_constant(graph, out, self._attributes["value"])
        elif node.op_type in {"Cast", "Identity"} and node.input[0] in graph.constants:
            graph.constants[out] = graph.constants[node.input[0]]
            if node.input[0] in graph.int4:
                graph.int4.add(out)
        elif node.op_type == "DequantizeLinear":
            self._dequantise(out)
        elif node.op_type == "QuantizeLinear":
            self._quantise(out)
        elif node.input[0] in graph.quantised:
            self._on_integers(out)
        else:
            maker: Callable[[], Pending] | None = getattr(self, f"_{node.op_type.lower()}", None)
            if node.op_type in _PASSED:
                self._pass(out)
            elif maker is None:
                raise UnsupportedError("no layer of the device")
            else:
                graph.pending[out] = maker()

    # Scales

    def _scale(self) -> tuple[NDArray[Any], NDArray[Any], bool]:
        scale = self._graph.constants.get(self._node.input[1])
        if scale is None:
            raise UnsupportedError("its scale is no constant")
        zero_name = self._node.input[2] if len(self._node.input) > 2 else ""
        zero = self._graph.constants.get(zero_name, np.zeros(scale.shape, np.uint8))
        if zero.dtype not in {np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)}:
            raise UnsupportedError(f"{zero.dtype} values")
        return scale.astype(np.float64), zero, zero.dtype == np.int8

    def _dequantise(self, out: str) -> None:
        name, graph = self._node.input[0], self._graph
        scale, zero, _ = self._scale()
        if name in graph.constants:
            if np.any(zero):
                raise UnsupportedError("weights with a zero point")
            bits = 4 if name in graph.int4 else 8
            axis = int(self._attributes.get("axis", 1))
            if self._attributes.get("block_size", 0):
                raise UnsupportedError("weights with a scale for each block")
            graph.weights[out] = Weights(graph.constants[name], np.atleast_1d(scale), axis, bits)
            return
        value = graph.quantised.get(name)
        if value is None:
            raise UnsupportedError("what it takes is not on the device")
        if scale.size != 1:
            raise UnsupportedError("an activation with more than one scale")
        found = (float(scale.reshape(-1)[0]), int(zero.reshape(-1)[0]))
        if value.scale is None:
            value = Quantised(value.tensor, *found, value.is_signed, value.shape)
            graph.quantised[name] = value
            tensor = graph.model.tensors[value.tensor]
            if tensor.zero != value.device_zero:
                if any(value.tensor in (*layer.inputs, layer.output) for layer in graph.model.layers):
                    raise UnsupportedError("a tensor that is read with two zero points")
                graph.model.tensors[value.tensor] = replace(tensor, zero=value.device_zero)
        elif (value.scale, value.zero) != found:
            value = Quantised(value.tensor, *found, value.is_signed, value.shape)
            tensor = graph.model.tensors[value.tensor]
            if tensor.zero != value.device_zero:
                raise UnsupportedError("a tensor that is read with two zero points")
        graph.dequantised[out] = value

    def _quantise(self, out: str) -> None:
        name, graph = self._node.input[0], self._graph
        scales, zeros, is_signed = self._scale()
        if scales.size != 1 or zeros.dtype == np.int32:
            raise UnsupportedError("an activation that is no INT8 with one scale")
        scale, zero = float(scales.reshape(-1)[0]), int(zeros.reshape(-1)[0])
        if name in graph.float_inputs:
            shape = graph.float_inputs[name]
            tensor = _add_input(graph, name, shape, zero if is_signed else zero - 128, is_float=True)
            graph.quantised[out] = Quantised(tensor, scale, zero, is_signed, shape)
        elif name in graph.pending:
            graph.quantised[out] = graph.pending[name].finish(graph.model, scale, zero, is_signed=is_signed)
        elif name in graph.dequantised:
            value = graph.dequantised[name]
            if (value.scale, value.zero, value.is_signed) == (scale, zero, is_signed):
                graph.quantised[out] = value
            else:
                pending = rectified(value)
                graph.quantised[out] = pending.finish(graph.model, scale, zero, is_signed=is_signed)
        else:
            raise UnsupportedError("what it quantises is not on the device")

    # Operators

    def _on_integers(self, out: str) -> None:
        """Take an operator on quantised values, which keep their scale: what joins or passes them."""
        graph, node = self._graph, self._node
        values = [graph.quantised[name] for name in node.input if name in graph.quantised]
        first = values[0]
        if node.op_type in _PASSED:
            self._pass(out)
        elif node.op_type == "Concat" and len(values) == len(node.input) and int(self._attributes["axis"]) == 1:
            if len({(value.scale, value.zero, value.is_signed) for value in values}) != 1:
                raise UnsupportedError("it joins tensors of two scales")
            pending = joined(graph.model, values)
            tensor = pending.make(graph.model, first.scale or 1.0, first.device_zero, -128, 127)
            graph.quantised[out] = Quantised(tensor, first.scale, first.zero, first.is_signed, pending.shape)
        else:
            raise UnsupportedError("no layer of the device on integers")

    def _pass(self, out: str) -> None:
        """Give the same values another shape."""
        name, graph, op = self._node.input[0], self._graph, self._node.op_type
        tables: tuple[dict[str, Any], ...] = (graph.quantised, graph.dequantised, graph.pending)
        for known in tables:
            if (found := known.get(name)) is not None:
                known[out] = replace(found, shape=self._new_shape(op, found.shape))
                return
        raise UnsupportedError("what it takes is not on the device")

    def _new_shape(self, op: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if op in {"Identity", "Dropout"}:
            return shape
        n_values = int(np.prod(shape))
        if op == "Flatten":
            if int(self._attributes.get("axis", 1)) != 1:
                raise UnsupportedError("it flattens along another axis")
            return (1, n_values)
        wanted = self._graph.constants.get(self._node.input[1]) if len(self._node.input) > 1 else None
        if op == "Reshape" and wanted is not None:
            sides = [int(side) if side else shape[at] for at, side in enumerate(wanted)]
            new = tuple(-(n_values // int(np.prod(sides))) if side == -1 else side for side in sides)
            if new[0] == 1 and int(np.prod(new)) == n_values:
                return new
        elif op == "Squeeze" and wanted is not None and 0 not in wanted:
            axes = {int(axis) % len(shape) for axis in wanted}
            return tuple(side for at, side in enumerate(shape) if at not in axes)
        raise UnsupportedError("a shape that is not known here")

    def _value(self, at: int = 0) -> Quantised:
        value = self._graph.dequantised.get(self._node.input[at])
        if value is None:
            raise UnsupportedError("what it takes is float, and nothing quantises it")
        return value

    def _image(self, at: int = 0) -> Quantised:
        value = self._value(at)
        tensor = self._graph.model.tensors[value.tensor]
        if value.shape != (1, tensor.c, tensor.h, tensor.w):
            raise UnsupportedError(f"its input has the shape {list(value.shape)}")
        return value

    def _window(self, h: int, w: int, kernel: Sequence[int] | None = None) -> Window:
        sides = [int(side) for side in self._attributes.get("kernel_shape", kernel or ())]
        stride = [int(step) for step in self._attributes.get("strides", (1, 1))]
        pad = [int(n) for n in self._attributes.get("pads", (0, 0, 0, 0))]
        auto = self._attributes.get("auto_pad", b"NOTSET")
        if len(sides) != 2 or len(stride) != 2 or len(pad) != 4 or min(pad) < 0:
            raise UnsupportedError("not in two dimensions")
        if int(self._attributes.get("ceil_mode", 0)):
            raise UnsupportedError("ceil_mode")
        if auto in {b"SAME_UPPER", b"SAME_LOWER"}:
            for at, n in enumerate((h, w)):
                total = max(0, (-(-n // stride[at]) - 1) * stride[at] + sides[at] - n)
                first = total // 2 if auto == b"SAME_UPPER" else total - total // 2
                pad[at], pad[at + 2] = first, total - first
        return Window((sides[0], sides[1]), (stride[0], stride[1]), (pad[0], pad[1], pad[2], pad[3]))

    def _bias(self, at: int, n_out: int) -> NDArray[np.float64]:
        if len(self._node.input) <= at or not self._node.input[at]:
            return np.zeros(n_out)
        name = self._node.input[at]
        if name in self._graph.weights:
            found = self._graph.weights[name]
            return np.broadcast_to(found.values.astype(np.float64) * found.scale, n_out)
        if name not in self._graph.constants:
            raise UnsupportedError("its bias is no constant")
        return np.broadcast_to(self._graph.constants[name].astype(np.float64).reshape(-1), n_out)

    def _constant(self, axis: int) -> Weights:
        found = self._graph.weights.get(self._node.input[1])
        if found is None:
            raise UnsupportedError("its weights are not quantised")
        if found.values.dtype.kind not in "iu" or np.abs(found.values.astype(np.int64)).max(initial=0) > 128:
            raise UnsupportedError("its weights have more than 8 bits")
        if found.scale.size > 1 and found.axis % found.values.ndim != axis:
            raise UnsupportedError("its weights have a scale for each input")
        return found

    def _conv(self) -> Pending:
        value = self._image()
        found = self._constant(0)
        values = found.values.astype(np.int8)
        if values.ndim != 4:
            raise UnsupportedError("not in two dimensions")
        tensor = self._graph.model.tensors[value.tensor]
        n_out, n_in, *kernel = values.shape
        group = int(self._attributes.get("group", 1))
        values, kernel = _dilated(values, [int(n) for n in self._attributes.get("dilations", (1, 1))])
        if "kernel_shape" in self._attributes:
            self._attributes["kernel_shape"] = kernel
        window = self._window(tensor.h, tensor.w, kernel)
        scale = np.broadcast_to(found.scale, n_out)
        bias = self._bias(2, n_out)
        is_depthwise = group > 1 and group == tensor.c == n_out and n_in == 1
        if group > 1 and not is_depthwise:
            values = _ungrouped(values, group)
        order = values[:, 0].transpose(1, 2, 0) if is_depthwise else values.transpose(0, 2, 3, 1)
        if not is_depthwise and order.shape[3] != tensor.c:
            raise UnsupportedError("its weights are for another number of channels")
        return weighted(self._graph.model, value, order, scale, found.bits, bias, window, is_depthwise=is_depthwise)

    def _gemm(self) -> Pending:
        attributes = self._attributes
        if attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1 or attributes.get("transA", 0):
            raise UnsupportedError("alpha, beta or a transposed input")
        return self._product(is_transposed=bool(attributes.get("transB", 0)))

    def _matmul(self) -> Pending:
        return self._product(is_transposed=False)

    def _product(self, *, is_transposed: bool) -> Pending:
        value = self._value()
        found = self._constant(0 if is_transposed else 1)
        values = found.values.astype(np.int8) if is_transposed else found.values.astype(np.int8).T
        tensor = self._graph.model.tensors[value.tensor]
        if values.ndim != 2 or value.shape != (1, tensor.n_bytes) or values.shape[1] != tensor.n_bytes:
            raise UnsupportedError("a product of other than one row")
        n_out = values.shape[0]
        order = values.reshape(n_out, tensor.c, tensor.h, tensor.w).transpose(0, 2, 3, 1)
        scale, bias = np.broadcast_to(found.scale, n_out), self._bias(2, n_out)
        window = Window((tensor.h, tensor.w))
        shape = (1, n_out)
        return weighted(
            self._graph.model, value, order, scale, found.bits, bias, window, is_depthwise=False, shape=shape
        )

    def _maxpool(self) -> Pending:
        value = self._image()
        tensor = self._graph.model.tensors[value.tensor]
        if any(int(n) != 1 for n in self._attributes.get("dilations", (1, 1))):
            raise UnsupportedError("a dilated pool")
        return pooled(self._graph.model, value, self._window(tensor.h, tensor.w), is_max=True, shape=None)

    def _averagepool(self) -> Pending:
        value = self._image()
        tensor = self._graph.model.tensors[value.tensor]
        window = self._window(tensor.h, tensor.w)
        if int(self._attributes.get("count_include_pad", 0)) and any(window.pad):
            raise UnsupportedError("a mean that counts what lies outside")
        return pooled(self._graph.model, value, window, is_max=False, shape=None)

    def _globalaveragepool(self) -> Pending:
        value = self._image()
        tensor = self._graph.model.tensors[value.tensor]
        return pooled(self._graph.model, value, Window((tensor.h, tensor.w)), is_max=False, shape=None)

    def _reducemean(self) -> Pending:
        value = self._image()
        axes = self._attributes.get("axes")
        if axes is None and len(self._node.input) > 1:
            axes = self._graph.constants.get(self._node.input[1])
        if axes is None or sorted(int(axis) % 4 for axis in axes) != [2, 3]:
            raise UnsupportedError("a mean over other axes than the image's")
        tensor = self._graph.model.tensors[value.tensor]
        shape = None if int(self._attributes.get("keepdims", 1)) else (1, tensor.c)
        return pooled(self._graph.model, value, Window((tensor.h, tensor.w)), is_max=False, shape=shape)

    def _add(self) -> Pending:
        return added(self._graph.model, self._value(0), self._value(1))

    def _concat(self) -> Pending:
        if int(self._attributes["axis"]) not in {1, -3}:
            raise UnsupportedError("it joins along another axis than the channels'")
        return joined(self._graph.model, [self._image(at) for at in range(len(self._node.input))])

    def _resize(self) -> Pending:
        value, attributes = self._image(), self._attributes
        mode = attributes.get("mode", b"nearest")
        transform = attributes.get("coordinate_transformation_mode", b"half_pixel")
        scales = self._graph.constants.get(self._node.input[2]) if len(self._node.input) > 2 else None
        is_plain = transform == b"asymmetric" and attributes.get("nearest_mode") == b"floor"
        if mode != b"nearest" or not is_plain or scales is None or scales.shape != (4,):
            raise UnsupportedError("a resize that does not repeat whole values")
        if list(scales[:2]) != [1, 1] or any(scale < 1 or scale != int(scale) for scale in scales[2:]):
            raise UnsupportedError("a resize by other than whole factors")
        return resized(self._graph.model, value, int(scales[2]), int(scales[3]))

    def _relu(self) -> Pending:
        return self._clipped(0.0, float("inf"))

    def _clip(self) -> Pending:
        limits = []
        for at, name, default in ((1, "min", -np.inf), (2, "max", np.inf)):
            given = self._node.input[at] if len(self._node.input) > at else ""
            limit = self._graph.constants.get(given) if given else self._attributes.get(name, default)
            if limit is None:
                raise UnsupportedError("its limits are no constants")
            limits.append(float(np.reshape(limit, -1)[0]))
        return self._clipped(*limits)

    def _clipped(self, low: float, high: float) -> Pending:
        pending = self._graph.pending.get(self._node.input[0])
        if pending is None:
            pending = rectified(self._value())
        return pending.clipped(low, high)


def _dilated(values: NDArray[np.int8], by: list[int]) -> tuple[NDArray[np.int8], list[int]]:
    """Put zeros between a kernel's weights."""
    n_out, n_in, h, w = values.shape
    kernel = [(h - 1) * by[0] + 1, (w - 1) * by[1] + 1]
    if by == [1, 1]:
        return values, kernel
    spread = np.zeros((n_out, n_in, *kernel), np.int8)
    spread[:, :, :: by[0], :: by[1]] = values
    return spread, kernel


def _ungrouped(values: NDArray[np.int8], group: int) -> NDArray[np.int8]:
    """Give a grouped convolution's weights as those of a whole one, with zeros."""
    n_out, n_in, h, w = values.shape
    if group < 1 or n_out % group:
        raise UnsupportedError("groups that do not divide its channels")
    whole = np.zeros((n_out, n_in * group, h, w), np.int8)
    for out in range(n_out):
        first = out // (n_out // group) * n_in
        whole[out, first : first + n_in] = values[out]
    return whole
