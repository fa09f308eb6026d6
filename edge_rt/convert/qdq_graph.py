"""What a quantised ONNX graph (QDQ) says: who reads what, which constants are integers, and every activation's scale.

uint8 activations are told as int8 ones, 128 less with their zero point, which means the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Never

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from edge_rt.backends.onnx_order import in_order
from edge_rt.convert.tflite_file import Quant
from edge_rt.errors import ModelFormatError

# What gives the integers that it takes, so that their scale is known from either side.
PASSING: Final = frozenset(
    {"Concat", "Flatten", "Identity", "MaxPool", "Reshape", "Resize", "Squeeze", "Transpose", "Unsqueeze"}
)
_SHIFT: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A constant of integers with its scales; zero is what stands for 0, as activations have it and weights do not."""

    array: NDArray[Any]
    scales: NDArray[np.float32]
    axis: int
    zero: int = 0

    def real(self) -> NDArray[np.float32]:
        """Give the numbers that it stands for."""
        scales = self.scales
        if scales.size > 1:
            shape = [1] * self.array.ndim
            shape[self.axis] = -1
            scales = scales.reshape(shape)
        return (self.array.astype(np.float32) - np.float32(self.zero)) * scales


class QdqGraph:
    """A model with static shapes. Every method raises ModelFormatError."""

    def __init__(self, model: ModelProto, *, name: str, rows: int = 1) -> None:
        self.name = name
        self.model = _static(model, rows)
        self.nodes = list(self.model.graph.node)
        self.constants = {each.name: numpy_helper.to_array(each) for each in self.model.graph.initializer}
        self.readers: Mapping[str, list[NodeProto]] = _readers(self.nodes)
        for node in self.nodes:
            if node.op_type == "Constant" and node.attribute:
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        self.outputs = [value.name for value in self.model.graph.output]
        self.inputs = [value.name for value in self.model.graph.input if value.name not in self.constants]
        self._shapes, self._types = dict(_shapes(self.model)), dict(_types(self.model))
        self._quants: dict[str, Quant] = {}
        self._find_quants()

    def refuse(self, field: str, problem: str) -> Never:
        raise ModelFormatError(path=self.name, field=field, problem=problem)

    def shape(self, value: str) -> tuple[int, ...]:
        if value in self.constants:
            return tuple(self.constants[value].shape)
        found = self._shapes.get(value)
        if found is None or any(dim <= 0 for dim in found):
            self.refuse(value, "its shape is not known; TensorFlow Lite for microcontrollers needs static shapes")
        return found

    def is_float(self, value: str) -> bool:
        return self._types.get(value) == onnx.TensorProto.FLOAT

    def quant(self, value: str) -> Quant:
        """Give the scale of an activation of integers, as int8."""
        found = self._quants.get(value)
        if found is None:
            self.refuse(value, "integers without a scale: no DequantizeLinear behind it")
        return found

    def sole_reader(self, value: str) -> NodeProto | None:
        """Give the one node that reads a value, None where others do or it is an output of the model."""
        readers = self.readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self.outputs else None

    def stored(self, value: str, dequantize: NodeProto) -> Stored:
        """Give the constant that a DequantizeLinear reads."""
        array = self.constants[dequantize.input[0]]
        scales = np.atleast_1d(self._constant(dequantize.input[1], "scale")).astype(np.float32)
        zeros = self._zeros(dequantize)
        zeros = zeros.astype(np.int32)
        if array.dtype == np.uint8:
            array, zeros = (array.astype(np.int16) - _SHIFT).astype(np.int8), zeros - _SHIFT
        if array.dtype not in (np.int8, np.int32) or (zeros.any() and zeros.size > 1):
            self.refuse(value, f"{array.dtype} constants with zero points {zeros[:3]}; 8 bit around 0 are needed")
        axis = attribute(dequantize, "axis", 1) % max(array.ndim, 1) if scales.size > 1 else 0
        return Stored(array=array, scales=scales, axis=axis, zero=int(zeros[0]))

    def quant_of(self, node: NodeProto) -> Quant:
        """Give what a QuantizeLinear or DequantizeLinear of an activation says, as int8."""
        scale = self._constant(node.input[1], "scale")
        zero = self._zeros(node)
        if scale.size != 1 or zero.size != 1:
            self.refuse(node.name, "an activation with a scale for each channel")
        if zero.dtype not in (np.uint8, np.int8):
            self.refuse(node.name, f"{zero.dtype} activations; 8 bit are needed")
        shift = _SHIFT if zero.dtype == np.uint8 else 0
        return Quant((float(scale.reshape(())),), (int(zero.reshape(())) - shift,))

    def _zeros(self, node: NodeProto) -> NDArray[Any]:
        if len(node.input) > 2 and node.input[2]:
            return np.atleast_1d(self._constant(node.input[2], "zero point"))
        return np.zeros(1, np.uint8 if node.op_type == "QuantizeLinear" else np.int8)

    def _constant(self, value: str, what: str) -> NDArray[Any]:
        if value not in self.constants:
            self.refuse(value, f"a {what} that is computed")
        return self.constants[value]

    def _find_quants(self) -> None:
        for node in self.nodes:
            if node.op_type == "QuantizeLinear":
                self._quants[node.output[0]] = self.quant_of(node)
            elif node.op_type == "DequantizeLinear" and node.input[0] not in self.constants:
                self._quants.setdefault(node.input[0], self.quant_of(node))
        for nodes in (self.nodes, self.nodes[::-1]):
            for node in nodes:
                if node.op_type in PASSING:
                    self._pass_on(node)

    def _pass_on(self, node: NodeProto) -> None:
        data = node.input if node.op_type == "Concat" else node.input[:1]
        values = [*data, *node.output[:1]]
        if any(self.is_float(value) for value in values):
            return
        known = next((self._quants[value] for value in values if value in self._quants), None)
        if known is not None:
            for value in values:
                self._quants.setdefault(value, known)


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """Give a node's attribute."""
    found = next((each for each in node.attribute if each.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)


def _static(model: ModelProto, rows: int) -> ModelProto:
    """Copy a model with its first dimensions of inputs set, and infer every shape from them."""
    copy = ModelProto()
    copy.CopyFrom(model)
    constants = {each.name for each in copy.graph.initializer}
    for value in copy.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in constants and dims and dims[0].dim_value <= 0:
            dims[0].dim_value = rows
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    del copy.graph.value_info[:]
    nodes = list(in_order(copy.graph.node))
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return onnx.shape_inference.infer_shapes(copy, data_prop=True)


def _readers(nodes: list[NodeProto]) -> dict[str, list[NodeProto]]:
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in nodes:
        for value in dict.fromkeys(node.input):
            readers[value].append(node)
    return readers


def _values(model: ModelProto) -> Iterator[Any]:
    yield from model.graph.value_info
    yield from model.graph.input
    yield from model.graph.output


def _shapes(model: ModelProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    for value in _values(model):
        if value.type.tensor_type.HasField("shape"):
            yield value.name, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _types(model: ModelProto) -> Iterator[tuple[str, int]]:
    for value in _values(model):
        yield value.name, value.type.tensor_type.elem_type
