"""A BERT encoder's weights, as Hugging Face's safetensors have them, into an ONNX graph of the last hidden state.

Inputs: input_ids, attention_mask and token_type_ids, INT64 [batch, sequence]. Output: last_hidden_state, FP32 [batch,
sequence, hidden]. Built from the same weights, the file is the same.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edge_rt.convert.safetensors_file import read_safetensors
from edge_rt.errors import ModelFormatError

_OPSET = 17
_IR_VERSION = 8
_EPSILON = 1e-12
MINILM_N_HEADS = 12

State = dict[str, NDArray[Any]]


def convert_minilm(src: Path, dst: Path, beside: Path | None) -> None:  # noqa: ARG001
    """Write the ONNX file of a BERT with heads as MiniLM-L6 has them. Raises ModelFormatError."""
    state = read_safetensors(src)
    try:
        model = build(state, MINILM_N_HEADS)
    except KeyError as exc:
        raise ModelFormatError(path=src.name, field=str(exc), problem="no such tensor") from exc
    except ValueError as exc:
        raise ModelFormatError(path=src.name, field="shape", problem=str(exc)) from exc
    dst.write_bytes(model.SerializeToString(deterministic=True))


def build(state: State, n_heads: int) -> onnx.ModelProto:
    """Give the graph. Raises KeyError and ValueError for tensors that do not fit."""
    builder = _Builder(state, n_heads)
    value, mask = builder.embed(), builder.mask()
    n_layers = 0
    while f"encoder.layer.{n_layers}.attention.self.query.weight" in state:
        value = builder.layer(n_layers, value, mask)
        n_layers += 1
    if n_layers == 0:
        raise KeyError("encoder.layer.0.attention.self.query.weight")
    return builder.finish(value)


class _Builder:
    def __init__(self, state: State, n_heads: int):
        self._state = state
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []
        self._hidden = int(self._floats("embeddings.word_embeddings.weight", 2).shape[1])
        if self._hidden % n_heads:
            raise ValueError(f"{self._hidden} values do not divide among {n_heads} heads")
        head = self._hidden // n_heads
        self._constant("to_heads", np.array([0, 0, n_heads, head]))
        self._constant("from_heads", np.array([0, 0, self._hidden]))
        self._constant("score_scale", np.array(1 / math.sqrt(head), np.float32))
        for name, number in (("one", 1), ("half", 0.5), ("root_half", math.sqrt(0.5)), ("masked", -1e4)):
            self._constant(name, np.array(number, np.float32))
        for name, index in (("zero_index", 0), ("one_index", 1)):
            self._constant(name, np.array([index]))
        self._constant("mask_axes", np.array([1, 2]))

    def embed(self) -> str:
        """Add up a token's own vector, its place's and its segment's."""
        for kind in ("word", "position", "token_type"):
            table = self._floats(f"embeddings.{kind}_embeddings.weight", 2)
            if table.shape[1] != self._hidden:
                raise ValueError(f"embeddings.{kind}_embeddings.weight has rows of {table.shape[1]}")
            self._constant(f"{kind}_table", table)
        self._node("Shape", ["input_ids"], "ids_shape")
        self._node("Gather", ["ids_shape", "one_index"], "n_tokens")
        self._node("Gather", ["word_table", "input_ids"], "words")
        self._node("Gather", ["token_type_table", "token_type_ids"], "types")
        self._node("Slice", ["position_table", "zero_index", "n_tokens", "zero_index"], "places")
        self._node("Add", ["words", "types"], "words_types")
        self._node("Add", ["words_types", "places"], "embedded")
        return self._norm("embedded", "embeddings.LayerNorm")

    def mask(self) -> str:
        """Give what is added to a score: 0 for a token, so little for padding that it gets no weight."""
        self._node("Cast", ["attention_mask"], "mask_float", to=TensorProto.FLOAT)
        self._node("Unsqueeze", ["mask_float", "mask_axes"], "mask_rows")
        self._node("Sub", ["one", "mask_rows"], "mask_inverse")
        return self._node("Mul", ["mask_inverse", "masked"], "mask_scores")

    def layer(self, index: int, value: str, mask: str) -> str:
        prefix = f"encoder.layer.{index}"
        heads: dict[str, str] = {}
        for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            flat = self._linear(value, f"{prefix}.attention.self.{part}")
            split = self._node("Reshape", [flat, "to_heads"], f"{flat}/heads")
            heads[part] = self._node("Transpose", [split], f"{flat}/turned", perm=order)
        name = f"layer{index}"
        self._node("MatMul", [heads["query"], heads["key"]], f"{name}/products")
        self._node("Mul", [f"{name}/products", "score_scale"], f"{name}/scores")
        self._node("Add", [f"{name}/scores", mask], f"{name}/masked")
        self._node("Softmax", [f"{name}/masked"], f"{name}/weights", axis=-1)
        self._node("MatMul", [f"{name}/weights", heads["value"]], f"{name}/context")
        self._node("Transpose", [f"{name}/context"], f"{name}/context/turned", perm=[0, 2, 1, 3])
        self._node("Reshape", [f"{name}/context/turned", "from_heads"], f"{name}/context/flat")
        attended = self._linear(f"{name}/context/flat", f"{prefix}.attention.output.dense")
        self._node("Add", [attended, value], f"{name}/attention/sum")
        value = self._norm(f"{name}/attention/sum", f"{prefix}.attention.output.LayerNorm")
        wide = self._gelu(self._linear(value, f"{prefix}.intermediate.dense"))
        narrow = self._linear(wide, f"{prefix}.output.dense")
        self._node("Add", [narrow, value], f"{name}/sum")
        return self._norm(f"{name}/sum", f"{prefix}.output.LayerNorm")

    def finish(self, value: str) -> onnx.ModelProto:
        self._node("Identity", [value], "last_hidden_state")
        shape: list[str | int | None] = ["batch", "sequence"]
        names = ("input_ids", "attention_mask", "token_type_ids")
        graph = helper.make_graph(
            self._nodes,
            "bert",
            [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in names],
            [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*shape, self._hidden])],
            self._constants,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION, producer_name="edge_rt"
        )
        onnx.checker.check_model(model, full_check=True)
        return model

    def _linear(self, value: str, name: str) -> str:
        weights, bias = self._floats(f"{name}.weight", 2), self._floats(f"{name}.bias", 1)
        if weights.shape[0] != bias.size:
            raise ValueError(f"{name} has weights of {weights.shape} and a bias of {bias.size}")
        self._constant(f"{name}/weight", weights.T)
        self._constant(f"{name}/bias", bias)
        self._node("MatMul", [value, f"{name}/weight"], f"{name}/product")
        return self._node("Add", [f"{name}/product", f"{name}/bias"], name)

    def _norm(self, value: str, name: str) -> str:
        for part in ("weight", "bias"):
            self._constant(f"{name}/{part}", self._floats(f"{name}.{part}", 1))
        return self._node(
            "LayerNormalization", [value, f"{name}/weight", f"{name}/bias"], name, axis=-1, epsilon=_EPSILON
        )

    def _gelu(self, value: str) -> str:
        self._node("Mul", [value, "root_half"], f"{value}/scaled")
        self._node("Erf", [f"{value}/scaled"], f"{value}/erf")
        self._node("Add", [f"{value}/erf", "one"], f"{value}/gate")
        self._node("Mul", [value, f"{value}/gate"], f"{value}/gated")
        return self._node("Mul", [f"{value}/gated", "half"], f"{value}/gelu")

    def _node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, name: str, value: NDArray[Any]) -> None:
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))

    def _floats(self, name: str, rank: int) -> NDArray[np.float32]:
        array = self._state[name]
        if array.dtype != np.float32 or array.ndim != rank or not np.isfinite(array).all():
            raise ValueError(f"{name} is not {rank}-dimensional of finite 32-bit floats")
        return array
