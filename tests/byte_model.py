"""A tiny random Llama that reads and writes any text, byte by byte, in weights that an INT4 engine takes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from edge_rt.backends.base import ModelFile
from tests.gguf_files import GgufFile, Tensor, tiny_llama

_WIDTH, _N_WORDS = 64, 64
_CONTROL = {"<unk>": 2, "<s>": 3, "</s>": 3}
_BYTE, _NORMAL = 6, 1
# Each type that the engine takes, two of them in one fused matrix.
_TYPES = {"attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q4_0", "attn_output": "Q4_0", "ffn_down": "Q8_0"}


def write(path: Path, seed: int = 0) -> ModelFile:
    file = described()
    random = np.random.default_rng(seed)
    data = bytearray()
    for tensor in file.tensors:
        data += _weights(tensor, random)
        data += bytes(-len(data) % file.alignment)
    raw = file.encode()
    path.write_bytes(raw[: len(raw) - len(data)] + data)
    return ModelFile(model="bytes", variant="", path=path, quant="")


def described() -> GgufFile:
    words = ["\u2581", *(f"\u2581w{i}" for i in range(_N_WORDS - 1))]
    tokens = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    file = tiny_llama(n_vocab=len(tokens), width=_WIDTH, linear="Q4_1", embedding="Q8_0")
    file.set("llama.context_length", "u32", 512)
    file.set("tokenizer.ggml.tokens", "[string]", tokens)
    file.set("tokenizer.ggml.scores", "[f32]", [0.0] * len(tokens))
    file.set("tokenizer.ggml.token_type", "[i32]", [*_CONTROL.values(), *[_BYTE] * 256, *[_NORMAL] * _N_WORDS])
    file.set("tokenizer.ggml.bos_token_id", "u32", 1)
    file.set("tokenizer.ggml.eos_token_id", "u32", 2)
    file.set("tokenizer.ggml.unknown_token_id", "u32", 0)
    file.set("tokenizer.ggml.add_space_prefix", "bool", False)
    file.tensors = [Tensor(t.name, t.shape, _TYPES.get(str(t.name).split(".")[-2], t.type)) for t in file.tensors]
    return file


def _weights(tensor: Tensor, random: np.random.Generator) -> bytes:
    if len(tensor.shape) == 1:
        return (1 + 0.2 * random.standard_normal(tensor.shape)).astype(np.float32).tobytes()
    k, n = tensor.shape
    scale = 3.0 if "attn_q" in str(tensor.name) else 1.0
    size = scale if "embd" in str(tensor.name) else scale / np.sqrt(k)
    floats = random.standard_normal((n, k)) * size
    return gguf.quantize(floats.astype(np.float32), gguf.GGMLQuantizationType[tensor.type]).tobytes()
