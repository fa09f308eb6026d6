"""Check a LoRA adapter before llama.cpp, which trusts it, sees it: its kind, and each matrix against the model's."""

from __future__ import annotations

import math
from pathlib import Path

from edge_rt.catalog.gguf import GgufHeader, TensorInfo, read_tensors
from edge_rt.catalog.part import hash_file
from edge_rt.errors import ModelFormatError
from edge_rt.types import AdapterFile

_MAX_RANK = 4096
_TYPES = frozenset({"F32", "F16", "BF16"})  # what converters write, and what scales without surprises
_EMBEDDING = "token_embd.weight"  # its rows are looked up and not multiplied, which is another kind of pair


def check_adapter(adapter: AdapterFile, base: GgufHeader, base_path: Path) -> int:
    """Give an adapter's size in bytes. Raises ModelFormatError unless it is a LoRA that fits the model."""
    path = adapter.path

    def refuse(field: str, problem: str) -> ModelFormatError:
        return ModelFormatError(path=path, field=field, problem=problem)

    keys, tensors = read_tensors(Path(path))
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
        if tensor.type not in _TYPES:
            raise refuse(f"tensor {name}", f"is {tensor.type}, not one of {', '.join(sorted(_TYPES))}")
        if f"{target}.lora_{'ba'[side == 'b']}" not in named:
            raise refuse(f"tensor {name}", "is there without its other half")
    for target in {name.rpartition(".lora_")[0] for name in named}:
        if problem := _misfit(matrices[target], named[f"{target}.lora_a"], named[f"{target}.lora_b"]):
            raise refuse(f"tensor {target}", problem)
    if adapter.base_sha256 and (found := hash_file(base_path)) != adapter.base_sha256:
        problem = f"belongs to the model with SHA-256 {adapter.base_sha256}, this one's is {found}"
        raise refuse("base_sha256", problem)
    return sum(tensor.size_bytes for tensor in tensors)


def _misfit(base: TensorInfo, a: TensorInfo, b: TensorInfo) -> str:
    """Say why two matrices make up none of the model's; "" if they do."""
    if len(base.shape) != 2 or len(a.shape) != 2 or len(b.shape) != 2:
        return f"stands for no matrix: the model's {base.name} is {base.shape}"
    rank = a.shape[1]
    if (a.shape, b.shape) == ((base.shape[0], rank), (rank, base.shape[1])) and rank <= _MAX_RANK:
        return ""
    return f"{a.shape} and {b.shape} do not make up the model's {base.shape} by a rank of 1 to {_MAX_RANK}"
