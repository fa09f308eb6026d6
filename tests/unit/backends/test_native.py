"""What the native back end takes and refuses, and tiny models with random weights against llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from edge_rt.backends import native_library, registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows
from edge_rt.backends.native_library import load_native
from edge_rt.errors import BackendLoadError, BackendStepError, BackendUnavailableError, ModelFormatError
from tests.gguf_files import GgufFile, tiny_llama
from tests.tiny_models import TinyLayer, TinyModel

if isinstance(registry.get("native").probe(), Absent):
    pytest.skip("the native engine is not here", allow_module_level=True)

OPTIONS = LoadOptions(n_ctx=128, n_seq_max=2, n_batch=64, n_ubatch=16, n_threads=1)


def write(file: GgufFile, path: Path, *, seed: int | None = None) -> ModelFile:
    """Write a model, with random float weights if there is a seed."""
    raw = file.encode()
    if seed is not None:
        rng = np.random.default_rng(seed)
        data = bytearray()
        for tensor in file.tensors:
            values = rng.standard_normal(math.prod(tensor.shape)) / (1 if len(tensor.shape) == 1 else 4)
            data += values.astype({"F32": np.float32, "F16": np.float16}[tensor.type]).tobytes()
            data += bytes(-len(data) % file.alignment)
        raw = raw[: len(raw) - len(data)] + bytes(data)
    path.write_bytes(raw)
    return ModelFile(model="tiny", variant="", path=path, quant="")


def refusal(file: GgufFile, path: Path, options: LoadOptions = OPTIONS) -> str:
    with pytest.raises(BackendLoadError) as caught:
        registry.get("native").load(write(file, path), options)
    return caught.value.reason


def test_weights_without_kernels_are_refused(tmp_path: Path) -> None:
    assert "IQ3_S" in refusal(tiny_llama(width=256, linear="IQ3_S"), tmp_path / "m.gguf")


def test_missing_or_misshapen_tensor_is_refused(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors.remove(file.tensor("blk.1.ffn_up.weight"))
    assert "ffn_up (layer 1) is missing" in refusal(file, tmp_path / "m.gguf")
    file = tiny_llama()
    file.tensor("blk.1.attn_k.weight").shape = (64, 48)
    assert "attn_k (layer 1)" in refusal(file, tmp_path / "m.gguf")


def test_kv_of_another_type_is_refused(tmp_path: Path) -> None:
    reason = refusal(tiny_llama(), tmp_path / "m.gguf", LoadOptions(n_ctx=64, kv_type="q4_0"))
    assert "f16 or q8_0" in reason
    assert "q4_0" in reason


@pytest.mark.parametrize("linear", ["F32", "F16"])
@pytest.mark.parametrize("n_vocab", [64, 77])
def test_random_model_in_float_gives_llama_cpps_logits(tmp_path: Path, linear: str, n_vocab: int) -> None:
    file = write(tiny_llama(linear=linear, embedding=linear, n_vocab=n_vocab), tmp_path / "m.gguf", seed=3)
    ids = [int(i) for i in np.random.default_rng(7).integers(0, n_vocab, 50)]
    logits = {}
    for name in ("native", "llama_cpu"):
        session = registry.get(name).load(file, OPTIONS)
        try:
            logits[name] = session.decode([SeqRows(0, 0, ids, False, want_all=True)])[0].copy()
        finally:
            session.close()
    theirs = logits["llama_cpu"]
    # both keep KV in F16, llama.cpp also sums values and rounds activations for F16 weights in it
    assert np.std(logits["native"] - theirs) < 0.01 * np.std(theirs)


@pytest.mark.parametrize(
    "rows",
    [SeqRows(0, 1, [1], True), SeqRows(0, 0, [64], True), SeqRows(0, 0, [-1], True), SeqRows(2, 0, [1], True)],
    ids=["gap", "beyond the vocabulary", "negative", "no such sequence"],
)
def test_wrong_rows_are_refused_and_nothing_changes(tmp_path: Path, rows: SeqRows) -> None:
    session = registry.get("native").load(write(tiny_llama(), tmp_path / "m.gguf"), OPTIONS)
    try:
        before = session.seq_bytes(0)
        with pytest.raises(BackendStepError):
            session.decode([SeqRows(1, 0, [1, 2], False), rows])
        assert (session.seq_bytes(0), session.seq_bytes(1)) == (before, before)
    finally:
        session.close()


def test_copy_needs_an_empty_target_and_a_long_enough_source(tmp_path: Path) -> None:
    session = registry.get("native").load(write(tiny_llama(), tmp_path / "m.gguf"), OPTIONS)
    try:
        session.decode([SeqRows(0, 0, [1, 2, 3], False)])
        with pytest.raises(BackendStepError):
            session.seq_copy(0, 1, 4)
        session.seq_copy(0, 1, 3)
        with pytest.raises(BackendStepError):
            session.seq_copy(0, 1, 3)
    finally:
        session.close()


def test_library_that_is_not_there_or_is_none_makes_the_back_end_absent(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="C compiler"):
        load_native(tmp_path / "gone.so")
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(BackendUnavailableError, match="does not load"):
        load_native(tmp_path / "broken.so")


def test_types_are_ggmls() -> None:
    from edge_rt.catalog.ggml_types import GGML_TYPES

    assert {name: GGML_TYPES[number].name for name, number in native_library.TYPES.items()} == {
        name: name for name in native_library.TYPES
    }


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.inf, math.nan])
def test_divisors_of_rope_must_be_above_zero(tmp_path: Path, divisor: float) -> None:
    file = TinyModel(extra_tensors={"rope_freqs.weight": np.array([1.0] * 7 + [divisor])}).write(tmp_path / "m.gguf")
    with pytest.raises(ModelFormatError, match="rope_freqs"):
        registry.get("native").load(file, OPTIONS)


def test_model_without_any_attention_is_refused(tmp_path: Path) -> None:
    file = TinyModel(arch="deci", layers=(TinyLayer(n_kv_heads=0),)).write(tmp_path / "m.gguf")
    with pytest.raises(BackendLoadError, match="no layer has attention"):
        registry.get("native").load(file, OPTIONS)


def test_a_machine_of_more_cpus_than_the_pool_takes_uses_as_many_as_it_can(tmp_path: Path) -> None:
    file = write(tiny_llama(), tmp_path / "m.gguf")
    session = registry.get("native").load(file, LoadOptions(n_ctx=64, n_threads=384))
    try:
        assert session.info.n_threads == native_library.MAX_THREADS
        session.set_threads(2)
        session.set_threads(384)
    finally:
        session.close()


@pytest.mark.parametrize("name", ["native", "llama_cpu"])
@pytest.mark.parametrize(("n_batch", "n_rows"), [(512, 32), (20, 20)])
def test_the_logits_of_guesses_count_in_the_estimate(tmp_path: Path, name: str, n_batch: int, n_rows: int) -> None:
    file, backend = write(tiny_llama(), tmp_path / "m.gguf"), registry.get(name)
    without, with_guesses = (
        backend.estimate(
            file, LoadOptions(n_ctx=64, n_seq_max=2, n_batch=n_batch, n_ubatch=16, max_draft=n)
        ).total_bytes
        for n in (0, 15)
    )
    assert with_guesses - without == (n_rows - 2) * 64 * 4


@pytest.mark.parametrize("n_threads", [1, 2])
def test_products_cut_into_parts_of_rows_do_not_change_a_bit(tmp_path: Path, n_threads: int) -> None:
    """Rows of 2,048 floats: 16 fit a part, 100 are cut into several, of which the last is not full."""
    file = TinyModel(layers=(TinyLayer(n_ff=2048),)).write(tmp_path / "m.gguf")
    ids = [int(i) for i in np.random.default_rng(4).integers(0, 64, 100)]
    logits = []
    for n_ubatch in (16, 100):
        options = LoadOptions(n_ctx=128, n_seq_max=1, n_batch=100, n_ubatch=n_ubatch, n_threads=n_threads)
        session = registry.get("native").load(file, options)
        try:
            logits.append(session.decode([SeqRows(0, 0, ids, False, want_all=True)])[0].tobytes())
        finally:
            session.close()
    assert logits[0] == logits[1]
