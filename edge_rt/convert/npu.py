"""Quantise a whole ONNX model as NPUs compute: integers from input to output, shapes that are known.

Beside qdq.py, which quantises what onnxruntime computes in integers on a CPU, all operators get quantised inputs and
outputs here, since a float node in between costs an NPU a conversion or the whole rest of the graph. Weights are INT8
or INT4 with a scale for each output channel, activations UINT8 or UINT16: W8A8, W8A16 and W4A16. What an NPU asks for
beyond that was tried on Qualcomm's compiler: a normalisation's gain is UINT8, a 16-bit Sigmoid has the scale 1/65536.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, version_converter
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

from edge_rt.convert.qdq import (
    WEIGHTED,
    Range,
    RangesFile,
    is_depthwise,
    quantized_by,
    read_ranges,
    weight_rows,
)
from edge_rt.convert.rounding import int4_scales, keep_sums
from edge_rt.convert.static_shapes import make_static
from edge_rt.convert.unquantized import dequantize_inputs_first, is_quantized, unquantize
from edge_rt.errors import ModelFormatError

_OPSET_8BIT = 17
_OPSET = 21  # the first with INT4 and 16-bit activations
_IR_VERSION = 10
_MAX_BIAS = {8: 2**27, 16: 2**30}  # by bits of activations; of larger ones Qualcomm's HTP loses the last bits
_WIDER = 257  # steps of 16 bit in one of 8, of the same range
_TINY = float(np.finfo(np.float32).tiny)
_ACTIVATIONS = {8: QuantType.QUInt8, 16: QuantType.QUInt16}
_WEIGHTS = {4: QuantType.QInt4, 8: QuantType.QInt8}
# Outputs whose range the operator itself gives; 16 bit only, as Qualcomm's compiler takes it.
_FIXED = {"Sigmoid": (1 / 65536, 0), "Tanh": (1 / 32768, 32768)}


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits of weights and activations."""

    weight_bits: Literal[4, 8]
    activation_bits: Literal[8, 16]


W8A8, W8A16, W4A16 = Precision(8, 8), Precision(8, 16), Precision(4, 16)


def convert_npu(precision: Precision, src: Path, dst: Path, beside: Path | None) -> None:
    """Write src, float or QDQ, in a precision; beside holds ranges, shapes and what stays in more bits.

    Raises ModelFormatError.
    """
    if beside is None:
        raise ModelFormatError(path=dst.name, field="derive_with", problem="the recipe needs a file of ranges")
    told = read_ranges(beside)
    model = prepare(onnx.load(src, load_external_data=False), told, name=src.name)
    made = quantize(
        model, told.ranges, precision, float_nodes=told.float_nodes, int8_nodes=told.int8_nodes, name=src.name
    )
    dst.write_bytes(made.SerializeToString(deterministic=True))


convert_w8a8, convert_w8a16, convert_w4a16 = (partial(convert_npu, precision) for precision in (W8A8, W8A16, W4A16))


def prepare(model: ModelProto, told: RangesFile, *, name: str = "model") -> ModelProto:
    """Give the float model that ranges are measured on: without QDQ, of known shapes. Raises ModelFormatError."""
    if is_quantized(model):
        model = unquantize(model, name=name)
    model = dequantize_inputs_first(model)
    return make_static(model, told.shapes, name=name) if told.shapes else model


