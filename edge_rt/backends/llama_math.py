"""What a model of the llama family computes beside its matrices, in numpy and float32.

The matrices' products are a function that is passed in, so an accelerator, its model or plain floats may do them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.native_config import LayerConfig, NativeConfig

Floats = NDArray[np.float32]
# A matrix's name and vectors [m, k] to products [m, n].
Linear = Callable[[str, Floats], Floats]

QKV, ATTENTION_OUTPUT, GATE_UP, DOWN, OUTPUT = "attn_qkv", "attn_output", "ffn_gate_up", "ffn_down", "output"


def unsupported(config: NativeConfig) -> str | None:
    """Name what the file asks for that is not computed here; None if all is."""
    for i, layer in enumerate(config.layers):
        if not (layer.n_heads and layer.n_kv_heads and layer.n_ff):
            return f"layer {i} without attention or feed-forward part"
        if layer.window:
            return f"layer {i} with a window of {layer.window} tokens"
    if config.temperature_scale:
        return "queries scaled by their position"
    if config.rope.has_factors or config.rope.is_longrope:
        return "RoPE with a list of factors"
    return None


@dataclass(slots=True)
class KvCache:
    """Keys and values of one sequence: float32 [n_ctx, n_kv_heads, head_dim] per layer, n_past of them filled."""

    keys: list[Floats]
    values: list[Floats]
    n_past: int = 0

    @classmethod
    def of(cls, config: NativeConfig, n_ctx: int) -> KvCache:
        shapes = [(n_ctx, layer.n_kv_heads, config.head_dim) for layer in config.layers]
        return cls([np.zeros(s, np.float32) for s in shapes], [np.zeros(s, np.float32) for s in shapes])


class LlamaMath:
    """One model. vectors are the norms by their names in GGUF; embed gives float32 [m, n_embd] for m token ids."""

    def __init__(
        self,
        config: NativeConfig,
        vectors: Mapping[str, Floats],
        embed: Callable[[NDArray[np.intp]], Floats],
        linear: Linear,
    ) -> None:
        self._config, self._vectors, self._embed, self._linear = config, vectors, embed, linear
        self._frequencies = np.array(config.rope.frequencies(None))

    def forward(self, ids: Sequence[int], kv: KvCache, *, want_all: bool = False) -> Floats:
        """Compute the next tokens of the sequence in kv: float32 logits [m, n_vocab], of the last token or of all."""
        for x in self.states(ids, kv):
            last = x
        return self.logits(last if want_all else last[-1:])

    def states(self, ids: Sequence[int], kv: KvCache) -> Iterator[Floats]:
        """Compute as forward does, and give the tokens' states [m, n_embd]: embedded, then behind each layer."""
        x = self._embed(np.asarray(ids, np.intp))
        yield x
        positions = np.arange(kv.n_past, kv.n_past + len(ids))
        for i, layer in enumerate(self._config.layers):
            x = x + self._attend(i, layer, x, kv, positions)
            x = x + self._feed(i, x)
            yield x
        kv.n_past += len(ids)

    def logits(self, x: Floats) -> Floats:
        """Give float32 logits [m, n_vocab] of states [m, n_embd] behind the last layer."""
        return self._linear(OUTPUT, rms_norm(x, self._vectors["output_norm.weight"], self._config.norm_eps))

    def _attend(self, i: int, layer: LayerConfig, x: Floats, kv: KvCache, positions: NDArray[np.int_]) -> Floats:
        config, m = self._config, len(x)
        n_q, n_kv = layer.n_heads * config.head_dim, layer.n_kv_heads * config.head_dim
        normed = rms_norm(x, self._vectors[f"blk.{i}.attn_norm.weight"], config.norm_eps)
        q, k, v = np.split(self._linear(f"blk.{i}.{QKV}", normed), [n_q, n_q + n_kv], axis=1)
        q, k, v = (part.reshape(m, -1, config.head_dim) for part in (q, k, v))
        if layer.uses_rope:
            angles = np.outer(positions, self._frequencies)
            factor, halves = config.rope.attention_factor, config.rope.pairs_halves
            q, k = (rotate(part, angles, pairs_halves=halves) * np.float32(factor) for part in (q, k))
        keys, values, end = kv.keys[i], kv.values[i], kv.n_past + m
        keys[kv.n_past : end], values[kv.n_past : end] = k, v
        out = attention(q, keys[:end], values[:end], positions)
        return self._linear(f"blk.{i}.{ATTENTION_OUTPUT}", out.reshape(m, n_q))

    def _feed(self, i: int, x: Floats) -> Floats:
        normed = rms_norm(x, self._vectors[f"blk.{i}.ffn_norm.weight"], self._config.norm_eps)
        gate, up = np.split(self._linear(f"blk.{i}.{GATE_UP}", normed), 2, axis=1)
        return self._linear(f"blk.{i}.{DOWN}", swiglu(gate, up))


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Scale each row [m, n] to a root mean square of 1, then each column by its weight [n]."""
    mean = np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)
    normed: Floats = (x / np.sqrt(mean + eps) * weight).astype(np.float32)
    return normed


def rotate(x: Floats, angles: NDArray[np.float64], *, pairs_halves: bool = False) -> Floats:
    """Turn pairs of the first elements of heads [m, heads, head_dim] by angles [m, pairs]: 2i and 2i + 1, or i and
    i + n / 2."""
    n = angles.shape[1]
    cos, sin = np.cos(angles)[:, None].astype(np.float32), np.sin(angles)[:, None].astype(np.float32)
    first, second = (slice(0, n), slice(n, 2 * n)) if pairs_halves else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attention(q: Floats, keys: Floats, values: Floats, positions: NDArray[np.int_]) -> Floats:
    """Attend from q [m, heads, head_dim] at positions [m] to keys and values [n, kv_heads, head_dim] up to them."""
    m, n_heads, head_dim = q.shape
    n, n_kv_heads, _ = keys.shape
    # Heads that share a KV head are rows of one product.
    grouped = q.reshape(m, n_kv_heads, -1, head_dim).transpose(1, 0, 2, 3).reshape(n_kv_heads, -1, head_dim)
    scores = np.matmul(grouped, keys.transpose(1, 2, 0)) / np.float32(np.sqrt(head_dim))
    is_later = np.arange(n) > positions[:, None]
    scores = np.where(np.repeat(is_later, n_heads // n_kv_heads, axis=0), np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    out = np.matmul(weights, values.transpose(1, 0, 2)).reshape(n_kv_heads, m, -1, head_dim)
    return np.ascontiguousarray(out.transpose(1, 0, 2, 3)).reshape(m, n_heads, head_dim)


def swiglu(gate: Floats, up: Floats) -> Floats:
    """Give gate * sigmoid(gate) * up, element by element."""
    activated: Floats = (gate / (1 + np.exp(-np.clip(gate, -80, None))) * up).astype(np.float32)
    return activated
