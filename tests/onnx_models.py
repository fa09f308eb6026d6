"""Tiny models as ONNX Runtime GenAI's builder writes them: `from tests.onnx_models import OnnxModel`.

The graph, its nodes' names and its initialisers follow microsoft/onnxruntime-genai, src/python/py/models/builders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.tiny_models import EPSILON, Array, TinyModel, plain_frequencies

N_POSITIONS = 128


@dataclass(frozen=True)
class Quantised:
    """A matrix as MatMulNBits keeps it, and the values it stands for."""

    quants: NDArray[np.uint8]
    scales: NDArray[Any]
    zero_points: NDArray[Any] | None
    values: Array

    @classmethod
    def of(cls, matrix: Array, block_size: int, zero_points: str, dtype: Any) -> Quantised:
        """Quantise by plain rounding; without zero points the numbers are 8 more than what they stand for."""
        n_rows, n_cols = matrix.shape
        n_blocks = -(-n_cols // block_size)
        padded = np.zeros((n_rows, n_blocks * block_size))
        padded[:, :n_cols] = matrix
        blocks = padded.reshape(n_rows, n_blocks, block_size)
        low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
        if zero_points == "none":
            scales, zeros = np.maximum(-low / 8, high / 7) + 1e-6, np.full((n_rows, n_blocks), 8.0)
        else:
            scales = (high - low) / 15 + 1e-6
            zeros = np.clip(np.round(-low / scales), 0, 15)
        # F16's numbers in either type, so that the blocks of GGUF hold the same values
        scales = scales.astype(np.float16).astype(dtype)
        q = np.clip(np.round(blocks / scales[..., None].astype(float)) + zeros[..., None], 0, 15).astype(np.uint8)
        values = (scales[..., None].astype(float) * (q - zeros[..., None])).reshape(n_rows, -1)[:, :n_cols]
        kept: NDArray[Any] | None = None
        if zero_points == "packed":
            even = np.zeros((n_rows, n_blocks + n_blocks % 2), np.uint8)
            even[:, :n_blocks] = zeros
            kept = even[:, 0::2] | even[:, 1::2] << 4
        elif zero_points == "float":
            kept = zeros.astype(dtype)
        return cls(q[..., 0::2] | q[..., 1::2] << 4, scales, kept, values)


@dataclass
class OnnxModel:
    """A model to be written as a folder.

    tiny       what it computes; its matrices are quantised
    packs_qkv  one product for q, k and v
    ties_floats  the output's matrix is the embedding, turned; else it is quantised apart
    edit       changes the model before it is written
    """

    tiny: TinyModel
    block_size: int = 32
    zero_points: str = "none"
    dtype: Any = np.float32
    packs_qkv: bool = False
    rope_inside: bool = True
    ties_floats: bool = False
    model_type: str = "llama"
    edit: Callable[[onnx.ModelProto], None] = lambda model: None
    values: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, NDArray[Any]] = {}
        self.values = {}
        self._model = self._build()

    def reference(self) -> TinyModel:
        """The same model with the values that the quantised weights stand for."""
        values = self.values

        class Dequantised(TinyModel):
            def weights(self) -> dict[str, Array]:
                return values

        t = self.tiny
        return Dequantised(**{name: getattr(t, name) for name in t.__dataclass_fields__})

    def write(self, folder: Path, *, external: bool = True) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        t, first = self.tiny, self.tiny.layers[0]
        decoder = {
            "filename": "model.onnx",
            "hidden_size": t.n_embd,
            "head_size": t.head_dim,
            "num_hidden_layers": len(t.layers),
            "num_attention_heads": first.n_heads,
            "num_key_value_heads": first.n_kv_heads,
            "inputs": {"input_ids": "input_ids"},
        }
        config = {"model": {"type": self.model_type, "vocab_size": t.n_vocab, "decoder": decoder}, "search": {}}
        (folder / "genai_config.json").write_text(json.dumps(config))
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        self.edit(model)
        if external:
            onnx.save_model(
                model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=64
            )
        else:
            onnx.save_model(model, folder / "model.onnx")
        return folder

    def _node(self, op: str, inputs: list[str], output: str, name: str, **attributes: Any) -> str:
        outputs = attributes.pop("outputs", [output])
        domain = attributes.pop("domain", "")
        self._nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))
        return output

    def _keep(self, name: str, values: Any, dtype: Any = None) -> str:
        self._tensors[name] = np.asarray(values, self.dtype if dtype is None else dtype)
        return name

    def _build(self) -> onnx.ModelProto:
        t = self.tiny
        w = dict(t.weights())
        self._positions()
        embedding = w["token_embd.weight"].astype(np.float16).astype(float)
        self.values["token_embd.weight"] = embedding
        base, name = "/model/embed_tokens", "/model/embed_tokens/Gather"
        if self.ties_floats:
            turned = self._keep("lm_head.MatMul.weight", embedding.T)
            table = self._node("Transpose", [turned], f"{base}/Transpose/output_0", f"{base}/Transpose", perm=[1, 0])
        else:
            table = self._keep("model.embed_tokens.weight", embedding)
        residual, delta = self._node("Gather", [table, "input_ids"], f"{name}/output_0", name), ""
        for i in range(len(t.layers)):
            x, residual = self._norm(
                f"{i}/input", residual, delta, w[f"blk.{i}.attn_norm.weight"], f"blk.{i}.attn_norm"
            )
            delta = self._attention(i, x, w)
            norm = w[f"blk.{i}.ffn_norm.weight"]
            x, residual = self._norm(f"{i}/post_attention", residual, delta, norm, f"blk.{i}.ffn_norm")
            delta = self._mlp(i, x, w)
        x, _ = self._norm(f"{len(t.layers)}/final_norm", residual, delta, w["output_norm.weight"], "output_norm")
        if self.ties_floats:
            return self._wrap(self._node("MatMul", [x, "lm_head.MatMul.weight"], "logits", "/lm_head/MatMul"))
        head = w.get("output.weight", embedding)
        logits = self._linear("/lm_head", x, [("output", head, None)], outputs=["logits"])
        return self._wrap(logits)

    def _positions(self) -> None:
        base = "/model/attn_mask_reformat/attn_mask_subgraph"
        one, axis = self._keep("/model/constants/INT64/1", 1, np.int64), "/model/constants/INT64/[1]"
        self._keep(axis, [1], np.int64)
        total = self._node("ReduceSum", ["attention_mask", axis], f"{base}/ReduceSum/output_0", f"{base}/ReduceSum")
        less = self._node("Sub", [total, axis], f"{base}/Sub/output_0", f"{base}/Sub")
        self._node("Cast", [less], f"{base}/Sub/Cast/output_0", f"{base}/Sub/Cast", to=TensorProto.INT32)
        shape = self._node("Shape", ["attention_mask"], f"{base}/Shape/output_0", f"{base}/Shape")
        count = self._node("Gather", [shape, one], f"{base}/Gather/output_0", f"{base}/Gather", axis=0)
        self._node("Cast", [count], f"{base}/Gather/Cast/output_0", f"{base}/Gather/Cast", to=TensorProto.INT32)
        frequencies = plain_frequencies(self.tiny.head_dim) if self.tiny.frequencies is None else self.tiny.frequencies
        angles = np.arange(N_POSITIONS)[:, None] * frequencies
        self._keep("cos_cache", np.cos(angles) * self.tiny.factor)
        self._keep("sin_cache", np.sin(angles) * self.tiny.factor)

    def _norm(self, place: str, residual: str, delta: str, weight: Array, key: str) -> tuple[str, str]:
        name = f"/model/layers.{place}_layernorm"
        kept = f"{name[1:].replace('/', '.')}.weight"
        weight = weight.astype(self.dtype).astype(float)
        self.values[f"{key}.weight"] = weight
        self._keep(kept, weight)
        out = f"{name}/output_0"
        if not delta:
            facts: dict[str, Any] = {"epsilon": EPSILON, "axis": -1, "stash_type": 1}
            return self._node(
                "SimplifiedLayerNormalization", [residual, kept], out, f"{name}/LayerNorm", **facts
            ), residual
        total = f"{name}/output_3"
        outputs = [out] if "final" in place else [out, "", "", total]
        inputs, node = [residual, delta, kept], f"{name}/SkipLayerNorm"
        facts = {"outputs": outputs, "domain": "com.microsoft", "epsilon": EPSILON}
        self._node("SkipSimplifiedLayerNormalization", inputs, out, node, **facts)
        return out, total

    def _linear(
        self, name: str, x: str, parts: list[tuple[str, Array, Array | None]], outputs: list[str] | None = None
    ) -> str:
        """Multiply with matrices below each other; parts: GGUF's name, rows in Hugging Face's order, bias."""
        matrix = np.concatenate([rows for _, rows, _ in parts])
        made = Quantised.of(matrix, self.block_size, self.zero_points, self.dtype)
        start = 0
        for key, rows, _ in parts:
            self.values[f"{key}.weight"] = self._gguf_order(key, made.values[start : start + len(rows)])
            start += len(rows)
        base = f"{name[1:].replace('/', '.')}.MatMul.weight"
        inputs = [x, self._keep(f"{base}_Q4", made.quants, np.uint8), self._keep(f"{base}_scales", made.scales)]
        if made.zero_points is not None:
            inputs.append(self._keep(f"{base}_zero_points", made.zero_points, made.zero_points.dtype))
        out = (outputs or [f"{name}/MatMul/output_0"])[0]
        facts = {"K": matrix.shape[1], "N": len(matrix), "bits": 4, "block_size": self.block_size, "accuracy_level": 4}
        self._node("MatMulNBits", inputs, out, f"{name}/MatMul_Q4", domain="com.microsoft", **facts)
        biases = [bias for _, _, bias in parts if bias is not None]
        if not biases:
            return out
        for key, _, bias in parts:
            assert bias is not None
            self.values[f"{key}.bias"] = self._gguf_order(key, bias.astype(self.dtype).astype(float))
        kept = self._keep(f"{name[1:].replace('/', '.')}.Add.bias", np.concatenate(biases))
        return self._node("Add", [out, kept], f"{name}/Add/output_0", f"{name}/Add")

    def _gguf_order(self, key: str, rows: Array) -> Array:
        return rows if self.tiny.pairs_halves or not key.endswith(("attn_q", "attn_k")) else self._halves_to_pairs(rows)

    def _halves_to_pairs(self, rows: Array) -> Array:
        out = np.empty_like(rows)
        half = self.tiny.head_dim // 2
        for start in range(0, len(rows), 2 * half):
            for i in range(half):
                out[start + 2 * i] = rows[start + i]
                out[start + 2 * i + 1] = rows[start + half + i]
        return out

    def _attention(self, i: int, x: str, w: dict[str, Array]) -> str:
        t, layer, base = self.tiny, self.tiny.layers[i], f"/model/layers.{i}/attn"

        def part(kind: str) -> tuple[str, Array, Array | None]:
            key = f"blk.{i}.attn_{kind}"
            return key, w[f"{key}.weight"], w.get(f"{key}.bias")

        if self.packs_qkv:
            values = [self._linear(f"{base}/qkv_proj", x, [part("q"), part("k"), part("v")]), "", ""]
        else:
            values = [self._linear(f"{base}/{kind}_proj", x, [part(kind)]) for kind in "qkv"]
        if t.has_qk_norm:
            heads = (layer.n_heads, layer.n_kv_heads)
            values[:2] = [self._head_norm(i, k, v, n, w) for k, v, n in zip("qk", values, heads, strict=False)]
        if not self.rope_inside:
            for slot, kind in enumerate("qk"):
                node, inputs = (
                    f"{base}/{kind}_rotary/RotaryEmbedding",
                    [values[slot], "position_ids", "cos_cache", "sin_cache"],
                )
                values[slot] = self._node("RotaryEmbedding", inputs, f"{node}/output_0", node, domain="com.microsoft")
        mask = "/model/attn_mask_reformat/attn_mask_subgraph"
        inputs = [*values, f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
        inputs += [f"{mask}/Sub/Cast/output_0", f"{mask}/Gather/Cast/output_0"]
        inputs += ["cos_cache", "sin_cache"] if self.rope_inside else []
        name = f"{base}/GroupQueryAttention"
        out = self._node(
            "GroupQueryAttention",
            inputs,
            f"{name}/output_0",
            name,
            outputs=[f"{name}/output_0", f"present.{i}.key", f"present.{i}.value"],
            domain="com.microsoft",
            num_heads=layer.n_heads,
            kv_num_heads=layer.n_kv_heads,
            scale=float(t.head_dim**-0.5),
            local_window_size=layer.window or -1,
            softcap=0.0,
            do_rotary=int(self.rope_inside),
            rotary_interleaved=0,
        )
        return self._linear(f"{base}/o_proj", out, [part("output")])

    def _head_norm(self, i: int, kind: str, value: str, n_heads: int, w: dict[str, Array]) -> str:
        base, hd = f"/model/layers.{i}/attn/{kind}_norm", self.tiny.head_dim
        shapes = [f"/model/constants/INT64/[0, -1, {n}]" for n in (hd, n_heads * hd)]
        for shape, last in zip(shapes, (hd, n_heads * hd), strict=True):
            self._keep(shape, [0, -1, last], np.int64)
        key = f"blk.{i}.attn_{kind}_norm.weight"
        self.values[key] = w[key]
        kept = self._keep(f"model.layers.{i}.attn.{kind}_norm.layernorm.weight", w[key])
        inner = self._node("Reshape", [value, shapes[0]], f"{base}/Reshape_1/output_0", f"{base}/Reshape_1")
        name = f"{base}/SimplifiedLayerNormalization"
        facts: dict[str, Any] = {"epsilon": EPSILON, "axis": -1, "stash_type": 1}
        normed = self._node("SimplifiedLayerNormalization", [inner, kept], f"{name}/output_0", name, **facts)
        return self._node("Reshape", [normed, shapes[1]], f"{base}/Reshape_2/output_0", f"{base}/Reshape_2")

    def _mlp(self, i: int, x: str, w: dict[str, Array]) -> str:
        base = f"/model/layers.{i}/mlp"
        gate, up = (
            self._linear(f"{base}/{kind}_proj", x, [(f"blk.{i}.ffn_{kind}", w[f"blk.{i}.ffn_{kind}.weight"], None)])
            for kind in ("gate", "up")
        )
        act = f"{base}/act_fn"
        sigmoid = self._node("Sigmoid", [gate], f"{act}/Sigmoid/output_0", f"{act}/Sigmoid")
        silu = self._node("Mul", [gate, sigmoid], f"{act}/Mul/output_0", f"{act}/Mul")
        product = self._node("Mul", [silu, up], f"{base}/Mul/output_0", f"{base}/Mul")
        return self._linear(f"{base}/down_proj", product, [(f"blk.{i}.ffn_down", w[f"blk.{i}.ffn_down.weight"], None)])

    def _wrap(self, logits: str) -> onnx.ModelProto:
        t, kind = self.tiny, helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
        ]
        if not self.rope_inside:
            inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "length"]))
        outputs = [helper.make_tensor_value_info(logits, kind, ["batch", "length", t.n_vocab])]
        for i, layer in enumerate(t.layers):
            for what in ("key", "value"):
                shape = ["batch", layer.n_kv_heads, "past", t.head_dim]
                inputs.append(helper.make_tensor_value_info(f"past_key_values.{i}.{what}", kind, shape))
                shape = ["batch", layer.n_kv_heads, "total", t.head_dim]
                outputs.append(helper.make_tensor_value_info(f"present.{i}.{what}", kind, shape))
        tensors = [numpy_helper.from_array(np.ascontiguousarray(v), name) for name, v in self._tensors.items()]
        graph = helper.make_graph(self._nodes, "main_graph", inputs, outputs, tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)
