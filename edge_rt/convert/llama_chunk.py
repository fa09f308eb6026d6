"""Some layers of a Llama for a chunk of a prompt, as an ONNX graph of fixed shapes: what an NPU can prefill with.

Everything that changes from chunk to chunk is an input, so one compiled graph serves all: the angles of RoPE, the
mask, and the keys and values of n_past earlier tokens. Outputs are the chunk's hidden states and its keys and values,
which the caller keeps. Queries and keys have the elements that RoPE turns together half a head apart, whatever the file
has: it changes no product of the two, and needs no gather.

    x         FP32 [1, chunk, n_embd]           cos, sin  FP32 [1, 1, chunk, head_dim]
    mask      FP32 [1, 1, chunk, n_past + chunk], 0 or MASKED
    keys.I, values.I      FP32 [1, kv_heads, n_past, head_dim], one pair for each layer I
    hidden    FP32 [1, chunk, n_embd]
    new_keys.I, new_values.I   FP32 [1, kv_heads, chunk, head_dim]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_rt.backends.llama_math import ATTENTION_OUTPUT, DOWN, GATE_UP, QKV
from edge_rt.backends.native_config import NativeConfig
from edge_rt.convert.onnx_build import OnnxBuilder

MASKED = -64.0  # next to scores of some tens it leaves no weight, and shares a 16-bit scale with them
_OPSET = 21
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tokens of a chunk, and of those before it that it can attend to."""

    chunk: int = 128
    n_past: int = 128


def build_chunk(
    config: NativeConfig,
    matrices: Mapping[str, Floats],
    vectors: Mapping[str, Floats],
    layers: Sequence[int],
    shape: Shape,
) -> onnx.ModelProto:
    """Give the graph of some layers that follow each other.

    matrices  as fpga_llama.read_exact gives them: float32 [n_rows, k]; vectors: the norms, by their names in GGUF

    Raises ValueError for layers without RoPE, or without attention or a feed-forward part.
    """
    builder = _Chunk(config, matrices, vectors, shape)
    value = "x"
    for index in layers:
        layer = config.layers[index]
        if not (layer.n_heads and layer.n_kv_heads and layer.n_ff and layer.uses_rope) or layer.window:
            raise ValueError(f"layer {index} is not one of attention with RoPE and a feed-forward part")
        value = builder.layer(index, value)
    return builder.finish(value, layers)


def angles(config: NativeConfig, first: int, shape: Shape) -> dict[str, Floats]:
    """Give cos and sin for a chunk whose first token stands at position first."""
    turns = np.outer(np.arange(first, first + shape.chunk), np.array(config.rope.frequencies(None)))
    both = np.concatenate([turns, turns], axis=1)[None, None]
    factor = config.rope.attention_factor
    return {name: (call(both) * factor).astype(np.float32) for name, call in (("cos", np.cos), ("sin", np.sin))}


def mask(n_filled: int, shape: Shape) -> Floats:
    """Let each token see itself, those before it, and the last n_filled of the n_past places."""
    past = np.full((shape.chunk, shape.n_past), MASKED, np.float32)
    past[:, shape.n_past - n_filled :] = 0
    later = np.triu(np.full((shape.chunk, shape.chunk), MASKED, np.float32), 1)
    return np.concatenate([past, later], axis=1)[None, None]


