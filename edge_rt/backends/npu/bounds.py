"""What vendors' stacks do not look at: indices beyond a table, integers beyond 32 bits. So requests are checked for it.

OpenVINO 2026.4's CPU device: GatherND reads whatever lies at an index that is beyond its data, memory of the process or
a crash; Gather gives zeros. QNN 2.7's simulator: a quantised Gather answers with something. Both compute 64-bit
integers in 32 bits, and cut off what does not fit. onnxruntime refuses the first two, and computes the third.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Final

import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from edge_rt.backends.base import ModelFile
from edge_rt.backends.npu.vendor import Telemetry, VendorSession
from edge_rt.errors import BackendLoadError, InvalidRequestError
from edge_rt.tensor_types import TensorSpec

_INT32: Final = (-(2**31), 2**31 - 1)
_OF_SHAPES: Final = frozenset({"Shape", "Size"})  # tell nothing of values
_SAME_NUMBERS: Final = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
UNCHECKED: Final = "GatherND"
_WHY: Final = "and the stack may read beyond the data where they are too large; onnx_cpu refuses such a request"


def unsafe_reason(model: ModelProto) -> str | None:
    """Say which GatherND has indices that a request may choose; None if there is none."""
    if any(_is_or_holds(node, UNCHECKED) for function in model.functions for node in function.node):
        return f"a function of its own has a {UNCHECKED}, {_WHY}"
    graph = model.graph
    constants = {each.name for each in graph.initializer}
    from_values = {value.name for value in graph.input if value.name not in constants}
    for node in _in_order(graph.node):
        if any(_holds(body, UNCHECKED) for body in _bodies(node)):
            return f"{node.name or node.op_type} has a {UNCHECKED} inside, {_WHY}"
        if node.op_type == UNCHECKED and node.input[1] in from_values:
            return f"{node.name or UNCHECKED} takes indices from what a request holds, {_WHY}"
        if node.op_type not in _OF_SHAPES and (from_values & set(node.input) or _bodies(node)):
            from_values.update(node.output)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a request must keep to.

    numbers  the least and greatest number of an input
    sizes    the greatest size of an input in one of its dimensions
    """

    numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sizes: Mapping[tuple[str, int], int] = field(default_factory=dict)


