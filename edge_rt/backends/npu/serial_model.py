"""Compiles quantised ONNX graphs (QDQ: INT8 activations, INT8 or INT4 weights) for serial NPUs.

The graph is walked from its inputs. What lies between a DequantizeLinear and a QuantizeLinear becomes one layer of
integers. What gives float values that nothing quantises, or is no layer of the device, is left for the CPU with all
that depends on it: the tail, an ONNX graph of its own, which begins with quantised tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_rt.backends.npu.serial_format import Model, pack
from edge_rt.backends.npu.serial_graph import Graph, Walker, keep_constant, take_input
from edge_rt.backends.npu.serial_layers import Quantised, UnsupportedError
from edge_rt.backends.onnx_order import in_order


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of the device's graph.

    name     of the ONNX tensor; shape that ONNX gives it
    is_float its values are floats, which the host quantises with scale and zero; else integers as they are
    """

    name: str
    h: int
    w: int
    c: int
    shape: tuple[int, ...]
    scale: float
    zero: int
    is_signed: bool
    is_float: bool

    @property
    def n_bytes(self) -> int:
        return self.h * self.w * self.c

    def to_device(self, values: NDArray[Any]) -> bytes:
        """Give the device's bytes for a feed."""
        if self.is_float:
            low, high = (-128, 127) if self.is_signed else (0, 255)
            steps = np.rint(values.astype(np.float32) / np.float32(self.scale)) + self.zero
            values = np.clip(steps, low, high).astype(np.int8 if self.is_signed else np.uint8)
        image = values.reshape(self.c, self.h, self.w).transpose(1, 2, 0)
        image = np.ascontiguousarray(image)
        return (image if self.is_signed else image ^ np.uint8(0x80)).tobytes()

    def from_device(self, data: bytes) -> NDArray[Any]:
        """Give the values that the device's bytes stand for."""
        image = np.frombuffer(data, np.int8).reshape(self.h, self.w, self.c).transpose(2, 0, 1)
        values: NDArray[Any] = np.ascontiguousarray(image)
        if not self.is_signed:
            values = values.view(np.uint8) ^ np.uint8(0x80)
        values = values.reshape(self.shape)
        if not self.is_float:
            return values
        return (values.astype(np.float32) - np.float32(self.zero)) * np.float32(self.scale)


@dataclass(frozen=True, slots=True)
class Program:
    """A model compiled: the device's file and its ports; the tail for onnxruntime, None where nothing is left for it.

    tail_kinds, tail_reason  of the nodes left for the CPU, and why the first of them is
    """

    model: Model
    file: bytes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tail: bytes | None
    kinds: tuple[tuple[str, int], ...]
    tail_kinds: tuple[tuple[str, int], ...]
    tail_reason: str


def compile_model(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]] | None = None) -> Program:
    """Compile a graph; shapes: in place of those that its inputs have.

    Raises ValueError where nothing of it is a layer of the device, or nodes wait for one another.
    """
    graph = Graph()
    for constant in model.graph.initializer:
        keep_constant(graph, constant.name, constant)
    for value in model.graph.input:
        if value.name not in graph.constants:
            take_input(graph, value, shapes or {})
    for node in in_order(model.graph.node):
        try:
            Walker(graph, node).walk()
        except UnsupportedError as exc:
            graph.reasons[node.output[0]] = f"{node.op_type} {node.output[0]}: {exc}"
    return _link(graph, model)


