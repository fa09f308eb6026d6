"""Read the tensors of a safetensors file: a length, a JSON header, and the bytes that it divides."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular

_MAX_HEADER_BYTES = 16 * 2**20
_MAX_FILE_BYTES = 4 * 2**30
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}

_Size = Annotated[int, Meta(ge=0, le=2**40)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


_Header = dict[str | Literal["__metadata__"], msgspec.Raw]


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Give a file's tensors by name. Raises ModelFormatError."""
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > _MAX_FILE_BYTES:
                problem = f"{size} bytes, the limit is {_MAX_FILE_BYTES}"
                raise ModelFormatError(path=path.name, field="file", problem=problem)
            raw = file.read(8)
            n_bytes = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
            if not 2 <= n_bytes <= min(_MAX_HEADER_BYTES, size - 8):
                raise ModelFormatError(path=path.name, field="header", problem="it has no header of a sound length")
            header = file.read(n_bytes)
            data = file.read(size)
    except OSError as exc:
        raise ModelFormatError(path=path.name, field="file", problem=f"cannot be read: {exc.strerror}") from exc
    try:
        entries = msgspec.json.decode(header, type=_Header)
        entries.pop("__metadata__", None)
        return {name: _array(msgspec.json.decode(entry, type=_Entry), data) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise ModelFormatError(path=path.name, field="header", problem=str(exc)) from exc


def _array(entry: _Entry, data: bytes) -> NDArray[Any]:
    if entry.dtype not in _DTYPES:
        raise ValueError(f"tensors of {entry.dtype} are not known here")
    dtype = np.dtype(_DTYPES[entry.dtype])
    begin, end = entry.data_offsets
    if end > len(data) or end - begin != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"bytes {begin} to {end} of {len(data)} do not hold a tensor of shape {entry.shape}")
    return np.frombuffer(data[begin:end], dtype).reshape(entry.shape)
