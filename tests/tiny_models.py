"""Tiny random models of the llama family, written as GGUF files, and what they compute: in numpy, in double precision.

The computation is written from the papers and from transformers' models, apart from the engine's own reading of the
file: a model here says what it computes, and its keys say the same to whoever reads the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import ModelFile
from tests.gguf_files import GgufFile, Tensor

Array = NDArray[np.float64]
Key = tuple[str, object]
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class TinyLayer:
    """window 0 sees all tokens; n_kv_heads 0 with heads is one matrix in place of attention."""

    n_heads: int = 4
    n_kv_heads: int = 2
    n_ff: int = 96
    window: int = 0
    uses_rope: bool = True


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """What is computed, and the keys (without the architecture's name) that say so.

    biases             matrices that have one
    frequencies        of RoPE; factor multiplies what it turned
    extra_tensors      beside the weights, such as divisors of the frequencies
    temperature        scale and length
    """

    arch: str = "llama"
    layers: Sequence[TinyLayer] = (TinyLayer(), TinyLayer())
    n_embd: int = 64
    head_dim: int = 16
    n_vocab: int = 64
    keys: dict[str, Key] = field(default_factory=dict)
    biases: Sequence[str] = ()
    has_qk_norm: bool = False
    is_tied: bool = True
    pairs_halves: bool = False
    frequencies: Array | None = None
    factor: float = 1.0
    extra_tensors: dict[str, Array] = field(default_factory=dict)
    temperature: tuple[float, int] | None = None
    seed: int = 0

    def weights(self) -> dict[str, Array]:
        """Draw the weights: matrices as [rows, columns], everything else as vectors. All are exact in F32."""
        rng = np.random.default_rng(self.seed)

        def matrix(n_rows: int, n_cols: int, scale: float = 1.0) -> Array:
            return (rng.standard_normal((n_rows, n_cols)) * scale / math.sqrt(n_cols)).astype(np.float32).astype(float)

        def vector(n: int, mean: float) -> Array:
            return (mean + 0.3 * rng.standard_normal(n)).astype(np.float32).astype(float)

        n_embd, hd = self.n_embd, self.head_dim
        out = {
            "token_embd.weight": matrix(self.n_vocab, n_embd, math.sqrt(n_embd)),
            "output_norm.weight": vector(n_embd, 1),
        }
        if not self.is_tied:
            out["output.weight"] = matrix(self.n_vocab, n_embd)
        if "output" in self.biases:
            out["output.bias"] = vector(self.n_vocab, 0)
        for i, layer in enumerate(self.layers):
            q_dim, kv_dim = layer.n_heads * hd, layer.n_kv_heads * hd
            part: dict[str, Array] = {}
            if layer.n_kv_heads:
                part |= {"attn_q": matrix(q_dim, n_embd, 2), "attn_k": matrix(kv_dim, n_embd)}
                part |= {"attn_v": matrix(kv_dim, n_embd), "attn_output": matrix(n_embd, q_dim)}
                if self.has_qk_norm:
                    part |= {"attn_q_norm": vector(hd, 1), "attn_k_norm": vector(hd, 1)}
            elif layer.n_heads:
                part["attn_output"] = matrix(n_embd, n_embd)
            if layer.n_ff:
                part |= {"ffn_gate": matrix(layer.n_ff, n_embd), "ffn_up": matrix(layer.n_ff, n_embd)}
                part["ffn_down"] = matrix(n_embd, layer.n_ff)
            for name, values in part.items():
                out[f"blk.{i}.{name}.weight"] = values
                if name in self.biases:
                    out[f"blk.{i}.{name}.bias"] = vector(len(values), 0)
            for name, is_there in (("attn_norm", layer.n_heads), ("ffn_norm", layer.n_ff)):
                if is_there:
                    out[f"blk.{i}.{name}.weight"] = vector(n_embd, 1)
        return out

    def file(self) -> GgufFile:
        """Describe the file; its data are zeros."""
        file = GgufFile()
        file.set("general.architecture", "string", self.arch)
        keys: dict[str, Key] = {
            "block_count": ("u32", len(self.layers)),
            "context_length": ("u32", 128),
            "embedding_length": ("u32", self.n_embd),
            "attention.layer_norm_rms_epsilon": ("f32", EPSILON),
            "attention.key_length": ("u32", self.head_dim),
            "attention.value_length": ("u32", self.head_dim),
            "rope.dimension_count": ("u32", self.head_dim),
        }
        for key, values in (
            ("feed_forward_length", [layer.n_ff for layer in self.layers]),
            ("attention.head_count", [layer.n_heads for layer in self.layers]),
            ("attention.head_count_kv", [layer.n_kv_heads for layer in self.layers]),
        ):
            keys[key] = ("u32", values[0]) if len(set(values)) == 1 else ("[i32]", values)
        for key, (kind, content) in (keys | self.keys).items():
            file.set(f"{self.arch}.{key}", kind, content)
        file.set("tokenizer.ggml.model", "string", "llama")
        file.set("tokenizer.ggml.tokens", "[string]", [f"t{i}" for i in range(self.n_vocab)])
        file.set("tokenizer.ggml.scores", "[f32]", [0.0] * self.n_vocab)
        file.set("tokenizer.ggml.token_type", "[i32]", [1] * self.n_vocab)
        file.tensors = [
            Tensor(name, values.shape[::-1]) for name, values in (self.weights() | self.extra_tensors).items()
        ]
        return file

    def write(self, path: Path) -> ModelFile:
        file = self.file()
        data = bytearray()
        for values in (self.weights() | self.extra_tensors).values():
            data += values.astype(np.float32).tobytes()
            data += bytes(-len(data) % file.alignment)
        raw = file.encode()
        path.write_bytes(raw[: len(raw) - len(data)] + data)
        return ModelFile(model="tiny", variant="", path=path, quant="")

    def logits(self, ids: Sequence[int]) -> Array:
        """Compute the logits after each token. K and V are rounded to F16, as both engines keep them."""
        weights = self.weights()
        head = {"output.weight": weights["token_embd.weight"]} | weights
        return _linear(head, "output", rms_norm(_states(self, weights, ids), weights["output_norm.weight"]))

    def states(self, ids: Sequence[int]) -> Array:
        """Compute the states behind the last layer, before the output norm."""
        return _states(self, self.weights(), ids)


def plain_frequencies(n_rot: int = 16, base: float = 10_000.0) -> Array:
    return np.asarray(base ** (-np.arange(0, n_rot, 2) / n_rot))


def yarn_frequencies(
    factor: float, n_ctx_original: int, *, n_rot: int = 16, base: float = 10_000.0, fast: float = 32, slow: float = 1
) -> Array:
    """Follow transformers' _compute_yarn_parameters."""

    def correction(n_turns: float) -> float:
        return n_rot * math.log(n_ctx_original / (n_turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(correction(fast)), 0), min(math.ceil(correction(slow)), n_rot - 1)
    ramp = np.clip((np.arange(n_rot // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    plain = plain_frequencies(n_rot, base)
    return np.asarray(plain / factor * ramp + plain * (1 - ramp))


def rms_norm(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPSILON) * weight)


def _rotate(model: TinyModel, x: Array) -> Array:
    """Turn [tokens, heads, head_dim], as complex numbers."""
    frequencies = plain_frequencies(model.head_dim) if model.frequencies is None else model.frequencies
    n = len(frequencies)
    turns = np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None, :] * model.factor
    real, imaginary = (x[..., :n], x[..., n : 2 * n]) if model.pairs_halves else (x[..., 0::2], x[..., 1::2])
    turned = (real + 1j * imaginary) * turns
    if model.pairs_halves:
        return np.concatenate([turned.real, turned.imag], axis=-1)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def _attention(model: TinyModel, layer: TinyLayer, w: dict[str, Array], x: Array) -> Array:
    n, hd = len(x), model.head_dim
    q = _linear(w, "attn_q", x).reshape(n, layer.n_heads, hd)
    k = _linear(w, "attn_k", x).reshape(n, layer.n_kv_heads, hd)
    v = _linear(w, "attn_v", x).reshape(n, layer.n_kv_heads, hd)
    if model.has_qk_norm:
        q, k = rms_norm(q, w["attn_q_norm.weight"]), rms_norm(k, w["attn_k_norm.weight"])
    if layer.uses_rope:
        q, k = _rotate(model, q), _rotate(model, k)
    if model.temperature is not None:
        scale, length = model.temperature
        q = q * (1 + scale * np.log(1 + np.arange(n) // length))[:, None, None]
    k, v = k.astype(np.float16).astype(float), v.astype(np.float16).astype(float)
    group = layer.n_heads // layer.n_kv_heads
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, group, axis=1)) / math.sqrt(hd)
    age = np.arange(n)[:, None] - np.arange(n)
    hidden = (age < 0) | (age >= layer.window) if layer.window else age < 0
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, np.repeat(v, group, axis=1)).reshape(n, -1)
    return _linear(w, "attn_output", mixed)


def _linear(w: dict[str, Array], name: str, x: Array) -> Array:
    return np.asarray(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0))


def _states(model: TinyModel, weights: dict[str, Array], ids: Sequence[int]) -> Array:
    x = weights["token_embd.weight"][list(ids)]
    for i, layer in enumerate(model.layers):
        prefix = f"blk.{i}."
        w = {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}
        if layer.n_heads:
            normed = rms_norm(x, w["attn_norm.weight"])
            mix = _attention(model, layer, w, normed) if layer.n_kv_heads else _linear(w, "attn_output", normed)
            x = x + mix
        if layer.n_ff:
            normed = rms_norm(x, w["ffn_norm.weight"])
            gate = _linear(w, "ffn_gate", normed)
            x = x + _linear(w, "ffn_down", gate / (1 + np.exp(-gate)) * _linear(w, "ffn_up", normed))
    return x
