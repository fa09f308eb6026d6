from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.convert.safetensors_file import read_safetensors
from edge_rt.errors import ModelFormatError
from edge_rt.worker.recipe import apply

pytest.importorskip("onnx", reason="the extra onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from edge_rt.convert.bert import build  # noqa: E402

State = dict[str, NDArray[Any]]
HIDDEN, WIDE, N_HEADS = 8, 20, 2


def small_state() -> State:
    rng = np.random.default_rng(0)
    state: State = {}

    def put(name: str, *shape: int) -> None:
        state[name] = rng.normal(0, 0.5, shape).astype("<f4")

    for kind, n_rows in (("word", 30), ("position", 16), ("token_type", 2)):
        put(f"embeddings.{kind}_embeddings.weight", n_rows, HIDDEN)
    linear = {
        f"attention.{part}": (HIDDEN, HIDDEN) for part in ("self.query", "self.key", "self.value", "output.dense")
    } | {"intermediate.dense": (WIDE, HIDDEN), "output.dense": (HIDDEN, WIDE)}
    for layer in range(2):
        for part, shape in linear.items():
            put(f"encoder.layer.{layer}.{part}.weight", *shape)
            put(f"encoder.layer.{layer}.{part}.bias", shape[0])
    norms = [f"encoder.layer.{i}.{part}" for i in range(2) for part in ("attention.output", "output")]
    for norm in ("embeddings", *norms):
        for part in ("weight", "bias"):
            put(f"{norm}.LayerNorm.{part}", HIDDEN)
    return state


def reference(state: State, ids: list[int], types: list[int]) -> NDArray[Any]:
    """One text without padding, in double precision, a head at a time."""

    def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
        x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-12)
        return np.asarray(x * state[f"{name}.LayerNorm.weight"] + state[f"{name}.LayerNorm.bias"])

    def linear(x: NDArray[Any], name: str) -> NDArray[Any]:
        return np.asarray(x @ state[f"{name}.weight"].astype(float).T + state[f"{name}.bias"])

    table = {kind: state[f"embeddings.{kind}_embeddings.weight"].astype(float) for kind in ("word", "position")}
    x = table["word"][ids] + table["position"][: len(ids)] + state["embeddings.token_type_embeddings.weight"][types]
    x = norm(x, "embeddings")
    for layer in range(2):
        prefix = f"encoder.layer.{layer}"
        query, key, value = (linear(x, f"{prefix}.attention.self.{part}") for part in ("query", "key", "value"))
        contexts = []
        for head in np.split(np.arange(HIDDEN), N_HEADS):
            scores = np.exp(query[:, head] @ key[:, head].T / math.sqrt(len(head)))
            contexts.append(scores / scores.sum(axis=1, keepdims=True) @ value[:, head])
        x = norm(
            x + linear(np.concatenate(contexts, axis=1), f"{prefix}.attention.output.dense"),
            f"{prefix}.attention.output",
        )
        wide = linear(x, f"{prefix}.intermediate.dense")
        gelu = wide * 0.5 * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))
        x = norm(x + linear(gelu, f"{prefix}.output.dense"), f"{prefix}.output")
    return x


def test_graph_computes_what_bert_would_whatever_is_padded() -> None:
    state = small_state()
    session = ort.InferenceSession(build(state, N_HEADS).SerializeToString())
    texts = [([1, 5, 9, 2, 7], [0, 0, 0, 1, 1]), ([3, 29, 4], [0, 0, 0])]
    feeds = {name: np.zeros((2, 6), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    for row, (ids, types) in enumerate(texts):
        feeds["input_ids"][row, : len(ids)] = ids
        feeds["token_type_ids"][row, : len(ids)] = types
        feeds["attention_mask"][row, : len(ids)] = 1
    found = session.run(["last_hidden_state"], feeds)[0]
    for row, (ids, types) in enumerate(texts):
        np.testing.assert_allclose(found[row, : len(ids)], reference(state, ids, types), atol=2e-5)


def safetensors(state: State) -> bytes:
    header, data = {}, b""
    for name, array in state.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_safetensors_come_back(tmp_path: Path) -> None:
    state = small_state()
    (tmp_path / "m").write_bytes(safetensors(state))
    found = read_safetensors(tmp_path / "m")
    assert found.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**39, 2**39], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2]},
        [],
    ],
)
def test_headers_that_lie(entry: object, tmp_path: Path) -> None:
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ModelFormatError):
        read_safetensors(tmp_path / "m")


@pytest.mark.parametrize("raw", [b"", b"\1", struct.pack("<Q", 2**60), struct.pack("<Q", 4) + b"abcd"])
def test_other_files(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(raw)
    with pytest.raises(ModelFormatError):
        read_safetensors(tmp_path / "m")


def test_the_recipe_names_what_does_not_fit(tmp_path: Path) -> None:
    state = small_state()
    (tmp_path / "m").write_bytes(safetensors(state))
    with pytest.raises(ModelFormatError, match="8 values do not divide among 12 heads"):
        apply("minilm-l6", tmp_path / "m", tmp_path / "out")
    del state["encoder.layer.1.output.dense.bias"]
    with pytest.raises(KeyError, match=r"layer\.1\.output\.dense\.bias"):
        build(state, N_HEADS)
