"""A BERT encoder's weights, as Hugging Face's safetensors have them, into an ONNX graph of the last hidden state.

Inputs: input_ids, attention_mask and token_type_ids, INT64 [batch, sequence]. Output: last_hidden_state, FP32 [batch,
sequence, hidden]. Built from the same weights, the file is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_rt.convert.gptq import round_matrices
from edge_rt.convert.npu import W4A16, quantize
from edge_rt.convert.onnx_build import OPSET, OnnxBuilder, Shape
from edge_rt.convert.qdq import read_ranges
from edge_rt.convert.safetensors_file import read_safetensors
from edge_rt.errors import ModelFormatError

_EPSILON = 1e-12
MINILM_N_HEADS = 12
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
STATIC_N_TOKENS = 128
_MASKED, _MASKED_STATIC = -1e4, -64.0
_STATIC_OPSET = 21  # GELU came with 20, quantised values of 4 and 16 bit with 21

_INT8_PRODUCTS = frozenset(
    f"encoder.layer.{name}/product"
    for name in (
        "4.intermediate.dense",
        "5.attention.self.value",
        "5.attention.output.dense",
        "5.intermediate.dense",
        "5.output.dense",
    )
)

State = dict[str, NDArray[Any]]


def convert_minilm(src: Path, dst: Path, beside: Path | None) -> None:
    """Write the ONNX file of a BERT with heads as MiniLM-L6 has them. Raises ModelFormatError."""
    del beside
    _convert(src, dst, n_tokens=None)


def convert_minilm_w4a16(src: Path, dst: Path, beside: Path | None) -> None:
    """Write the static float form in W4A16, its matrices rounded for the texts that stand in beside with the ranges.

    Five of 36 keep 8 bits: a fifth of the weights, and half of what rounding all of them does to the embeddings.
    Raises ModelFormatError.
    """
    if beside is None or not (told := read_ranges(beside)).texts:
        raise ModelFormatError(path=dst.name, field="derive_with", problem="the recipe needs ranges with texts")
    model = onnx.load(src, load_external_data=False)
    rounded, scales = round_matrices(model, text_feeds(told.texts), keep=_INT8_PRODUCTS)
    made = quantize(rounded, told.ranges, W4A16, int8_nodes=_INT8_PRODUCTS, scales=scales, name=src.name)
    dst.write_bytes(made.SerializeToString(deterministic=True))


def text_feeds(texts: Iterable[Sequence[int]]) -> Iterator[tuple[dict[str, NDArray[np.int64]], int]]:
    """Give each text's tokens as the static form takes them, with how many there are."""
    for text in texts:
        ids = text[:STATIC_N_TOKENS]
        feed = {name: np.zeros((1, STATIC_N_TOKENS), np.int64) for name in _INPUTS}
        feed["input_ids"][0, : len(ids)] = ids
        feed["attention_mask"][0, : len(ids)] = 1
        yield feed, len(ids)


def _convert(src: Path, dst: Path, *, n_tokens: int | None) -> None:
    state = read_safetensors(src)
    try:
        model = build(state, MINILM_N_HEADS, n_tokens=n_tokens)
    except KeyError as exc:
        raise ModelFormatError(path=src.name, field=str(exc), problem="no such tensor") from exc
    except ValueError as exc:
        raise ModelFormatError(path=src.name, field="shape", problem=str(exc)) from exc
    dst.write_bytes(model.SerializeToString(deterministic=True))


def convert_minilm_static(src: Path, dst: Path, beside: Path | None) -> None:
    """Write the same for texts of STATIC_N_TOKENS tokens, the shorter ones filled up, as NPUs take it."""
    del beside
    _convert(src, dst, n_tokens=STATIC_N_TOKENS)


def build(state: State, n_heads: int, *, n_tokens: int | None = None) -> onnx.ModelProto:
    """Give the graph, for n_tokens in each text or for any number.

    With n_tokens all shapes but the batch's are known, GELU is one node, the scores' scale is in the query's weights,
    and what padding gets is small enough to share a 16-bit scale with the scores.

    Raises KeyError and ValueError for tensors that do not fit.
    """
    builder = _Builder(state, n_heads, n_tokens)
    value, mask = builder.embed(), builder.mask()
    n_layers = 0
    while f"encoder.layer.{n_layers}.attention.self.query.weight" in state:
        value = builder.layer(n_layers, value, mask)
        n_layers += 1
    if n_layers == 0:
        raise KeyError("encoder.layer.0.attention.self.query.weight")
    return builder.finish(value)


