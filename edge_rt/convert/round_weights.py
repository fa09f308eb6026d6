"""Round a float ONNX model's weights to values that 4 bit hold, so that its layers' outputs change least.

Compilers for NPUs take float models and round weights to nearest, each output channel (or group of its inputs) by its
largest one. In 4 bit that is the end of many models. Here the weights are put on that very grid first, one after the
other in order of their inputs' energy, and those still to come make up for the error (GPTQ); the bias makes up for the
mean of what is left. A compiler that then scales by the largest weight finds every weight on its grid, and keeps it.

The model stays one of floats, with the same nodes. Layers are Conv of one group, Gemm and MatMul with constant weights;
depthwise convolutions have few weights, which compilers leave in 16 bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from edge_rt.backends.onnx_cpu import first_line
from edge_rt.convert import rounding
from edge_rt.convert.qdq import weight_rows
from edge_rt.errors import ModelFormatError

_LIMIT = 7  # of 4 bit
_PULL = 0.1  # of the mean energy, towards the weights as they were
_MAX_ROWS = 512  # of a layer's input that one sample gives

Feed = Mapping[str, NDArray[Any]]
Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """A node with constant weights: values of weights are [outputs, inputs] in the order they are multiplied in."""

    node: NodeProto
    weights: str
    rows: Rows
    axis: int
    shape: tuple[int, ...]
    bias: str

    def as_stored(self, rows: Rows) -> NDArray[np.float32]:
        """Undo what weight_rows did."""
        if self.node.op_type == "Conv":
            moved = (self.shape[0], *self.shape[2:], self.shape[1])
            return np.moveaxis(rows.reshape(moved), -1, 1).astype(np.float32)
        rest = tuple(n for axis, n in enumerate(self.shape) if axis != self.axis)
        return np.moveaxis(rows.reshape(self.shape[self.axis], *rest), 0, self.axis).astype(np.float32)


def round_model(
    model: ModelProto,
    feeds: Sequence[Feed],
    *,
    but: frozenset[str] = frozenset(),
    group: int = 0,
    name: str = "model",
) -> ModelProto:
    """Give the model with its layers' weights rounded, one after the other, each fed by those rounded before.

    but    names of nodes that stay as they are
    group  inputs of an output that share a scale; 0: all of them
    name   of the model, for errors

    Raises ModelFormatError for a model that onnxruntime does not take.
    """
    try:
        _open(model)
    except Exception as exc:  # onnxruntime's own, which share no base
        raise ModelFormatError(path=name, field="graph", problem=first_line(exc)) from exc
    rounded = ModelProto()
    rounded.CopyFrom(model)
    layers = [layer for layer in find_layers(model) if layer.node.name not in but]
    means = _output_means(layers, model, feeds)
    for layer in layers:
        energy, mean = _observe(layer, model, rounded, feeds)
        rows = round_rows(made_up(layer.rows, energy), energy, group)
        _put(rounded, layer.weights, layer.as_stored(rows))
        if layer.bias:
            shift = means[layer.node.name] - mean + (layer.rows - rows) @ energy.mean
            _put(rounded, layer.bias, (_constant(rounded, layer.bias) + shift).astype(np.float32))
    return rounded


def find_layers(model: ModelProto) -> list[Layer]:
    """List the layers that can be rounded, in the order they are computed in. A weight that two share is left out."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    uses = [name for node in model.graph.node for name in node.input]
    layers: list[Layer] = []
    for node in model.graph.node:
        if node.op_type not in {"Conv", "Gemm", "MatMul"} or len(node.input) < 2 or node.input[1] not in constants:
            continue
        weights = numpy_helper.to_array(constants[node.input[1]])
        attributes = _attributes(node)
        plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0 and not attributes.get("transA", 0)
        is_whole = attributes.get("group", 1) == 1 and weights.ndim == (4 if node.op_type == "Conv" else 2)
        if not plain or not is_whole or weights.dtype != np.float32 or uses.count(node.input[1]) > 1:
            continue
        bias = node.input[2] if len(node.input) > 2 else ""
        can_shift = bias in constants and uses.count(bias) == 1 and constants[bias].dims == [_n_outputs(node, weights)]
        rows, axis = weight_rows(node, weights)
        layers.append(Layer(node, node.input[1], rows, axis, weights.shape, bias if can_shift else ""))
    return layers


@dataclass(frozen=True, slots=True)
class Energy:
    """What a layer's input is: the means of its values' products with each other, and of themselves.

    crossed  of the float model's values with these
    """

    products: Rows
    mean: NDArray[np.float64]
    crossed: Rows


def made_up(rows: Rows, energy: Energy) -> Rows:
    """Give weights that make of the rounded model's values, as far as they can, what the float model computes. Pure."""
    pull = _PULL * float(np.mean(np.diag(energy.products))) * np.eye(len(energy.products))
    solved = np.linalg.solve(energy.products + pull, (rows @ (energy.crossed + pull)).T)
    return np.asarray(solved.T)


