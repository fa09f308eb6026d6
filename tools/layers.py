"""Which form each layer of a model gets: float, 8 bit, or 4-bit weights, by how much the outputs suffer from it.

A layer is a Conv, Gemm or MatMul with constant weights. Its sensitivity to a form is the relative squared error of the
model's outputs when it alone has that form. The search orders the steps down by error per byte saved and takes as many
as the budget allows, measuring the whole model each time: errors of layers add up only roughly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from edge_rt.convert.qdq import OPERATORS, WEIGHTED, Range, quantize_int8
from tools.int4 import quantize_int4, takes_int4

Form = Literal["float", "int8", "int4"]
Plan = Mapping[str, Form]  # by the layer's node name
Feeds = Sequence[Mapping[str, NDArray[Any]]]
_BITS: Mapping[Form, float] = {"float": 32, "int8": 8, "int4": 4.5}


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    op: str
    n_weights: int
    forms: tuple[Form, ...]

    def n_bytes(self, form: Form) -> int:
        return int(self.n_weights * _BITS[form] / 8)


@dataclass(frozen=True, slots=True)
class Step:
    """One layer in one form and what that alone does to the outputs."""

    layer: Layer
    form: Form
    error: float

    @property
    def saved_bytes(self) -> int:
        return self.layer.n_bytes("float") - self.layer.n_bytes(self.form)


@dataclass(frozen=True, slots=True)
class Outcome:
    plan: Plan
    model: ModelProto
    error: float

    @property
    def n_bytes(self) -> int:
        return int(self.model.ByteSize())


def find_layers(model: ModelProto) -> tuple[Layer, ...]:
    """Give the model's layers in their order."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found: list[Layer] = []
    for node in model.graph.node:
        if node.op_type in WEIGHTED and node.input[1] in constants:
            weights = numpy_helper.to_array(constants[node.input[1]])
            forms: tuple[Form, ...] = ("float", "int8")
            forms += ("int4",) if takes_int4(node, weights) else ()
            found.append(Layer(node.name, node.op_type, weights.size, forms))
    return tuple(found)


def build(
    model: ModelProto, ranges: Mapping[str, Range], plan: Plan, *, keep_float: frozenset[str] = frozenset()
) -> ModelProto:
    """Give the model with each layer in its form; keep_float names other nodes that stay float.

    What has no weights is computed in integers where any layer is.
    """
    int4 = [name for name, form in plan.items() if form == "int4"]
    if int4:
        model = quantize_int4(model, int4)
    if "int8" not in plan.values():
        return model
    floats = {name for name, form in plan.items() if form == "float"} | set(int4)
    return quantize_int8(model, ranges, float_nodes=floats | _activations(model, floats) | keep_float)


def build_alone(model: ModelProto, ranges: Mapping[str, Range], layer: Layer, form: Form) -> ModelProto:
    """Give the model with everything float but one layer."""
    if form == "int4":
        return quantize_int4(model, [layer.name])
    integers = {layer.name} | _activations(model, {layer.name})
    others = {node.name for node in model.graph.node if node.op_type in OPERATORS} - integers
    return quantize_int8(model, ranges, float_nodes=others)


def _activations(model: ModelProto, names: Set[str]) -> set[str]:
    """Name the Clip and Relu nodes behind the named ones: both are one operation, with one range, in integers."""
    outputs = {output for node in model.graph.node if node.name in names for output in node.output}
    # A matrix of 4 bit has its bias in a node of its own.
    outputs |= {o for n in model.graph.node if n.name in {f"{name}/bias" for name in names} for o in n.output}
    return {node.name for node in model.graph.node if node.op_type in ("Clip", "Relu") and node.input[0] in outputs}