def index_bounds(model: ModelProto) -> Bounds:
    """Find the bounds of what becomes an index of Gather in a table whose size is known.

    An input that is one as it comes is bounded by its numbers. Indices that only sizes tell, as positions in a text,
    are bounded by those sizes, each dimension that has a part in them. What is computed otherwise is not seen.
    """
    graph = onnx.shape_inference.infer_shapes(model).graph
    constants = {each.name for each in graph.initializer}
    tables = dict(_shapes(graph))
    inputs = {value.name: len(tables.get(value.name, ())) for value in graph.input if value.name not in constants}
    everything = frozenset((name, axis) for name, rank in inputs.items() for axis in range(rank))
    origins = {name: name for name in inputs}
    from_values = set(inputs)
    told_by: dict[str, frozenset[tuple[str, int]]] = {}
    numbers: dict[str, tuple[int, int]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for node in _in_order(graph.node):
        read = [name for name in node.input if name]
        if node.op_type in _SAME_NUMBERS and read and read[0] in origins:
            origins[node.output[0]] = origins[read[0]]
        if node.op_type in _OF_SHAPES:
            told_by[node.output[0]] = _dimensions(node, origins, inputs) or everything
            continue
        if node.op_type == "Gather" and read[1] not in constants:
            axis = _integer(node, "axis", 0)
            size = (tables.get(read[0]) or (0,) * (axis + 1))[axis]
            if size > 0 and read[1] in origins:
                low, high = numbers.get(origins[read[1]], _INT32)
                numbers[origins[read[1]]] = (max(low, -size), min(high, size - 1))
            elif size > 0 and read[1] not in from_values:
                for place in told_by.get(read[1], ()):
                    sizes[place] = min(size, sizes.get(place, size))
        if from_values & set(read) or _bodies(node):
            from_values.update(node.output)
        for output in node.output:
            told_by[output] = frozenset().union(*(told_by.get(name, frozenset()) for name in read))
    return Bounds(numbers=numbers, sizes=sizes)


def _dimensions(
    node: NodeProto, origins: Mapping[str, str], inputs: Mapping[str, int]
) -> frozenset[tuple[str, int]] | None:
    """Give the dimensions that a Shape tells, None where they are not an input's."""
    if node.op_type != "Shape" or node.input[0] not in inputs or origins[node.input[0]] != node.input[0]:
        return None
    name, rank = node.input[0], inputs[node.input[0]]
    end = _integer(node, "end", rank)
    return frozenset((name, axis) for axis in range(rank)[_integer(node, "start", 0) : end])


def _integer(node: NodeProto, name: str, default: int) -> int:
    return next((each.i for each in node.attribute if each.name == name), default)


def _shapes(graph: GraphProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Give the shapes that are known, 0 for a size that is not."""
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            yield value.name, tuple(size.dim_value for size in value.type.tensor_type.shape.dim)
    for each in graph.initializer:
        yield each.name, tuple(each.dims)


def read_unsafe_reason(path: Path) -> str | None:
    """Say unsafe_reason of a checked file."""
    return unsafe_reason(onnx.load(path, load_external_data=False))


def read_bounds(path: Path, inputs: Sequence[TensorSpec], kinds: Collection[str]) -> Bounds:
    """Give the bounds of a checked file of these kinds of operators. Raises BackendLoadError."""
    wide = {spec.name: _INT32 for spec in inputs if spec.datatype == "INT64"}
    if "Gather" not in kinds:
        return Bounds(numbers=wide)
    try:
        found = index_bounds(onnx.load(path, load_external_data=False))
    except (RuntimeError, ValueError) as exc:  # onnx's own, of a graph that contradicts itself
        raise BackendLoadError(model=path.name, reason=f"its shapes cannot be inferred: {exc}"[:500]) from exc
    is_open = {(spec.name, axis) for spec in inputs for axis, size in enumerate(spec.shape) if size < 0}
    sizes = {place: size for place, size in found.sizes.items() if place in is_open}
    return Bounds(numbers={**wide, **found.numbers}, sizes=sizes)


def check(feeds: Mapping[str, NDArray[Any]], bounds: Bounds) -> None:
    """Raise InvalidRequestError for what a stack would make something else of, or read beyond a table for."""
    for (name, axis), size in bounds.sizes.items():
        if (found := feeds[name].shape[axis]) > size:
            problem = f"has size {found} in dimension {axis}, and this model has a table for up to {size}"
            raise InvalidRequestError(param=name, problem=problem)
    for name, (low, high) in bounds.numbers.items():
        feed = feeds[name]
        if not feed.size:
            continue
        least, greatest = int(feed.min()), int(feed.max())
        if least < low or greatest > high:
            wrong = least if least < low else greatest
            remedy = "; the stack computes in 32 bits, the back end onnx_cpu in 64" if (low, high) == _INT32 else ""
            raise InvalidRequestError(param=name, problem=f"holds {wrong}, and may hold {low} to {high}{remedy}")


class BoundedSession:
    """A VendorSession whose feeds are checked first."""

    def __init__(self, session: VendorSession, bounds: Bounds) -> None:
        self._session, self._bounds = session, bounds
        self.inputs, self.outputs, self.placement = session.inputs, session.outputs, session.placement

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        check(feeds, self._bounds)
        return self._session.run(feeds, outputs)

    @property
    def pid(self) -> int | None:
        """The process that computes, as the session tells it."""
        pid: int | None = getattr(self._session, "pid", None)
        return pid

    def telemetry(self) -> Telemetry:
        return self._session.telemetry()

    def close(self) -> None:
        self._session.close()


def bounded(session: VendorSession, file: ModelFile) -> VendorSession:
    """Give a session of the file whose feeds are checked, where there is anything to check. Raises BackendLoadError."""
    try:
        bounds = read_bounds(file.path, file.onnx.inputs, {kind for kind, _ in file.onnx.kinds})
    except BaseException:
        session.close()
        raise
    return BoundedSession(session, bounds) if bounds.numbers or bounds.sizes else session


def _bodies(node: NodeProto) -> list[GraphProto]:
    bodies = []
    for each in node.attribute:
        if each.type == AttributeProto.GRAPH:
            bodies.append(each.g)
        elif each.type == AttributeProto.GRAPHS:
            bodies += each.graphs
    return bodies


def _holds(graph: GraphProto, kind: str) -> bool:
    return any(_is_or_holds(node, kind) for node in graph.node)


def _is_or_holds(node: NodeProto, kind: str) -> bool:
    return node.op_type == kind or any(_holds(body, kind) for body in _bodies(node))


def _in_order(nodes: Sequence[NodeProto]) -> Iterator[NodeProto]:
    """Give nodes behind those that they read, whatever the file's order."""
    makers = {output: n for n, node in enumerate(nodes) for output in node.output}
    order: TopologicalSorter[int] = TopologicalSorter()
    for n, node in enumerate(nodes):
        order.add(n, *sorted({makers[value] for value in node.input if value in makers}))
    return (nodes[n] for n in order.static_order())
