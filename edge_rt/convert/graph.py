"""An ONNX graph from an untrusted folder: its nodes by what they produce, its initialisers read when asked for.

External data is read only from regular files inside the folder, within their size. Imported by the child process that
converts; needs the extra `onnx`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto

from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular

MAX_GRAPH_BYTES = 2**31 - 1  # protobuf's own limit
_MAX_NODES = 200_000
_MAX_DIMS = 4
_DTYPES: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype("<f4"),
    TensorProto.FLOAT16: np.dtype("<f2"),
    TensorProto.UINT8: np.dtype("u1"),
    TensorProto.INT32: np.dtype("<i4"),
    TensorProto.INT64: np.dtype("<i8"),
}
# Inputs that the nodes walked over have, at least and at most.
_N_INPUTS = {
    "Add": (2, 2),
    "Cast": (1, 1),
    "Gather": (2, 2),
    "GroupQueryAttention": (7, 20),
    "MatMul": (2, 2),
    "MatMulNBits": (3, 6),
    "Mul": (2, 2),
    "Reshape": (2, 2),
    "RotaryEmbedding": (4, 4),
    "Sigmoid": (1, 1),
    "SimplifiedLayerNormalization": (2, 2),
    "SkipSimplifiedLayerNormalization": (3, 4),
    "Transpose": (1, 1),
}
FLOATS = (np.dtype("<f4"), np.dtype("<f2"))


def inside(folder: Path, name: str) -> Path:
    """Give the real path of a file that a model names. Raises ModelFormatError where it leads out of the folder."""
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or name.startswith("/") or "\\" in name or ".." in parts:
        raise ModelFormatError(path=str(folder), field=repr(name), problem="is not a plain path inside the folder")
    real = (folder / name).resolve()
    if not real.is_relative_to(folder.resolve()):
        raise ModelFormatError(
            path=str(folder), field=repr(name), problem="a link leads out of the folder; copy the file into it"
        )
    return real


def read_bounded(folder: Path, name: str, limit: int) -> bytes:
    path = inside(folder, name)
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > limit:
                raise ModelFormatError(path=str(path), field="file", problem=f"{size} bytes, the limit is {limit}")
            return file.read(limit)
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc


class Graph:
    """The graph of folder/name.

    used   initialisers that were asked for
    seen   ids of nodes that were given out
    """

    def __init__(self, folder: Path, name: str):
        self._folder = folder
        self._path = str(folder / name)
        try:
            model = onnx.ModelProto.FromString(read_bounded(folder, name, MAX_GRAPH_BYTES))
        except DecodeError as exc:
            raise ModelFormatError(path=self._path, field="protobuf", problem=f"it is no ONNX model: {exc}") from exc
        graph = model.graph
        if len(graph.node) > _MAX_NODES:
            self.fail("graph", f"{len(graph.node)} nodes, the limit is {_MAX_NODES}")
        if model.functions or graph.sparse_initializer:
            self.fail("graph", "functions and sparse initialisers are not known here")
        if not all(isinstance(text, str) for text in _texts(graph)):
            self.fail("protobuf", "a name in it is not UTF-8")
        self.nodes = list(graph.node)
        self.inputs = {value.name for value in graph.input}
        self.outputs = [value.name for value in graph.output]
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        if len(self.initializers) != len(graph.initializer):
            self.fail("graph", "two initialisers have one name")
        self.used: set[str] = set()
        self.seen: set[int] = set()
        self._producers: dict[str, NodeProto] = {}
        for node in self.nodes:
            low, high = _N_INPUTS.get(node.op_type, (0, len(node.input)))
            if not low <= len(node.input) <= high or not node.output:
                self.fail(label(node), f"{len(node.input)} inputs and {len(node.output)} outputs")
            for output in filter(None, node.output):
                if output in self._producers or output in self.initializers or output in self.inputs:
                    self.fail(label(node), f"its output {output!r} is produced twice")
                self._producers[output] = node

    def error(self, field: str, problem: str) -> ModelFormatError:
        return ModelFormatError(path=self._path, field=field, problem=problem)

    def fail(self, field: str, problem: str) -> Never:
        raise self.error(field, problem)

    def producer(self, value: str, after: str) -> NodeProto:
        """Give the node that makes a value, past casts. after: who wants it, for errors."""
        node = self._producers.get(self.source(value))
        if node is None or _is_float_cast(node):
            self.fail(after, f"its input {value!r} comes from no node")
        self.seen.add(id(node))
        return node

    def source(self, value: str) -> str:
        """Follow a value back past casts."""
        for _ in range(len(self.nodes)):
            node = self._producers.get(value)
            if node is None or not _is_float_cast(node):
                break
            self.seen.add(id(node))
            value = node.input[0]
        return value

    def maker(self, value: str) -> NodeProto | None:
        return self._producers.get(value)

    def integer(self, node: NodeProto, key: str, default: int = 0) -> int:
        return int(self._attribute(node, key, AttributeProto.INT, default))

    def number(self, node: NodeProto, key: str, default: float) -> float:
        return float(self._attribute(node, key, AttributeProto.FLOAT, default))

    def integers(self, node: NodeProto, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._attribute(node, key, AttributeProto.INTS, default))

    def _attribute(self, node: NodeProto, key: str, kind: Any, default: Any) -> Any:
        found = next((a for a in node.attribute if a.name == key), None)
        if found is None:
            return default
        if found.type != kind:
            self.fail(label(node), f"its {key} is of another type than ONNX gives it")
        return {AttributeProto.INT: found.i, AttributeProto.FLOAT: found.f, AttributeProto.INTS: found.ints}[kind]

    def only_attributes(self, node: NodeProto, known: frozenset[str]) -> None:
        """Refuse attributes other than the known ones, unless they ask for nothing."""
        for a in node.attribute:
            asks = {
                AttributeProto.INT: a.i not in (0, -1),
                AttributeProto.FLOAT: a.f != 0.0,
                AttributeProto.STRING: a.s not in (b"", b"NONE"),
            }
            if a.name not in known and asks.get(a.type, True):
                value = {AttributeProto.INT: a.i, AttributeProto.FLOAT: a.f, AttributeProto.STRING: a.s}.get(a.type, "")
                self.fail(label(node), f"its {a.name} {value} is not known here")

    def shape(self, name: str, after: str) -> tuple[int, ...]:
        return tuple(self._tensor(name, after).dims)

    def dtype(self, name: str, after: str) -> np.dtype[Any]:
        tensor = self._tensor(name, after)
        if (dtype := _DTYPES.get(tensor.data_type)) is None:
            kind = (
                TensorProto.DataType.Name(tensor.data_type)
                if tensor.data_type in TensorProto.DataType.values()
                else "?"
            )
            self.fail(name, f"data of type {kind} are not known here")
        return dtype

    def array(self, name: str, after: str, dtypes: tuple[np.dtype[Any], ...] = ()) -> NDArray[Any]:
        """Read an initialiser, of one of dtypes."""
        tensor, dtype = self._tensor(name, after), self.dtype(name, after)
        if dtypes and dtype not in dtypes:
            self.fail(name, f"{dtype.name} where {' or '.join(d.name for d in dtypes)} is expected")
        dims = tuple(tensor.dims)
        if len(dims) > _MAX_DIMS or any(d < 1 for d in dims) or (n := math.prod(dims)) * dtype.itemsize >= 2**40:
            self.fail(name, f"the shape {dims} is not one of a weight")
        raw = self._external(tensor) if tensor.data_location == TensorProto.EXTERNAL else _inline(tensor, dtype)
        if len(raw) != n * dtype.itemsize:
            self.fail(name, f"{len(raw)} bytes of data, its shape {dims} takes {n * dtype.itemsize}")
        return np.frombuffer(raw, dtype).reshape(dims)

    def _tensor(self, name: str, after: str) -> TensorProto:
        tensor: TensorProto | None = self.initializers.get(name)
        if tensor is None:
            self.fail(after, f"its input {name!r} is not an initialiser")
        self.used.add(name)
        return tensor

    def _external(self, tensor: TensorProto) -> bytes:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        path = inside(self._folder, facts.get("location", ""))
        try:
            offset, length = int(facts.get("offset", "0")), int(facts.get("length", "-1"))
        except ValueError:
            self.fail(tensor.name, "offset and length of its external data are no numbers")
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                length = size - offset if length == -1 else length
                if offset < 0 or length < 0 or offset + length > size:
                    self.fail(tensor.name, f"bytes {offset} to {offset + length} of {path.name}, which has {size}")
                file.seek(offset)
                return file.read(length)
        except OSError as exc:
            raise ModelFormatError(
                path=str(path), field=tensor.name, problem=f"cannot be read: {exc.strerror}"
            ) from exc


def _texts(graph: onnx.GraphProto) -> Iterator[object]:
    """List every name; protobuf gives those that are not UTF-8 as bytes."""
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for tensor in graph.initializer:
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    yield from (value.name for value in (*graph.input, *graph.output))


def _inline(tensor: TensorProto, dtype: np.dtype[Any]) -> bytes:
    if tensor.raw_data:
        return tensor.raw_data
    if tensor.data_type == TensorProto.FLOAT:
        return np.asarray(tensor.float_data, dtype).tobytes()
    if tensor.data_type == TensorProto.INT64:
        return np.asarray(tensor.int64_data, dtype).tobytes()
    if tensor.data_type == TensorProto.FLOAT16:
        return np.asarray(tensor.int32_data, np.uint16).tobytes()
    return np.asarray(tensor.int32_data).astype(dtype).tobytes()


def _is_float_cast(node: NodeProto) -> bool:
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16)
    return node.op_type == "Cast" and any(a.name == "to" and a.i in kinds for a in node.attribute)


def label(node: NodeProto) -> str:
    """Name a node for errors."""
    return f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"
