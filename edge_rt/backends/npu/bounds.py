"""What vendors' stacks do not look at: indices beyond a table, integers beyond 32 bits. So requests are checked for it.

Tried with indices that a request holds, in OpenVINO 2026.4's CPU device, QNN 2.7's and rknn-toolkit2 2.5's simulators:

                 beyond the table                                    from the end (-1 is the last)
Gather           OpenVINO zeros; QNN and RKNN fail, or something     QNN fails where they are 32-bit
                 where QNN's table is quantised
GatherElements   OpenVINO and QNN the nearest, RKNN fails            QNN always the last
GatherND         OpenVINO reads whatever lies there, or crashes      right
ScatterElements  OpenVINO writes there, or crashes; QNN leaves out   QNN leaves them out
ScatterND        OpenVINO fails, on one thread gives memory as it    QNN leaves them out
                 was; QNN leaves them out
OneHot           right: nothing is hot                               QNN: nothing is hot

OpenVINO and QNN compute 64-bit integers in 32 bits, and cut off what does not fit. onnxruntime is right in all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from edge_rt.backends.base import ModelFile
from edge_rt.backends.npu.vendor import Telemetry, VendorSession
from edge_rt.backends.onnx_order import in_order
from edge_rt.errors import BackendLoadError, InvalidRequestError
from edge_rt.tensor_types import TensorSpec

_INT32: Final = (-(2**31), 2**31 - 1)
_OF_SHAPES: Final = frozenset({"Shape", "Size"})  # tell nothing of values
_SAME_NUMBERS: Final = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_BY_AXIS: Final = frozenset({"Gather", "GatherElements", "Scatter", "ScatterElements"})
_BY_TUPLE: Final = frozenset({"GatherND", "ScatterND"})
_INDEXED: Final = _BY_AXIS | _BY_TUPLE | {"OneHot"}
# What reads or writes beyond the data.
UNCHECKED: Final = frozenset({"GatherND", "Scatter", "ScatterElements", "ScatterND"})
_WHY: Final = "and the stack may go beyond the data where they are too large; onnx_cpu refuses such a request"


def unsafe_reason(model: ModelProto) -> str | None:
    """Say which operator may go beyond its data with what a request holds, and cannot be checked; None if none does."""
    for function in model.functions:
        for node in function.node:
            if (kind := _unchecked(node)) is not None:
                return f"a function of its own has a {kind}, {_WHY}"
    if not any(_unchecked(node) is not None for node in model.graph.node):
        return None
    graph = onnx.shape_inference.infer_shapes(model).graph
    checked = {use.by for use in _uses(graph) if use.size > 0}
    from_values = set(_inputs(graph))
    for node in in_order(graph.node):
        if kind := next((found for body in _bodies(node) for found in _held(body)), None):
            return f"{node.name or node.op_type} has a {kind} inside, {_WHY}"
        if node.op_type in UNCHECKED and node.input[1] in from_values and node.output[0] not in checked:
            return f"{node.name or node.op_type} takes indices from what a request holds, {_WHY}"
        if node.op_type not in _OF_SHAPES and (from_values & set(node.input) or _bodies(node)):
            from_values.update(node.output)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a request must keep to.

    numbers  the least and greatest number of an input
    sizes    the greatest size of an input in one of its dimensions
    wraps    inputs that are nothing but indices, with the size from whose end negative ones count
    """

    numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sizes: Mapping[tuple[str, int], int] = field(default_factory=dict)
    wraps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Use:
    """What is done with an input's numbers as they are.

    by    the first output of the node that does it
    size  of what they are indices in; 0 where it is not known, or they are none
    """

    origin: str
    by: str
    kind: str
    size: int


