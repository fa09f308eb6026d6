"""Round matrices to INT4 so that what they give for known inputs changes least (GPTQ).

One input's weights after the other are rounded, those that count most first; what that makes wrong is put right, as far
as it goes, by the weights that are still to come. How inputs go together is their second moment over some samples.
After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from edge_rt.convert.npu import int4_scales

_DAMPING = 0.01  # of the mean second moment, for inputs that the samples hardly move
_LEAST, _MOST = -8, 7

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
        values, scales[node.name] = round_weights(weights, moments[node.input[0]])
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


def round_weights(
    weights: NDArray[np.float64], moments: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Round [inputs, outputs] to INT4 with a scale for each output; gives the values that are left, and the scales."""
    importance = np.diag(moments)
    scales = int4_scales(weights.T, importance)
    order = np.argsort(-importance, kind="stable")
    damped = moments[np.ix_(order, order)].copy()
    damped[np.diag_indices_from(damped)] += _DAMPING * max(float(importance.mean()), np.finfo(np.float64).tiny)
    spread = np.linalg.cholesky(np.linalg.inv(damped)).T  # upper: how an error goes on to inputs that come later
    left = weights[order].copy()
    found = np.empty_like(left)
    for index in range(len(left)):
        found[index] = np.clip(np.rint(left[index] / scales), _LEAST, _MOST) * scales
        error = (left[index] - found[index]) / spread[index, index]
        left[index + 1 :] -= np.outer(spread[index, index + 1 :], error)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return found[back], scales
