"""Weights of ONNX nodes as matrices of the FPGA's engine: where a file has them, and how they are read.

INT8 that are all INT4 become one matrix. Other INT8 become two, 16 times their upper four bits and their lower four, as
fpga_pack does with Q8_0; with one scale a row nothing is lost. Rows are filled up with zeros to whole groups of 32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from edge_rt.backends.fpga_numbers import GROUP, Z_STEPS, Weights, encode_weights
from edge_rt.backends.fpga_onnx_graph import NotForEngineError, OnnxGraph, attribute, inputs
from edge_rt.backends.fpga_pack import BLOCK_SIZES, Matrix, from_matmul_nbits

_INT4 = (TensorProto.INT4, TensorProto.UINT4)
_INTEGERS = (TensorProto.INT8, TensorProto.UINT8, *_INT4)
# What a Cast may make of integers without changing one; it wraps what does not fit.
_WIDER: Mapping[int, set[int]] = {
    TensorProto.INT4: {TensorProto.INT4, TensorProto.INT8},
    TensorProto.UINT4: {TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8},
    TensorProto.INT8: {TensorProto.INT8},
    TensorProto.UINT8: {TensorProto.UINT8},
}
_HOLDS_ALL = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT16, TensorProto.INT32}
_HALF = 8

Form = Literal["nbits", "conv", "rows", "columns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where a node's weights are: names of constants, and how they lie in them.

    form      nbits: MatMulNBits' bytes; conv: [n, k...]; rows: [n, k]; columns: [k, n]
    n, k      rows of the matrix, and weights a row without padding; of each of n_groups matrices
    zero      "" without zero points
    block     weights that share a scale; 0: whole rows do
    is_int4   the file says so, and not only the values
    """

    form: Form
    q: str
    scale: str
    zero: str
    n: int
    k: int
    n_groups: int = 1
    block: int = 0
    is_int4: bool = False

    @property
    def k_padded(self) -> int:
        return -(-self.k // GROUP) * GROUP

    @property
    def n_pieces(self) -> int:
        """Matrices of INT4 that each matrix takes at most."""
        return 1 if self.is_int4 else 2


def nbits_source(graph: OnnxGraph, node: NodeProto) -> WeightSource:
    """Find a MatMulNBits' weights. Raises NotForEngineError for what the packer refuses."""
    names = inputs(node)
    n, k, block, bits = (attribute(node, name, 0) for name in ("N", "K", "block_size", "bits"))
    if names[4]:
        raise NotForEngineError("its columns are in another order (g_idx)")
    if (bits or 4) != 4 or attribute(node, "weight_prepacked", 0):
        raise NotForEngineError(f"its weights have {bits} bits, the engine takes 4 that are not packed for a CPU")
    if block not in BLOCK_SIZES or n < 1 or k < 1 or k % block:
        raise NotForEngineError(
            f"{n} rows of {k} weights in blocks of {block}: the engine takes whole ones of {BLOCK_SIZES}"
        )
    _constants(graph, names[1], names[2], names[3])
    b, scales = graph.constants[names[1]], graph.constants[names[2]]
    if b.data_type != TensorProto.UINT8 or math.prod(b.dims) != n * k // 2 or math.prod(scales.dims) != n * k // block:
        raise NotForEngineError("its weights or scales are not as many as its shape says")
    if names[3] and graph.constants[names[3]].data_type != TensorProto.UINT8:
        raise NotForEngineError("its zero points are no integers")
    return WeightSource(form="nbits", q=names[1], scale=names[2], zero=names[3], n=n, k=k, block=block, is_int4=True)


def dequantised_source(graph: OnnxGraph, value: str, form: Form, *, n_groups: int = 1) -> WeightSource:
    """Find the INT4 or INT8 behind weights that a DequantizeLinear makes, or a Cast and a Mul by scales of the rows.

    Raises NotForEngineError.
    """
    node = graph.producer(value)
    if node is not None and node.op_type == "Mul":
        return _scaled_source(graph, node, form, n_groups)
    if node is None or node.op_type != "DequantizeLinear":
        raise NotForEngineError("its weights are floats" if value in graph.constants else "its weights are computed")
    q, scale, zero = inputs(node)[:3]
    axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)
    return integer_source(graph, q, scale, zero, form, axis=axis, block=block, n_groups=n_groups)


