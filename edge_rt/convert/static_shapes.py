"""Fix a model's shapes and fold what follows from them: NPUs compile for one shape."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime
from onnx import ModelProto

from edge_rt.errors import ModelFormatError


def make_static(model: ModelProto, shapes: Mapping[str, tuple[int, ...]], *, name: str = "model") -> ModelProto:
    """Give the model for inputs of these shapes: constants computed, normalisations inside convolutions, nodes named.

    onnxruntime's basic optimiser does that, which writes operators of ONNX only.
    Raises ModelFormatError for an input that is not there or cannot have its shape.
    """
    fixed = ModelProto()
    fixed.CopyFrom(model)
    inputs = {value.name: value for value in fixed.graph.input}
    for input_name, shape in shapes.items():
        if input_name not in inputs:
            raise ModelFormatError(path=name, field=input_name, problem="is not among the model's inputs")
        dims = inputs[input_name].type.tensor_type.shape.dim
        if len(dims) != len(shape) or any(d.dim_value not in (0, size) for d, size in zip(dims, shape, strict=False)):
            raise ModelFormatError(path=name, field=input_name, problem=f"cannot have the shape {shape}")
        for dim, size in zip(dims, shape, strict=True):
            dim.dim_value = size
    # What was written down of the others may name dimensions that are numbers now.
    del fixed.graph.value_info[:]
    for output in fixed.graph.output:
        output.type.tensor_type.ClearField("shape")
    return _named(_folded(fixed, name))


def _folded(model: ModelProto, name: str) -> ModelProto:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "folded.onnx"
        options.optimized_model_filepath = str(path)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as exc:  # onnxruntime's own, which share no base
            raise ModelFormatError(path=name, field="graph", problem=str(exc)[:200]) from exc
        folded = onnx.load(path)
    # Its own domains are imported whether used or not.
    used = {node.domain or "" for node in folded.graph.node}
    kept = [entry for entry in folded.opset_import if (entry.domain or "") in {*used, ""}]
    del folded.opset_import[:]
    folded.opset_import.extend(kept)
    return folded


def _named(model: ModelProto) -> ModelProto:
    taken: set[str] = set()
    for index, node in enumerate(model.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{index}_{node.output[0]}"
        taken.add(node.name)
    return model
