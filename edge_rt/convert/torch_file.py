"""Read the tensors out of a PyTorch file without PyTorch, and without running anything that is in it.

A .pth file of before 1.6 is five pickles and then the storages' bytes. A pickle names functions that loading calls.
Here three names have a meaning and every other is refused: an ordered dictionary, a storage's type, and "a tensor is
this part of that storage", which makes a numpy array.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_MAX_FILE_BYTES = 2**30
_MAX_DIMS = 8
_STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "LongStorage": "<i8"}


class _Storage:
    """A storage that the pickle speaks of and the file's end fills."""

    def __init__(self, dtype: np.dtype[Any], n_items: int):
        self.dtype = dtype
        self.n_items = n_items
        self.data: NDArray[Any] = np.empty(0, dtype)


class _Part:
    """A tensor: a part of a storage, whose bytes come later."""

    __slots__ = ("offset", "shape", "storage", "strides")

    def __init__(self, storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides

    def array(self) -> NDArray[Any]:
        data = self.storage.data[self.offset :]
        strides = tuple(stride * data.itemsize for stride in self.strides)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(data, self.shape, strides, writeable=False))


class _Rebuild:
    """torch._utils._rebuild_tensor_v2; an object without attributes, so that the pickle can set none."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Part:
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor of no storage")
        numbers = (offset, *shape, *stride)
        if not all(type(n) is int and 0 <= n < 2**40 for n in numbers) or len(shape) > _MAX_DIMS:
            raise pickle.UnpicklingError(f"a tensor of shape {shape!r} at {offset!r}")
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        # The second keeps a stride of 0 from making much of little.
        if last >= storage.n_items or math.prod(shape) > storage.n_items:
            raise pickle.UnpicklingError(f"a tensor of shape {shape!r} reaches beyond its storage")
        return _Part(storage, offset, shape, stride)


class _Reader(pickle.Unpickler):
    """Unpickles what a state dict is made of and refuses every other name."""

    def __init__(self, file: io.BytesIO, storages: dict[str, _Storage]):
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch" and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"it calls {module}.{name}, which is not allowed")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, n_items, view = pid
        if kind != "storage" or view is not None or not isinstance(key, str) or type(n_items) is not int or n_items < 0:
            raise pickle.UnpicklingError("a storage of a form that is not known")
        if key not in self._storages:
            self._storages[key] = _Storage(np.dtype(_STORAGES[storage_type]), n_items)
        return self._storages[key]


def read_state_dict(path: Path) -> dict[str, NDArray[Any]]:
    """Give a file's tensors by name. Raises ModelFormatError for anything that is not a plain state dict."""
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > _MAX_FILE_BYTES:
                _refuse(path, "file", f"{size} bytes, the limit is {_MAX_FILE_BYTES}")
            raw = file.read(_MAX_FILE_BYTES)
    except OSError as exc:
        raise ModelFormatError(path=path.name, field="file", problem=f"cannot be read: {exc.strerror}") from exc
    if raw.startswith(b"PK"):
        _refuse(path, "format", "a zip archive, as PyTorch writes since 1.6; only the form before it is known here")
    storages: dict[str, _Storage] = {}
    file_ = io.BytesIO(raw)
    load: Callable[[], Any] = lambda: _Reader(file_, storages).load()  # noqa: E731
    try:
        if load() != _MAGIC or load() != _PROTOCOL:
            _refuse(path, "format", "not a PyTorch file")
        load()  # of the machine that wrote it
        found = load()
        _fill(file_, load(), storages)
        return _arrays(found)
    except ModelFormatError:
        raise
    # Loading a pickle that was made to harm can end in almost any way; none of them is ours to tell apart.
    except Exception as exc:
        raise ModelFormatError(path=path.name, field="pickle", problem=str(exc) or type(exc).__name__) from exc


def _fill(file: io.BytesIO, keys: Any, storages: dict[str, _Storage]) -> None:
    if not isinstance(keys, list) or len(keys) != len(storages) or set(keys) != set(storages):
        raise pickle.UnpicklingError("the storages that come are not those that the tensors need")
    for key in keys:
        storage = storages[key]
        (n_items,) = struct.unpack("<q", file.read(8))
        if n_items != storage.n_items:
            raise pickle.UnpicklingError(f"storage {key} has {n_items} items, not {storage.n_items}")
        data = file.read(n_items * storage.dtype.itemsize)
        storage.data = np.frombuffer(data, storage.dtype, n_items)


def _arrays(found: Any) -> dict[str, NDArray[Any]]:
    if not isinstance(found, dict):
        raise pickle.UnpicklingError("no dictionary of tensors")
    arrays: dict[str, NDArray[Any]] = {}
    for name, part in found.items():
        if not isinstance(name, str) or not isinstance(part, _Part):
            raise pickle.UnpicklingError(f"{name!r} is no tensor")
        arrays[name] = part.array()
    return arrays


def _refuse(path: Path, field: str, problem: str) -> Never:
    raise ModelFormatError(path=path.name, field=field, problem=problem)
