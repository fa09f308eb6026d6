"""Give the float model that a QDQ one stands for: weights as the integers say, activations not rounded.

A quantised activation also cuts off what is outside its range; where that range begins at zero the model was trained or
made with a Relu there, so a Relu takes its place. Where ranges end above is not kept.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization.onnx_model import ONNXModel

from edge_rt.errors import ModelFormatError

_JOINING = "Concat"
_LEAST: dict[int, int] = {
    TensorProto.UINT8: 0,
    TensorProto.INT8: -128,
    TensorProto.UINT16: 0,
    TensorProto.INT16: -32768,
}


def is_quantized(model: ModelProto) -> bool:
    """Say whether a model has quantised activations between its nodes."""
    return any(node.op_type == "QuantizeLinear" for node in model.graph.node)


def unquantize(model: ModelProto, *, name: str = "model") -> ModelProto:
    """Give a QDQ model in float; what else is in it stays, a graph input's own DequantizeLinear too.

    Raises ModelFormatError for a scale or a zero point that is no constant, and for integers that no
    DequantizeLinear takes.
    """
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in constants:
            # How tools/pcb stores 4-bit weights: onnxruntime unpacks them when it loads the file.
            constants[node.output[0]] = constants[node.input[0]].astype(np.int8)
    quantized = {node.output[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
    renamed: dict[str, str] = {}
    rectified: dict[str, NodeProto] = {}
    nodes: list[NodeProto] = []
    new: dict[str, NDArray[np.float32]] = {}
    for node in graph.node:
        if node.output[0] in constants or node.op_type == "QuantizeLinear":
            continue
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            new[node.output[0]] = _dequantized(node, constants, name)
        elif node.op_type == "DequantizeLinear" and node.input[0] in quantized:
            source = quantized[node.input[0]]
            value = source.input[0]
            if _begins_at_zero(source, constants, types, name):
                relu = f"{value}/relu"
                rectified[relu] = helper.make_node("Relu", [value], [relu], relu)
                value = relu
            renamed[node.output[0]] = value
        else:
            nodes.append(node)
    # A value may have been quantised twice: what comes of its DequantizeLinear is then renamed again.
    nodes = [_renamed(node, renamed) for node in (*rectified.values(), *nodes)]
    _finish(model, nodes, new, renamed, name)
    ONNXModel(model).topological_sort()
    onnx.checker.check_model(model, full_check=True)
    return model


def _renamed(node: NodeProto, renamed: dict[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    for index, value in enumerate(copy.input):
        while value in renamed:
            value = renamed[value]  # noqa: PLW2901
        copy.input[index] = value
    return copy


def _constant(node: NodeProto, index: int, constants: dict[str, NDArray[np.generic]], name: str) -> NDArray[np.generic]:
    if (value := constants.get(node.input[index])) is None:
        raise ModelFormatError(path=name, field=node.input[index], problem="is no constant, and belongs to a scale")
    return value


def _dequantized(node: NodeProto, constants: dict[str, NDArray[np.generic]], name: str) -> NDArray[np.float32]:
    values = _constant(node, 0, constants, name).astype(np.float64)
    scale = _constant(node, 1, constants, name).astype(np.float64)
    zero = _constant(node, 2, constants, name).astype(np.float64) if len(node.input) > 2 else np.zeros_like(scale)
    if scale.ndim == 1 and scale.size > 1:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % values.ndim
        shape = [1] * values.ndim
        shape[axis] = scale.size
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return ((values - zero) * scale).astype(np.float32)


def _begins_at_zero(
    node: NodeProto, constants: dict[str, NDArray[np.generic]], types: dict[str, int], name: str
) -> bool:
    zero = _constant(node, 2, constants, name)
    return zero.size == 1 and int(zero.reshape(-1)[0]) == _LEAST.get(types[node.input[2]])


def _finish(
    model: ModelProto, nodes: list[NodeProto], new: dict[str, NDArray[np.float32]], renamed: dict[str, str], name: str
) -> None:
    graph = model.graph
    ends = [output.name for output in graph.output if output.name in renamed]
    nodes = [*nodes, *(_renamed(helper.make_node("Identity", [end], [end], end), renamed) for end in ends)]
    used = {value for node in nodes for value in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    known = {tensor.name for tensor in kept} | set(new) | {value.name for value in graph.input}
    known |= {output for node in nodes for output in node.output}
    if lost := sorted(used - known - {""}):
        raise ModelFormatError(path=name, field=lost[0], problem="is quantised, and no DequantizeLinear takes it")
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
    graph.initializer.extend(
        numpy_helper.from_array(value, constant) for constant, value in sorted(new.items()) if constant in used
    )


def dequantize_inputs_first(model: ModelProto) -> ModelProto:
    """Give the model with a DequantizeLinear of an input before the Concat of raw bytes, not behind.

    Joining raw bytes is nothing that an NPU's compiler takes for part of a quantised graph.
    """
    moved = ModelProto()
    moved.CopyFrom(model)
    while _lift(moved):
        pass
    return moved


def _lift(model: ModelProto) -> bool:
    nodes = list(model.graph.node)
    producer = {output: node for node in nodes for output in node.output}
    for node in nodes:
        source = producer.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if source is None or source.op_type != _JOINING:
            continue
        if sum(source.output[0] in other.input for other in nodes) > 1:
            continue
        before = []
        for index, value in enumerate(source.input):
            lifted = f"{value}/dequantized"
            before.append(helper.make_node("DequantizeLinear", [value, *node.input[1:]], [lifted], lifted))
            source.input[index] = lifted
        source.output[0] = node.output[0]
        place = next(index for index, other in enumerate(nodes) if other is source)
        rebuilt = [*nodes[:place], *before, *(other for other in nodes[place:] if other is not node)]
        del model.graph.node[:], model.graph.value_info[:]
        model.graph.node.extend(rebuilt)
        return True
    return False
