"""Quantise an ONNX model to 8 bit: QuantizeLinear and DequantizeLinear around what can be computed in integers.

onnxruntime's quantiser places the nodes; the numbers are chosen here. Activations are uint8 with the ranges given.
Weights are int8 with a scale for each output channel, large enough for two things that the quantiser leaves to luck:

- On x86 without VNNI the products of two neighbours are added in 16 bits that saturate. 255 × 127 × 2 does not fit, so
  the usual remedy is 7-bit weights everywhere. Only neighbours that are large together need it, so only their channels
  get a larger scale. The results then are the same on every CPU.
- A bias becomes an int32 in units of both scales; a channel that is all but dead has a scale that is too small for it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import onnx
from msgspec import Meta
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular

# Operators that stay integers between their inputs and outputs in onnxruntime and on most NPUs.
OPERATORS: tuple[str, ...] = (
    "Add",
    "AveragePool",
    "Clip",
    "Concat",
    "Conv",
    "Flatten",
    "Gemm",
    "GlobalAveragePool",
    "MatMul",
)
OPERATORS += ("MaxPool", "Relu", "Reshape", "Resize", "Squeeze", "Transpose", "Unsqueeze")
WEIGHTED = ("Conv", "Gemm", "MatMul")
_MAX_RANGES_BYTES = 16 * 2**20
# After rounding a pair's sum may be one more: 255 × 128 fits into 16 bits.
_MAX_PAIR = 127
_MAX_BIAS = 2**30
_NO_BOUNDS = ("no_low", "no_high")

Range = tuple[float, float]
_Size = Annotated[int, Meta(ge=1, le=2**20)]
_Text = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**24)], ...], Meta(min_length=1, max_length=4096)]


class RangesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Each activation's least and greatest value, by its name in the float model; note says how they were got.

    For the recipes of NPUs (npu.py) also:
    shapes       of the inputs, where the model leaves them open
    float_nodes  names of nodes that stay float
    int8_nodes   names of nodes whose weights have 8 bit where the others have 4
    texts        tokens that 4-bit weights are chosen for (gptq.py)
    """

    note: str
    ranges: Annotated[dict[str, Range], Meta(min_length=1, max_length=100_000)]
    shapes: Annotated[dict[str, tuple[_Size, ...]], Meta(max_length=64)] = {}
    float_nodes: Annotated[tuple[str, ...], Meta(max_length=100_000)] = ()
    int8_nodes: Annotated[tuple[str, ...], Meta(max_length=100_000)] = ()
    texts: Annotated[tuple[_Text, ...], Meta(max_length=10_000)] = ()


