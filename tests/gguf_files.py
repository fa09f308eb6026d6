"""Write small GGUF files for tests, sound ones and broken ones: `from tests.gguf_files import GgufFile`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_CODES = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "B"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
# ggml's number, block size and block bytes of the types the tests write
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ3_S": (21, 256, 110),
    "I32": (26, 1, 4),
}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content: Any) -> bytes:
    """Encode a typed value; kind is a scalar's name, "string", or "[kind]" for an array."""
    if kind.startswith("["):
        item = kind.strip("[]")
        if item == "string":
            return struct.pack("<IIQ", 9, 8, len(content)) + b"".join(string(c) for c in content)
        number, code = _CODES[item]
        return struct.pack("<IIQ", 9, number, len(content)) + struct.pack(f"<{len(content)}{code}", *content)
    if kind == "string":
        return struct.pack("<I", 8) + string(content)
    number, code = _CODES[kind]
    return struct.pack("<I" + code, number, content)


@dataclass
class Tensor:
    name: str | bytes
    shape: Sequence[int]
    type: str = "F32"
    offset: int | None = None  # None: right after the one before
    type_number: int | None = None
    has_data: bool = True

    @property
    def size_bytes(self) -> int:
        if not self.has_data:
            return 0
        _, block_size, block_bytes = TYPES[self.type]
        return math.prod(self.shape) // block_size * block_bytes


@dataclass
class GgufFile:
    """A file to be written. Every part can be set wrong; n_keys and n_tensors override the true counts."""

    keys: dict[str | bytes, bytes] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    n_keys: int | None = None
    n_tensors: int | None = None
    doubled_keys: list[str] = field(default_factory=list)
    n_dims: int | None = None  # of the first tensor
    tail: bytes = b""

    def set(self, key: str, kind: str, content: Any) -> None:
        self.keys[key] = value(kind, content)

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def header(self) -> bytes:
        pairs = [(key, raw) for key, raw in self.keys.items()] + [(key, self.keys[key]) for key in self.doubled_keys]
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(pairs) if self.n_keys is None else self.n_keys
        out = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        out += b"".join(string(key) + raw for key, raw in pairs)
        offset = 0
        for index, tensor in enumerate(self.tensors):
            at = offset if tensor.offset is None else tensor.offset
            n_dims = self.n_dims if self.n_dims is not None and index == 0 else len(tensor.shape)
            number = TYPES[tensor.type][0] if tensor.type_number is None else tensor.type_number
            out += string(tensor.name) + struct.pack("<I", n_dims)
            out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", number, at)
            offset = at + -(-tensor.size_bytes // self.alignment) * self.alignment
        return out

    def encode(self) -> bytes:
        header = self.header()
        header += bytes(-len(header) % self.alignment)
        return header + bytes(self.data_bytes()) + self.tail

    def data_bytes(self) -> int:
        return sum(-(-t.size_bytes // self.alignment) * self.alignment for t in self.tensors)


def tiny_llama(
    *, n_layers: int = 2, n_vocab: int = 64, width: int = 64, linear: str = "Q4_0", embedding: str = "Q8_0"
) -> GgufFile:
    """A Llama that llama.cpp itself would take, with weights of zero: four heads, two of them for K and V."""
    file = GgufFile()
    head_dim, n_ff = width // 4, 2 * width
    file.set("general.architecture", "string", "llama")
    file.set("general.name", "string", "tiny")
    file.set("llama.block_count", "u32", n_layers)
    file.set("llama.context_length", "u32", 128)
    file.set("llama.embedding_length", "u32", width)
    file.set("llama.feed_forward_length", "u32", n_ff)
    file.set("llama.attention.head_count", "u32", 4)
    file.set("llama.attention.head_count_kv", "u32", 2)
    file.set("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5)
    file.set("llama.rope.dimension_count", "u32", head_dim)
    file.set("llama.vocab_size", "u32", n_vocab)
    file.set("tokenizer.ggml.model", "string", "llama")
    file.set("tokenizer.ggml.tokens", "[string]", [f"t{i}" for i in range(n_vocab)])
    file.set("tokenizer.ggml.scores", "[f32]", [0.0] * n_vocab)
    file.set("tokenizer.ggml.token_type", "[i32]", [1] * n_vocab)
    file.set("tokenizer.chat_template", "string", "{{ messages }}")
    file.tensors = [Tensor("token_embd.weight", (width, n_vocab), embedding), Tensor("output_norm.weight", (width,))]
    for layer in range(n_layers):
        shapes = {
            "attn_norm": ((width,), "F32"),
            "attn_q": ((width, width), linear),
            "attn_k": ((width, 2 * head_dim), linear),
            "attn_v": ((width, 2 * head_dim), linear),
            "attn_output": ((width, width), linear),
            "ffn_norm": ((width,), "F32"),
            "ffn_gate": ((width, n_ff), linear),
            "ffn_up": ((width, n_ff), linear),
            "ffn_down": ((n_ff, width), linear),
        }
        file.tensors += [Tensor(f"blk.{layer}.{name}.weight", *of) for name, of in shapes.items()]
    return file
