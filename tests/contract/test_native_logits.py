"""The native engine on the real model: its logits against llama.cpp's, and what must not change them at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, NoCellsError, SeqRows, TokenSession

pytestmark = pytest.mark.model

_TEXT = "tests/golden/prose.txt"
_N_WINDOW, _N_WINDOWS = 256, 4


def load(name: str, path: Path, **options: int) -> TokenSession:
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


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def text_ids(session: TokenSession, n: int) -> list[int]:
    text = (Path(__file__).resolve().parents[2] / _TEXT).read_text(encoding="utf-8")
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
    ours, theirs = load("native", model_forms[form]), load("llama_cpu", model_forms[form])
    try:
        ids = text_ids(ours, _N_WINDOW * _N_WINDOWS)
        divergence: list[float] = []
        n_same = 0
        for start in range(0, len(ids), _N_WINDOW):
            window = ids[start : start + _N_WINDOW]
            p, q = log_softmax(all_logits(theirs, window)), log_softmax(all_logits(ours, window))
            divergence.extend((np.exp(p) * (p - q)).sum(axis=-1))
            n_same += int((p.argmax(axis=-1) == q.argmax(axis=-1)).sum())
    finally:
        ours.close()
        theirs.close()
    print(f"{form}: mean KL {np.mean(divergence):.5f}, same greedy choice {n_same / len(ids):.4f} of {len(ids)}")
    assert np.mean(divergence) <= 0.005
    assert n_same >= 0.9 * len(ids)


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
