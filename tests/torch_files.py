"""Write PyTorch files of the form before 1.6, without PyTorch."""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x1950A86A20F9469CFC6C
STORAGES = {"<f4": "FloatStorage", "<f8": "DoubleStorage", "<f2": "HalfStorage", "<i8": "LongStorage"}


def op_global(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def op_text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def op_int(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def op_ints(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(op_int, values)) + b"t"


def op_tensor(
    key: str, shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int, n_items: int, storage: str
) -> bytes:
    """The opcodes that rebuild one tensor of the storage named key."""
    pid = b"(" + op_text("storage") + op_global("torch", storage) + op_text(key) + op_text("cpu") + op_int(n_items)
    hooks = op_global("collections", "OrderedDict") + b")R"
    parts = pid + b"Nt" + b"Q" + op_int(offset) + op_ints(shape) + op_ints(strides) + b"\x89" + hooks
    return op_global("torch._utils", "_rebuild_tensor_v2") + b"(" + parts + b"t" + b"R"


def state_dict_pickle(items: Mapping[str, bytes]) -> bytes:
    """A pickled OrderedDict whose values are the opcodes given."""
    body = b"".join(op_text(name) + value for name, value in items.items())
    return b"\x80\x02" + op_global("collections", "OrderedDict") + b")R" + b"(" + body + b"u" + b"."


def file_of(state: bytes, storages: Mapping[str, bytes]) -> bytes:
    """A file around a pickled state dict; storages are n_items (8 bytes) and data each."""
    out = io.BytesIO()
    for value in (MAGIC, 1001, {"little_endian": True}):
        pickle.dump(value, out, protocol=2)
    out.write(state)
    pickle.dump(list(storages), out, protocol=2)
    for raw in storages.values():
        out.write(raw)
    return out.getvalue()


def torch_file(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The file that torch.save of these tensors would be, each in a storage of its own, with its strides."""
    items, storages = OrderedDict[str, bytes](), OrderedDict[str, bytes]()
    for index, (name, array) in enumerate(arrays.items()):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        kind = STORAGES[array.dtype.str]
        items[name] = op_tensor(str(index), array.shape, strides, offset=0, n_items=array.size, storage=kind)
        order = np.argsort([-stride for stride in strides], kind="stable")
        flat = array.transpose(order).tobytes() if array.ndim else array.tobytes()
        storages[str(index)] = struct.pack("<q", array.size) + flat
    return file_of(state_dict_pickle(items), storages)
