"""Round a model's matrices to INT4 for inputs that are known: which, by what they see of some samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from edge_rt.convert.rounding import damped, int4_scales, round_rows

Moments = dict[str, NDArray[np.float64]]


def round_matrices(
    model: ModelProto, feeds: Iterable[tuple[Mapping[str, NDArray[Any]], int]], *, keep: frozenset[str] = frozenset()
) -> tuple[ModelProto, dict[str, NDArray[np.float64]]]:
    """Give the model with its MatMul nodes' constant weights on INT4 grids, and each one's scales by its node's name.

    feeds  of the model, each with how many of its rows count: the others fill up
    keep   names of nodes that stay
    """
    rounded = ModelProto()
    rounded.CopyFrom(model)
    constants = {tensor.name: tensor for tensor in rounded.graph.initializer}
    nodes = [n for n in rounded.graph.node if n.op_type == "MatMul" and n.input[1] in constants and n.name not in keep]
    moments = second_moments(model, nodes, feeds)
    scales: dict[str, NDArray[np.float64]] = {}
    for node in nodes:
        tensor = constants[node.input[1]]
        weights = numpy_helper.to_array(tensor).astype(np.float64)
        values, scales[node.name] = round_matrix(weights, moments[node.input[0]])
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return rounded, scales


def second_moments(
    model: ModelProto, nodes: Iterable[NodeProto], feeds: Iterable[tuple[Mapping[str, NDArray[Any]], int]]
) -> Moments:
    """Sum up xᵀx of each node's input [1, rows, size] over the feeds' rows that count."""
    given = {value.name for value in model.graph.input}
    names = sorted({node.input[0] for node in nodes} - given)
    wanted = sorted({node.input[0] for node in nodes} & given)
    shown = onnx.shape_inference.infer_shapes(model)
    present = {output.name for output in shown.graph.output}
    shown.graph.output.extend(v for v in shown.graph.value_info if v.name in names and v.name not in present)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # sums in one order, so the same bytes each time
    session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    moments: Moments = {}
    for feed, n_rows in feeds:
        found = dict(zip(names, session.run(names, dict(feed)) if names else [], strict=True))
        found |= {name: np.asarray(feed[name]) for name in wanted}
        for name, value in found.items():
            rows = value.reshape(-1, value.shape[-1])[:n_rows].astype(np.float64)
            moments[name] = moments.get(name, 0.0) + rows.T @ rows
    return moments


def round_matrix(
    weights: NDArray[np.float64], moments: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Round [inputs, outputs] to INT4 with a scale for each output; gives the values that are left, and the scales."""
    rows = weights.T
    scales = int4_scales(rows, np.diag(moments))
    of_each = np.broadcast_to(scales[:, None], rows.shape)
    return round_rows(rows, damped(moments), of_each, -8, 7).T, scales
