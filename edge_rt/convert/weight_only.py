"""Compress the matrices of a float model in its file, activations staying float: INT8, or UINT4 in blocks.

A matrix becomes integers behind a DequantizeLinear, which runtimes that compute with packed weights (OpenVINO) fold
into the product; others undo it when they load. 4-bit weights are rounded so that what they give for known inputs
changes least (GPTQ, as in gptq.py): a block of inputs has a scale and a zero point for each output, chosen when the
blocks before it have been rounded. Convolutions are left: no runtime here computes with packed ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_rt.convert.bert import text_feeds
from edge_rt.convert.gptq import second_moments
from edge_rt.convert.qdq import read_ranges
from edge_rt.convert.rounding import damped
from edge_rt.errors import ModelFormatError

BLOCK: Final = 32
_MOST: Final = 15
_OPSET: Final = 21  # the first with UINT4 and with blocks

Matrix = NDArray[np.float64]  # [inputs, outputs]


def convert_w8(src: Path, dst: Path, beside: Path | None) -> None:
    """Write src with its matrices in INT8, a scale for each output. Raises ModelFormatError."""
    del beside
    model = onnx.load(src, load_external_data=False)
    for node, tensor in _matrices(model, src.name):
        weights = numpy_helper.to_array(tensor).astype(np.float64)
        scales = np.maximum(np.abs(weights).max(axis=0) / 127, np.finfo(np.float32).tiny)
        values = np.rint(weights / scales).astype(np.int8)
        constants = [numpy_helper.from_array(values, f"{tensor.name}/int8")]
        _replace(model, node, tensor, [*constants, _floats(scales, f"{tensor.name}/scale")], axis=1)
    dst.write_bytes(_finished(model))


def convert_minilm_w4(src: Path, dst: Path, beside: Path | None) -> None:
    """Write the static float form with its matrices in UINT4, rounded for the texts that stand in beside.

    Raises ModelFormatError.
    """
    if beside is None or not (texts := read_ranges(beside).texts):
        raise ModelFormatError(path=dst.name, field="derive_with", problem="the recipe needs ranges with texts")
    model = onnx.load(src, load_external_data=False)
    found = _matrices(model, src.name)
    moments = second_moments(model, [node for node, _ in found], text_feeds(texts))
    for node, tensor in found:
        weights = numpy_helper.to_array(tensor).astype(np.float64)
        values, scales, zeros = round_blocks(weights, moments[node.input[0]])
        constants = [
            _uint4(f"{tensor.name}/uint4", values),
            _floats(scales, f"{tensor.name}/scale"),
            _uint4(f"{tensor.name}/zero", zeros),
        ]
        _replace(model, node, tensor, constants, axis=0, block_size=BLOCK)
    dst.write_bytes(_finished(model))


def round_blocks(
    weights: Matrix, moments: Matrix, block: int = BLOCK
) -> tuple[NDArray[np.uint8], Matrix, NDArray[np.uint8]]:
    """Round [inputs, outputs] to 0..15 in blocks of inputs; gives values, and scales and zero points of the blocks.

    moments  the inputs' second moments, as second_moments sums them up
    inputs   must be a multiple of block. Pure.
    """
    n_in, n_out = weights.shape
    spread = np.linalg.cholesky(
        np.linalg.inv(damped(moments))
    ).T  # upper: how an error goes on to inputs that come later
    left = weights.copy()
    values = np.empty(weights.shape, np.uint8)
    scales, zeros = np.empty((n_in // block, n_out)), np.empty((n_in // block, n_out), np.uint8)
    for begin in range(0, n_in, block):
        part = left[begin : begin + block]
        low, high = np.minimum(part.min(axis=0), 0), np.maximum(part.max(axis=0), 0)
        scale = np.maximum((high - low) / _MOST, np.finfo(np.float32).tiny).astype(np.float32).astype(np.float64)
        zero = np.clip(np.rint(-low / scale), 0, _MOST)
        scales[begin // block], zeros[begin // block] = scale, zero
        for at in range(begin, begin + block):
            values[at] = np.clip(np.rint(left[at] / scale) + zero, 0, _MOST)
            error = (left[at] - (values[at] - zero) * scale) / spread[at, at]
            left[at + 1 :] -= np.outer(spread[at, at + 1 :], error)
    return values, scales, zeros


def _matrices(model: ModelProto, name: str) -> list[tuple[NodeProto, TensorProto]]:
    """List the products with a constant float matrix of whole blocks. Raises ModelFormatError where there is none."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    uses = [value for node in model.graph.node for value in node.input]
    found = [
        (node, constants[node.input[1]])
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in constants and uses.count(node.input[1]) == 1
    ]
    found = [
        (node, tensor)
        for node, tensor in found
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2 and tensor.dims[0] % BLOCK == 0
    ]
    version = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if not found or version < _OPSET:
        problem = f"has opset {version}, and {_OPSET} is needed" if found else "has no product with a constant matrix"
        raise ModelFormatError(path=name, field="graph.node", problem=problem)
    return found


def _replace(
    model: ModelProto,
    node: NodeProto,
    tensor: TensorProto,
    constants: list[TensorProto],
    *,
    axis: int,
    block_size: int = 0,
) -> None:
    """Put a DequantizeLinear of constants in the place of a matrix."""
    made = f"{tensor.name}/float"
    given = [constant.name for constant in constants]
    dequantize = helper.make_node("DequantizeLinear", given, [made], made, axis=axis, block_size=block_size)
    place = next(at for at, other in enumerate(model.graph.node) if other is node or other.name == node.name)
    nodes = list(model.graph.node)
    nodes[place].input[1] = made
    nodes.insert(place, dequantize)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    kept = [other for other in model.graph.initializer if other.name != tensor.name]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *constants])


def _floats(values: Matrix, name: str) -> TensorProto:
    return numpy_helper.from_array(values.astype(np.float32), name)


def _uint4(name: str, values: NDArray[np.uint8]) -> TensorProto:
    flat = np.pad(values.reshape(-1), (0, values.size % 2))
    packed = (flat[0::2] | flat[1::2] << 4).tobytes()
    return TensorProto(name=name, data_type=TensorProto.UINT4, dims=values.shape, raw_data=packed)


def _finished(model: ModelProto) -> bytes:
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString(deterministic=True)
    return data
