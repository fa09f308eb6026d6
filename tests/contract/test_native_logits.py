"""The native engine on the real model: its logits against llama.cpp's, and what must not change them at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.divergence import Divergence
from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, NoCellsError, SeqRows, TokenSession

pytestmark = pytest.mark.model

_TEXTS = {"tests/golden/prose.txt": 2048, "tests/golden/technical.txt": 1024, "LICENSE": 1024}
_N_WINDOW = 256


def load(name: str, path: Path, **options: int | str) -> TokenSession:
    backend = registry.get(name)
    if isinstance(found := backend.probe(), Absent):
        pytest.skip(f"{name}: {found.reason}")
    settings = {"n_ctx": 512, "n_seq_max": 4, "n_batch": 128, "n_ubatch": 128, "n_threads": 2} | options
    return backend.load(ModelFile(model="m", variant="", path=path, quant=""), LoadOptions(**settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def native(model_store: Path) -> Iterator[TokenSession]:
    session = load("native", model_store)
    yield session
    session.close()


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "native" in request.fixturenames:
        session: TokenSession = request.getfixturevalue("native")
        for seq_id in range(session.caps.n_seq_max):
            session.seq_trim(seq_id, 0)


def text_ids(session: TokenSession, n: int, name: str = "tests/golden/prose.txt") -> list[int]:
    text = (Path(__file__).resolve().parents[2] / name).read_text(encoding="utf-8")
    ids = session.tokenize(text, special=False)
    assert len(ids) >= n
    return ids[:n]


def all_logits(session: TokenSession, ids: list[int], *, chunk: int = 128) -> NDArray[np.float32]:
    session.seq_trim(0, 0)
    parts = [
        session.decode([SeqRows(0, i, ids[i : i + chunk], False, want_all=True)])[0].copy()
        for i in range(0, len(ids), chunk)
    ]
    return np.concatenate(parts)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["q4_1", "q4_0"])
def test_logits_are_llama_cpps(form: str, model_forms: dict[str, Path]) -> None:
    if form not in model_forms:
        pytest.skip(f"the form {form} is not in the store; `edge_rt models pull` fetches it")
    # llama.cpp's threads spin where they wait, and another process of the tests may want the other core.
    ours, theirs = load("native", model_forms[form]), load("llama_cpu", model_forms[form], n_threads=1)
    all_texts = Divergence()
    try:
        for name, n_tokens in _TEXTS.items():
            ids = text_ids(ours, n_tokens, name)
            found = Divergence()
            for start in range(0, len(ids), _N_WINDOW):
                window = ids[start : start + _N_WINDOW]
                found.add(window, all_logits(theirs, window), all_logits(ours, window))
            print(f"{form}, {name}: mean KL {found.mean_kl:.5f}, same greedy choice {found.same_choice:.4f}")
            all_texts += found
    finally:
        ours.close()
        theirs.close()
    assert len(all_texts.kl) >= 4096
    assert all_texts.mean_kl <= 0.005
    assert all_texts.perplexity_change <= 0.005
    assert all_texts.same_choice >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("form", ["q4_1", "q4_0"])
def test_int8_kv_costs_no_more_than_the_rounding_of_activations(form: str, model_forms: dict[str, Path]) -> None:
    """With float weights the divergence is 0.0008; here each change that small turns some activation's rounding."""
    if form not in model_forms:
        pytest.skip(f"the form {form} is not in the store; `edge_rt models pull` fetches it")
    f16, int8 = load("native", model_forms[form]), load("native", model_forms[form], kv_type="q8_0")
    try:
        ids = text_ids(f16, 2 * 512)
        found = Divergence()
        for window in (ids[:512], ids[512:]):
            found.add(window, all_logits(f16, window), all_logits(int8, window))
            assert int8.seq_bytes(0) < 0.54 * f16.seq_bytes(0)
    finally:
        f16.close()
        int8.close()
    print(f"{form}: mean KL {found.mean_kl:.5f}, perplexity changed by {found.perplexity_change:.4f}")
    assert 0 < found.mean_kl <= 0.008
    assert found.perplexity_change <= 0.01


def test_batch_gives_what_single_runs_give(native: TokenSession) -> None:
    ids = text_ids(native, 300)
    prompts = [ids[:70], ids[70:71], ids[71:116]]
    alone = [all_logits(native, prompt)[-1] for prompt in prompts]
    native.seq_trim(0, 0)
    native.decode([SeqRows(0, 0, prompts[0][:69], False)])
    # a decoding row, a prompt of one token and a longer one in the same step
    mixed = [SeqRows(0, 69, prompts[0][69:], True), SeqRows(1, 0, prompts[1], True), SeqRows(2, 0, prompts[2], True)]
    for logits, expected in zip(native.decode(mixed), alone, strict=True):
        assert logits.tobytes() == expected.tobytes()


def test_cut_of_the_prompt_and_threads_do_not_change_a_bit(native: TokenSession) -> None:
    ids = text_ids(native, 100)
    whole = all_logits(native, ids)
    native.set_threads(1)
    try:
        assert all_logits(native, ids, chunk=7).tobytes() == whole.tobytes()
    finally:
        native.set_threads(2)


def test_micro_batches_do_not_change_a_bit(native: TokenSession, model_store: Path) -> None:
    ids = text_ids(native, 100)
    small = load("native", model_store, n_ubatch=24)
    try:
        assert all_logits(small, ids).tobytes() == all_logits(native, ids).tobytes()
    finally:
        small.close()


@pytest.mark.parametrize("n_shared", [31, 32, 45])
def test_shared_prefix_is_copied_before_it_is_written(native: TokenSession, n_shared: int) -> None:
    ids, other = text_ids(native, 60), text_ids(native, 200)[140:]
    expected = {0: all_logits(native, ids)[-1], 1: all_logits(native, ids[:n_shared] + other)[-1]}
    native.seq_trim(0, 0)
    native.decode([SeqRows(0, 0, ids[:n_shared], False)])
    native.seq_copy(0, 1, n_shared)
    both = [SeqRows(0, n_shared, ids[n_shared:], True), SeqRows(1, n_shared, other, True)]
    for seq_id, logits in enumerate(native.decode(both)):
        assert logits.tobytes() == expected[seq_id].tobytes()


def test_blocks_come_back(native: TokenSession) -> None:
    """Fill the pool over and over: a leaked or twice freed block would show."""
    ids = text_ids(native, 512)
    expected = all_logits(native, ids[:40])[-1]
    for _ in range(3):
        native.seq_trim(0, 0)
        native.decode([SeqRows(0, 0, ids[:40], False)])
        native.seq_copy(0, 1, 40)
        native.seq_copy(1, 2, 33)
        for n in range(40, 440, 100):  # 14 blocks of 16, and one each for the others' own last block
            native.decode([SeqRows(1, n, ids[n : n + 100], False)])
        with pytest.raises(NoCellsError):
            native.decode([SeqRows(1, 440, ids[440:512], False)])
        state = native.seq_save(2)
        for seq_id in range(3):
            native.seq_trim(seq_id, 0)
        native.seq_load(3, state)
        logits = native.decode([SeqRows(3, 33, ids[33:40], True)])[0]
        assert logits.tobytes() == expected.tobytes()
        native.seq_trim(3, 0)
    for i in range(0, 512, 128):
        native.decode([SeqRows(2, i, ids[i : i + 128], False)])  # every block is free again