def _link(graph: Graph, model: onnx.ModelProto) -> Program:
    """Find what of the graph is left for the CPU, and what it takes from the device."""
    if not graph.model.layers:
        reason = next(iter(graph.reasons.values()), "it has no node")
        raise ValueError(f"nothing of it is a layer of the device: {reason}")
    makers = {out: node for node in model.graph.node for out in node.output}
    outputs: list[Port] = []
    tail_nodes: dict[int, onnx.NodeProto] = {}
    cuts: dict[str, Quantised] = {}
    direct: set[str] = set()
    waiting = []
    for value in model.graph.output:
        if value.name in graph.dequantised or value.name in graph.quantised:
            found = graph.dequantised.get(value.name) or graph.quantised[value.name]
            outputs.append(_port(graph, value.name, found, is_float=value.name in graph.dequantised))
            direct.add(value.name)
        else:
            waiting.append(value.name)
    n_direct = len(outputs)
    while waiting:
        name = waiting.pop()
        node = makers.get(name)
        if name in graph.quantised and node is not None:
            cuts[name] = graph.quantised[name]
        elif node is not None and id(node) not in tail_nodes:
            tail_nodes[id(node)] = node
            waiting += [given for given in node.input if given]
    outputs += [_port(graph, name, value, is_float=False) for name, value in cuts.items()]
    graph.model.outputs = [_tensor_of(graph, port.name) for port in outputs]
    inputs = tuple(
        _port(graph, *_of_input(graph, tensor), is_float=graph.ports[tensor][1]) for tensor in graph.model.inputs
    )
    counted = [node for node in tail_nodes.values() if not _is_folded(graph, node)]
    reason = next((graph.reasons[node.output[0]] for node in model.graph.node if node.output[0] in graph.reasons), "")
    tail = _tail(model, tail_nodes, outputs[n_direct:], direct) if tail_nodes else None
    if counted and not reason:
        name = counted[-1].output[0]
        reason = f"{counted[-1].op_type} {name}: it gives float values, and nothing quantises them"
    left = Counter(node.op_type for node in counted)
    return Program(
        model=graph.model,
        file=pack(graph.model),
        inputs=inputs,
        outputs=tuple(outputs),
        tail=tail,
        kinds=tuple((Counter(node.op_type for node in model.graph.node) - left).most_common()),
        tail_kinds=tuple(left.most_common()),
        tail_reason=reason,
    )


def _is_folded(graph: Graph, node: onnx.NodeProto) -> bool:
    return node.output[0] in graph.constants or node.output[0] in graph.weights


def _tensor_of(graph: Graph, name: str) -> int:
    return (graph.dequantised.get(name) or graph.quantised[name]).tensor


def _of_input(graph: Graph, tensor: int) -> tuple[str, Quantised]:
    name, is_float = graph.ports[tensor]
    values = graph.quantised.items()
    found = next((value for key, value in values if value.tensor == tensor and (is_float or key == name)), None)
    assert found is not None, "each input was quantised or is an integer"
    return name, found


def _port(graph: Graph, name: str, value: Quantised, *, is_float: bool) -> Port:
    tensor = graph.model.tensors[value.tensor]
    scale = 1.0 if value.scale is None else value.scale
    return Port(name, tensor.h, tensor.w, tensor.c, value.shape, scale, value.zero, value.is_signed, is_float)


def _tail(model: onnx.ModelProto, nodes: Mapping[int, onnx.NodeProto], cuts: Sequence[Port], direct: set[str]) -> bytes:
    """Give the nodes left for the CPU as a graph of their own; its inputs are cuts and inputs of the whole graph."""
    kept = [node for node in model.graph.node if id(node) in nodes]
    used = {name for node in kept for name in node.input}
    given = [
        helper.make_tensor_value_info(port.name, TensorProto.INT8 if port.is_signed else TensorProto.UINT8, port.shape)
        for port in cuts
    ]
    given += [value for value in model.graph.input if value.name in used]
    graph = helper.make_graph(
        kept,
        "tail",
        given,
        [_unshaped(value) for value in model.graph.output if value.name not in direct],
        initializer=[tensor for tensor in model.graph.initializer if tensor.name in used],
    )
    tail = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    data: bytes = tail.SerializeToString()
    return data


def _unshaped(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Give an output without its shape, which follows from the cuts'."""
    bare = onnx.ValueInfoProto()
    bare.name = value.name
    bare.type.tensor_type.elem_type = value.type.tensor_type.elem_type
    return bare
