"""What an ONNX file is, checked before onnxruntime sees it; needs the extra `onnx`.

The file is untrusted. Nothing in it makes this or onnxruntime's loader read outside the model's folder, or allocate
more than the files have bytes: a tensor's declared size must be there. Sparse initialisers, which unfold to whatever
their shape says, are refused. What the operators compute at run time is not looked at, except shapes that are written
down as constants.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Never

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto

from edge_rt.backends.onnx_facts import OnnxModel
from edge_rt.backends.onnx_scan import MAX_STRUCTURE_BYTES, structure_bytes
from edge_rt.backends.onnx_tensors import MAX_DIMS, Folder, check_tensor, type_name
from edge_rt.backends.tensor_feeds import MAX_ELEMENTS
from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.tensor_types import Datatype, TensorSpec

MAX_FILE_BYTES = 2**31 - 1  # protobuf's own limit
MAX_NODES = 50_000
MAX_DEPTH = 8  # of graphs in the attributes of nodes
MAX_TENSORS = 1024  # inputs, and outputs
MAX_NAME_BYTES = 4096
MAX_TEXT_BYTES = 2**24  # of one string attribute
OLDEST_OPSET = 7  # what onnxruntime promises to run
# Their operators are part of onnxruntime; a model's own functions and configured libraries add to them.
KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
_REFUSED = {"EPContext": "it holds a program for another device", "ATen": "it runs code outside the model"}

_DATATYPES: dict[int, Datatype] = {
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8",
    TensorProto.UINT16: "UINT16",
    TensorProto.UINT32: "UINT32",
    TensorProto.UINT64: "UINT64",
    TensorProto.INT8: "INT8",
    TensorProto.INT16: "INT16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.FLOAT16: "FP16",
    TensorProto.FLOAT: "FP32",
    TensorProto.DOUBLE: "FP64",
    TensorProto.STRING: "BYTES",
}
# The input that says how large the output becomes.
_SHAPE_INPUT = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "Resize": 3}


def read_model(path: Path) -> OnnxModel:
    """Read and check a file. Raises ModelFormatError naming the place."""
    return _Reader(path).check(*read_proto(path))


def read_checked(path: Path) -> tuple[OnnxModel, onnx.ModelProto]:
    """Read and check a file, and give what was checked with its facts. Raises as read_model does."""
    model, file_bytes = read_proto(path)
    return _Reader(path).check(model, file_bytes), model


def read_proto(path: Path) -> tuple[onnx.ModelProto, int]:
    """Parse a file; with it its size in bytes. Raises ModelFormatError."""
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_FILE_BYTES:
                problem = f"{size} bytes, the limit is {MAX_FILE_BYTES}: export it with external data"
                raise ModelFormatError(path=str(path), field="file", problem=problem)
            data = file.read(size)  # read allocates what it is told, however short the file
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc
    if (n_bytes := structure_bytes(data)) > MAX_STRUCTURE_BYTES:
        problem = f"more than {MAX_STRUCTURE_BYTES} bytes of it are neither weights nor text"
        raise ModelFormatError(path=str(path), field="file", problem=problem)
    try:
        if n_bytes < 0:
            raise DecodeError
        return onnx.ModelProto.FromString(data), len(data)
    except DecodeError as exc:
        raise ModelFormatError(path=str(path), field="protobuf", problem="it is no ONNX model, or it is cut") from exc


def fast_graph(model: OnnxModel, accuracy_level: int) -> bytes:
    """Give the model's file with accuracy_level in each of its MatMulNBits. Raises ModelFormatError."""
    proto, _ = read_proto(model.path)
    stack: list[GraphProto | onnx.FunctionProto] = [proto.graph, *proto.functions]
    while stack:
        for node in stack.pop().node:
            for attribute in node.attribute:
                stack += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
            if node.op_type == "MatMulNBits":
                kept = [a for a in node.attribute if a.name != "accuracy_level"]
                del node.attribute[:]
                node.attribute.extend([*kept, onnx.helper.make_attribute("accuracy_level", accuracy_level)])
    return bytes(proto.SerializeToString())


