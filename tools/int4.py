"""Weights of 4 bit in an ONNX model, activations staying float.

A matrix becomes onnxruntime's MatMulNBits: blocks of inputs with a scale and a zero point each, accuracy_level 4, so
that the products are computed in 8 bit. There is no such operator for a convolution: its weights become INT4 behind a
DequantizeLinear, which makes the file small, and which onnxruntime undoes when it loads the model: it then computes in
float, in as much memory and time as before.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, version_converter

from edge_rt.convert.qdq import weight_rows

BLOCK_SIZE = 32
_MICROSOFT = "com.microsoft"
_INT4_OPSET = 21  # the first with INT4
_SHRINK = np.linspace(1.0, 0.6, 17)  # of the range, tried for the least squared error
_ACCURACY_LEVEL = 4


def quantize_int4(model: ModelProto, nodes: Collection[str], *, block_size: int = BLOCK_SIZE) -> ModelProto:
    """Give the model with the named Conv, Gemm and MatMul nodes' constant weights in 4 bit."""
    model = _at_least(model, _INT4_OPSET) if any(_is_conv(model, name) for name in nodes) else _copy(model)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    rewritten: list[NodeProto] = []
    for node in model.graph.node:
        if node.name not in nodes:
            rewritten.append(node)
        elif node.op_type == "Conv":
            rewritten += _conv(node, constants, model)
        else:
            rewritten += _matrix(node, constants, model, block_size)
    del model.graph.node[:]
    model.graph.node.extend(rewritten)
    if not any(opset.domain == _MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_MICROSOFT, 1))
    drop_unused(model)
    return model


def takes_int4(node: NodeProto, weights: NDArray[Any]) -> bool:
    """Say whether a node's weights can be in 4 bit: a Gemm's only if it does nothing but multiply and add."""
    if node.op_type == "Conv":
        return True
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0 and not attributes.get("transA", 0)
    return weights.ndim == 2 and plain


def drop_unused(model: ModelProto) -> None:
    """Remove the constants that no node takes any more."""
    used = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def _at_least(model: ModelProto, opset: int) -> ModelProto:
    default = next(entry for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if default.version >= opset:
        return _copy(model)
    converted: ModelProto = version_converter.convert_version(model, opset)
    converted.ir_version = max(converted.ir_version, 10)
    return converted


def _is_conv(model: ModelProto, name: str) -> bool:
    return any(node.name == name and node.op_type == "Conv" for node in model.graph.node)


def _conv(node: NodeProto, constants: dict[str, TensorProto], model: ModelProto) -> list[NodeProto]:
    """One scale for each output channel, no zero point."""
    weights = numpy_helper.to_array(constants[node.input[1]])
    rows = weights.reshape(len(weights), -1).astype(np.float64)
    scales = _symmetric_scales(rows)
    values = np.clip(np.rint(rows / scales[:, None]), -8, 7).astype(np.int8).reshape(weights.shape)
    name = node.input[1]
    model.graph.initializer.append(_int4(f"{name}/int4", values))
    model.graph.initializer.append(numpy_helper.from_array(scales.astype(np.float32), f"{name}/int4_scale"))
    dequantize = helper.make_node(
        "DequantizeLinear", [f"{name}/int4", f"{name}/int4_scale"], [f"{name}/float"], f"{node.name}/dequantize", axis=0
    )
    conv = NodeProto()
    conv.CopyFrom(node)
    conv.input[1] = f"{name}/float"
    return [dequantize, conv]


def _int4(name: str, values: NDArray[np.int8]) -> TensorProto:
    flat = (values.reshape(-1) & 0x0F).astype(np.uint8)
    flat = np.pad(flat, (0, flat.size % 2))
    return TensorProto(
        name=name, data_type=TensorProto.INT4, dims=values.shape, raw_data=(flat[0::2] | flat[1::2] << 4).tobytes()
    )


def _symmetric_scales(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    widest = np.maximum(np.abs(rows).max(axis=1) / 7, np.finfo(np.float32).tiny)
    best, least = widest, np.full(len(rows), np.inf)
    for shrink in _SHRINK:
        scales = widest * shrink
        rounded = np.clip(np.rint(rows / scales[:, None]), -8, 7) * scales[:, None]
        error = ((rows - rounded) ** 2).sum(axis=1)
        best, least = np.where(error < least, scales, best), np.minimum(error, least)
    return np.asarray(best)


def _matrix(node: NodeProto, constants: dict[str, TensorProto], model: ModelProto, size: int) -> list[NodeProto]:
    rows, _ = weight_rows(node, numpy_helper.to_array(constants[node.input[1]]))
    n_out, n_in = rows.shape
    packed, scales, zeros = pack_blocks(rows, size)
    name = node.input[1]
    for suffix, value in (("nbits", packed), ("nbits_scale", scales), ("nbits_zero", zeros)):
        model.graph.initializer.append(numpy_helper.from_array(value, f"{name}/{suffix}"))
    has_bias = len(node.input) > 2 and node.input[2] != ""
    product = f"{node.output[0]}/product" if has_bias else node.output[0]
    nodes = [
        helper.make_node(
            "MatMulNBits",
            [node.input[0], f"{name}/nbits", f"{name}/nbits_scale", f"{name}/nbits_zero"],
            [product],
            node.name,
            domain=_MICROSOFT,
            K=n_in,
            N=n_out,
            bits=4,
            block_size=size,
            accuracy_level=_ACCURACY_LEVEL,
        )
    ]
    if has_bias:
        nodes.append(helper.make_node("Add", [product, node.input[2]], [node.output[0]], f"{node.name}/bias"))
    return nodes


def pack_blocks(
    rows: NDArray[np.float64], size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Round [outputs, inputs] to 4 bit in blocks, as MatMulNBits stores them: values, scales and zero points.

    The first of two values is in the lower half of its byte; inputs are padded with zeros to whole blocks.
    """
    n_out, n_in = rows.shape
    n_blocks = -(-n_in // size)
    blocks = np.pad(rows, ((0, 0), (0, n_blocks * size - n_in))).reshape(n_out, n_blocks, size)
    low = np.minimum(blocks.min(axis=2, keepdims=True), 0)
    high = np.maximum(blocks.max(axis=2, keepdims=True), 0)
    scales = np.maximum((high - low) / 15, np.finfo(np.float32).tiny)
    zeros = np.clip(np.rint(-low / scales), 0, 15)
    values = np.clip(np.rint(blocks / scales) + zeros, 0, 15).astype(np.uint8)
    zero_bytes = np.pad(zeros[:, :, 0].astype(np.uint8), ((0, 0), (0, n_blocks % 2)), constant_values=8)
    return (
        values[:, :, 0::2] | values[:, :, 1::2] << 4,
        scales.astype(np.float32).reshape(-1),
        (zero_bytes[:, 0::2] | zero_bytes[:, 1::2] << 4).reshape(-1),
    )
