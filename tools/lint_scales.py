"""Find parts of a quantised model that its own scales leave hardly any levels: no inputs are needed, the file says it.

lint_ranges.py looks at a float model before it is quantised. This looks at what somebody has quantised already: a
Concat whose output has so coarse a scale that what one of its inputs can hold fits into a few steps of it. Boxes and
scores in one output tensor are the usual case, in files of every vendor's tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

_LEVELS: Mapping[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255),
    TensorProto.INT8: (-128, 127),
    TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767),
}


@dataclass(frozen=True, slots=True)
class ScaleFinding:
    """An input of a Concat that has few levels in the scale of its output."""

    tensor: str
    step: float
    part: str
    range: tuple[float, float]
    levels: float

    def __str__(self) -> str:
        low, high = self.range
        return (
            f"{self.tensor}: {self.part} has a scale of its own for {low:.4g} … {high:.4g}, "
            f"a step of the shared scale is {self.step:.4g}: {self.levels:.1f} levels are left"
        )


def lint_scales(model: ModelProto, min_levels: float) -> list[ScaleFinding]:
    """Give the worst input of each Concat that has fewer than min_levels steps of its output's scale."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    producer = {output: node for node in model.graph.node for output in node.output}
    quantized = {node.input[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
    found = []
    for node in model.graph.node:
        joined = quantized.get(node.output[0]) if node.op_type == "Concat" else None
        if joined is None or (step := _step(joined, constants)) is None:
            continue
        worst: ScaleFinding | None = None
        for name in node.input:
            source = producer.get(name)
            span = _range(source, constants) if source is not None and source.op_type == "DequantizeLinear" else None
            if source is None or span is None or span[0] == span[1]:
                continue
            levels = (span[1] - span[0]) / step
            if levels < min_levels and (worst is None or levels < worst.levels):
                worst = ScaleFinding(node.output[0], step, f"input {_origin(source, producer)}", span, levels)
        if worst is not None:
            found.append(worst)
    return found


def _origin(source: NodeProto, producer: Mapping[str, NodeProto]) -> str:
    """Name what was quantised, not what the quantiser called its result."""
    quantizing = producer.get(source.input[0])
    return str(quantizing.input[0]) if quantizing is not None else str(source.input[0])


def _step(node: NodeProto, constants: Mapping[str, TensorProto]) -> float | None:
    if (scale := constants.get(node.input[1])) is None:
        return None
    values: NDArray[Any] = numpy_helper.to_array(scale)
    return float(values.reshape(-1)[0]) if values.size == 1 and np.isfinite(values).all() and values.min() > 0 else None


def _range(node: NodeProto, constants: Mapping[str, TensorProto]) -> tuple[float, float] | None:
    """Give the least and the greatest value that a DequantizeLinear can give."""
    step = _step(node, constants)
    zero = constants.get(node.input[2]) if len(node.input) > 2 else None
    if step is None or zero is None or zero.data_type not in _LEVELS:
        return None
    middle = int(numpy_helper.to_array(zero).reshape(-1)[0])
    low, high = _LEVELS[zero.data_type]
    return (low - middle) * step, (high - middle) * step
