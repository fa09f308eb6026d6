"""A tiny float Llama, LoRA adapters for it, and the model with an adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import ModelFile
from tests import byte_model
from tests.gguf_files import Tensor

RANK, ALPHA = 4, 8.0
TARGETS = ("blk.0.attn_q.weight", "blk.0.ffn_down.weight")
Pair = tuple[NDArray[np.float32], NDArray[np.float32]]  # A [rank, n_in] and B [n_out, rank]


def write_model(path: Path, delta: Mapping[str, NDArray[np.float32]] | None = None) -> ModelFile:
    """Write a model of random weights, always the same; delta [n_out, n_in] is added to those it names."""
    file = byte_model.described()
    file.tensors = [Tensor(t.name, t.shape) for t in file.tensors]
    random = np.random.default_rng(0)
    data = bytearray()
    for tensor in file.tensors:
        weights = random.standard_normal(tuple(reversed(tensor.shape))).astype(np.float32)
        weights = 1 + 0.2 * weights if weights.ndim == 1 else weights / np.sqrt(weights.shape[1])
        data += (weights + (delta or {}).get(str(tensor.name), np.float32(0))).astype(np.float32).tobytes()
        data += bytes(-len(data) % file.alignment)
    raw = file.encode()
    path.write_bytes(raw[: len(raw) - len(data)] + data)
    return ModelFile(model="floats", variant="", path=path, quant="")


def shapes() -> dict[str, tuple[int, ...]]:
    """Give the model's matrices as [n_out, n_in]."""
    return {str(t.name): tuple(reversed(t.shape)) for t in byte_model.described().tensors}


def random_pairs(seed: int) -> dict[str, Pair]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (0.3 * random.standard_normal(shape)).astype(np.float32)

    return {name: (normal(RANK, shapes()[name][1]), normal(shapes()[name][0], RANK)) for name in TARGETS}


def merged(pairs: Mapping[str, Pair], scale: float) -> dict[str, NDArray[np.float32]]:
    return {name: scale * ALPHA / RANK * (b @ a) for name, (a, b) in pairs.items()}


def write_adapter(path: Path, pairs: Mapping[str, Pair], **keys: str) -> Path:
    """Write an adapter as llama.cpp's converter does; keys replace those of its kind."""
    writer = gguf.GGUFWriter(path, keys.get("arch", "llama"))
    writer.add_string("general.type", keys.get("type", "adapter"))
    writer.add_string("adapter.type", keys.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