class _Builder(OnnxBuilder):
    def __init__(self, state: State, n_heads: int, n_tokens: int | None):
        super().__init__(state)
        self._n_tokens = n_tokens
        self._hidden = int(self.floats("embeddings.word_embeddings.weight", 2).shape[1])
        if self._hidden % n_heads:
            raise ValueError(f"{self._hidden} values do not divide among {n_heads} heads")
        head = self._hidden // n_heads
        self.constant("to_heads", np.array([0, 0, n_heads, head]))
        self.constant("from_heads", np.array([0, 0, self._hidden]))
        self._score_scale = 1 / math.sqrt(head)
        numbers = {"one": 1.0, "masked": _MASKED_STATIC}
        if n_tokens is None:
            numbers = {"score_scale": self._score_scale, "one": 1.0, "half": 0.5, "root_half": math.sqrt(0.5)}
            numbers["masked"] = _MASKED
        for name, number in numbers.items():
            self.constant(name, np.array(number, np.float32))
        for name, index in (("zero_index", 0), ("one_index", 1)) if n_tokens is None else ():
            self.constant(name, np.array([index]))
        self.constant("mask_axes", np.array([1, 2]))

    def embed(self) -> str:
        """Add up a token's own vector, its place's and its segment's."""
        for kind in ("word", "position", "token_type"):
            table = self.floats(f"embeddings.{kind}_embeddings.weight", 2)
            if table.shape[1] != self._hidden:
                raise ValueError(f"embeddings.{kind}_embeddings.weight has rows of {table.shape[1]}")
            if kind == "position" and self._n_tokens is not None:
                self.constant("places", table[: self._n_tokens])
            else:
                self.constant(f"{kind}_table", table)
        if self._n_tokens is None:
            self.node("Shape", ["input_ids"], "ids_shape")
            self.node("Gather", ["ids_shape", "one_index"], "n_tokens")
        self.node("Gather", ["word_table", "input_ids"], "words")
        self.node("Gather", ["token_type_table", "token_type_ids"], "types")
        if self._n_tokens is None:
            self.node("Slice", ["position_table", "zero_index", "n_tokens", "zero_index"], "places")
        self.node("Add", ["words", "types"], "words_types")
        self.node("Add", ["words_types", "places"], "embedded")
        return self._norm("embedded", "embeddings.LayerNorm")

    def mask(self) -> str:
        """Give what is added to a score: 0 for a token, so little for padding that it gets no weight."""
        self.node("Cast", ["attention_mask"], "mask_float", to=TensorProto.FLOAT)
        self.node("Unsqueeze", ["mask_float", "mask_axes"], "mask_rows")
        self.node("Sub", ["one", "mask_rows"], "mask_inverse")
        return self.node("Mul", ["mask_inverse", "masked"], "mask_scores")

    def layer(self, index: int, value: str, mask: str) -> str:
        prefix = f"encoder.layer.{index}"
        heads: dict[str, str] = {}
        for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            is_scaled = part == "query" and self._n_tokens is not None
            scale = self._score_scale if is_scaled else 1.0
            flat = self._linear(value, f"{prefix}.attention.self.{part}", scale)
            split = self.node("Reshape", [flat, "to_heads"], f"{flat}/heads")
            heads[part] = self.node("Transpose", [split], f"{flat}/turned", perm=order)
        name = f"layer{index}"
        self.node("MatMul", [heads["query"], heads["key"]], f"{name}/products")
        scores = f"{name}/products"
        if self._n_tokens is None:
            scores = self.node("Mul", [scores, "score_scale"], f"{name}/scores")
        self.node("Add", [scores, mask], f"{name}/masked")
        self.node("Softmax", [f"{name}/masked"], f"{name}/weights", axis=-1)
        self.node("MatMul", [f"{name}/weights", heads["value"]], f"{name}/context")
        self.node("Transpose", [f"{name}/context"], f"{name}/context/turned", perm=[0, 2, 1, 3])
        self.node("Reshape", [f"{name}/context/turned", "from_heads"], f"{name}/context/flat")
        attended = self._linear(f"{name}/context/flat", f"{prefix}.attention.output.dense")
        self.node("Add", [attended, value], f"{name}/attention/sum")
        value = self._norm(f"{name}/attention/sum", f"{prefix}.attention.output.LayerNorm")
        wide = self._gelu(self._linear(value, f"{prefix}.intermediate.dense"))
        narrow = self._linear(wide, f"{prefix}.output.dense")
        self.node("Add", [narrow, value], f"{name}/sum")
        return self._norm(f"{name}/sum", f"{prefix}.output.LayerNorm")

    def finish(self, value: str) -> onnx.ModelProto:
        self.node("Identity", [value], "last_hidden_state")
        shape: Shape = ["batch", "sequence" if self._n_tokens is None else self._n_tokens]
        return self.model(
            "bert",
            [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in _INPUTS],
            [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*shape, self._hidden])],
            opset=OPSET if self._n_tokens is None else _STATIC_OPSET,
        )

    def _linear(self, value: str, name: str, scale: float = 1.0) -> str:
        weights, bias = self.floats(f"{name}.weight", 2), self.floats(f"{name}.bias", 1)
        if weights.shape[0] != bias.size:
            raise ValueError(f"{name} has weights of {weights.shape} and a bias of {bias.size}")
        self.constant(f"{name}/weight", weights.T * np.float32(scale))
        self.constant(f"{name}/bias", bias * np.float32(scale))
        self.node("MatMul", [value, f"{name}/weight"], f"{name}/product")
        return self.node("Add", [f"{name}/product", f"{name}/bias"], name)

    def _norm(self, value: str, name: str) -> str:
        for part in ("weight", "bias"):
            self.constant(f"{name}/{part}", self.floats(f"{name}.{part}", 1))
        return self.node(
            "LayerNormalization", [value, f"{name}/weight", f"{name}/bias"], name, axis=-1, epsilon=_EPSILON
        )

    def _gelu(self, value: str) -> str:
        if self._n_tokens is not None:
            return self.node("Gelu", [value], f"{value}/gelu")
        self.node("Mul", [value, "root_half"], f"{value}/scaled")
        self.node("Erf", [f"{value}/scaled"], f"{value}/erf")
        self.node("Add", [f"{value}/erf", "one"], f"{value}/gate")
        self.node("Mul", [value, f"{value}/gate"], f"{value}/gated")
        return self.node("Mul", [f"{value}/gated", "half"], f"{value}/gelu")
