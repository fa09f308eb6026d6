"""Models of a size and shape with random weights: what a benchmark of speed beyond the caches needs, and no more.

They are whole GGUF files of the llama family that any engine loads, all matrices in one form. The weights have the
spread that keeps activations near one, so no engine meets numbers it would not meet in a trained model.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_CHUNK_BLOCKS = 1 << 19
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT, _STRING, _ARRAY = 4, 5, 6, 8, 9
_BLOCK = 32
# ggml's number of the type, bytes before the nibbles of a block
_FORMS = {"q4_0": (2, 2), "q4_1": (3, 4)}
_F16 = 1
_NIBBLE_STD = 4.61  # of 0..15, each as likely as the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a model of the llama family; n_embd is n_heads times the head's dimension."""

    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    n_ff: int
    n_vocab: int

    def matrices(self) -> list[tuple[str, int, int, float]]:
        """Give name, columns, rows and the standard deviation of the weights of each matrix."""
        n_kv = self.n_embd // self.n_heads * self.n_kv_heads
        wide, narrow = self.n_embd**-0.5, self.n_ff**-0.5
        once = (2 * self.n_layers) ** -0.5  # the residual stream adds up twice a layer
        found = [("token_embd", self.n_embd, self.n_vocab, 1.0), ("output", self.n_embd, self.n_vocab, wide)]
        for i in range(self.n_layers):
            found += [
                (f"blk.{i}.attn_q", self.n_embd, self.n_embd, wide),
                (f"blk.{i}.attn_k", self.n_embd, n_kv, wide),
                (f"blk.{i}.attn_v", self.n_embd, n_kv, wide),
                (f"blk.{i}.attn_output", self.n_embd, self.n_embd, wide * once),
                (f"blk.{i}.ffn_gate", self.n_embd, self.n_ff, wide),
                (f"blk.{i}.ffn_up", self.n_embd, self.n_ff, wide),
                (f"blk.{i}.ffn_down", self.n_ff, self.n_embd, narrow * once),
            ]
        return found

    def norms(self) -> list[str]:
        each = [f"blk.{i}.{name}" for i in range(self.n_layers) for name in ("attn_norm", "ffn_norm")]
        return ["output_norm", *each]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="1.1b", n_layers=22, n_embd=2048, n_heads=32, n_kv_heads=4, n_ff=5632, n_vocab=32_000),
        Shape(name="3b", n_layers=28, n_embd=3072, n_heads=24, n_kv_heads=8, n_ff=8192, n_vocab=32_000),
    )
}


