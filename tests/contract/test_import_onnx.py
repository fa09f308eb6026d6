"""Folders of ONNX Runtime GenAI, imported: what the native engine makes of them, against numpy and onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx", reason="the extra onnx is not installed")

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows
from edge_rt.catalog.gguf import read_header
from edge_rt.worker.convert import convert
from tests.onnx_models import OnnxModel
from tests.tiny_models import TinyLayer, TinyModel, plain_frequencies

if isinstance(registry.get("native").probe(), Absent):
    pytest.skip("the native engine is not here", allow_module_level=True)

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 96, 60)]
LAYER = TinyLayer(n_ff=192)
LLAMA = TinyModel(n_embd=128, head_dim=32, n_vocab=96, layers=(LAYER, LAYER))
QWEN2 = TinyModel(
    arch="qwen2",
    n_embd=128,
    head_dim=32,
    n_vocab=96,
    layers=(LAYER, LAYER),
    biases=("attn_q", "attn_k", "attn_v"),
    pairs_halves=True,
    is_tied=False,
)
QWEN3 = TinyModel(
    arch="qwen3", n_embd=128, head_dim=32, n_vocab=96, layers=(LAYER,) * 2, has_qk_norm=True, pairs_halves=True
)
DIVISORS = np.linspace(1, 8, 16)
LLAMA3 = TinyModel(
    n_embd=128,
    head_dim=32,
    n_vocab=96,
    layers=(LAYER, LAYER),
    keys={"rope.freq_base": ("f32", 500.0)},
    extra_tensors={"rope_freqs.weight": DIVISORS.astype(np.float32).astype(float)},
    frequencies=plain_frequencies(32, 500.0) / DIVISORS.astype(np.float32),
)
WINDOW = TinyModel(
    n_embd=128,
    head_dim=32,
    n_vocab=96,
    layers=(TinyLayer(n_ff=192, window=16),) * 2,
    keys={"attention.sliding_window": ("u32", 16)},
)
MODELS: dict[str, dict[str, Any]] = {
    "blocks of 32": {},
    "blocks of 64 with zero points": {"block_size": 64, "zero_points": "packed"},
    "blocks of 128 with zero points of floats": {"block_size": 128, "zero_points": "float"},
    "packed qkv": {"packs_qkv": True},
    "RoPE outside": {"rope_inside": False},
    "F16": {"dtype": np.float16, "zero_points": "packed"},
    "output tied to the embedding": {"ties_floats": True},
    "frequencies with divisors": {"tiny": LLAMA3},
    "window": {"tiny": WINDOW, "model_type": "mistral"},
    "biases": {"tiny": QWEN2, "model_type": "qwen2"},
    "packed biases": {"tiny": QWEN2, "model_type": "qwen2", "packs_qkv": True, "block_size": 128},
    "norms of q and k": {"tiny": QWEN3, "model_type": "qwen3", "rope_inside": False},
    "norms of q and k, RoPE inside": {"tiny": QWEN3, "model_type": "qwen3"},
}


def logits_of(path: Path) -> NDArray[np.float32]:
    options = LoadOptions(n_ctx=128, n_seq_max=1, n_batch=128, n_ubatch=32, n_threads=1)
    session = registry.get("native").load(ModelFile(model="m", variant="", path=path, quant=""), options)
    try:
        return session.decode([SeqRows(0, 0, IDS, False, want_all=True)])[0].copy()
    finally:
        session.close()


def onnxruntime_logits(folder: Path, model: OnnxModel) -> NDArray[np.float32]:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        "input_ids": np.array([IDS], np.int64),
        "attention_mask": np.ones((1, len(IDS)), np.int64),
    }
    if not model.rope_inside:
        feeds["position_ids"] = np.arange(len(IDS), dtype=np.int64)[None]
    for i, layer in enumerate(model.tiny.layers):
        for what in ("key", "value"):
            feeds[f"past_key_values.{i}.{what}"] = np.zeros((1, layer.n_kv_heads, 0, model.tiny.head_dim), model.dtype)
    return np.asarray(session.run(["logits"], feeds)[0][0])


def spread(difference: NDArray[Any], logits: NDArray[Any]) -> float:
    """Root mean square of a difference as a part of the logits' own."""
    return float(np.sqrt((difference.astype(float) ** 2).mean() / (logits.astype(float) ** 2).mean()))


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_computes_what_the_graph_says(name: str, tmp_path: Path) -> None:
    """Against the same weights in F32 only the activations' 8 bits make a difference: below 3 % of the logits.

    The reference in numpy reads the weights as GGUF has them, onnxruntime runs the graph itself.
    """
    model = OnnxModel(**({"tiny": LLAMA} | MODELS[name]))
    folder = model.write(tmp_path / "onnx")
    vocab, dst, plain = tmp_path / "vocab.gguf", tmp_path / "out.gguf", tmp_path / "plain.gguf"
    model.tiny.write(vocab)
    convert(folder, vocab, dst)
    reference = model.reference()
    reference.write(plain)
    exact = reference.logits(IDS)
    imported, native_f32 = logits_of(dst), logits_of(plain)
    assert spread(native_f32 - exact, exact) < 1e-3
    assert spread(imported - native_f32, exact) < 0.03
    if model.dtype is np.float32:
        theirs = onnxruntime_logits(folder, model)
        assert spread(theirs - exact, exact) < 0.03
        assert spread(imported - theirs, exact) < 0.04
    header = read_header(dst)
    quant = "Q4_0" if model.zero_points == "none" else "Q4_1"
    assert {t.type for t in header.tensors if t.name.startswith("blk.0.ffn_") and "norm" not in t.name} == {quant}
    assert header.n_vocab == 96
    assert {t.name: t.type for t in header.tensors}["token_embd.weight"] == "F16"


def test_a_wrong_order_of_rows_would_be_seen(tmp_path: Path) -> None:
    """The tolerance above is narrow enough: without the exchange of rows the logits are far away."""
    model = OnnxModel(LLAMA)
    exact = model.reference().logits(IDS)
    weights = model.values
    for key in [k for k in weights if k.endswith(("attn_q.weight", "attn_k.weight"))]:
        weights[key] = np.roll(weights[key], 1, axis=0)
    assert spread(model.reference().logits(IDS) - exact, exact) > 0.2
