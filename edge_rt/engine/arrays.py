"""Tensors as they travel (bytes) to arrays and back.

BYTES tensors become object arrays of bytes; going back, elements may be bytes or text, which is written as UTF-8.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import DTYPES
from edge_rt.errors import BackendStepError, InvalidRequestError
from edge_rt.tensor_types import Datatype, Tensor

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
    if min(tensor.shape, default=0) < 0:
        raise InvalidRequestError(param=f"{param}.shape", problem=f"must not be negative, got {_shape(tensor.shape)}")
    n_elements = math.prod(tensor.shape)
    if tensor.datatype == "BYTES":
        return _read_bytes(param, bytes(tensor.data), n_elements).reshape(tensor.shape)
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
    if (known := _DATATYPES.get(dtype)) is not None:
        return known
    return "BYTES" if dtype.kind in "OSU" else _DATATYPES.get(dtype.newbyteorder("="))


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
