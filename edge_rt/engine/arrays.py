"""Tensors as they travel (bytes) to arrays and back, and arrays against what a model takes.

BYTES tensors become object arrays of bytes; going back, elements may be bytes or text, which is written as UTF-8.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import BackendStepError, InvalidRequestError
from edge_rt.types import Datatype, Tensor, TensorSpec

DTYPES: Mapping[Datatype, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
_DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<I")
_MAX_DIMENSIONS = 8
_SHOWN_CHARS = 80


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Give a tensor's elements as an array that shares its memory and cannot be written to; BYTES are copied out.

    Raises InvalidRequestError unless the bytes are what shape and datatype say. A BOOL other than 0 and 1 is refused:
    computing with it is undefined, and it tells of a mask of 0 and 255 or of another datatype, which no guess mends.
    """
    param = f"inputs.{tensor.name[:_SHOWN_CHARS]}"
    if len(tensor.shape) > _MAX_DIMENSIONS:
        problem = f"has {len(tensor.shape)} dimensions, the limit is {_MAX_DIMENSIONS}"
        raise InvalidRequestError(param=param, problem=problem)
    if any(size < 0 for size in tensor.shape):
        raise InvalidRequestError(param=f"{param}.shape", problem=f"must not be negative, got {_shape(tensor.shape)}")
    n_elements = math.prod(tensor.shape)
    if tensor.datatype == "BYTES":
        return _read_bytes(param, tensor.data, n_elements).reshape(tensor.shape)
    dtype = DTYPES[tensor.datatype]
    if n_elements * dtype.itemsize != len(tensor.data):
        problem = (
            f"{tensor.datatype} {_shape(tensor.shape)} takes {n_elements * dtype.itemsize} bytes, "
            f"got {len(tensor.data)}"
        )
        raise InvalidRequestError(param=param, problem=problem)
    array = np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
    if tensor.datatype == "BOOL" and n_elements and (highest := int(array.view(np.uint8).max())) > 1:
        raise InvalidRequestError(param=param, problem=f"a BOOL is the byte 0 or 1, got {highest}")
    return array


def to_tensor(name: str, array: NDArray[Any]) -> Tensor:
    """Write an array down, in one copy. Raises BackendStepError for a type that no tensor has."""
    datatype = datatype_of(array.dtype)
    if datatype is None:
        raise BackendStepError(reason=f"output {name!r} is an array of {array.dtype}, which no tensor datatype holds")
    if datatype == "BYTES":
        data = b"".join(_length_and_bytes(element) for element in array.reshape(-1))
    else:
        data = array.astype(DTYPES[datatype], copy=False).tobytes()
    return Tensor(name=name, datatype=datatype, shape=array.shape, data=data)


def datatype_of(dtype: np.dtype[Any]) -> Datatype | None:
    """Name an array's type as tensors do; None if they have none for it. Text and byte strings are BYTES."""
    return "BYTES" if dtype.kind in "OSU" else _DATATYPES.get(dtype.newbyteorder("<"))


def check_feeds(
    feeds: Mapping[str, NDArray[Any]], inputs: Sequence[TensorSpec], *, optional: Iterable[str] = ()
) -> None:
    """Raise InvalidRequestError unless feeds are what a model takes: names, datatypes and shapes.

    optional names inputs that may be left out.
    """
    specs = {spec.name: spec for spec in inputs}
    for name, array in feeds.items():
        param = f"inputs.{name[:_SHOWN_CHARS]}"
        spec = specs.get(name)
        if spec is None:
            raise InvalidRequestError(param=param, problem=f"is no input of this model; it has {_names(specs)}")
        datatype = datatype_of(array.dtype)
        if datatype != spec.datatype:
            problem = f"must be {spec.datatype}, got {datatype or array.dtype}"
            raise InvalidRequestError(param=param, problem=problem)
        if not fits(array.shape, spec.shape):
            problem = f"must have the shape {_shape(spec.shape)}, got {_shape(array.shape)}"
            raise InvalidRequestError(param=f"{param}.shape", problem=problem)
    if missing := specs.keys() - feeds.keys() - set(optional):
        raise InvalidRequestError(param=f"inputs.{min(missing)}", problem="is missing")


def check_outputs(wanted: Sequence[str], outputs: Sequence[TensorSpec]) -> None:
    """Raise InvalidRequestError unless a model has each of the wanted outputs."""
    known = {spec.name: spec for spec in outputs}
    for name in wanted:
        if name not in known:
            problem = f"{name[:_SHOWN_CHARS]!r} is no output of this model; it has {_names(known)}"
            raise InvalidRequestError(param="outputs", problem=problem)
    if len(set(wanted)) != len(wanted):
        raise InvalidRequestError(param="outputs", problem="names an output twice")


def fits(shape: Sequence[int], spec: Sequence[int]) -> bool:
    """Say whether an array's shape is one that a spec allows; -1 in the spec is any size."""
    return len(shape) == len(spec) and all(size == want or want < 0 for size, want in zip(shape, spec, strict=True))


def _read_bytes(param: str, data: bytes, n_elements: int) -> NDArray[Any]:
    """Cut elements apart that stand behind their lengths."""
    if n_elements * _LENGTH.size > len(data):  # before room for them is made
        problem = f"{n_elements} BYTES elements take at least {n_elements * _LENGTH.size} bytes, got {len(data)}"
        raise InvalidRequestError(param=param, problem=problem)
    array = np.empty(n_elements, object)
    at = 0
    for i in range(n_elements):
        if len(data) - at < _LENGTH.size:
            raise InvalidRequestError(param=param, problem=f"ends in the length of element {i}")
        (size_bytes,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if len(data) - at < size_bytes:
            problem = f"element {i} is {size_bytes} bytes long, {len(data) - at} are left"
            raise InvalidRequestError(param=param, problem=problem)
        array[i] = data[at : at + size_bytes]
        at += size_bytes
    if at != len(data):
        raise InvalidRequestError(param=param, problem=f"has {len(data) - at} bytes after its last element")
    return array


def _length_and_bytes(element: Any) -> bytes:
    data = element if isinstance(element, bytes) else str(element).encode("utf-8", "surrogateescape")
    return _LENGTH.pack(len(data)) + data


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape[:_MAX_DIMENSIONS])) + (", …]" if len(shape) > _MAX_DIMENSIONS else "]")


def _names(known: Mapping[str, object]) -> str:
    return ", ".join(list(known)[:32])
