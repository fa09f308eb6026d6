"""A session that drafts: its KV holds how each sequence begins, whatever became of the guesses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.null import FAIL, _next
from edge_rt.engine.draft_model import Ask
from edge_rt.engine.session_drafts import SessionDrafts
from edge_rt.errors import BackendStepError
from tests.unit.engine.null_engine import Recorder


def made(*, n_ctx: int = 200, n_seq_max: int = 4, n_batch: int = 64) -> tuple[SessionDrafts, Recorder]:
    file = ModelFile(model="child", variant="", path=Path("-"), quant="")
    session = Recorder(file, LoadOptions(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch))
    return SessionDrafts(session, name="child", max_draft=8), session


def ask(seq_id: int, token_ids: list[int], n_max: int = 4, owner: str = "") -> Ask:
    return Ask(seq_id=seq_id, token_ids=token_ids, n_max=n_max, owner=owner)


def fill(drafts: SessionDrafts, wanted: Ask) -> None:
    for _ in range(100):
        n_missing = drafts.n_missing(wanted)
        if not n_missing or not drafts.compute(wanted, min(n_missing, 30)):
            return


def continued(token_ids: list[int], n: int) -> list[int]:
    whole = list(token_ids)
    while len(whole) < len(token_ids) + n:
        whole.append(_next(whole))
    return whole[len(token_ids) :]


def test_it_guesses_as_its_model_goes_on() -> None:
    drafts, _ = made()
    first, second = list(b"once upon a time"), list(b"there was")
    fill(drafts, ask(0, first))
    found = drafts.propose([ask(0, first, 5), ask(2, second, 3)])
    assert [draft.token_ids for draft in found] == [continued(first, 5), continued(second, 3)]
    assert all(0.9 < chance <= 1.0 for draft in found for chance in draft.chances)


def test_one_round_is_one_decode_for_all() -> None:
    drafts, session = made()
    asks = [ask(i, [*list(b"once upon"), 97 + i], 5) for i in range(4)]
    for each in asks:
        fill(drafts, each)
    n_before = len(getattr(session, "batches", []))
    drafts.propose(asks)
    assert [len(batch) for batch in session.batches[n_before:]] == [4] * 5


steps = st.lists(
    st.tuples(
        st.integers(0, 3),  # the slot
        st.sampled_from(["grow", "right", "new", "back", "forget"]),
        st.text("ab", min_size=1, max_size=70),
        st.sampled_from(["", "x"]),
        st.integers(1, 8),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(40, 300))
def test_its_kv_always_holds_how_sequences_begin(plan: list[tuple[int, str, str, str, int]], n_ctx: int) -> None:
    """Slots get other sequences, those are put back, guesses come true or not; guesses are those of the whole text,
    or of its end where the context does not hold it."""
    drafts, session = made(n_ctx=n_ctx)
    held = {i: [60 + i] for i in range(4)}
    owners = dict.fromkeys(range(4), "")
    for seq_id, verb, text, owner, n_max in plan:
        token_ids = held[seq_id]
        if verb == "grow":
            held[seq_id] = token_ids + list(text.encode())
        elif verb == "right":
            held[seq_id] = token_ids + continued(token_ids, len(text) % 9)
        elif verb == "new":
            held[seq_id], owners[seq_id] = [61, *text.encode()], owner
        elif verb == "back":
            held[seq_id] = token_ids[: 1 + len(text) % len(token_ids)]
        else:
            drafts.forget(seq_id)
            continue
        wanted = ask(seq_id, held[seq_id] + [65], min(n_max, drafts.max_draft), owners[seq_id])
        fill(drafts, wanted)
        if drafts.n_missing(wanted) != 0:
            continue
        (draft,) = drafts.propose([wanted])
        whole, kv = wanted.token_ids, session.kv.get(seq_id, [])
        if draft.token_ids:
            n_own = len(kv) - (len(draft.token_ids) - 1)
            assert kv[:n_own] == list(whole[len(whole) - n_own :])
            assert n_own == len(whole) or len(whole) + n_max > n_ctx or n_own >= n_ctx // 2 - 1
            assert draft.token_ids == continued(kv[:n_own], len(draft.token_ids))
        assert session.cells_used() <= n_ctx


def test_what_another_slot_holds_is_copied_within_one_owner() -> None:
    common = list(b"a long system prompt that all begin with, of many words, " * 2)
    for owner, n_missing in (("a", 0), ("b", len(common) + 2 - 8)):
        drafts, session = made(n_ctx=400)
        fill(drafts, ask(0, [*common, 97], owner="a"))
        drafts.propose([ask(0, [*common, 97], owner="a")])
        assert drafts.n_missing(ask(1, [*common, 98, 98], owner=owner)) == n_missing
        assert (1 in session.kv) == (owner == "a")


def test_under_pressure_who_was_not_drafted_for_goes_first_and_then_nobody_is() -> None:
    drafts, session = made(n_ctx=100)
    for seq_id in range(2):
        wanted = ask(seq_id, [*list(b"x" * 39), 97 + seq_id])
        fill(drafts, wanted)
        drafts.propose([wanted])
    for _ in range(3):
        drafts.propose([ask(1, [*list(b"x" * 39), 98])])
    late = ask(2, list(b"y" * 30))
    fill(drafts, late)
    assert drafts.propose([late])[0].token_ids
    assert set(session.kv) == {1, 2}
    both = [ask(1, [*list(b"x" * 39), 98], 8), ask(2, list(b"y" * 30), 8)]
    huge = ask(3, list(b"z" * 60), 8)
    drafts.propose(both)
    assert drafts.compute(huge, 60) == 0
    assert [bool(draft.token_ids) for draft in drafts.propose(both)] == [True, True]


def test_bias_form_and_sureness_are_heeded() -> None:
    drafts, _ = made()
    text = list(b"once")
    right = continued(text, 3)
    banned = Ask(seq_id=0, token_ids=text, n_max=1, bias={right[0]: -100.0})
    assert drafts.propose([banned])[0].token_ids != right[:1]
    only = Ask(
        seq_id=0,
        token_ids=text,
        n_max=3,
        n_allowed=lambda ids: next((n for n, i in enumerate(ids) if i != 90), len(ids)),
    )
    assert drafts.propose([only])[0].token_ids in ([], [90] * 3)
    never = Ask(seq_id=0, token_ids=text, n_max=3, min_chance=1.01)
    assert drafts.propose([never])[0].token_ids == []


def test_a_step_that_fails_is_told() -> None:
    drafts, _ = made()
    with pytest.raises(BackendStepError):
        drafts.propose([ask(0, [*b"once", FAIL])])