def integer_source(
    graph: OnnxGraph,
    q: str,
    scale: str,
    zero: str,
    form: Form,
    *,
    axis: int | None = None,
    block: int = 0,
    n_groups: int = 1,
) -> WeightSource:
    """Find the INT4 or INT8 of a quantised node. axis None: that of the rows. Raises NotForEngineError."""
    if (cast := graph.producer(q)) is not None and cast.op_type == "Cast" and q not in graph.constants:
        q = inputs(cast)[0]  # of INT4 to INT8, which onnxruntime's operators take
    else:
        cast = None
    _constants(graph, q, scale, zero)
    tensor, scales = graph.constants[q], graph.constants[scale]
    if tensor.data_type not in _INTEGERS:
        raise NotForEngineError("its weights are neither INT4 nor INT8")
    if cast is not None and attribute(cast, "to", 0) not in _WIDER[tensor.data_type] | _HOLDS_ALL:
        raise NotForEngineError("a Cast changes its weights")
    dims = list(tensor.dims)
    if len(dims) < 2 or (form != "conv" and len(dims) != 2) or min(dims) < 1:
        raise NotForEngineError(f"its weights have the shape {dims}")
    row_axis, column_axis = (1, 0) if form == "columns" else (0, 1)
    n, k = dims[row_axis], math.prod(dims) // dims[row_axis]
    n_scales = math.prod(scales.dims)
    at = row_axis if axis is None else axis + len(dims) * (axis < 0)
    if block:
        if form == "conv" or block not in BLOCK_SIZES or at != column_axis or k % block:
            raise NotForEngineError(
                f"its scales are for blocks of {block}: the engine takes whole ones of {BLOCK_SIZES}"
            )
        fits = n_scales == n * k // block
    else:
        fits = n_scales == 1 or (n_scales == n and at == row_axis)
    if not fits or (zero and math.prod(graph.constants[zero].dims) not in (1, n_scales)):
        raise NotForEngineError("its scales are not one for each row or block")
    if n % n_groups:
        raise NotForEngineError(f"{n} rows cannot be divided among {n_groups} groups")
    return WeightSource(
        form=form,
        q=q,
        scale=scale,
        zero=zero,
        n=n // n_groups,
        k=k,
        n_groups=n_groups,
        block=block,
        is_int4=tensor.data_type in _INT4,
    )


def _scaled_source(graph: OnnxGraph, node: NodeProto, form: Form, n_groups: int) -> WeightSource:
    for cast, scale in (inputs(node)[:2], inputs(node)[1::-1]):
        maker = graph.producer(cast)
        if (
            maker is None
            or maker.op_type != "Cast"
            or inputs(maker)[0] not in graph.constants
            or scale not in graph.constants
        ):
            continue
        found = integer_source(graph, cast, scale, "", form, n_groups=n_groups)
        n, rank = found.n * n_groups, len(graph.constants[found.q].dims)
        sizes = list(graph.constants[scale].dims)
        wide = [1] * (rank - len(sizes)) + sizes
        row_axis = 1 if form == "columns" else 0
        if len(wide) == rank and all(size == (n if at == row_axis else 1) for at, size in enumerate(wide)):
            return found
        raise NotForEngineError(f"its weights have scales of the shape {sizes}, not one for each row")
    raise NotForEngineError("its weights are computed")


