"""The llama family in the native engine: tiny random models of F32 weights against numpy, and against llama.cpp.

numpy shows that the computation is right; llama.cpp shows that keys and tensors mean to others what they mean here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows
from edge_rt.backends.native import NativeSession
from edge_rt.backends.native_config import read_config
from edge_rt.backends.native_library import load_native
from edge_rt.devices import cpu
from edge_rt.errors import BackendStepError, BackendUnavailableError
from tests.tiny_models import TinyLayer, TinyModel, plain_frequencies, yarn_frequencies

if isinstance(registry.get("native").probe(), Absent):
    pytest.skip("the native engine is not here", allow_module_level=True)

N_TOKENS = 100
# micro-batches that are no multiple of a block of KV
OPTIONS = LoadOptions(n_ctx=128, n_seq_max=2, n_batch=128, n_ubatch=24, n_threads=2)
# RoPE's divisors as a converted Llama 3 has them: 1 for fast pairs, the factor for slow ones, and between
DIVISORS = np.array([1, 1, 1, 1.5, 2.5, 4, 8, 8.0])
YARN = {
    "rope.scaling.type": ("string", "yarn"),
    "rope.scaling.factor": ("f32", 4.0),
    "rope.scaling.original_context_length": ("u32", 32),
}
YARN_FACTOR = 1 + 0.1 * np.log(4)
LONGROPE = {"rope.scaling.type": ("string", "longrope"), "rope.scaling.attn_factor": ("f32", 1.25)}
DECI_LAYERS = (
    TinyLayer(n_heads=8, n_kv_heads=2, n_ff=160),
    TinyLayer(n_heads=4, n_kv_heads=0, n_ff=64),
    TinyLayer(n_heads=0, n_kv_heads=0, n_ff=96),
    TinyLayer(n_heads=0, n_kv_heads=0, n_ff=0),
    TinyLayer(n_heads=2, n_kv_heads=1, n_ff=32),
)
ALL_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

# What llama.cpp computes too.
SHARED = {
    "llama": TinyModel(),
    "separate output": TinyModel(is_tied=False),
    "odd vocabulary": TinyModel(n_vocab=77),
    "base": TinyModel(keys={"rope.freq_base": ("f32", 500.0)}, frequencies=plain_frequencies(base=500.0)),
    "wide heads": TinyModel(head_dim=32, layers=(TinyLayer(n_heads=4, n_kv_heads=1),) * 2),
    "biases": TinyModel(biases=ALL_BIASES),
    "linear": TinyModel(
        keys={"rope.scaling.type": ("string", "linear"), "rope.scaling.factor": ("f32", 2.5)},
        frequencies=plain_frequencies() / 2.5,
    ),
    "linear by its old key": TinyModel(keys={"rope.scale_linear": ("f32", 4.0)}, frequencies=plain_frequencies() / 4),
    "none in spite of a factor": TinyModel(
        keys={"rope.scaling.type": ("string", "none"), "rope.scaling.factor": ("f32", 2.5)}
    ),
    "yarn": TinyModel(keys=YARN, frequencies=yarn_frequencies(4, 32), factor=YARN_FACTOR),
    "yarn, times a factor": TinyModel(
        keys=YARN | {"rope.scaling.attn_factor": ("f32", 0.75)},
        frequencies=yarn_frequencies(4, 32),
        factor=0.75 * YARN_FACTOR,
    ),
    "rope_freqs": TinyModel(extra_tensors={"rope_freqs.weight": DIVISORS}, frequencies=plain_frequencies() / DIVISORS),
    "longrope, short": TinyModel(
        keys=LONGROPE | {"rope.scaling.original_context_length": ("u32", 1024)},
        extra_tensors={"rope_factors_long.weight": 3 * DIVISORS, "rope_factors_short.weight": DIVISORS},
        frequencies=plain_frequencies() / DIVISORS,
        factor=1.25,
    ),
    "longrope, long": TinyModel(
        keys=LONGROPE | {"rope.scaling.original_context_length": ("u32", 64)},
        extra_tensors={"rope_factors_long.weight": DIVISORS, "rope_factors_short.weight": DIVISORS / 2},
        frequencies=plain_frequencies() / DIVISORS,
        factor=1.25,
    ),
    "mistral3": TinyModel(
        arch="mistral3",
        keys=YARN
        | {
            "rope.scaling.yarn_beta_fast": ("f32", 4.0),
            "rope.scaling.yarn_beta_slow": ("f32", 0.5),
            "rope.scaling.yarn_log_multiplier": ("f32", 0.7),
            "attention.temperature_scale": ("f32", 0.2),
        },
        frequencies=yarn_frequencies(4, 32, fast=4, slow=0.5),
        factor=YARN_FACTOR / (1 + 0.07 * np.log(4)),
        temperature=(0.2, 32),
        is_tied=False,
    ),
    "qwen2": TinyModel(arch="qwen2", pairs_halves=True, biases=("attn_q", "attn_k", "attn_v")),
    "qwen2 with a bias of the output": TinyModel(
        arch="qwen2", pairs_halves=True, biases=("attn_q", "attn_k", "attn_v", "output"), is_tied=False
    ),
    "qwen2, yarn": TinyModel(
        arch="qwen2", pairs_halves=True, keys=YARN, frequencies=yarn_frequencies(4, 32), factor=YARN_FACTOR
    ),
    "qwen3": TinyModel(
        arch="qwen3", pairs_halves=True, has_qk_norm=True, head_dim=32, layers=(TinyLayer(n_heads=4, n_kv_heads=2),) * 2
    ),
    "smollm3": TinyModel(arch="smollm3", layers=tuple(TinyLayer(uses_rope=i not in (3, 7)) for i in range(8))),
    "deci": TinyModel(arch="deci", layers=DECI_LAYERS),
    "deci, rope_freqs": TinyModel(
        arch="deci",
        layers=DECI_LAYERS,
        extra_tensors={"rope_freqs.weight": DIVISORS},
        frequencies=plain_frequencies() / DIVISORS,
    ),
}
# What llama.cpp does not read (windows and yarn's betas of these architectures), drops (the attention of a layer
# without feed-forward part) or does not load (widths that differ between layers of a llama).
OWN = {
    "window": TinyModel(keys={"attention.sliding_window": ("u32", 40)}, layers=(TinyLayer(window=40),) * 2),
    "window of a block": TinyModel(keys={"attention.sliding_window": ("u32", 32)}, layers=(TinyLayer(window=32),) * 2),
    "window within a block": TinyModel(
        keys={"attention.sliding_window": ("u32", 5)}, layers=(TinyLayer(window=5),) * 2
    ),
    "window of one": TinyModel(keys={"attention.sliding_window": ("u32", 1)}, layers=(TinyLayer(window=1),) * 2),
    "windows in some layers": TinyModel(
        arch="qwen3",
        pairs_halves=True,
        has_qk_norm=True,
        keys={
            "attention.sliding_window": ("u32", 40),
            "attention.sliding_window_pattern": ("[bool]", [True, False, True]),
        },
        layers=(TinyLayer(window=40, n_heads=8), TinyLayer(n_heads=8), TinyLayer(window=40, n_heads=8)),
    ),
    "yarn's betas": TinyModel(
        keys=YARN | {"rope.scaling.yarn_beta_fast": ("f32", 4.0), "rope.scaling.yarn_beta_slow": ("f32", 0.5)},
        frequencies=yarn_frequencies(4, 32, fast=4, slow=0.5),
        factor=YARN_FACTOR,
    ),
    "attention alone": TinyModel(arch="deci", layers=(TinyLayer(), TinyLayer(n_ff=0), TinyLayer(), TinyLayer(n_ff=0))),
    "a matrix as the last layer": TinyModel(arch="deci", layers=(TinyLayer(), TinyLayer(n_kv_heads=0, n_ff=0))),
    "pruned llama": TinyModel(layers=(TinyLayer(n_heads=8, n_ff=160), TinyLayer(n_heads=2, n_kv_heads=1, n_ff=32))),
}


def all_logits(back_end: str, file: ModelFile, ids: list[int]) -> NDArray[np.float32]:
    session = registry.get(back_end).load(file, OPTIONS)
    try:
        return session.decode([SeqRows(0, 0, ids, False, want_all=True)])[0].copy()
    finally:
        session.close()


def some_ids(model: TinyModel) -> list[int]:
    return [int(i) for i in np.random.default_rng(7).integers(0, model.n_vocab, N_TOKENS)]


@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_logits_are_those_of_numpy(name: str, tmp_path: Path) -> None:
    model = (SHARED | OWN)[name]
    ids = some_ids(model)
    expected = model.logits(ids)
    ours = all_logits("native", model.write(tmp_path / "m.gguf"), ids)
    assert np.abs(ours - expected).max() < 1e-3 * np.std(expected)


@pytest.mark.parametrize("name", SHARED)
def test_logits_are_llama_cpps(name: str, tmp_path: Path) -> None:
    model = SHARED[name]
    file, ids = model.write(tmp_path / "m.gguf"), some_ids(SHARED[name])
    ours, theirs = all_logits("native", file, ids), all_logits("llama_cpu", file, ids)
    # llama.cpp sums values in F16
    assert np.std(ours - theirs) < 2e-3 * np.std(theirs)


FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up": ("ffn_gate", "ffn_up")}


class Elsewhere:
    """Multiplies a tiny model's matrices in numpy, as another device would; fails_at is the number of a call."""

    def __init__(self, model: TinyModel, fails_at: int = -1) -> None:
        self.weights, self.fails_at, self.n_calls = model.weights(), fails_at, 0

    def multiply(self, name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        self.n_calls += 1
        if self.n_calls == self.fails_at:
            raise BackendStepError(reason=f"{name} failed")
        if name == "output":
            matrix = self.weights.get("output.weight", self.weights["token_embd.weight"])
        else:
            layer, _, part = name.rpartition(".")
            matrix = np.concatenate([self.weights[f"{layer}.{each}.weight"] for each in FUSED.get(part, (part,))])
        return (x @ matrix.T).astype(np.float32)

    def load(self, file: ModelFile) -> NativeSession:
        try:
            lib = load_native()
        except BackendUnavailableError as exc:
            pytest.skip(exc.reason)
        config = read_config(file.model, str(file.path), file.header)
        return NativeSession(
            lib, file, file.header, config, OPTIONS, cpu.usable(), multiply=self.multiply, backend="elsewhere"
        )


@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_logits_are_those_of_numpy_with_the_matrices_on_another_device(name: str, tmp_path: Path) -> None:
    model = (SHARED | OWN)[name]
    ids = some_ids(model)
    elsewhere = Elsewhere(model)
    session = elsewhere.load(model.write(tmp_path / "m.gguf"))
    found = [session.decode([SeqRows(0, 0, ids[:60], False, want_all=True)])[0].copy()]
    found += [session.decode([SeqRows(0, 60, ids[60:], False, want_all=True)])[0].copy()]
    session.close()
    expected = model.logits(ids)
    assert np.abs(np.concatenate(found) - expected).max() < 1e-3 * np.std(expected)
    assert elsewhere.n_calls > 4  # a chain for each 24 rows and matrix


def test_what_the_other_device_raises_a_step_raises_and_the_next_one_works(tmp_path: Path) -> None:
    model = SHARED["llama"]
    ids = some_ids(model)
    elsewhere = Elsewhere(model, fails_at=3)
    session = elsewhere.load(model.write(tmp_path / "m.gguf"))
    with pytest.raises(BackendStepError, match=r"blk\.0\.ffn_gate_up failed"):
        session.decode([SeqRows(0, 0, ids[:5], want_logits=True)])
    assert elsewhere.n_calls == 3
    session.seq_trim(0, 0)
    assert session.info.backend == "elsewhere"
    assert np.argmax(session.decode([SeqRows(0, 0, ids, want_logits=True)])[0]) == np.argmax(model.logits(ids)[-1])
    session.close()


@pytest.mark.parametrize("name", ["mistral3", "deci", "windows in some layers", "attention alone"])
def test_cut_of_the_prompt_and_company_do_not_change_a_bit(name: str, tmp_path: Path) -> None:
    model = (SHARED | OWN)[name]
    ids = some_ids(model)
    file = model.write(tmp_path / "m.gguf")
    whole = all_logits("native", file, ids)
    session = registry.get("native").load(file, replace(OPTIONS, n_ctx=256, n_ubatch=7, n_threads=1))
    try:
        parts = []
        for start, end in ((0, 1), (1, 33), (33, 34), (34, 90), (90, 100)):
            batch = [SeqRows(0, start, ids[start:end], False, want_all=True)]
            if start == 1:
                batch.append(SeqRows(1, 0, ids[50:90], True))
            parts.append(session.decode(batch)[0].copy())
    finally:
        session.close()
    assert np.concatenate(parts).tobytes() == whole.tobytes()
