"""Find values of very different size that would share one 8-bit scale, and say what to leave float.

A detector that joins boxes (0 to 320) and scores (0 to 1) into one tensor loses the scores when that is quantised: its
steps are larger than 1. Every runtime computes such a model "correctly" and every score is wrong.

`python -m tools.quantize lint MODEL INPUTS` prints what is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from edge_rt.convert.qdq import WEIGHTED
from tools.activations import activations, session_with_activations

MIN_LEVELS = 16
# Of one channel of an output less is asked: over few inputs a class may just not have been there.
_MIN_CHANNEL_LEVELS = MIN_LEVELS / 4
_MAX_PROBABILITY = 2  # outputs within it are no boxes
_JOINING = ("Concat",)
_MAX_PARTS = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """A tensor whose scale is too coarse for a part of it.

    part        the input of a Concat, or the index along an axis
    range       of the part; levels: the steps of the shared scale that it has
    float_nodes what to leave float, in the graph's order
    """

    tensor: str
    step: float
    part: str
    range: tuple[float, float]
    levels: float
    float_nodes: tuple[str, ...]

    def __str__(self) -> str:
        low, high = self.range
        return (
            f"{self.tensor}: {self.part} is within {low:.4g} … {high:.4g}, "
            f"a step of the shared scale is {self.step:.4g}: {self.levels:.1f} levels of 255. "
            f"Leave float: {' '.join(self.float_nodes)}"
        )


def lint(
    model: ModelProto, feeds: Sequence[Mapping[str, NDArray[Any]]], *, min_levels: float = MIN_LEVELS
) -> list[Finding]:
    """Run the float model over feeds and give what has fewer than min_levels steps, the worst part of each tensor."""
    if not feeds:
        raise ValueError("no inputs to look at")
    graph = _Graph(model)
    seen = _Extremes(model)
    for feed in feeds:
        seen.add(feed)
    found = [*_joined(graph, seen, min_levels)]
    covered = {name for finding in found for name in finding.float_nodes}
    for output in model.graph.output:
        producer = graph.producer.get(output.name)
        if producer is None or producer.name in covered:
            continue
        finding = _parted(output.name, graph, seen, min_levels)
        if finding is not None:
            found.append(finding)
    return found


class _Extremes:
    """The least and greatest value of each activation, and of each channel of what the model gives out."""

    def __init__(self, model: ModelProto):
        self._session = session_with_activations(model)
        self._outputs = {output.name for output in model.graph.output}
        self.whole: dict[str, tuple[float, float]] = {}
        self.parts: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}

    def add(self, feed: Mapping[str, NDArray[Any]]) -> None:
        for name, value in activations(self._session, feed):
            if not value.size:
                continue
            low, high = self.whole.get(name, (0.0, 0.0))  # zero is always among a scale's values
            self.whole[name] = (min(low, float(value.min())), max(high, float(value.max())))
            if name in self._outputs:
                self._add_parts(name, value)

    def _add_parts(self, name: str, value: NDArray[Any]) -> None:
        axis = _channels(value.shape)
        if not 1 < value.shape[axis] <= _MAX_PARTS:
            return
        others = tuple(i for i in range(value.ndim) if i != axis)
        low, high = value.min(axis=others), value.max(axis=others)
        if (before := self.parts.get(name)) is not None and before[0].shape == low.shape:
            low, high = np.minimum(low, before[0]), np.maximum(high, before[1])
        self.parts[name] = (low, high)


def _channels(shape: tuple[int, ...]) -> int:
    """Guess which axis is not of positions: the second, but the last of [batch, many rows, few columns]."""
    if len(shape) == 3:
        return 1 if shape[1] <= shape[2] else 2
    return 1 if len(shape) > 1 else 0


class _Graph:
    def __init__(self, model: ModelProto):
        self.nodes = list(model.graph.node)
        self.producer = {output: node for node in self.nodes for output in node.output}
        self.consumers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self.consumers[name].append(node)
        self._constants = {tensor.name for tensor in model.graph.initializer}

    def tail(self, node: NodeProto) -> tuple[str, ...]:
        """Name a node, all behind it, and what leads to them since the last layer with weights."""
        wanted: set[str] = set()
        behind = [node]
        while behind:
            at = behind.pop()
            if at.name not in wanted:
                wanted.add(at.name)
                behind += [consumer for output in at.output for consumer in self.consumers[output]]
        before = [n for n in self.nodes if n.name in wanted]
        while before:
            for name in before.pop().input:
                source = self.producer.get(name)
                if source is not None and source.name not in wanted and not self._has_weights(source):
                    wanted.add(source.name)
                    before.append(source)
        return tuple(n.name for n in self.nodes if n.name in wanted)

    def _has_weights(self, node: NodeProto) -> bool:
        return node.op_type in WEIGHTED and node.input[1] in self._constants


def _levels(low: float, high: float, step: float) -> float:
    return (max(high, 0.0) - min(low, 0.0)) / step


def _joined(graph: _Graph, seen: _Extremes, min_levels: float) -> list[Finding]:
    found: list[Finding] = []
    for node in graph.nodes:
        parts = {name: seen.whole[name] for name in node.input if name in seen.whole}
        if node.op_type not in _JOINING or len(parts) < 2:
            continue
        step = (max(high for _, high in parts.values()) - min(low for low, _ in parts.values())) / 255
        if step <= 0:
            continue
        levels = {name: _levels(low, high, step) for name, (low, high) in parts.items() if (low, high) != (0.0, 0.0)}
        worst = min(levels, key=lambda name: levels[name])
        if levels[worst] < min_levels:
            tail = graph.tail(node)
            found.append(Finding(node.output[0], step, f"input {worst}", parts[worst], levels[worst], tail))
    return found


def _parted(output: str, graph: _Graph, seen: _Extremes, min_levels: float) -> Finding | None:
    """Look at an output that no Concat joins: one convolution may give boxes and scores as its channels."""
    low, high = seen.whole.get(output, (0.0, 0.0))
    if output not in seen.parts or high - low <= _MAX_PROBABILITY:
        return None
    step = (high - low) / 255
    lows, highs = seen.parts[output]
    levels = (np.maximum(highs, 0) - np.minimum(lows, 0)) / step
    levels[levels == 0] = np.inf  # a channel of zeros loses nothing
    worst = int(levels.argmin())
    if levels[worst] >= min(min_levels, _MIN_CHANNEL_LEVELS):
        return None
    part = (float(lows[worst]), float(highs[worst]))
    return Finding(output, step, f"channel {worst}", part, float(levels[worst]), graph.tail(graph.producer[output]))