def quantize(
    model: ModelProto,
    ranges: Mapping[str, Range],
    precision: Precision,
    *,
    float_nodes: Collection[str] = (),
    int8_nodes: Collection[str] = (),
    scales: Mapping[str, NDArray[np.float64]] | None = None,
    name: str = "model",
) -> ModelProto:
    """Give the float model in QDQ form.

    ranges       of all float activations
    float_nodes  names of nodes that stay as they are
    int8_nodes   names of nodes whose weights have 8 bit where the others have 4
    scales       of weights that are on a grid already, by their node's name: one for each output

    Raises ModelFormatError for an activation without a range, and for nodes without names of their own.
    """
    model = onnx.shape_inference.infer_shapes(_at_opset(model, precision))
    names = [node.name for node in model.graph.node]
    if "" in names or len(set(names)) != len(names):
        raise ModelFormatError(path=name, field="graph.node", problem="nodes need names of their own")
    if lost := sorted({*float_nodes, *int8_nodes} - set(names)):
        raise ModelFormatError(path=name, field=lost[0], problem="no node is named so")
    # The pixels' own DequantizeLinear is there already.
    nodes = [n for n in model.graph.node if n.name not in float_nodes and n.op_type != "DequantizeLinear"]
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    _check_ranges(model, nodes, constants, ranges, name)
    chosen = _overrides(nodes, constants, ranges, precision, frozenset(int8_nodes), scales or {})
    _keep_filter_sums(model, nodes, chosen)
    quantized = _quantized(model, nodes, ranges, precision, chosen)
    return _widen_inputs(quantized) if precision.activation_bits == 16 else quantized


