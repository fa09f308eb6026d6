"""A GGUF file's copy: all keys with their types, all tensors' bytes, and what was to change."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.gguf_files import GgufFile, Tensor, tiny_llama
from tools.gguf_copy import copy_gguf

ARRAYS: dict[str, tuple[str, Any]] = {
    "a.names": ("[string]", ["ä", "", "c"]),
    "a.bytes": ("[u8]", [0, 255]),
    "a.small": ("[i8]", [-1, 1]),
    "a.words": ("[u16]", [1, 65535]),
    "a.counts": ("[u32]", [1, 2**32 - 1]),
    "a.signed": ("[i32]", [-1, 1]),
    "a.long": ("[u64]", [2**63]),
    "a.scores": ("[f32]", [0.5, -1.0]),
    "a.double": ("[f64]", [0.1]),
    "a.flags": ("[bool]", [True, False]),
    "a.flag": ("bool", True),
    "a.number": ("f64", 0.1),
}


def written(path: Path, file: GgufFile) -> Path:
    """Write a file whose tensors hold random bytes."""
    raw = file.encode()
    n = file.data_bytes()
    path.write_bytes(raw[: len(raw) - n] + os.urandom(n))
    return path


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    keys = {k: (f.types, f.contents()) for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    return keys, {t.name: (t.tensor_type, tuple(t.shape), t.data.tobytes()) for t in reader.tensors}


@pytest.mark.parametrize("alignment", [32, 128])
def test_a_copy_has_every_key_and_tensor(tmp_path: Path, alignment: int) -> None:
    file = tiny_llama()
    file.alignment = alignment
    file.set("general.alignment", "u32", alignment)
    for key, (kind, content) in ARRAYS.items():
        file.set(key, kind, content)
    source = written(tmp_path / "a.gguf", file)
    assert contents(copy_gguf(source, tmp_path / "b.gguf")) == contents(source)


def test_what_is_named_changes_and_nothing_else(tmp_path: Path) -> None:
    source = written(tmp_path / "a.gguf", tiny_llama())
    name, floats = "blk.0.attn_q.weight", np.arange(4096, dtype=np.float32).reshape(64, 64)
    target = copy_gguf(
        source,
        tmp_path / "b.gguf",
        keys={"llama.block_count": 1},
        floats={name: floats},
        keeps=lambda tensor: not tensor.startswith("blk.1."),
    )
    keys, tensors = contents(source)
    assert keys["llama.block_count"][1] == 2
    keys["llama.block_count"] = (keys["llama.block_count"][0], 1)
    tensors = {each: data for each, data in tensors.items() if not each.startswith("blk.1.")}
    tensors[name] = (gguf.GGMLQuantizationType.F32, (64, 64), floats.tobytes())
    assert contents(target) == (keys, tensors)


NESTED = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 5, 2) + struct.pack("<ii", 1, 2)


@pytest.mark.parametrize("value", [struct.pack("<IIQ", 9, 5, 0), NESTED])
def test_arrays_that_gguf_does_not_write_are_refused(tmp_path: Path, value: bytes) -> None:
    file = GgufFile(tensors=[Tensor("t", (32,))])
    file.set("general.architecture", "string", "llama")
    file.keys["a.odd"] = value
    with pytest.raises(ValueError, match=r"a\.odd is an empty or nested array"):
        copy_gguf(written(tmp_path / "a.gguf", file), tmp_path / "b.gguf")
