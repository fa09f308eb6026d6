"""Tensors on their way from an ONNX graph into a TensorFlow Lite one: which number stands for which value, and how.

ONNX keeps channels in front of rows and columns, TensorFlow Lite behind them. So every value says which of its ONNX
axes is where; most are never moved, for all operators on pictures want channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_rt.convert.qdq_graph import QdqGraph, Stored
from edge_rt.convert.tflite_file import Quant, TfliteWriter

CHANNELS_LAST: Final = (0, 2, 3, 1)
_WITHOUT_BOUND: Final = 3e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the file; shape has ONNX's axes, and order says which of them is first, second, … in the file."""

    index: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    quant: Quant | None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.order)

    @property
    def type_name(self) -> str:
        return "float32" if self.quant is None else "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where a node's result goes: the value that it becomes, and what of the nodes behind it is a part of it.

    quant  None: it stays float
    """

    value: str
    quant: Quant | None
    low: float
    high: float

    def activation(self) -> str | None:
        """Name the activation that keeps to the bounds, None if TensorFlow Lite has none."""
        if self.quant is not None:
            scale, zero = self.quant.scales[0], self.quant.zero_points[0]
            half = scale / 2
            if self.low <= (-128 - zero) * scale + half and self.high >= (127 - zero) * scale - half:
                return "NONE"  # no integer is beyond them
        bounds = (self.low, self.high)
        infinite = float("inf")
        names = {(-infinite, infinite): "NONE", (0, infinite): "RELU", (0, 6): "RELU6", (-1, 1): "RELU_N1_TO_1"}
        return names.get(bounds)


class Values:
    """The values so far, by their ONNX names; what a DequantizeLinear gives is known by the integers that it takes."""

    def __init__(self, graph: QdqGraph, writer: TfliteWriter) -> None:
        self._graph, self._writer = graph, writer
        self._values: dict[str, Value] = {}
        self._dequantized: dict[str, str] = {}
        self._moved: dict[tuple[int, tuple[int, ...]], Value] = {}
        self._floats: dict[str, Value] = {}
        self.done: set[int] = set()  # ids of nodes that became a part of another
        self._makers = {output: node for node in graph.nodes for output in node.output}

    # what there is

    def alias(self, name: str, of: str) -> None:
        """Let a float value be known by the integers that it was made of."""
        self._dequantized[name] = of

    def rename(self, name: str, value: Value) -> None:
        self._values[name] = value

    def integer(self, name: str) -> Value | None:
        """Give the integers that a value is, or was made of; None for floats."""
        found = self._values.get(self._dequantized.get(name, name))
        return found if found is not None and found.quant is not None else None

    def any(self, name: str) -> Value:
        """Give a value as it is, integers if it was made of them."""
        return self.integer(name) or self.real(name)

    def real(self, name: str) -> Value:
        """Give a value as floats."""
        if name in self._values and self._values[name].quant is None:
            return self._values[name]
        if name not in self._floats:
            self._floats[name] = self._as_float(name)
        return self._floats[name]

    def _as_float(self, name: str) -> Value:
        whole = self.integer(name)
        if whole is None:
            array = self.constant(name)
            if array is None:
                self._graph.refuse(name, "is computed by nothing that is known here")
            index = self._writer.constant(name, array.astype(np.float32))
            return Value(index=index, shape=array.shape, order=tuple(range(array.ndim)), quant=None)
        value = self._new(f"{name}/float", whole, None)
        self._writer.operator("DEQUANTIZE", [whole.index], [value.index], version=2)
        return value

    def constant(self, name: str) -> NDArray[Any] | None:
        """Give a constant as floats, None if it is computed."""
        stored = self.stored(name)
        return self._graph.constants.get(name) if stored is None else stored.real()

    def stored(self, name: str) -> Stored | None:
        """Give a constant of integers that a DequantizeLinear reads, None if it is none."""
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] not in self._graph.constants:
            return None
        return self._graph.stored(name, maker)

    # what is made

    def given(self, name: str) -> Value:
        """Declare an input of the model: pictures with channels last, and integers where the model wants them."""
        quant = self._input_quant(name)
        shape = self._graph.shape(name)
        readers = self._graph.readers.get(name, [])
        is_picture = len(shape) == 4 and not any(node.op_type == "Transpose" for node in readers)
        order = CHANNELS_LAST if is_picture else tuple(range(len(shape)))
        value = self._declare(name, shape, order, quant)
        self._values[name] = value
        if quant is not None:
            for node in readers:
                if node.op_type == "QuantizeLinear":  # it has nothing left to do
                    self.done.add(id(node))
                    self._values[node.output[0]] = value
        return value

    def _input_quant(self, name: str) -> Quant | None:
        if not self._graph.is_float(name):
            return self._graph.quant(name)
        readers = self._graph.readers.get(name, [])
        quants = {self._graph.quant_of(node) for node in readers if node.op_type == "QuantizeLinear"}
        if len(quants) != 1 or any(node.op_type != "QuantizeLinear" for node in readers):
            return None
        return quants.pop()

    def result(self, name: str, shape: Sequence[int], order: Sequence[int], quant: Quant | None) -> Value:
        """Make a value that an operator gives."""
        value = self._declare(name, tuple(shape), tuple(order), quant)
        self._values[name] = value
        return value

    def _declare(self, name: str, shape: tuple[int, ...], order: tuple[int, ...], quant: Quant | None) -> Value:
        stored = [shape[axis] for axis in order]
        index = self._writer.activation(name, stored, "float32" if quant is None else "int8", quant)
        return Value(index=index, shape=shape, order=order, quant=quant)

    def _new(self, name: str, like: Value, quant: Quant | None) -> Value:
        return self._declare(name, like.shape, like.order, quant)

    def sink(self, node: NodeProto, *, may_quantize: bool) -> Sink:
        """Follow a node's result through the activation and the QuantizeLinear that only it goes to."""
        value, low, high = node.output[0], -float("inf"), float("inf")
        reader = self._graph.sole_reader(value)
        while reader is not None and reader.op_type in ("Relu", "Clip"):
            below, above = self.bounds(reader)
            low, high, value = max(low, below), min(high, above), reader.output[0]
            self.done.add(id(reader))
            reader = self._graph.sole_reader(value)
        if may_quantize and reader is not None and reader.op_type == "QuantizeLinear":
            self.done.add(id(reader))
            return Sink(value=reader.output[0], quant=self._graph.quant_of(reader), low=low, high=high)
        return Sink(value=value, quant=None, low=low, high=high)

    def will_quantize(self, node: NodeProto) -> bool:
        """Say whether a node's result becomes integers and nothing else."""
        reader = self._graph.sole_reader(node.output[0])
        while reader is not None and reader.op_type in ("Relu", "Clip"):
            reader = self._graph.sole_reader(reader.output[0])
        return reader is not None and reader.op_type == "QuantizeLinear"

    def bounds(self, node: NodeProto) -> tuple[float, float]:
        """Give what a Relu or Clip keeps to; bounds at the end of the floats are none."""
        if node.op_type == "Relu":
            return 0.0, float("inf")
        ends = []
        for n, default in ((1, -float("inf")), (2, float("inf"))):
            name = node.input[n] if len(node.input) > n else ""
            if name and name not in self._graph.constants:
                self._graph.refuse(node.name, "a Clip with a bound that is computed")
            bound = float(self._graph.constants[name]) if name else default
            ends.append(default if abs(bound) > _WITHOUT_BOUND else bound)
        return ends[0], ends[1]

    # moving

    def moved(self, value: Value, order: Sequence[int]) -> Value:
        """Give a value with its axes in another order."""
        order = tuple(order)
        if value.order == order:
            return value
        key = (value.index, order)
        if key not in self._moved:
            target = replace(value, order=order)
            made = self._declare(f"moved/{value.index}", value.shape, order, value.quant)
            if _without_ones(value) == _without_ones(target):
                self.reshape(value, made)
            else:
                turn = np.array([value.order.index(axis) for axis in order], np.int32)
                wanted = self._writer.constant(f"moved/{value.index}/axes", turn)
                self._writer.operator(
                    "TRANSPOSE", [value.index, wanted], [made.index], version=2, options_kind="TransposeOptions"
                )
            self._moved[key] = made
        return self._moved[key]

    def reshape(self, value: Value, made: Value) -> None:
        wanted = self._writer.constant(f"shape/{made.index}", np.array(made.stored_shape, np.int32))
        self._writer.operator("RESHAPE", [value.index, wanted], [made.index], options_kind="ReshapeOptions")

    def fitting(self, value: Value, quant: Quant) -> Value:
        """Give integers with another scale."""
        if value.quant == quant:
            return value
        made = self._new(f"scaled/{value.index}", value, quant)
        self._writer.operator("QUANTIZE", [value.index], [made.index], version=2, options_kind="QuantizeOptions")
        return made


def _without_ones(value: Value) -> list[int]:
    return [axis for axis in value.order if value.shape[axis] != 1]