def read_ranges(path: Path) -> RangesFile:
    """Read a file of ranges. Raises ModelFormatError."""
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_RANGES_BYTES + 1)
        if len(raw) > _MAX_RANGES_BYTES:
            raise ModelFormatError(path=path.name, field="file", problem=f"longer than {_MAX_RANGES_BYTES} bytes")
        found = msgspec.json.decode(raw, type=RangesFile)
    except OSError as exc:
        raise ModelFormatError(path=path.name, field="file", problem=f"cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFormatError(path=path.name, field="JSON", problem=str(exc)) from exc
    for name, (low, high) in found.ranges.items():
        if not -1e30 < low <= high < 1e30:
            raise ModelFormatError(path=path.name, field=name, problem=f"{low} to {high} is no range")
    return found


def convert_int8(src: Path, dst: Path, beside: Path | None) -> None:
    """Write src in 8 bit; beside holds the ranges of its activations. Raises ModelFormatError."""
    if beside is None:
        raise ModelFormatError(path=dst.name, field="derive_with", problem="the recipe needs a file of ranges")
    model = quantize_int8(onnx.load(src, load_external_data=False), read_ranges(beside).ranges, name=src.name)
    dst.write_bytes(model.SerializeToString(deterministic=True))


def quantize_int8(
    model: ModelProto, ranges: Mapping[str, Range], *, float_nodes: Collection[str] = (), name: str = "model"
) -> ModelProto:
    """Give the model in 8 bit.

    ranges       of all activations between integer nodes
    float_nodes  names of nodes that stay as they are

    Raises ModelFormatError for an activation without a range, and for a node without a name among unique ones.
    """
    model = onnx.shape_inference.infer_shapes(model)
    names = [node.name for node in model.graph.node]
    if "" in names or len(set(names)) != len(names):
        raise ModelFormatError(path=name, field="graph.node", problem="nodes need names of their own; run name_nodes")
    nodes = [n for n in model.graph.node if n.op_type in OPERATORS and n.name not in float_nodes]
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    floats = _float_values(model)
    for node in nodes:
        for value in (*node.input, *node.output):
            if value in floats and value not in constants and value not in ranges:
                raise ModelFormatError(path=name, field=value, problem="has no range; calibrate the model again")
    known = {
        value: TensorData(lowest=np.float32(low), highest=np.float32(high)) for value, (low, high) in ranges.items()
    }
    quantizer = QDQQuantizer(
        model,
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=TensorsData(CalibrationMethod.MinMax, known),
        nodes_to_quantize=[node.name for node in nodes],
        nodes_to_exclude=[],
        op_types_to_quantize=list(OPERATORS),
        extra_options={
            "TensorQuantOverrides": _weight_scales(nodes, constants, ranges),
            "ForceQuantizeNoInputCheck": True,
        },
    )
    quantized = quantized_by(quantizer)
    _keep_float(quantized)
    return quantized


def quantized_by(quantizer: Any) -> ModelProto:
    """Let onnxruntime's quantizer do its work, and give the model."""
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # it advises to prepare the model, which has been done
    try:
        quantizer.quantize_model()
    finally:
        logging.root.setLevel(level)
    quantized: ModelProto = quantizer.model.model
    quantized.producer_name = "edge_rt"
    return quantized


def _keep_float(model: ModelProto) -> None:
    """Keep onnxruntime from quantising the layers that are to stay float.

    It does so by itself when it loads a model (WeightBiasQuantization): Conv and Gemm right behind a DequantizeLinear
    get int8 weights with one scale for all channels. EfficientNet loses more by one such layer than by all its layers
    in 8 bit with a scale for each channel. A Clip that cuts nothing keeps the two apart.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    dequantized = {output for node in model.graph.node if node.op_type == "DequantizeLinear" for output in node.output}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        is_float_layer = node.op_type in WEIGHTED and node.input[1] in constants
        if is_float_layer and node.input[0] in dequantized:
            apart = f"{node.name}/float_input"
            nodes.append(helper.make_node("Clip", [node.input[0], *_NO_BOUNDS], [apart], apart))
            node.input[0] = apart
        nodes.append(node)
    if len(nodes) > len(model.graph.node):
        bound = np.float32(np.finfo(np.float32).max)
        model.graph.initializer.extend(
            numpy_helper.from_array(np.array(value), name)
            for name, value in zip(_NO_BOUNDS, (-bound, bound), strict=True)
        )
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def activation_scale(low: float, high: float) -> float:
    """Give the step of a uint8 activation; zero is always among its values."""
    return (max(high, 0.0) - min(low, 0.0)) / 255


def _float_values(model: ModelProto) -> set[str]:
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    return {value.name for value in values if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}


def _weight_scales(
    nodes: Collection[NodeProto], constants: Mapping[str, onnx.TensorProto], ranges: Mapping[str, Range]
) -> dict[str, list[dict[str, Any]]]:
    """Choose the scales of all weights that are constants, as the quantiser takes them."""
    overrides: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        if node.op_type not in WEIGHTED or node.input[1] not in constants:
            continue
        weights = numpy_helper.to_array(constants[node.input[1]])
        rows, axis = weight_rows(node, weights)
        scales = _scales(rows, is_depthwise=is_depthwise(node, weights))
        if len(node.input) > 2 and node.input[2] in constants and node.input[0] in ranges:
            bias = np.abs(numpy_helper.to_array(constants[node.input[2]])).reshape(-1)
            step = activation_scale(*ranges[node.input[0]])
            if step > 0 and bias.size == scales.size:
                scales = np.maximum(scales, bias / (step * _MAX_BIAS))
        overrides[node.input[1]] = [
            {
                "axis": axis,
                "quant_type": QuantType.QInt8,
                "scale": np.array(scale, np.float32),
                "zero_point": np.array(0, np.int8),
            }
            for scale in scales
        ]
    return overrides


def weight_rows(node: NodeProto, weights: NDArray[Any]) -> tuple[NDArray[np.float64], int]:
    """Give the weights as [outputs, inputs] in the order they are multiplied in, and the axis of the outputs."""
    if node.op_type == "Conv":
        return np.moveaxis(weights, 1, -1).reshape(len(weights), -1).astype(np.float64), 0
    transposed = node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
    axis = 0 if transposed else weights.ndim - 1
    return np.moveaxis(weights, axis, 0).reshape(weights.shape[axis], -1).astype(np.float64), axis


def is_depthwise(node: NodeProto, weights: NDArray[Any]) -> bool:
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    return node.op_type == "Conv" and groups > 1 and weights.shape[1] == 1


def _scales(rows: NDArray[np.float64], *, is_depthwise: bool) -> NDArray[np.float64]:
    scales = np.abs(rows).max(axis=1) / 127
    if not is_depthwise:  # whose products are added in 32 bits
        padded = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))
        for sign in (1, -1):
            pairs = np.maximum(sign * padded, 0).reshape(len(rows), -1, 2).sum(axis=2)
            scales = np.maximum(scales, pairs.max(axis=1) / _MAX_PAIR)
    return np.asarray(np.maximum(scales, np.finfo(np.float32).tiny))
