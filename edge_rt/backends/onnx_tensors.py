"""Whether a tensor in an ONNX file is as large as it says, and where its data may stand."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

from onnx import TensorProto

MAX_DIMS = 16
# Bits of an element in raw data, and the field that holds the elements otherwise.
_TYPES: dict[int, tuple[int, str]] = {
    TensorProto.FLOAT: (32, "float_data"),
    TensorProto.UINT8: (8, "int32_data"),
    TensorProto.INT8: (8, "int32_data"),
    TensorProto.UINT16: (16, "int32_data"),
    TensorProto.INT16: (16, "int32_data"),
    TensorProto.INT32: (32, "int32_data"),
    TensorProto.INT64: (64, "int64_data"),
    TensorProto.STRING: (0, "string_data"),
    TensorProto.BOOL: (8, "int32_data"),
    TensorProto.FLOAT16: (16, "int32_data"),
    TensorProto.DOUBLE: (64, "double_data"),
    TensorProto.UINT32: (32, "uint64_data"),
    TensorProto.UINT64: (64, "uint64_data"),
    TensorProto.BFLOAT16: (16, "int32_data"),
    TensorProto.FLOAT8E4M3FN: (8, "int32_data"),
    TensorProto.FLOAT8E4M3FNUZ: (8, "int32_data"),
    TensorProto.FLOAT8E5M2: (8, "int32_data"),
    TensorProto.FLOAT8E5M2FNUZ: (8, "int32_data"),
    TensorProto.UINT4: (4, "int32_data"),
    TensorProto.INT4: (4, "int32_data"),
}
_FIELDS = sorted({name for _, name in _TYPES.values()})


def type_name(number: int) -> str:
    """Give a data type's name, as ONNX spells it."""
    try:
        return str(TensorProto.DataType.Name(number))
    except ValueError:
        return f"number {number}"


class Folder:
    """The folder of a model file, and the sizes of the files in it that the model names."""

    def __init__(self, model: Path) -> None:
        self._root = model.parent
        self._sizes: dict[str, int] = {}

    @property
    def n_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._sizes))

    def size(self, location: str) -> int | str:
        """Give the size of a file that a model names, or what is wrong with the name or the file."""
        if location not in self._sizes:
            parts = location.split("/")
            if not location or len(location) > 1024 or {"\0", "\\"} & set(location) or {"", ".", ".."} & set(parts):
                return f"external data {location[:200]!r} is no plain path inside the model's folder"
            path = self._root / location
            try:
                # Every step on the way may be a link.
                if not path.resolve(strict=True).is_relative_to(self._root.resolve()):
                    return f"external data {location!r}: a link leads out of the model's folder"
                found = path.stat()
            except (OSError, RuntimeError) as exc:  # RuntimeError is how Python tells of links in a circle
                return f"external data {location!r} cannot be read: {getattr(exc, 'strerror', None) or exc}"
            if not stat.S_ISREG(found.st_mode) or not os.access(path, os.R_OK):
                return f"external data {location!r} is no regular file that can be read"
            self._sizes[location] = found.st_size
        return self._sizes[location]


def check_tensor(tensor: TensorProto, folder: Folder) -> str:
    """Say why a tensor's data cannot be what its type and shape promise; "" if it is."""
    if tensor.data_type not in _TYPES:
        return f"type {type_name(tensor.data_type)} is not supported"
    if len(tensor.dims) > MAX_DIMS:
        return f"{len(tensor.dims)} dimensions, the limit is {MAX_DIMS}"
    if any(size < 0 for size in tensor.dims) or math.prod(tensor.dims) >= 2**48:
        return f"shape {list(tensor.dims)}"
    if any(size >= 2**48 for size in tensor.dims):  # beside a 0, whose product shows nothing
        return f"shape {list(tensor.dims)}"
    if tensor.HasField("segment"):
        return "it is stored in segments, which are not supported"
    n_elements = math.prod(tensor.dims)
    bits, field = _TYPES[tensor.data_type]
    n_bytes = (n_elements * bits + 7) // 8
    if tensor.data_location == TensorProto.EXTERNAL:
        return _external(tensor, n_bytes, folder)
    filled = [name for name in _FIELDS if len(getattr(tensor, name))]
    if tensor.HasField("raw_data"):
        if filled or tensor.data_type == TensorProto.STRING:
            return "it has raw data beside or in place of its elements"
        n_have = len(tensor.raw_data)
        return "" if n_have == n_bytes else _lie(tensor, f"{n_bytes} bytes", f"{n_have}")
    if any(name != field for name in filled):
        return f"it has {filled[0]}, its type {type_name(tensor.data_type)} goes with {field}"
    n_want, n_have = (n_bytes if bits == 4 else n_elements), len(getattr(tensor, field))
    return "" if n_have == n_want else _lie(tensor, f"{n_want} elements", f"{n_have}")


def _external(tensor: TensorProto, n_bytes: int, folder: Folder) -> str:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if tensor.data_type == TensorProto.STRING:
        return "strings cannot be external data"
    size = folder.size(entries.get("location", ""))
    if isinstance(size, str):
        return size
    numbers = {}
    for key, default in (("offset", 0), ("length", n_bytes)):
        text = entries.get(key, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            return f"external data's {key} {text[:40]!r} is no number"
        numbers[key] = int(text)
    if numbers["length"] != n_bytes:
        return _lie(tensor, f"{n_bytes} bytes", str(numbers["length"]))
    if numbers["offset"] + n_bytes > size:
        return f"external data ends at {numbers['offset'] + n_bytes}, its file has {size} bytes"
    return ""


def _lie(tensor: TensorProto, need: str, have: str) -> str:
    return f"shape {list(tensor.dims)} of {type_name(tensor.data_type)} needs {need}, {have} are there"
