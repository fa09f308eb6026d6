"""What every TokenSession promises; runs over each back end that is present."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, NoCellsError, SeqRows, TokenSession
from edge_rt.backends.fpga import FpgaBackend
from edge_rt.backends.llama_library import load_library
from edge_rt.backends.native_library import load_native
from edge_rt.errors import (
    BackendStepError,
    BackendUnavailableError,
    EdgeRtError,
    InvalidRequestError,
    ModelFormatError,
)
from tests import byte_model
from tests.fpga_sources import golden_source

N_CTX = 256
N_BATCH = 128
TEXT = "The pressure in line 3 rose at 14:05, then fell – naïve 漢字 🙂."


def load(name: str, request: pytest.FixtureRequest) -> TokenSession:
    options = LoadOptions(n_ctx=N_CTX, n_seq_max=4, n_batch=N_BATCH, n_threads=1)
    if name == "fpga":
        try:
            load_native()
            load_library()
        except BackendUnavailableError as exc:
            pytest.skip(f"{name}: {exc.reason}")
        path = request.getfixturevalue("tmp_path_factory").mktemp("fpga") / "m.gguf"
        return FpgaBackend(golden_source()).load(byte_model.write(path), options)
    if isinstance(absent := registry.get(name).probe(), Absent):
        pytest.skip(f"{name}: {absent.reason}")
    path = request.getfixturevalue("model_store") if name != "null" else Path("none")
    file = ModelFile(model="m", variant="", path=path, quant="")
    return registry.get(name).load(file, options)


# fpga runs on the engine's golden model, with a tiny model: what is checked is the session, not the RTL.
@pytest.fixture(
    scope="module",
    params=["null", "fpga", *(pytest.param(n, marks=pytest.mark.model) for n in ("llama_cpu", "native"))],
)
def session(request: pytest.FixtureRequest) -> Iterator[TokenSession]:
    loaded = load(request.param, request)
    yield loaded
    loaded.close()
    loaded.close()


@pytest.fixture(autouse=True)
def _empty(session: TokenSession) -> None:
    for seq_id in range(session.caps.n_seq_max):
        session.seq_trim(seq_id, 0)


def greedy(session: TokenSession, seq_id: int, prompt: list[int], n: int, *, chunk: int = 64) -> list[int]:
    ids = list(prompt)
    n_done = 0
    while len(ids) - len(prompt) < n:
        part = ids[n_done : n_done + chunk]
        last = n_done + len(part) == len(ids)
        logits = session.decode([SeqRows(seq_id, n_done, part, last)])
        n_done += len(part)
        if last:
            ids.append(int(np.argmax(logits[0])))
    return ids[len(prompt) :]


def prompt(session: TokenSession, text: str = TEXT) -> list[int]:
    return session.tokenize(text, special=False, add_bos=True)


def test_says_what_it_is(session: TokenSession) -> None:
    assert session.caps.n_ctx == N_CTX
    assert session.caps.n_seq_max == 4
    assert session.caps.n_vocab == session.vocab.n_vocab > 256
    assert session.vocab.eog_ids
    assert session.info.caps == session.caps


def test_pieces_join_to_the_text(session: TokenSession) -> None:
    ids = session.tokenize(TEXT, special=False)
    assert b"".join(map(session.piece, ids)).decode() == TEXT


def test_control_tokens_are_parsed_only_when_asked(session: TokenSession) -> None:
    eos = session.vocab.eos_text
    assert session.tokenize(eos, special=True) == [session.vocab.eos_id]
    assert session.vocab.eos_id not in session.tokenize(eos, special=False)
    assert session.piece(session.vocab.eos_id) == b""
    assert session.piece(session.vocab.eos_id, special=True).decode() == eos


def test_any_number_of_control_tokens_is_parsed(session: TokenSession) -> None:
    eos = session.piece(session.vocab.eos_id, special=True).decode()
    text = f"{eos}{eos}Red, green {eos} blue\n"
    once = session.tokenize(text, special=True)
    assert once.count(session.vocab.eos_id) == 3
    assert session.tokenize(text * 2000, special=True) == once * 2000
    with_bos = session.tokenize(text * 2000, special=True, add_bos=True)
    assert with_bos in (once * 2000, [session.vocab.bos_id, *once * 2000])


def test_control_texts_are_all_that_special_parses(session: TokenSession) -> None:
    some = [*range(512), *range(512, session.caps.n_vocab, 16)]
    pieces = (session.piece(i, special=True) for i in some if i < session.caps.n_vocab)
    texts = {raw.decode(errors="ignore") for raw in pieces} | session.vocab.control_texts
    parsed = {t for t in texts if session.tokenize(t, special=True) != session.tokenize(t, special=False)}
    assert parsed == session.vocab.control_texts


@pytest.mark.parametrize("offset", [-1, 0])
def test_piece_refuses_ids_outside_the_vocabulary(session: TokenSession, offset: int) -> None:
    with pytest.raises(InvalidRequestError):
        session.piece(-1 if offset else session.caps.n_vocab)


def test_logits_come_only_where_asked_for(session: TokenSession) -> None:
    ids = prompt(session)
    assert session.decode([SeqRows(0, 0, ids[:4], want_logits=False)]) == []
    outputs = session.decode([SeqRows(0, 4, ids[4:7], want_logits=True), SeqRows(1, 0, ids[:2], False, want_all=True)])
    assert [o.shape for o in outputs] == [(session.caps.n_vocab,), (2, session.caps.n_vocab)]
    assert all(o.dtype == np.float32 and np.isfinite(o).all() for o in outputs)


def test_the_cut_of_a_prompt_into_steps_does_not_change_the_answer(session: TokenSession) -> None:
    ids = prompt(session)
    whole = greedy(session, 0, ids, 8)
    assert greedy(session, 1, ids, 8, chunk=5) == whole


def test_sequences_in_one_batch_do_not_see_each_other(session: TokenSession) -> None:
    texts = [prompt(session, t) for t in (TEXT, "Count: 1, 2, 3,", "def f(x):")]
    alone = [greedy(session, 3, ids, 6) for ids in texts if session.seq_trim(3, 0) is None]
    together: list[list[int]] = [list(ids) for ids in texts]
    done = [0, 0, 0]
    for _ in range(6):
        batch = [SeqRows(i, done[i], ids[done[i] :], True) for i, ids in enumerate(together)]
        outputs = session.decode(batch)
        for i, logits in enumerate(outputs):
            done[i] = len(together[i])
            together[i].append(int(np.argmax(logits)))
    assert [ids[len(p) :] for ids, p in zip(together, texts, strict=True)] == alone


def test_trimmed_sequence_goes_on_as_if_nothing_had_followed(session: TokenSession) -> None:
    ids = prompt(session)
    expected = greedy(session, 0, ids, 6)
    session.decode([SeqRows(1, 0, ids, False)])
    session.decode([SeqRows(1, len(ids), ids[:9], False)])
    session.seq_trim(1, len(ids) - 1)
    logits = session.decode([SeqRows(1, len(ids) - 1, ids[-1:], True)])
    assert int(np.argmax(logits[0])) == expected[0]


def test_guessed_rows_show_what_rows_one_by_one_show_and_leave_nothing_behind(session: TokenSession) -> None:
    ids = prompt(session)
    answer = greedy(session, 0, ids, 6)
    wrong = [ids[3]] * 3
    session.seq_trim(0, len(ids) - 1)
    each = [
        session.decode([SeqRows(0, len(ids) - 1 + i, [token_id], True)])[0].copy()
        for i, token_id in enumerate([ids[-1], *answer[:4]])
    ]
    session.decode([SeqRows(1, 0, ids[:-1], False)])
    rows = [ids[-1], *answer[:2], *wrong]
    company = SeqRows(2, 0, ids[:5], True)
    together = session.decode([SeqRows(1, len(ids) - 1, rows, True, want_all=True), company])[0][:3].copy()
    session.seq_trim(1, len(ids) + 2)
    after = session.decode([SeqRows(1, len(ids) + 2, answer[2:4], True, want_all=True)])[0]
    guessed = np.concatenate([together, after])
    if session.caps.is_batch_invariant:
        assert np.array_equal(guessed, np.stack(each))
    else:
        assert np.abs(guessed - np.stack(each)).max() < 0.25


def test_copied_prefix_equals_a_computed_one(session: TokenSession) -> None:
    ids = prompt(session)
    expected = greedy(session, 0, ids, 6)
    session.seq_copy(0, 1, len(ids) - 2)
    session.seq_trim(0, 0)  # the copy must not depend on its source
    logits = session.decode([SeqRows(1, len(ids) - 2, ids[-2:], True)])
    assert int(np.argmax(logits[0])) == expected[0]


def test_saved_sequence_continues_after_a_restore(session: TokenSession) -> None:
    ids = prompt(session)
    expected = greedy(session, 0, ids, 6)
    session.seq_trim(0, len(ids) - 1)
    state = session.seq_save(0)
    assert 0 < state.nbytes <= session.seq_bytes(0)
    session.seq_trim(0, 0)
    session.seq_load(2, state)
    logits = session.decode([SeqRows(2, len(ids) - 1, ids[-1:], True)])
    assert int(np.argmax(logits[0])) == expected[0]


def test_parts_that_were_saved_are_put_together_again(session: TokenSession) -> None:
    ids = (prompt(session) * 4)[:75]
    expected = greedy(session, 0, ids, 4)
    session.seq_trim(0, 70)
    assert session.seq_length(0) == 70
    if not session.caps.can_save_ranges:
        with pytest.raises(BackendStepError):
            session.seq_save(0, 32, 64)
        return
    cuts = [0, 32, 64, 70]
    states = [session.seq_save(0, start, end) for start, end in pairwise(cuts)]
    for start, end in ((-1, 32), (32, 71), (64, 32)):
        with pytest.raises(BackendStepError):
            session.seq_save(0, start, end)
    session.seq_trim(0, 0)
    with pytest.raises(BackendStepError, match="follow"):
        session.seq_load(2, states[1])
    assert session.seq_length(2) == 0
    for state, end in zip(states, cuts[1:], strict=True):
        session.seq_load(2, state)
        assert session.seq_length(2) == end
    with pytest.raises(BackendStepError):
        session.seq_load(2, states[0])
    logits = session.decode([SeqRows(2, 70, ids[70:], True)])
    assert int(np.argmax(logits[0])) == expected[0]


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"ERTS"], ids=["empty", "foreign", "head-only"])
def test_foreign_state_is_refused(session: TokenSession, damage: bytes) -> None:
    with pytest.raises(BackendStepError):
        session.seq_load(0, np.frombuffer(damage, dtype=np.uint8))


def test_cells_that_run_out_are_told_and_nothing_is_lost(session: TokenSession) -> None:
    ids = prompt(session)
    expected = greedy(session, 0, ids, 4)
    session.seq_trim(0, len(ids) - 1)
    filler = (ids * 40)[:64]
    for n in range((N_CTX - len(ids)) // 64):
        session.decode([SeqRows(1, n * 64, filler, False)])
    with pytest.raises(NoCellsError):
        session.decode([SeqRows(1, n * 64 + 64, filler, False)])
    session.seq_trim(1, 0)
    logits = session.decode([SeqRows(0, len(ids) - 1, ids[-1:], True)])
    assert int(np.argmax(logits[0])) == expected[0]


def test_too_many_rows_are_refused(session: TokenSession) -> None:
    with pytest.raises(BackendStepError, match="129"):
        session.decode([SeqRows(0, 0, [1] * (N_BATCH + 1), True)])


def test_thread_count_does_not_change_the_choice(session: TokenSession) -> None:
    ids = prompt(session)
    expected = greedy(session, 0, ids, 4)
    session.set_threads(2)
    try:
        assert greedy(session, 1, ids, 4) == expected
    finally:
        session.set_threads(1)


@pytest.mark.parametrize("name", ["llama_cpu", "native", "fpga"])
def test_a_file_that_is_no_model_is_refused_before_the_library_sees_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    file = ModelFile(model="m", variant="", path=path, quant="")
    with pytest.raises(ModelFormatError):
        registry.get(name).load(file, LoadOptions(n_ctx=64))


@pytest.mark.parametrize("name", registry.names())
def test_probe_finds_devices_or_says_why_not(name: str) -> None:
    try:
        found = registry.get(name).probe()
    except EdgeRtError as exc:
        pytest.fail(f"probe raised {exc}")
    assert found


def test_a_closed_session_refuses_instead_of_touching_freed_memory(
    session: TokenSession, request: pytest.FixtureRequest
) -> None:
    closed = load(session.info.backend, request)
    (token_id, *_) = closed.tokenize("a", special=False)
    closed.close()
    with pytest.raises(BackendStepError, match="closed"):
        closed.tokenize("a", special=False)
    with pytest.raises(BackendStepError, match="closed"):
        closed.piece(token_id)
    with pytest.raises(BackendStepError, match="closed"):
        closed.decode([SeqRows(0, 0, [token_id], want_logits=True)])


@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_number_of_threads_changes_no_bit_of_what_is_computed(session: TokenSession, n_threads: int) -> None:
    """It may change between any two steps, as powerd advises it."""
    ids = prompt(session)

    def logits(threads: list[int]) -> list[np.ndarray]:
        session.seq_trim(0, 0)
        found, n_done = [], 0
        for step, size in enumerate((len(ids) - 4, 1, 1, 2)):
            session.set_threads(threads[step % len(threads)])
            part = ids[n_done : n_done + size]
            found += session.decode([SeqRows(0, n_done, part, want_logits=True)])
            n_done += size
        session.set_threads(1)
        return found

    one = logits([1])
    for threads in ([n_threads], [1, n_threads]):
        for expected, computed in zip(one, logits(threads), strict=True):
            np.testing.assert_array_equal(computed, expected)
