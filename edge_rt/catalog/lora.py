"""Check a LoRA adapter before llama.cpp, which trusts it, sees it: its kind, and each matrix against the model's."""

from __future__ import annotations

import math
from pathlib import Path

from edge_rt.catalog.gguf import GgufHeader, TensorInfo, read_tensors
from edge_rt.catalog.part import hash_file
from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.types import AdapterFile

_MAX_RANK = 4096
# What converters write, and what scales without surprises: by type the bits of the exponent, and a number's bytes.
_EXPONENTS = {"F32": (0x7F800000, 4), "F16": (0x7C00, 2), "BF16": (0x7F80, 2)}
_CHUNK_BYTES = 16 * 2**20
_EMBEDDING = "token_embd.weight"  # its rows are looked up and not multiplied, which is another kind of pair


def same_file(adapter: AdapterFile) -> tuple[str, int, int]:
    """Give what tells an adapter's file from another under its name, without reading it."""
    try:
        stat = Path(adapter.path).stat()
    except OSError:  # which loading says
        return adapter.name, 0, 0
    return adapter.name, stat.st_size, stat.st_mtime_ns


def check_adapter(adapter: AdapterFile, base: GgufHeader, base_path: Path) -> int:
    """Give an adapter's size in bytes. Raises ModelFormatError unless it is a LoRA that fits the model."""
    path = adapter.path

    def refuse(field: str, problem: str) -> ModelFormatError:
        return ModelFormatError(path=path, field=field, problem=problem)

    keys, tensors, _ = read_tensors(Path(path))
    for key, wanted in (
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        ("general.architecture", base.arch),
    ):
        if keys.get(key) != wanted:
            raise refuse(key, f"is {str(keys.get(key))[:40]!r}, it must be {wanted!r}")
    alpha = keys.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise refuse("adapter.lora.alpha", "must be a finite number")
    if any(key.startswith("adapter.alora.") for key in keys):
        raise refuse("adapter.alora", "adapters that are switched on by tokens are not supported")
    named = {tensor.name: tensor for tensor in tensors}
    matrices = {tensor.name: tensor for tensor in base.tensors}
    for name, tensor in named.items():
        target, _, side = name.rpartition(".lora_")
        if side not in ("a", "b") or target not in matrices:
            raise refuse(f"tensor {name}", "belongs to no matrix of the model")
        if target == _EMBEDDING:
            raise refuse(f"tensor {name}", "changes the embedding, which is not supported")
        if tensor.type not in _EXPONENTS:
            raise refuse(f"tensor {name}", f"is {tensor.type}, not one of {', '.join(sorted(_EXPONENTS))}")
        if f"{target}.lora_{'ba'[side == 'b']}" not in named:
            raise refuse(f"tensor {name}", "is there without its other half")
    for target in {name.rpartition(".lora_")[0] for name in named}:
        if problem := _misfit(matrices[target], named[f"{target}.lora_a"], named[f"{target}.lora_b"]):
            raise refuse(f"tensor {target}", problem)
    if adapter.base_sha256 and (found := hash_file(base_path)) != adapter.base_sha256:
        problem = f"belongs to the model with SHA-256 {adapter.base_sha256}, this one's is {found}"
        raise refuse("base_sha256", problem)
    return sum(tensor.size_bytes for tensor in tensors)


def check_numbers(adapter: AdapterFile) -> None:
    """Read an adapter's matrices, which check_adapter has passed. Raises ModelFormatError for one that is not finite.

    Each request that names such an adapter would fail, and say nothing of why.
    """
    _, tensors, data_offset = read_tensors(Path(adapter.path))
    with open_regular(Path(adapter.path)) as file:
        for tensor in tensors:
            file.seek(data_offset + tensor.offset)
            exponent, item_bytes = _EXPONENTS[tensor.type]
            for start in range(0, tensor.size_bytes, _CHUNK_BYTES):
                raw = file.read(min(_CHUNK_BYTES, tensor.size_bytes - start))
                if _has_exponent(raw, exponent, item_bytes):
                    problem = "holds a number that is not finite"
                    raise ModelFormatError(path=adapter.path, field=f"tensor {tensor.name}", problem=problem)


def _has_exponent(raw: bytes, exponent: int, item_bytes: int) -> bool:
    """Say whether a number has all bits of its exponent set, as NaN and infinity do."""
    import numpy as np  # not in the front process, which asks for same_file only

    bits = np.frombuffer(raw[: len(raw) // item_bytes * item_bytes], f"<u{item_bytes}")
    return bool(((bits & exponent) == exponent).any())


def _misfit(base: TensorInfo, a: TensorInfo, b: TensorInfo) -> str:
    """Say why two matrices make up none of the model's; "" if they do."""
    if len(base.shape) != 2 or len(a.shape) != 2 or len(b.shape) != 2:
        return f"stands for no matrix: the model's {base.name} is {base.shape}"
    rank = a.shape[1]
    if (a.shape, b.shape) == ((base.shape[0], rank), (rank, base.shape[1])) and rank <= _MAX_RANK:
        return ""
    return f"{a.shape} and {b.shape} do not make up the model's {base.shape} by a rank of 1 to {_MAX_RANK}"