def round_rows(rows: Rows, energy: Energy, group: int = 0) -> Rows:
    """Round each row to multiples of a scale, from -7 to 7, so that the products with the inputs change least.

    group  inputs that share a scale; 0: all of a row
    The largest of a group is ±7: a compiler that scales by it finds the same grid. Pure.
    """
    products = rounding.damped(energy.products)
    scales, largest = np.empty_like(rows), np.zeros(rows.shape, bool)
    size = group or rows.shape[1]
    for begin in range(0, rows.shape[1], size):
        part = slice(begin, begin + size)
        weights = np.diag(products)[part]
        scales[:, part] = rounding.choose_scales(rows[:, part], weights, -_LIMIT, _LIMIT)[:, None]
        largest[np.arange(len(rows)), begin + np.abs(rows[:, part]).argmax(axis=1)] = True
    return rounding.round_rows(rows, products, scales, -_LIMIT, _LIMIT, fixed=largest & (rows != 0))


def _output_means(
    layers: Sequence[Layer], model: ModelProto, feeds: Sequence[Feed]
) -> Mapping[str, NDArray[np.float64]]:
    names = [layer.node.output[0] for layer in layers]
    session = _session(model, names)
    means = {layer.node.name: np.zeros(len(layer.rows)) for layer in layers}
    for feed in feeds:
        for layer, output in zip(layers, session.run(names, dict(feed)), strict=True):
            means[layer.node.name] += _channel_means(layer, output) / len(feeds)
    return means


def _observe(
    layer: Layer, model: ModelProto, rounded: ModelProto, feeds: Sequence[Feed]
) -> tuple[Energy, NDArray[np.float64]]:
    """Give the energy of a layer's input in the rounded model, and the means of its outputs."""
    names = [layer.node.input[0], layer.node.output[0]]
    now, was = _session(rounded, names), _session(model, names[:1])
    n_in = layer.rows.shape[1]
    products, crossed, sums, n_rows = np.zeros((n_in, n_in)), np.zeros((n_in, n_in)), np.zeros(n_in), 0
    mean = np.zeros(len(layer.rows))
    rng = np.random.default_rng(0)
    for feed in feeds:
        given, output = _values(now, names, feed)
        (before,) = _values(was, names[:1], feed)
        rows, before = input_rows(layer, given), input_rows(layer, before)
        if len(rows) > _MAX_ROWS:
            some = rng.choice(len(rows), _MAX_ROWS, replace=False)
            rows, before = rows[some], before[some]
        wide = rows.astype(np.float64)
        products += wide.T @ wide
        crossed += before.astype(np.float64).T @ wide
        sums += wide.sum(axis=0)
        n_rows += len(rows)
        mean += _channel_means(layer, output) / len(feeds)
    return Energy(products / n_rows, sums / n_rows, crossed / n_rows), mean


def input_rows(layer: Layer, given: NDArray[Any]) -> NDArray[Any]:
    """Give the rows that a layer's weights are multiplied with: of a convolution's input, what lies under it."""
    if layer.node.op_type != "Conv":
        return given.reshape(-1, given.shape[-1])
    attributes = _attributes(layer.node)
    kernel = layer.shape[2:]
    strides, dilations = (attributes.get(name, [1, 1]) for name in ("strides", "dilations"))
    reach = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    padded = np.pad(given, ((0, 0), (0, 0), *_edges(attributes, given.shape[2:], reach, strides)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    return np.moveaxis(windows, 1, -1).reshape(-1, layer.rows.shape[1])


def _edges(
    attributes: Mapping[str, Any], sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """Give the zeros that a convolution puts before and behind its input, by dimension."""
    auto = attributes.get("auto_pad", b"NOTSET")
    if auto not in {b"SAME_UPPER", b"SAME_LOWER"}:  # NOTSET, or VALID, which has no pads
        top, left, bottom, right = attributes.get("pads", [0, 0, 0, 0])
        return [(top, bottom), (left, right)]
    edges = []
    for size, length, stride in zip(sizes, reach, strides, strict=True):
        missing = max((-(-size // stride) - 1) * stride + length - size, 0)
        less, more = missing // 2, missing - missing // 2
        edges.append((less, more) if auto == b"SAME_UPPER" else (more, less))
    return edges


def _channel_means(layer: Layer, output: NDArray[Any]) -> NDArray[np.float64]:
    axes = (0, 2, 3) if layer.node.op_type == "Conv" else tuple(range(output.ndim - 1))
    return np.asarray(output.mean(axis=axes, dtype=np.float64))


def _session(model: ModelProto, names: Sequence[str]) -> Any:
    seen = ModelProto()
    seen.CopyFrom(model)
    del seen.graph.output[:]
    for name in names:
        if name not in {value.name for value in model.graph.input}:
            seen.graph.output.append(helper.make_empty_tensor_value_info(name))
    return _open(seen)


def _open(model: ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _values(session: Any, names: Sequence[str], feed: Feed) -> list[NDArray[Any]]:
    """Compute what is named; an input of the model is what was fed."""
    computed = [name for name in names if name not in feed]
    found = dict(zip(computed, session.run(computed, dict(feed)), strict=True)) if computed else {}
    return [found[name] if name in found else feed[name] for name in names]


def _attributes(node: NodeProto) -> Mapping[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _n_outputs(node: NodeProto, weights: NDArray[Any]) -> int:
    return int(weight_rows(node, weights)[0].shape[0])


def _constant(model: ModelProto, name: str) -> NDArray[Any]:
    return numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == name))


def _put(model: ModelProto, name: str, value: NDArray[np.float32]) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), name))
