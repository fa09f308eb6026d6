"""A model's weights as the native engine wants them: mapped from a packed copy on disk, or packed into memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from edge_rt.backends.native_library import Config
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
