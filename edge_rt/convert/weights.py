"""A matrix of an ONNX graph as GGUF stores it: what type it becomes, and its bytes when they are wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from edge_rt.convert.blocks import BLOCK, BLOCK_SIZES, NBits, is_symmetric, reblock, unpack_zero_points
from edge_rt.convert.graph import FLOATS, Graph, label

_U1 = np.dtype("u1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Rows of what a node multiplies with.

    quant        F16, F32, Q4_0 or Q4_1
    initializer  the weights' name in the graph
    span, order  the rows taken, and then the order they get; None is as they are
    """

    graph: Graph
    node: NodeProto
    quant: str
    shape: tuple[int, int]
    span: slice | None = None
    order: NDArray[np.intp] | None = None

    @property
    def initializer(self) -> str:
        return str(self.node.input[1])

    def rows(self, span: slice) -> Matrix:
        return replace(self, shape=(span.stop - span.start, self.shape[1]), span=span)

    def reordered(self, order: NDArray[np.intp] | None) -> Matrix:
        return replace(self, order=order)

    def read(self) -> NDArray[Any]:
        """Give the rows: floats, or bytes of blocks."""
        span = slice(None) if self.span is None else self.span
        if self.node.op_type == "MatMul":
            rows: NDArray[Any] = self.graph.array(self.initializer, label(self.node), FLOATS).T[span]
        else:
            try:
                rows = reblock(_nbits(self.graph, self.node).rows(span), self.quant)
            except OverflowError as exc:
                self.graph.fail(label(self.node), str(exc))
        return np.ascontiguousarray(rows if self.order is None else rows[self.order])


def read_matrix(graph: Graph, node: NodeProto) -> Matrix:
    """Check a node that multiplies with weights, and say what they become."""
    name = label(node)
    if node.op_type == "MatMul":
        if len(node.input) != 2 or node.input[1] not in graph.initializers:
            graph.fail(name, "its weights are no initialiser; QDQ forms are not known here, build without them")
        shape = graph.shape(node.input[1], name)
        if len(shape) != 2 or graph.dtype(node.input[1], name) not in FLOATS:
            graph.fail(name, "weights of F32 or F16 in two dimensions are expected")
        quant = "F32" if graph.dtype(node.input[1], name).itemsize == 4 else "F16"
        return Matrix(graph=graph, node=node, quant=quant, shape=(shape[1], shape[0]))
    if node.op_type != "MatMulNBits" or node.domain != "com.microsoft":
        graph.fail(name, "MatMulNBits is expected here")
    if (bits := graph.integer(node, "bits", 4)) != 4:
        graph.fail(name, f"{bits} bits are not known here, only 4")
    if (size := graph.integer(node, "block_size")) not in BLOCK_SIZES:
        graph.fail(name, f"a block size of {size} is not known here, only {', '.join(map(str, BLOCK_SIZES))}")
    if graph.integer(node, "weight_prepacked"):
        graph.fail(name, "weights packed for one device are not known here")
    if len(node.input) > 4 and node.input[4]:
        graph.fail(name, "g_idx, an order of the columns, is not known here")
    n_rows, n_cols = graph.integer(node, "N"), graph.integer(node, "K")
    if n_rows < 1 or n_cols < BLOCK or n_cols % BLOCK:
        graph.fail(name, f"{n_rows} rows of {n_cols} columns; columns must be a multiple of {BLOCK}")
    quant = "Q4_0" if is_symmetric(_zero_points(graph, node, n_rows, -(-n_cols // size))) else "Q4_1"
    _check_shape(graph, node, 1, (n_rows, -(-n_cols // size), size // 2), (_U1,))
    _check_shape(graph, node, 2, (n_rows, -(-n_cols // size)), FLOATS)
    return Matrix(graph=graph, node=node, quant=quant, shape=(n_rows, n_cols))


def _check_shape(
    graph: Graph, node: NodeProto, index: int, wanted: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...]
) -> None:
    """Allow what is as long too: older files have scales and zero points in one dimension."""
    name = node.input[index] if len(node.input) > index else ""
    shape = graph.shape(name, label(node))
    if shape != wanted and shape != (math.prod(wanted),):
        graph.fail(name, f"its shape is {shape}, {wanted} is expected")
    if graph.dtype(name, label(node)) not in dtypes:
        graph.fail(name, f"{graph.dtype(name, label(node)).name}, {' or '.join(d.name for d in dtypes)} is expected")


def _zero_points(graph: Graph, node: NodeProto, n_rows: int, n_blocks: int) -> NDArray[np.float32] | None:
    if len(node.input) < 4 or not node.input[3]:
        return None
    name = node.input[3]
    is_packed = graph.dtype(name, label(node)) == _U1
    width = (n_blocks + 1) // 2 if is_packed else n_blocks
    _check_shape(graph, node, 3, (n_rows, width), (_U1, *FLOATS))
    values = graph.array(name, label(node))
    if is_packed:
        return unpack_zero_points(values, n_rows, n_blocks)
    return values.astype(np.float32).reshape(n_rows, n_blocks)


def _nbits(graph: Graph, node: NodeProto) -> NBits:
    name = label(node)
    n_rows, n_cols, size = (graph.integer(node, key) for key in ("N", "K", "block_size"))
    n_blocks = -(-n_cols // size)
    return NBits(
        n_cols,
        graph.array(node.input[1], name, (_U1,)).reshape(n_rows, n_blocks, size // 2),
        graph.array(node.input[2], name, FLOATS).astype(np.float32).reshape(n_rows, n_blocks),
        _zero_points(graph, node, n_rows, n_blocks),
    )