def _keep_filter_sums(model: ModelProto, nodes: list[NodeProto], chosen: Mapping[str, list[dict[str, Any]]]) -> None:
    """Put depthwise weights on their grids, so that the sum of each filter stays what it is.

    A filter of nine weights sees nearly one value nine times, mostly of one sign: what rounding adds to the sum of its
    weights is added to all its outputs.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in nodes:
        weights = numpy_helper.to_array(tensors[node.input[1]]) if node.op_type == "Conv" else None
        if weights is None or not is_depthwise(node, weights):
            continue
        scales = np.array([entry["scale"] for entry in chosen[node.input[1]]], np.float64)
        least, most = (-127, 127) if chosen[node.input[1]][0]["quant_type"] == QuantType.QInt8 else (-8, 7)
        rounded = keep_sums(weights.reshape(len(weights), -1) / scales[:, None], least, most) * scales[:, None]
        tensors[node.input[1]].CopyFrom(
            numpy_helper.from_array(rounded.reshape(weights.shape).astype(np.float32), node.input[1])
        )


def _quantized(
    model: ModelProto,
    nodes: list[NodeProto],
    ranges: Mapping[str, Range],
    precision: Precision,
    overrides: dict[str, list[dict[str, Any]]],
) -> ModelProto:
    quantizer = QDQQuantizer(
        model,
        per_channel=True,
        reduce_range=False,
        weight_qType=_WEIGHTS[precision.weight_bits],
        activation_qType=_ACTIVATIONS[precision.activation_bits],
        tensors_range=TensorsData(
            CalibrationMethod.MinMax,
            {
                value: TensorData(lowest=np.float32(low), highest=np.float32(high))
                for value, (low, high) in ranges.items()
            },
        ),
        nodes_to_quantize=[node.name for node in nodes],
        nodes_to_exclude=[],
        op_types_to_quantize=sorted({node.op_type for node in nodes}),
        extra_options={
            "TensorQuantOverrides": overrides,
            "ForceQuantizeNoInputCheck": True,
            # A Relu behind a range that begins at zero does nothing more, and is left out.
            "QDQKeepRemovableActivations": False,
        },
    )
    return quantized_by(quantizer)


def _widen_inputs(model: ModelProto) -> ModelProto:
    """Convert a graph's own uint8 inputs to uint16, step for step, before layers: none takes a mixture of both."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    moved = {n.output[0] for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in inputs}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type != "DequantizeLinear" or node.input[0] not in inputs | moved:
            continue
        value = node.output[0]
        readers = [n for n in model.graph.node if n.op_type in WEIGHTED and n.input[0] == value]
        zero = constants[node.input[2]] if len(node.input) > 2 else None
        if not readers or zero is None or zero.data_type != TensorProto.UINT8:
            continue
        scale = numpy_helper.to_array(constants[node.input[1]]).reshape(())
        by = [f"{value}/wide/scale", f"{value}/wide/zero"]
        model.graph.initializer.extend(
            [
                numpy_helper.from_array(np.array(scale / _WIDER, np.float32), by[0]),
                numpy_helper.from_array(np.array(int(numpy_helper.to_array(zero).item()) * _WIDER, np.uint16), by[1]),
            ]
        )
        nodes.append(helper.make_node("QuantizeLinear", [value, *by], [f"{value}/wide"], f"{value}/widen"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{value}/wide", *by], [f"{value}/float"], f"{value}/float"))
        for reader in readers:
            reader.input[0] = f"{value}/float"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _at_opset(model: ModelProto, precision: Precision) -> ModelProto:
    version = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    least = _OPSET_8BIT if precision == W8A8 else _OPSET
    if version >= least:
        copy = ModelProto()
        copy.CopyFrom(model)
        return copy
    converted: ModelProto = version_converter.convert_version(model, least)
    converted.ir_version = max(converted.ir_version, _IR_VERSION if least == _OPSET else converted.ir_version)
    return converted


def _check_ranges(
    model: ModelProto,
    nodes: list[NodeProto],
    constants: Mapping[str, TensorProto],
    ranges: Mapping[str, Range],
    name: str,
) -> None:
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    floats = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    for node in nodes:
        for value in (*node.input, *node.output):
            if value in floats and value not in constants and value not in ranges:
                raise ModelFormatError(path=name, field=value, problem="has no range; calibrate the model again")


def _overrides(
    nodes: list[NodeProto],
    constants: Mapping[str, TensorProto],
    ranges: Mapping[str, Range],
    precision: Precision,
    int8_nodes: frozenset[str],
    known: Mapping[str, NDArray[np.float64]],
) -> dict[str, list[dict[str, Any]]]:
    """Choose scales where the quantiser's own are not good, or not what NPUs take."""
    found: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        if node.op_type in WEIGHTED and node.input[1] in constants:
            rows, axis = weight_rows(node, numpy_helper.to_array(constants[node.input[1]]))
            bits = 8 if node.name in int8_nodes else precision.weight_bits
            if (scales := known.get(node.name)) is None:
                scales = int4_scales(rows) if bits == 4 else np.abs(rows).max(axis=1) / 127
            scales = np.maximum(scales, _least_scales(node, constants, ranges, precision, len(rows)))
            found[node.input[1]] = [
                {
                    "axis": axis,
                    "quant_type": _WEIGHTS[bits],
                    "scale": np.array(s, np.float32),
                    "zero_point": np.array(0, np.int8),
                }
                for s in scales
            ]
        elif node.op_type == "LayerNormalization" and node.input[1] in constants:
            found[node.input[1]] = [{"quant_type": QuantType.QUInt8}]
        elif node.op_type in _FIXED and precision.activation_bits == 16:
            scale, zero = _FIXED[node.op_type]
            found[node.output[0]] = [
                {
                    "quant_type": QuantType.QUInt16,
                    "scale": np.array(scale, np.float32),
                    "zero_point": np.array(zero, np.uint16),
                }
            ]
    return found


def _least_scales(
    node: NodeProto,
    constants: Mapping[str, TensorProto],
    ranges: Mapping[str, Range],
    precision: Precision,
    n_outputs: int,
) -> NDArray[np.float64]:
    """Give the scales below which a bias would not fit into 32 bits, in units of both scales."""
    least = np.full(n_outputs, _TINY)
    if len(node.input) > 2 and node.input[2] in constants and node.input[0] in ranges:
        bias = np.abs(numpy_helper.to_array(constants[node.input[2]])).reshape(-1).astype(np.float64)
        low, high = ranges[node.input[0]]
        step = (max(high, 0.0) - min(low, 0.0)) / (2**precision.activation_bits - 1)
        if step > 0 and math.isfinite(step) and bias.size == n_outputs:
            least = np.maximum(least, bias / (step * _MAX_BIAS[precision.activation_bits]))
    return least
