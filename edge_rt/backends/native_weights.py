"""A model's weights as the native engine wants them: mapped from a packed copy, packed here, or on another device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.native_library import LINEAR, Config
from edge_rt.catalog.packed import HEAD_BYTES, Packing, open_packed
from edge_rt.catalog.store import free_bytes
from edge_rt.errors import BackendLoadError


class NativeWeights:
    """An en_model.

    tensors  an array of Tensor, in the engine's order; where the output matrix is not the embedding too, the data of
             the embedding must outlive this
    Raises BackendLoadError with the engine's reason.
    """

    def __init__(self, lib: Any, model: str, path: Path, config: Config, tensors: Any, *, packed_copy: bool) -> None:
        self._lib = lib
        self._model = model
        self._asked = (ctypes.byref(config), tensors, len(tensors), -1)
        self.copy = self._open_copy(path) if packed_copy else None
        address, n_bytes = None, 0
        if self.copy is not None:
            self._bytes = np.frombuffer(self.copy, dtype=np.uint8, offset=HEAD_BYTES)
            address, n_bytes = self._bytes.ctypes.data, self._bytes.nbytes
        error = ctypes.create_string_buffer(256)
        self.pointer: int | None = lib.en_model_new(*self._asked, address, n_bytes, error, len(error))
        if not self.pointer:
            raise BackendLoadError(model=model, reason=error.value.decode())

    def _open_copy(self, path: Path) -> mmap.mmap | None:
        packing = Packing(layout=self._lib.en_layout().decode(), n_bytes=self._pack(None), pack=self._pack)
        return open_packed(path, packing, free_bytes=free_bytes)

    def _pack(self, out: mmap.mmap | None) -> int:
        """Pack into a map from HEAD_BYTES on; without one only count the bytes."""
        to = None if out is None else np.frombuffer(out, dtype=np.uint8, offset=HEAD_BYTES)
        error = ctypes.create_string_buffer(256)
        n_bytes = self._lib.en_pack_model(*self._asked, None if to is None else to.ctypes.data, error, len(error))
        if n_bytes < 0:
            raise BackendLoadError(model=self._model, reason=error.value.decode())
        return int(n_bytes)

    def close(self) -> None:
        if self.pointer:
            self._lib.en_model_free(self.pointer)
        self.pointer = None


Floats = NDArray[np.float32]
# A matrix's name and vectors [m, k] to products [m, n]; what it raises, a step raises.
Multiply = Callable[[str, Floats], Floats]


class ExternalWeights:
    """An en_model whose matrices a function multiplies: those of matrix_names, in their order.

    tensors  as NativeWeights has them; the data of the embedding must outlive this
    error    what the function raised last
    """

    def __init__(self, lib: Any, model: str, config: Config, tensors: Any, multiply: Multiply) -> None:
        self._lib, self._multiply = lib, multiply
        self._names = matrix_names(config.n_layers)
        self._function = LINEAR(self._call)  # the library holds the bare pointer: keep it alive
        self.error: BaseException | None = None
        error = ctypes.create_string_buffer(256)
        self.pointer: int | None = lib.en_model_external(
            ctypes.byref(config), tensors, len(tensors), -1, error, len(error)
        )
        if not self.pointer:
            raise BackendLoadError(model=model, reason=error.value.decode())

    def serve(self, context: int) -> None:
        """Multiply for a context of this model."""
        self._lib.en_set_linear(context, self._function, None)

    def _call(self, _user: int | None, matrix: int, x: int, m: int, k: int, y: int, n: int) -> int:
        try:
            _floats(y, m, n)[:] = self._multiply(self._names[matrix], _floats(x, m, k))
        except BaseException as exc:  # noqa: BLE001 - an interrupt too: it must not unwind through the library
            self.error = exc
            return 1
        return 0

    def close(self) -> None:
        if self.pointer:
            self._lib.en_model_free(self.pointer)
        self.pointer = None


def matrix_names(n_layers: int) -> Sequence[str]:
    """Name an external model's matrices by number, as EN_LINEAR_* counts them."""
    parts = ("attn_qkv", "attn_output", "ffn_gate_up", "ffn_down")
    return [*(f"blk.{i}.{part}" for i in range(n_layers) for part in parts), "output"]


def _floats(address: int, n_rows: int, n_cols: int) -> Floats:
    memory: Any = (ctypes.c_float * (n_rows * n_cols)).from_address(address)
    floats: Floats = np.frombuffer(memory, np.float32).reshape(n_rows, n_cols)
    return floats