class _Reader:
    """Walks one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = Folder(path)
        self._n_nodes = 0
        self._kinds: Counter[str] = Counter()
        self._domains: set[str] = set()
        self._n_slow = 0

    def check(self, model: onnx.ModelProto, file_bytes: int) -> OnnxModel:
        functions = {(function.domain, function.name) for function in model.functions}
        self._check_head(model)
        self._walk(model.graph, "graph", 0)
        for function in model.functions:
            self._text(function.name, "function")
            for node in function.node:
                self._node(node, f"function {function.name!r}", 0, {})
        initializers = {tensor.name for tensor in model.graph.initializer}
        inputs = self._specs((v for v in model.graph.input if v.name not in initializers), "input")
        outputs = self._specs(model.graph.output, "output")
        if not outputs:
            self._fail("graph.output", "the model has no outputs")
        own = {domain for domain, _ in functions}
        return OnnxModel(
            path=self._path,
            inputs=inputs,
            outputs=outputs,
            file_bytes=file_bytes,
            external_bytes=self._folder.n_bytes,
            external=self._folder.names,
            activation_bytes=sum(map(_static_bytes, model.graph.value_info)),
            custom_domains=tuple(sorted(self._domains - KNOWN_DOMAINS - own)),
            kinds=tuple(sorted(self._kinds.items())),
            n_slow=self._n_slow,
        )

    def _check_head(self, model: onnx.ModelProto) -> None:
        if not 3 <= model.ir_version <= onnx.IR_VERSION:
            self._fail("ir_version", f"{model.ir_version} is not in 3..{onnx.IR_VERSION}")
        opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
        if len(opsets) != len(model.opset_import):
            self._fail("opset_import", "a domain is there twice")
        newest = onnx.defs.onnx_opset_version()
        for domain, version in opsets.items():
            self._text(domain, "opset_import")
            if domain == "" and not OLDEST_OPSET <= version <= newest:
                self._fail("opset_import", f"opset {version} is not in {OLDEST_OPSET}..{newest}")
            if version < 1:
                self._fail("opset_import", f"opset {version} of domain {domain!r} is below 1")
        if not opsets:
            self._fail("opset_import", "is missing")

    def _walk(self, graph: GraphProto, where: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._fail(where, f"graphs are nested more than {MAX_DEPTH} deep")
        if graph.sparse_initializer:
            self._fail(f"{where}.sparse_initializer", "sparse initialisers are not supported")
        constants: dict[str, TensorProto] = {}
        for tensor in graph.initializer:
            self._tensor(tensor, f"initializer {tensor.name!r}")
            if tensor.name in constants or not tensor.name:
                self._fail(f"initializer {tensor.name!r}", "is there twice" if tensor.name else "has no name")
            constants[tensor.name] = tensor
        for value in (*graph.input, *graph.output, *graph.value_info):
            self._text(value.name, where)
            self._type(value.type, f"value {value.name!r}", 0)
        for node in graph.node:
            self._node(node, where, depth, constants)

    def _node(self, node: NodeProto, where: str, depth: int, constants: dict[str, TensorProto]) -> None:
        self._n_nodes += 1
        if self._n_nodes > MAX_NODES:
            self._fail(where, f"more than {MAX_NODES} nodes")
        for text in (node.name, node.op_type, node.domain, *node.input, *node.output):
            self._text(text, where)
        field = f"node {node.name or node.op_type!r}"
        if not node.op_type:
            self._fail(field, "has no operator")
        if node.op_type in _REFUSED and node.domain in ("com.microsoft", "org.pytorch.aten"):
            self._fail(field, f"{node.op_type} is not supported: {_REFUSED[node.op_type]}")
        self._domains.add(node.domain)
        self._kinds[node.op_type] += 1
        for attribute in node.attribute:
            self._attribute(attribute, field, depth)
            if node.op_type == "Constant" and attribute.name == "value":
                constants.update(dict.fromkeys(node.output[:1], attribute.t))
            if attribute.name == "shape" and node.op_type in ("RandomNormal", "RandomUniform"):
                self._check_size(attribute.ints, field)
        if node.op_type == "MatMulNBits" and next((a.i for a in node.attribute if a.name == "accuracy_level"), 0) != 4:
            self._n_slow += 1
        at = _SHAPE_INPUT.get(node.op_type)
        if at is not None and at < len(node.input) and (tensor := constants.get(node.input[at])) is not None:
            self._check_size(self._integers(tensor), field)

    def _attribute(self, attribute: AttributeProto, where: str, depth: int) -> None:
        self._text(attribute.name, where)
        field = f"{where}.{attribute.name}"
        for raw in (attribute.s, *attribute.strings):
            if len(raw) > MAX_TEXT_BYTES:
                self._fail(field, f"a string of {len(raw)} bytes, the limit is {MAX_TEXT_BYTES}")
        if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
            self._fail(field, "sparse tensors are not supported")
        for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
            self._tensor(tensor, field)
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            self._walk(graph, field, depth + 1)

    def _tensor(self, tensor: TensorProto, field: str) -> None:
        self._text(tensor.name, field)
        if problem := check_tensor(tensor, self._folder):
            self._fail(field, problem)

    def _integers(self, tensor: TensorProto) -> Sequence[int]:
        """Give the values of a shape; () for what is no list of int64, or stands in another file."""
        if tensor.data_type != TensorProto.INT64 or tensor.data_location == TensorProto.EXTERNAL:
            return ()
        if tensor.raw_data:
            return memoryview(tensor.raw_data).cast("q").tolist()
        return list(tensor.int64_data)

    def _check_size(self, sizes: Iterable[int], field: str) -> None:
        n_elements = math.prod(max(1, size) for size in sizes)
        if n_elements > MAX_ELEMENTS:
            self._fail(field, f"it makes a tensor of {n_elements} elements, the limit is {MAX_ELEMENTS}")

    def _specs(self, values: Iterable[ValueInfoProto], what: str) -> tuple[TensorSpec, ...]:
        specs: dict[str, TensorSpec] = {}
        for value in values:
            field = f"{what} {value.name!r}"
            if not value.name or value.name in specs:
                self._fail(field, "is there twice" if value.name else "has no name")
            if (kind := value.type.WhichOneof("value")) != "tensor_type":
                self._fail(field, f"it is a {(kind or 'value without type').removesuffix('_type')}, not a tensor")
            tensor = value.type.tensor_type
            if (datatype := _DATATYPES.get(tensor.elem_type)) is None:
                self._fail(field, f"its type {type_name(tensor.elem_type)} is not supported")
            if not tensor.HasField("shape") and what == "input":
                self._fail(
                    field, "its number of dimensions is not known; export the model with the shapes of its inputs"
                )
            shape = tuple(_size(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else (-1,)
            if what == "input":
                self._check_size(shape, field)  # no request could fill it, and a warm-up would
            specs[value.name] = TensorSpec(name=value.name, datatype=datatype, shape=shape)
            if len(specs) > MAX_TENSORS:
                self._fail(f"graph.{what}", f"more than {MAX_TENSORS}")
        return tuple(specs.values())

    def _type(self, declared: TypeProto, field: str, depth: int) -> None:
        kind = declared.WhichOneof("value")
        if kind not in ("tensor_type", "sparse_tensor_type"):
            if depth >= MAX_DEPTH:
                self._fail(field, f"types are nested more than {MAX_DEPTH} deep")
            if kind in ("sequence_type", "optional_type"):
                self._type(getattr(declared, kind).elem_type, field, depth + 1)
            return
        dims = getattr(declared, kind).shape.dim
        if len(dims) > MAX_DIMS:
            self._fail(field, f"{len(dims)} dimensions, the limit is {MAX_DIMS}")
        for dim in dims:
            self._text(dim.dim_param, field)
            if not -1 <= dim.dim_value < 2**31:
                self._fail(field, f"a dimension of {dim.dim_value}, it must be in 0..2147483647")

    def _text(self, text: Any, field: str) -> None:
        if not isinstance(text, str):  # what protobuf gives where the bytes are no UTF-8
            self._fail(field, "a name in it is not UTF-8")
        if len(text) > MAX_NAME_BYTES:
            self._fail(field, f"a name of {len(text)} characters, the limit is {MAX_NAME_BYTES}")

    def _fail(self, field: str, problem: str) -> Never:
        raise ModelFormatError(path=str(self._path), field=field[:200], problem=problem)


def _size(dim: TensorShapeProto.Dimension) -> int:
    return int(dim.dim_value) if dim.HasField("dim_value") else -1


def _static_bytes(value: ValueInfoProto) -> int:
    sizes = (max(1, dim.dim_value) for dim in value.type.tensor_type.shape.dim)
    return 4 * int(math.prod(sizes))