def read_matrices(graph: OnnxGraph, source: WeightSource) -> list[Matrix]:
    """Read the weights, a matrix for each group. Raises NotForEngineError for values that the engine does not hold."""
    try:
        if source.form == "nbits":
            zero = graph.array(source.zero) if source.zero else None
            b, scale = graph.array(source.q), graph.array(source.scale)
            return [from_matmul_nbits(b, scale, zero, n=source.n, k=source.k, bits=4, block_size=source.block)]
        q, scale = _rows(graph, source)
        n = source.n
        return [_matrix(q[i * n : (i + 1) * n], scale[i * n : (i + 1) * n], source) for i in range(source.n_groups)]
    except ValueError as exc:
        raise NotForEngineError(str(exc)) from exc


def row_sums(matrix: Matrix) -> NDArray[np.float64]:
    """Sum each row's weights: float64 [n_rows]."""
    out = np.zeros(matrix.n_rows)
    for piece in matrix.pieces:
        out[piece.first_row : piece.end_row] += _piece_sums(piece.weights)
    return out


def _piece_sums(weights: Weights) -> NDArray[np.float64]:
    group = GROUP << weights.group_log2
    sums = weights.q.reshape(weights.n_rows, -1, group).sum(axis=2, dtype=np.int64)
    steps = sums * (Z_STEPS if weights.asymmetric else 1) - weights.z.astype(np.int64) * group
    found: NDArray[np.float64] = (steps * weights.scale).sum(axis=1) * weights.row_unit
    return found


def _rows(graph: OnnxGraph, source: WeightSource) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Read INT8 [rows, k] without zero points and their scales [rows, blocks], all groups under each other."""
    q = graph.array(source.q)
    is_transposed = source.form == "columns"
    if source.form == "conv":
        q = np.moveaxis(q, 1, -1)  # the channels last: so do pictures lie that patches are taken from
        q = q.reshape(len(q), -1)
    q = q.T if is_transposed else q

    def spread(values: NDArray[Any]) -> NDArray[Any]:
        if values.size == 1:
            return np.broadcast_to(values.reshape(1, 1), (len(q), 1))
        if source.block:
            return values.reshape(source.k // source.block, -1).T if is_transposed else values.reshape(len(q), -1)
        return values.reshape(-1, 1)

    scale = spread(graph.array(source.scale).astype(np.float64))
    if source.zero and (zero := graph.array(source.zero)).any():
        wide = q.astype(np.int16) - np.repeat(spread(zero.astype(np.int16)), source.block or source.k, axis=1)
    else:
        wide = q
    if wide.min(initial=0) < -128 or wide.max(initial=0) > 127:
        raise ValueError("a weight less its zero point is no INT8")
    return wide.astype(np.int8), scale


def _matrix(q: NDArray[np.int8], scale: NDArray[np.float64], source: WeightSource) -> Matrix:
    padded = np.zeros((len(q), source.k_padded), np.int8)
    padded[:, : source.k] = q
    group_log2 = BLOCK_SIZES.index(source.block) if source.block else _longest_group(source.k_padded)
    scales = np.repeat(scale, source.k_padded // (GROUP << group_log2) // scale.shape[1], axis=1)
    if padded.min() >= -_HALF and padded.max() < _HALF:
        return Matrix.of(encode_weights(padded, scales, None, group_log2))
    upper = encode_weights(padded >> 4, scales, None, group_log2)
    upper = dataclasses.replace(upper, row_unit=upper.row_unit * 16)
    lower = ((padded & 15) - _HALF).astype(np.int8)
    return Matrix.of(upper, encode_weights(lower, scales, np.full(scales.shape, -float(_HALF)), group_log2))


def _longest_group(k: int) -> int:
    return max(log2 for log2 in range(len(BLOCK_SIZES)) if k % (GROUP << log2) == 0)


def _constants(graph: OnnxGraph, q: str, scale: str, zero: str) -> None:
    for name in (q, scale, *filter(None, [zero])):
        if name not in graph.constants:
            raise NotForEngineError("its weights are computed")