def write(path: Path, shape: Shape, form: str, *, seed: int = 1, progress: Callable[[float], None]) -> None:
    """Write a model to path; progress is told the share that is done. Raises OSError if the disk has no room for it."""
    n_bytes = sum(matrix_bytes(form, cols, rows) for _, cols, rows, _ in shape.matrices())
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < n_bytes + (1 << 30):
        raise OSError(
            f"{path.parent}: {free >> 20} MiB are free, {shape.name} in {form} needs {(n_bytes >> 20) + 1024}"
        )
    part = path.with_suffix(".part")
    rng = np.random.Generator(np.random.SFC64(seed))
    n_done = 0
    with part.open("wb") as file:
        file.write(_header(shape, form))
        for _, cols, rows, std in shape.matrices():
            for blocks in _random_blocks(rng, form, cols * rows // _BLOCK, std):
                file.write(blocks.data)
                n_done += blocks.nbytes
                progress(n_done / n_bytes)
            file.write(bytes(-file.tell() % _ALIGNMENT))
        for _ in shape.norms():
            file.write(np.ones(shape.n_embd, dtype=np.float32).data)
    part.rename(path)


def matrix_bytes(form: str, n_cols: int, n_rows: int) -> int:
    if form == "f16":
        return 2 * n_cols * n_rows
    return n_cols * n_rows // _BLOCK * (_FORMS[form][1] + _BLOCK // 2)


def _random_blocks(rng: np.random.Generator, form: str, n_blocks: int, std: float) -> Iterator[NDArray[np.uint8]]:
    if form == "f16":
        yield from _random_floats(rng, n_blocks * _BLOCK, std)
        return
    n_head = _FORMS[form][1]
    for start in range(0, n_blocks, _CHUNK_BLOCKS):
        n = min(_CHUNK_BLOCKS, n_blocks - start)
        blocks = np.empty((n, n_head + _BLOCK // 2), dtype=np.uint8)
        blocks[:, n_head:] = np.frombuffer(rng.bytes(n * _BLOCK // 2), dtype=np.uint8).reshape(n, -1)
        scales = (rng.uniform(0.75, 1.25, n) * std / _NIBBLE_STD).astype(np.float16)
        blocks[:, :2] = scales.view(np.uint8).reshape(n, 2)
        if form == "q4_1":  # the least weight: zero lies in the middle of the nibbles
            blocks[:, 2:4] = (scales * np.float16(-7.5)).view(np.uint8).reshape(n, 2)
        yield blocks


def _random_floats(rng: np.random.Generator, n: int, std: float) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, n, _CHUNK_BLOCKS * _BLOCK):
        values = rng.random(min(_CHUNK_BLOCKS * _BLOCK, n - start), dtype=np.float32)
        yield ((values - 0.5) * np.float32(std * 12**0.5)).astype(np.float16).view(np.uint8)


def _header(shape: Shape, form: str) -> bytes:
    pairs = _metadata(shape)
    kind = _F16 if form == "f16" else _FORMS[form][0]
    tensors = [(f"{name}.weight", (cols, rows), kind) for name, cols, rows, _ in shape.matrices()]
    tensors += [(f"{name}.weight", (shape.n_embd,), 0) for name in shape.norms()]
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
    for key, value in pairs:
        out += _text(key) + value
    offset = 0
    for name, dims, ggml_type in tensors:
        out += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)
        n_bytes = 4 * dims[0] if len(dims) == 1 else matrix_bytes(form, *dims)
        offset += n_bytes + -n_bytes % _ALIGNMENT
    return bytes(out) + bytes(-len(out) % _ALIGNMENT)


def _metadata(shape: Shape) -> list[tuple[str, bytes]]:
    """Describe the model, with a made-up vocabulary: three control tokens, the bytes, and words of no language."""
    n_words = shape.n_vocab - 259
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"\u2581w{i}" for i in range(n_words))]
    types = [2, 3, 3, *[6] * 256, *[1] * n_words]
    return [
        ("general.architecture", _value(_STRING, "llama")),
        ("general.name", _value(_STRING, f"random weights in the shape of a {shape.name} model")),
        ("llama.context_length", _value(_UINT32, 4096)),
        ("llama.embedding_length", _value(_UINT32, shape.n_embd)),
        ("llama.block_count", _value(_UINT32, shape.n_layers)),
        ("llama.feed_forward_length", _value(_UINT32, shape.n_ff)),
        ("llama.attention.head_count", _value(_UINT32, shape.n_heads)),
        ("llama.attention.head_count_kv", _value(_UINT32, shape.n_kv_heads)),
        ("llama.attention.layer_norm_rms_epsilon", _value(_FLOAT, 1e-5)),
        ("llama.rope.dimension_count", _value(_UINT32, shape.n_embd // shape.n_heads)),
        ("llama.rope.freq_base", _value(_FLOAT, 10_000.0)),
        ("llama.vocab_size", _value(_UINT32, shape.n_vocab)),
        ("tokenizer.ggml.model", _value(_STRING, "llama")),
        ("tokenizer.ggml.tokens", _list(_STRING, tokens)),
        ("tokenizer.ggml.scores", _list(_FLOAT, [-float(i) for i in range(shape.n_vocab)])),
        ("tokenizer.ggml.token_type", _list(_INT32, types)),
        ("tokenizer.ggml.bos_token_id", _value(_UINT32, 1)),
        ("tokenizer.ggml.eos_token_id", _value(_UINT32, 2)),
        ("tokenizer.ggml.unknown_token_id", _value(_UINT32, 0)),
    ]


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _bare(kind: int, value: object) -> bytes:
    return (
        _text(str(value)) if kind == _STRING else struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT: "<f"}[kind], value)
    )


def _value(kind: int, value: object) -> bytes:
    return struct.pack("<I", kind) + _bare(kind, value)


def _list(kind: int, values: Sequence[object]) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, len(values)) + b"".join(_bare(kind, value) for value in values)
