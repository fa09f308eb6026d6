"""The top-level graph of a checked ONNX file, with what refers to what: what plans are made from."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, Never, TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_rt.errors import ModelFormatError

MAX_SMALL_ELEMENTS = 2**20  # of a constant that is read to decide: scales, zero points, biases
MAX_INPUTS = 9
_ATTRIBUTES = {
    int: AttributeProto.INT,
    float: AttributeProto.FLOAT,
    bytes: AttributeProto.STRING,
    list: AttributeProto.INTS,
}
_Value = TypeVar("_Value", int, float, bytes, list[int])


class OnnxGraph:
    """Nodes in an order in which they can run, and the makers and readers of their values.

    Values that a node's subgraphs take from outside count as read by the node. Raises ModelFormatError where a value
    has two makers or none, and where nodes wait for each other.
    """

    def __init__(self, model: ModelProto, path: Path) -> None:
        self.model, self._path = model, path
        graph = model.graph
        self.initial: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.constants = dict(self.initial)  # and those that Constant nodes make
        self.inputs = tuple(value.name for value in graph.input if value.name not in self.constants)
        self.outputs = tuple(value.name for value in graph.output)
        self.maker: dict[str, int] = {}
        self.nodes: list[NodeProto] = list(graph.node)
        self.reads: list[tuple[str, ...]] = [_reads(node) for node in self.nodes]
        self.readers: defaultdict[str, list[int]] = defaultdict(list)
        known = {*self.constants, *self.inputs}
        for at, node in enumerate(self.nodes):
            for name in filter(None, node.output):
                if name in known or name in self.maker:
                    self._fail(name, "has two makers")
                self.maker[name] = at
            if node.op_type == "Constant" and len(node.output) == 1:
                made = next((each.t for each in node.attribute if each.name == "value"), None)
                if made is not None:
                    self.constants[node.output[0]] = made
        for at, names in enumerate(self.reads):
            for name in names:
                if name not in known and name not in self.maker:
                    self._fail(name, "is read and nobody makes it")
                self.readers[name].append(at)
        for name in self.outputs:
            if name not in known and name not in self.maker:
                self._fail(name, "is an output and nobody makes it")
        self.order = self._order()

    def producer(self, value: str) -> NodeProto | None:
        return None if (at := self.maker.get(value)) is None else self.nodes[at]

    def small(self, name: str) -> NDArray[Any] | None:
        """Read a constant of at most MAX_SMALL_ELEMENTS; None for what is none."""
        tensor = self.constants.get(name)
        if tensor is None or math.prod(tensor.dims) > MAX_SMALL_ELEMENTS:
            return None
        return self.array(name)

    def array(self, name: str) -> NDArray[Any]:
        """Read a constant; INT4 and UINT4 come as INT8 and UINT8. Raises ModelFormatError."""
        try:
            array = numpy_helper.to_array(self.constants[name], base_dir=str(self._path.resolve().parent))
        except Exception as exc:  # the file beside the model may have been changed since it was checked
            raise ModelFormatError(path=str(self._path), field=name[:200], problem=f"cannot be read: {exc}") from exc
        if self.constants[name].data_type in (TensorProto.INT4, TensorProto.UINT4):
            return array.astype(np.int8 if self.constants[name].data_type == TensorProto.INT4 else np.uint8)
        return array

    def label(self, at: int) -> str:
        node = self.nodes[at]
        return (node.name or next(filter(None, node.output), "") or node.op_type)[:120]

    def _order(self) -> tuple[int, ...]:
        """Sort so that makers come before readers, otherwise as in the file."""
        waits = [len({self.maker[name] for name in names if name in self.maker}) for names in self.reads]
        ready = [at for at in range(len(self.nodes) - 1, -1, -1) if not waits[at]]
        order: list[int] = []
        while ready:
            at = ready.pop()
            order.append(at)
            after = {reader for name in self.nodes[at].output if name for reader in self.readers.get(name, ())}
            for reader in sorted(after, reverse=True):
                waits[reader] -= 1
                if not waits[reader]:
                    ready.append(reader)
        if len(order) < len(self.nodes):
            stuck = next(at for at, n in enumerate(waits) if n)
            self._fail(self.label(stuck), "waits for itself")
        return tuple(order)

    def _fail(self, field: str, problem: str) -> Never:
        raise ModelFormatError(path=str(self._path), field=field[:200], problem=problem)


class NotForEngineError(Exception):
    """Why a node stays on the CPU, in words; never leaves the planner."""


def attribute(node: NodeProto, name: str, default: _Value) -> _Value:
    """Give an attribute that has the default's type. Raises NotForEngineError for another type."""
    for each in node.attribute:
        if each.name == name:
            if each.type != _ATTRIBUTES[type(default)]:
                raise NotForEngineError(f"its attribute {name} has another type")
            value: _Value = helper.get_attribute_value(each)
            return value
    return default


def inputs(node: NodeProto) -> list[str]:
    """Name the inputs of a node, "" for those that are not there."""
    return [*node.input, *[""] * MAX_INPUTS]


def tensor_bytes(tensor: TensorProto) -> int:
    return int(math.prod(tensor.dims)) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _reads(node: NodeProto) -> tuple[str, ...]:
    names = dict.fromkeys(filter(None, node.input))
    for each in node.attribute:
        names |= dict.fromkeys(_taken(each))
    return tuple(names)


def _taken(found: AttributeProto) -> list[str]:
    graphs = [*([found.g] if found.HasField("g") else []), *found.graphs]
    return [name for graph in graphs for name in _outer(graph)]


def _outer(graph: GraphProto) -> list[str]:
    """Name what a subgraph takes from outside; the checker has bounded how deep they are nested."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    read = [name for node in graph.node for name in _reads(node)] + [value.name for value in graph.output]
    return [name for name in read if name and name not in own]
