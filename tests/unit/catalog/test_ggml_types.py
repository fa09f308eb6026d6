from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from edge_rt.catalog.ggml_types import GGML_TYPES


def test_table_is_what_the_installed_ggml_says() -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the back end llama_cpu is not installed")
    (library,) = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so")
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    found = {
        number: (ggml.ggml_type_name(number).decode().upper(), ggml.ggml_blck_size(number), ggml.ggml_type_size(number))
        for number in range(llama_cpp.GGML_TYPE_COUNT)
        if ggml.ggml_type_size(number)
    }
    assert found == {n: (t.name, t.block_size, t.block_bytes) for n, t in GGML_TYPES.items()}