class Judge:
    """Measures models by their outputs for the same inputs, against the float model's."""

    def __init__(self, model: ModelProto, feeds: Feeds):
        if not feeds:
            raise ValueError("no inputs to judge by")
        self._feeds = feeds
        self._names = [output.name for output in model.graph.output]
        self._expected = self._run(model)

    def error(self, model: ModelProto) -> float:
        """Give the relative squared error of the worst output: |found - expected|² / |expected|², over all inputs."""
        worst = 0.0
        for expected, found in zip(self._expected, self._run(model), strict=True):
            power = float((expected**2).sum())
            worst = max(worst, float(((found - expected) ** 2).sum()) / max(power, 1e-30))
        return worst

    def _run(self, model: ModelProto) -> list[NDArray[np.float64]]:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        answers = [session.run(self._names, dict(feed)) for feed in self._feeds]
        return [
            np.concatenate([np.asarray(answer[i], np.float64).reshape(-1) for answer in answers])
            for i in range(len(self._names))
        ]


def measure(
    model: ModelProto,
    ranges: Mapping[str, Range],
    judge: Judge,
    forms: Sequence[Form],
    report: Callable[[Step], None] = lambda _: None,
) -> list[Step]:
    """Give the sensitivity of each layer to each form but float."""
    steps: list[Step] = []
    for layer in find_layers(model):
        for form in forms:
            if form != "float" and form in layer.forms:
                steps.append(Step(layer, form, judge.error(build_alone(model, ranges, layer, form))))
                report(steps[-1])
    return steps


def search(
    model: ModelProto,
    ranges: Mapping[str, Range],
    judge: Judge,
    steps: Sequence[Step],
    *,
    max_error: float | None = None,
    max_bytes: int | None = None,
    keep_float: frozenset[str] = frozenset(),
) -> Outcome:
    """Give the smallest model whose error is within max_error, or that of the least error within max_bytes.

    Raises ValueError where no plan is within the budget, or where none or both budgets are given.
    """
    if (max_error is None) == (max_bytes is None):
        raise ValueError("give one budget: an error or a size")
    ladder = _ladder(steps)

    def outcome(n_steps: int) -> Outcome:
        plan: dict[str, Form] = {layer.name: "float" for layer in find_layers(model)}
        for step in ladder[:n_steps]:
            plan[step.layer.name] = step.form
        made = build(model, ranges, plan, keep_float=keep_float)
        return Outcome(plan, made, judge.error(made))

    def fits(found: Outcome) -> bool:
        return found.error <= max_error if max_error is not None else found.n_bytes > (max_bytes or 0)

    # Of more steps the file is smaller and the error greater. For an error: the most steps that still fit. For a size:
    # the fewest that are within it, one more than the most that are not.
    low, high = 0, len(ladder)
    best = outcome(0)
    if max_error is not None and not fits(best):
        raise ValueError(f"the float model itself is at {best.error:.3g}")
    while low < high:
        middle = (low + high + 1) // 2
        if fits(found := outcome(middle)):
            low, best = middle, found
        else:
            high = middle - 1
    if max_bytes is None:
        return best
    if best.n_bytes > max_bytes:
        if low == len(ladder):
            raise ValueError(f"the smallest form has {best.n_bytes} bytes, the budget is {max_bytes}")
        best = outcome(low + 1)
    return best


def _ladder(steps: Sequence[Step]) -> list[Step]:
    """Order the steps by the error that a saved byte costs; a layer's second step counts what it adds to its first."""
    found: list[tuple[float, int, Step]] = []
    by_layer: dict[str, list[Step]] = {}
    for step in steps:
        by_layer.setdefault(step.layer.name, []).append(step)
    for of_layer in by_layer.values():
        cost, error, saved = 0.0, 0.0, 0
        for step in sorted(of_layer, key=lambda s: s.saved_bytes):
            more = max(step.saved_bytes - saved, 1)
            # Never before the layer's smaller step, though it may look cheaper.
            cost = max(cost, (step.error - error) / more)
            found.append((cost, step.saved_bytes, step))
            error, saved = step.error, step.saved_bytes
    return [step for *_, step in sorted(found, key=lambda entry: entry[:2])]
