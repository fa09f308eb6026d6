"""A draft head in the native engine against numpy, and when it can guess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_rt.backends.base import LoadOptions, SeqRows
from edge_rt.backends.drafting import Drafting, HeadAsk
from edge_rt.backends.native import NativeBackend, NativeSession
from edge_rt.catalog.draft_head import DraftHead, read_head
from edge_rt.errors import BackendStepError, ModelFormatError
from tests.draft_heads import TinyHead, need_native
from tests.tiny_models import TinyModel

need_native()

MODELS = {"tied": TinyModel(), "own output": TinyModel(is_tied=False, seed=4)}
IDS = [int(i) for i in np.random.default_rng(7).integers(0, 64, 60)]


def opened(folder: Path, model: TinyModel) -> tuple[NativeSession, DraftHead]:
    file = model.write(folder / "m.gguf")
    path = TinyHead(model=model).write(folder / "head.gguf", file)
    session = NativeBackend().load(file, LoadOptions(n_ctx=192, n_seq_max=3, n_batch=64, n_ubatch=16, n_threads=2))
    return session, read_head(path, "tiny", file.path, file.header)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[NativeSession]:
    session, head = opened(tmp_path, MODELS["tied"])
    session.load_head(head)
    yield session
    session.close()


@pytest.mark.parametrize("name", MODELS)
def test_guesses_are_those_that_numpy_computes(tmp_path: Path, name: str) -> None:
    session, head = opened(tmp_path, MODELS[name])
    try:
        assert session.head_bytes() == 0
        session.load_head(head)
        assert isinstance(session, Drafting)
        assert session.head_bytes() > sum(len(data) for _, data in head.tensors)
        for n in range(5, 45, 4):
            session.seq_trim(0, 0)
            session.decode([SeqRows(0, 0, IDS[:n], want_logits=True)])
            [(tokens, chances)] = session.draft([HeadAsk(0, IDS[n], 3)])
            expected = TinyHead(model=MODELS[name]).guesses(IDS[:n], IDS[n], 3)
            assert tokens == [token for token, _ in expected]
            np.testing.assert_allclose(chances, [chance for _, chance in expected], rtol=0.03)
    finally:
        session.close()


def test_company_and_earlier_guesses_change_no_bit(session: NativeSession) -> None:
    rows = [SeqRows(i, 0, IDS[10 * i : 10 * i + 10 + i], want_logits=True) for i in range(3)]
    before = [logits.copy() for logits in session.decode(rows)]
    asks = [HeadAsk(i, IDS[40 + i], 4 - i) for i in range(3)]
    together = session.draft(asks)
    assert [len(tokens) for tokens, _ in together] == [4, 3, 2]
    assert [session.draft([ask])[0] for ask in asks] == together
    for i in range(3):
        session.seq_trim(i, 0)
    assert all(np.array_equal(a, b) for a, b in zip(before, session.decode(rows), strict=True))


def test_a_guess_below_the_chance_wanted_ends_the_draft(session: NativeSession) -> None:
    session.decode([SeqRows(0, 0, IDS[:9], want_logits=True)])
    [(tokens, chances)] = session.draft([HeadAsk(0, IDS[9], 6)])
    least = sorted(chances)[2]
    n = next((i for i, chance in enumerate(chances) if chance < least), 6)
    assert session.draft([HeadAsk(0, IDS[9], 6, least)]) == [(tokens[:n], chances[:n])]
    assert session.draft([HeadAsk(0, IDS[9], 6, 1.1)]) == [([], [])]


def test_it_goes_on_from_the_row_that_the_sequence_was_trimmed_to(session: NativeSession) -> None:
    session.decode([SeqRows(0, 0, IDS[:20], want_logits=True)])
    session.decode([SeqRows(0, 20, IDS[20:26], want_logits=True, want_all=True)])
    session.seq_trim(0, 23)
    trimmed = session.draft([HeadAsk(0, 5, 3)])
    session.seq_trim(0, 0)
    session.decode([SeqRows(0, 0, IDS[:23], want_logits=True)])
    assert session.draft([HeadAsk(0, 5, 3)]) == trimmed


def test_where_a_state_is_missing_it_begins_again_with_the_next_row(session: NativeSession) -> None:
    session.decode([SeqRows(0, 0, IDS[:40], want_logits=False)])
    assert not session.can_draft(0)
    assert session.draft([HeadAsk(0, 5, 3)]) == [([], [])]
    session.decode([SeqRows(0, 40, IDS[40:42], want_logits=True)])
    assert session.can_draft(0)
    session.seq_copy(0, 1, 42)
    state = session.seq_save(0)
    session.seq_trim(0, 32)
    assert not session.can_draft(0)
    session.seq_trim(0, 0)
    session.seq_load(0, state)
    assert not session.can_draft(0)
    assert not session.can_draft(1)
    session.decode([SeqRows(i, 42, [7], want_logits=True) for i in range(2)])
    [restored, copied] = session.draft([HeadAsk(0, 5, 2), HeadAsk(1, 5, 2)])
    assert restored == copied
    assert len(restored[0]) == 2


@pytest.mark.parametrize("ask", [HeadAsk(3, 1, 1), HeadAsk(-1, 1, 1), HeadAsk(0, 64, 1), HeadAsk(0, -1, 1)])
def test_sequences_and_tokens_that_are_none_are_refused(session: NativeSession, ask: HeadAsk) -> None:
    session.decode([SeqRows(0, 0, IDS[:9], want_logits=True)])
    with pytest.raises(BackendStepError):
        session.draft([ask])
    assert session.draft([]) == []


def test_without_a_head_nothing_is_guessed(tmp_path: Path) -> None:
    session, _ = opened(tmp_path, MODELS["tied"])
    session.decode([SeqRows(0, 0, IDS[:9], want_logits=True)])
    assert not session.can_draft(0)
    with pytest.raises(BackendStepError, match="no draft head"):
        session.draft([HeadAsk(0, 1, 1)])
    session.close()
    with pytest.raises(BackendStepError, match="closed"):
        session.keep_states(1)


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    session, head = opened(tmp_path, MODELS["tied"])
    few = tuple((replace(info, shape=(*info.shape[:-1], 1)), data) for info, data in head.tensors)
    for wrong, reason in (
        (replace(head, n_ff=64), "ffn_gate has another shape"),
        (replace(head, n_ff=33), "no multiple of 32"),
        (replace(head, n_ff=128), "longer feed-forward part"),
        (replace(head, vocabulary=(2, 1)), "do not rise"),
        (replace(head, vocabulary=()), "knows no token"),
        (replace(head, tensors=few), "has another shape"),
    ):
        with pytest.raises(ModelFormatError, match=reason):
            session.load_head(wrong)
    assert session.head_bytes() == 0
    session.close()


def test_states_are_those_that_numpy_computes(session: NativeSession) -> None:
    session.keep_states(8)
    session.decode([SeqRows(0, 0, IDS[:30], want_logits=True, want_all=True)])
    expected = MODELS["tied"].states(IDS[:30])
    for position in range(22, 30):
        apart = session.state(0, position) - expected[position]
        assert np.std(apart) < 0.02 * np.std(expected[position])
    for position in (21, 30, -1):
        with pytest.raises(BackendStepError):
            session.state(0, position)
