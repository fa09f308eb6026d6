"""The order of packed weights is what EN_LAYOUT names: copies on disk outlive the library that wrote them."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_rt.backends.base import ModelFile
from edge_rt.backends.native import _tensors
from edge_rt.backends.native_config import engine_config, read_config
from edge_rt.backends.native_library import load_native
from edge_rt.errors import BackendUnavailableError
from tests.gguf_files import tiny_llama

try:
    LIB: Any = load_native()
except BackendUnavailableError as exc:
    pytest.skip(f"the native engine is not here: {exc.reason}", allow_module_level=True)

QUANTS = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Whoever changes the order of what is packed gives EN_LAYOUT another name and puts the new digest here.
PACKED = {"16x4-1": "c97dd34cb156e0dc8182b1baf3fd856fa723e5a66b08e8b3b473c97d2a366495"}


def packed(path: Path, quant: str) -> bytes:
    """Pack a model of weights that any machine draws alike."""
    model = tiny_llama(n_layers=1, n_vocab=40, width=256, linear=quant, embedding=quant)
    size = model.data_bytes()
    raw = model.encode()
    path.write_bytes(raw[: len(raw) - size] + np.random.Generator(np.random.PCG64(1)).bytes(size))
    file = ModelFile(model="tiny", variant="", path=path, quant="")
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    config = engine_config(read_config(file.model, str(file.path), file.header), None)
    tensors = _tensors(file.header, content.ctypes.data + file.header.data_offset)
    error = ctypes.create_string_buffer(256)
    n_bytes = LIB.en_pack_model(ctypes.byref(config), tensors, len(tensors), -1, None, error, len(error))
    out = np.zeros(n_bytes, dtype=np.uint8)
    assert (
        LIB.en_pack_model(ctypes.byref(config), tensors, len(tensors), -1, out.ctypes.data, error, len(error))
        == n_bytes
    )
    return out.tobytes()


def test_the_layouts_name_stands_for_the_bytes(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for quant in QUANTS:
        digest.update(packed(tmp_path / f"{quant}.gguf", quant))
    assert PACKED[LIB.en_layout().decode()] == digest.hexdigest()