class _Chunk(OnnxBuilder):
    def __init__(
        self, config: NativeConfig, matrices: Mapping[str, Floats], vectors: Mapping[str, Floats], shape: Shape
    ):
        super().__init__({})
        self._config, self._matrices, self._vectors, self._shape = config, matrices, vectors, shape
        half = config.head_dim // 2
        for name, value in (("start", 0), ("half", half), ("whole", config.head_dim), ("last_axis", 3)):
            self.constant(name, np.array([value]))

    def layer(self, index: int, x: str) -> str:
        name = f"blk.{index}"
        config, layer, shape = self._config, self._config.layers[index], self._shape
        dim, n_kv, groups = config.head_dim, layer.n_kv_heads, layer.n_heads // layer.n_kv_heads
        sizes = {"q": layer.n_heads * dim, "k": n_kv * dim, "v": n_kv * dim}
        parts = np.split(self._matrices[f"{name}.{QKV}"], np.cumsum(list(sizes.values()))[:-1])
        normed = self._norm(x, f"{name}.attn_norm")
        heads = {}
        for part, weights in zip("qkv", parts, strict=True):
            ordered = weights if part == "v" else self._halves(weights)
            # The scores' scale is in the queries.
            scaled = ordered / np.float32(math.sqrt(dim)) if part == "q" else ordered
            flat = self._linear(normed, f"{name}.attn_{part}", scaled)
            split = self._reshape(flat, f"{name}.{part}/heads", [1, shape.chunk, -1, dim])
            turned = self.node("Transpose", [split], f"{name}.{part}/turned", perm=[0, 2, 1, 3])
            heads[part] = turned if part == "v" else self._rope(turned, f"{name}.{part}")
        self.node("Identity", [heads["k"]], f"new_keys.{index}")
        self.node("Identity", [heads["v"]], f"new_values.{index}")
        keys = self.node("Concat", [f"keys.{index}", heads["k"]], f"{name}.keys", axis=2)
        values = self.node("Concat", [f"values.{index}", heads["v"]], f"{name}.values", axis=2)
        # Heads that share keys are rows of one product.
        rows = self._reshape(heads["q"], f"{name}.q/rows", [1, n_kv, groups * shape.chunk, dim])
        turned = self.node("Transpose", [keys], f"{name}.keys/turned", perm=[0, 1, 3, 2])
        scores = self.node("MatMul", [rows, turned], f"{name}.scores")
        n_seen = shape.n_past + shape.chunk
        scores = self._reshape(scores, f"{name}.scores/heads", [1, layer.n_heads, shape.chunk, n_seen])
        masked = self.node("Add", [scores, "mask"], f"{name}.masked")
        shares = self.node("Softmax", [masked], f"{name}.shares", axis=-1)
        shares = self._reshape(shares, f"{name}.shares/rows", [1, n_kv, groups * shape.chunk, n_seen])
        mixed = self.node("MatMul", [shares, values], f"{name}.mixed")
        mixed = self._reshape(mixed, f"{name}.mixed/heads", [1, layer.n_heads, shape.chunk, dim])
        mixed = self.node("Transpose", [mixed], f"{name}.mixed/turned", perm=[0, 2, 1, 3])
        mixed = self._reshape(mixed, f"{name}.mixed/flat", [1, shape.chunk, layer.n_heads * dim])
        out = self._linear(mixed, f"{name}.{ATTENTION_OUTPUT}", self._matrices[f"{name}.{ATTENTION_OUTPUT}"])
        x = self.node("Add", [x, out], f"{name}.attended")
        return self.node("Add", [x, self._feed(name, x)], f"{name}.out")

    def _feed(self, name: str, x: str) -> str:
        normed = self._norm(x, f"{name}.ffn_norm")
        gate_rows, up_rows = np.split(self._matrices[f"{name}.{GATE_UP}"], 2)
        gate = self._linear(normed, f"{name}.ffn_gate", gate_rows)
        up = self._linear(normed, f"{name}.ffn_up", up_rows)
        share = self.node("Sigmoid", [gate], f"{name}.gate/share")
        swish = self.node("Mul", [gate, share], f"{name}.gate/swish")
        both = self.node("Mul", [swish, up], f"{name}.gated")
        return self._linear(both, f"{name}.{DOWN}", self._matrices[f"{name}.{DOWN}"])

    def finish(self, value: str, layers: Sequence[int]) -> onnx.ModelProto:
        self.node("Identity", [value], "hidden")
        config, shape = self._config, self._shape
        dim, n_seen = config.head_dim, shape.n_past + shape.chunk
        inputs = {
            "x": [1, shape.chunk, config.n_embd],
            "cos": [1, 1, shape.chunk, dim],
            "sin": [1, 1, shape.chunk, dim],
            "mask": [1, 1, shape.chunk, n_seen],
        }
        outputs = {"hidden": [1, shape.chunk, config.n_embd]}
        for index in layers:
            n_kv = config.layers[index].n_kv_heads
            for part in ("keys", "values"):
                inputs[f"{part}.{index}"] = [1, n_kv, shape.n_past, dim]
                outputs[f"new_{part}.{index}"] = [1, n_kv, shape.chunk, dim]
        described = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in values.items()]
            for values in (inputs, outputs)
        ]
        return self.model("llama-chunk", *described, opset=_OPSET)

    def _halves(self, rows: Floats) -> Floats:
        """Order each head's rows so that those which RoPE turns together stand half a head apart."""
        if self._config.rope.pairs_halves:
            return rows
        dim = self._config.head_dim
        by_pair = rows.reshape(-1, dim // 2, 2, rows.shape[1])
        return np.ascontiguousarray(by_pair.transpose(0, 2, 1, 3).reshape(rows.shape))

    def _rope(self, x: str, name: str) -> str:
        first = self.node("Slice", [x, "start", "half", "last_axis"], f"{name}/first")
        second = self.node("Slice", [x, "half", "whole", "last_axis"], f"{name}/second")
        negative = self.node("Neg", [second], f"{name}/negative")
        crossed = self.node("Concat", [negative, first], f"{name}/crossed", axis=3)
        straight = self.node("Mul", [x, "cos"], f"{name}/straight")
        across = self.node("Mul", [crossed, "sin"], f"{name}/across")
        return self.node("Add", [straight, across], f"{name}/rope")

    def _norm(self, x: str, name: str) -> str:
        """Divide by the length, not by the root of the mean of squares: those may be too large for 16-bit floats.

        The model's epsilon is left out; beside states of ordinary size it is nothing.
        """
        self.constant(f"{name}/gain", self._vectors[f"{name}.weight"] * np.float32(math.sqrt(self._config.n_embd)))
        direction = self.node("LpNormalization", [x], f"{name}/direction", axis=-1, p=2)
        return self.node("Mul", [direction, f"{name}/gain"], name)

    def _linear(self, x: str, name: str, rows: Floats) -> str:
        self.constant(f"{name}/weight", rows.T)
        return self.node("MatMul", [x, f"{name}/weight"], name)

    def _reshape(self, x: str, name: str, shape: list[int]) -> str:
        self.constant(f"{name}/shape", np.array(shape))
        return self.node("Reshape", [x, f"{name}/shape"], name)