def index_bounds(model: ModelProto) -> Bounds:
    """Find the bounds of what becomes an index in a table whose size is known.

    An input that is one as it comes is bounded by its numbers. Indices that only sizes tell, as positions in a text,
    are bounded by those sizes, each dimension that has a part in them. What is computed otherwise is not seen.
    """
    graph = onnx.shape_inference.infer_shapes(model).graph
    constants = {each.name for each in graph.initializer}
    tables = dict(_shapes(graph))
    inputs = {name: len(tables.get(name, ())) for name in _inputs(graph)}
    everything = frozenset((name, axis) for name, rank in inputs.items() for axis in range(rank))
    origins = {name: name for name in inputs}
    from_values = set(inputs)
    told_by: dict[str, frozenset[tuple[str, int]]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for node in in_order(graph.node):
        read = [name for name in node.input if name]
        if node.op_type in _SAME_NUMBERS and read and read[0] in origins:
            origins[node.output[0]] = origins[read[0]]
        if node.op_type in _OF_SHAPES:
            told_by[node.output[0]] = _dimensions(node, origins, inputs) or everything
            continue
        if node.op_type == "Gather" and read[1] not in constants and read[1] not in from_values:
            axis = _integer(node, "axis", 0)
            size = (tables.get(read[0]) or (0,) * (axis + 1))[axis]
            for place in told_by.get(read[1], ()) if size > 0 else ():
                sizes[place] = min(size, sizes.get(place, size))
        if from_values & set(read) or _bodies(node):
            from_values.update(node.output)
        for output in node.output:
            told_by[output] = frozenset().union(*(told_by.get(name, frozenset()) for name in read))
    return _of_numbers(graph, sizes)


def _of_numbers(graph: GraphProto, sizes: Mapping[tuple[str, int], int]) -> Bounds:
    numbers: dict[str, tuple[int, int]] = {}
    counts: dict[str, set[int]] = {}
    for use in _uses(graph):
        counts.setdefault(use.origin, set()).add(use.size)
        if use.size > 0 and use.kind != "OneHot":  # for which any number is right
            low, high = numbers.get(use.origin, _INT32)
            numbers[use.origin] = (max(low, -use.size), min(high, use.size - 1))
    wraps = {name: min(found) for name, found in counts.items() if len(found) == 1 and min(found) > 0}
    return Bounds(numbers=numbers, sizes=sizes, wraps=wraps)


def _uses(graph: GraphProto) -> list[_Use]:
    """List all that is done with inputs' numbers in a graph whose shapes are inferred."""
    tables = dict(_shapes(graph))
    constants = {each.name: each for each in graph.initializer}
    origins = {name: name for name in _inputs(graph)}
    uses: list[_Use] = []
    for node in in_order(graph.node):
        if node.op_type in _SAME_NUMBERS and node.input[0] in origins:
            origins[node.output[0]] = origins[node.input[0]]
            continue
        place = (0 if node.op_type == "OneHot" else 1) if node.op_type in _INDEXED else -1
        for at, name in enumerate(node.input):
            if name in origins and node.op_type not in _OF_SHAPES:
                size = _size(node, tables, constants) if at == place else 0
                uses.append(_Use(origins[name], node.output[0], node.op_type, size))
        inside = set().union(*map(_read_inside, _bodies(node)))
        uses += [_Use(origins[name], node.output[0], node.op_type, 0) for name in inside & set(origins)]
    outputs = {value.name for value in graph.output}
    return uses + [_Use(origin, name, "", 0) for name, origin in origins.items() if name in outputs]


def _size(node: NodeProto, tables: Mapping[str, tuple[int, ...]], constants: Mapping[str, onnx.TensorProto]) -> int:
    """Give how many a node's indices count, 0 where that is not known or differs."""
    if node.op_type == "OneHot":
        depth = constants.get(node.input[1])
        if depth is None or depth.data_location == onnx.TensorProto.EXTERNAL:
            return 0
        return int(onnx.numpy_helper.to_array(depth).reshape(-1)[0])
    shape, axis = tables.get(node.input[0], ()), _integer(node, "axis", 0)
    if node.op_type in _BY_TUPLE:
        indices = tables.get(node.input[1], ())
        if not indices or indices[-1] != 1:
            return 0  # each column counts in a dimension of its own
        axis = _integer(node, "batch_dims", 0)
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


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


def _inputs(graph: GraphProto) -> list[str]:
    """Name what a request holds."""
    constants = {each.name for each in graph.initializer}
    return [value.name for value in graph.input if value.name not in constants]


def _shapes(graph: GraphProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Give the shapes that are known, 0 for a size that is not."""
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            yield value.name, tuple(size.dim_value for size in value.type.tensor_type.shape.dim)
    for each in graph.initializer:
        yield each.name, tuple(each.dims)


def read_unsafe_reason(path: Path) -> str | None:
    """Say unsafe_reason of a checked file."""
    try:
        return unsafe_reason(onnx.load(path, load_external_data=False))
    except (RuntimeError, ValueError) as exc:  # onnx's own, of a graph that contradicts itself
        return f"its shapes cannot be inferred: {exc}"[:500]


def read_bounds(path: Path, inputs: Sequence[TensorSpec], kinds: Collection[str], *, has_int64: bool = False) -> Bounds:
    """Give the bounds of a checked file of these kinds of operators; has_int64: the stack computes in 64 bits.

    Raises BackendLoadError.
    """
    wide = {spec.name: _INT32 for spec in inputs if spec.datatype == "INT64" and not has_int64}
    if not _INDEXED & set(kinds):
        return Bounds(numbers=wide)
    try:
        found = index_bounds(onnx.load(path, load_external_data=False))
    except (RuntimeError, ValueError) as exc:  # onnx's own, of a graph that contradicts itself
        raise BackendLoadError(model=path.name, reason=f"its shapes cannot be inferred: {exc}"[:500]) from exc
    is_open = {(spec.name, axis) for spec in inputs for axis, size in enumerate(spec.shape) if size < 0}
    sizes = {place: size for place, size in found.sizes.items() if place in is_open}
    return Bounds(numbers={**wide, **found.numbers}, sizes=sizes, wraps=found.wraps)


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
        if feed.dtype.kind == "f" and not np.isfinite(feed).all():
            raise InvalidRequestError(param=name, problem=f"holds what is no number, and may hold {low} to {high}")
        least, greatest = int(feed.min()), int(feed.max())
        if least < low or greatest > high:
            wrong = least if least < low else greatest
            remedy = "; the stack computes in 32 bits, the back end onnx_cpu in 64" if (low, high) == _INT32 else ""
            raise InvalidRequestError(param=name, problem=f"holds {wrong}, and may hold {low} to {high}{remedy}")


def wrapped(feeds: Mapping[str, NDArray[Any]], bounds: Bounds) -> Mapping[str, NDArray[Any]]:
    """Count indices from the beginning that count from the end: not every stack takes those."""
    changed = {}
    for name, size in bounds.wraps.items():
        feed = feeds[name]
        if feed.dtype.kind == "i" and feed.size and int(feed.min()) < 0:
            changed[name] = np.where((feed < 0) & (feed >= -size), feed + feed.dtype.type(size), feed)
    return {**feeds, **changed} if changed else feeds


class BoundedSession:
    """A VendorSession whose feeds are checked first."""

    def __init__(self, session: VendorSession, bounds: Bounds) -> None:
        self._session, self._bounds = session, bounds
        self.inputs, self.outputs, self.placement = session.inputs, session.outputs, session.placement

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        check(feeds, self._bounds)
        return self._session.run(wrapped(feeds, self._bounds), outputs)

    @property
    def pid(self) -> int | None:
        """The process that computes, as the session tells it."""
        pid: int | None = getattr(self._session, "pid", None)
        return pid

    def telemetry(self) -> Telemetry:
        return self._session.telemetry()

    def close(self) -> None:
        self._session.close()


def bounded(session: VendorSession, file: ModelFile, *, has_int64: bool = False) -> VendorSession:
    """Give a session of the file whose feeds are checked, where there is anything to check. Raises BackendLoadError."""
    try:
        kinds = {kind for kind, _ in file.onnx.kinds}
        bounds = read_bounds(file.path, file.onnx.inputs, kinds, has_int64=has_int64)
    except BaseException:
        session.close()
        raise
    return BoundedSession(session, bounds) if bounds.numbers or bounds.sizes or bounds.wraps else session


def _bodies(node: NodeProto) -> list[GraphProto]:
    bodies = []
    for each in node.attribute:
        if each.type == AttributeProto.GRAPH:
            bodies.append(each.g)
        elif each.type == AttributeProto.GRAPHS:
            bodies += each.graphs
    return bodies


def _unchecked(node: NodeProto) -> str | None:
    """Name what may go beyond its data, in a node or inside of it."""
    if node.op_type in UNCHECKED:
        return str(node.op_type)
    return next((kind for body in _bodies(node) for kind in _held(body)), None)


def _held(graph: GraphProto) -> Iterator[str]:
    yield from filter(None, map(_unchecked, graph.node))


def _read_inside(graph: GraphProto) -> set[str]:
    """Name what a body reads, which may be values from around it."""
    names = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    return names.union(*(_read_inside(body) for node in graph.node for body in _bodies(node)))
