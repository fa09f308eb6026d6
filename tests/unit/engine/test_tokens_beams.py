"""Beam searches in the step loop, beside each other and beside plain requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.backends.base import NoCellsError, SeqRows
from edge_rt.backends.null import EOS
from edge_rt.engine.beam_sequence import BeamSequence
from edge_rt.engine.prefix import Slot
from edge_rt.errors import BackendStepError, CellsExhaustedError, ContextLengthError, InvalidRequestError
from edge_rt.types import Beams
from tests import beam_reference
from tests.beam_reference import NearTie, random_logits
from tests.unit.engine.null_engine import Answer, Bench, Recorder, Whole, complete

N_VOCAB = 264
_DRAWN = random_logits(N_VOCAB, 3)


def model(context: Sequence[int]) -> NDArray[np.float32]:
    row = _DRAWN(context)
    row[EOS] += 4.0  # often enough
    row[EOS + 1 :] = -np.inf  # faults on purpose
    return row


class Chancy(Recorder):
    """A null session that knows no answer better than another."""

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        before = {seq_id: list(ids) for seq_id, ids in self._kv.items()}
        super().decode(batch)
        outputs = []
        for rows in batch:
            context = [*before.get(rows.seq_id, []), *rows.token_ids]
            if rows.want_all:
                n = len(context) - len(rows.token_ids)
                outputs.append(np.stack([model(context[: n + i + 1]) for i in range(len(rows.token_ids))]))
            elif rows.want_logits:
                outputs.append(model(context))
        return outputs


def bench(**options: object) -> Bench:
    return Bench(session_type=Chancy, **options)  # type: ignore[arg-type]


def expected(prompt: str, beams: Beams, n: int) -> list[tuple[int, ...]]:
    found = beam_reference.search(model, prompt.encode(), beams, max_answer=n, eog_ids=frozenset({EOS}))
    return [each.token_ids for each in found]


def answers(answer: Answer) -> list[tuple[int, ...]]:
    assert answer.error is None, answer.error
    ids = [hypothesis.token_ids for hypothesis in answer.last.hypotheses]
    n_tokens = [hypothesis.n_tokens for hypothesis in answer.last.hypotheses]
    return [(*each, EOS) if n > len(each) else each for each, n in zip(ids, n_tokens, strict=True)]


def test_a_search_answers_on_its_last_chunk() -> None:
    engine = bench()
    beams = Beams(n_beams=3, n_best=2)
    answer = engine.ask(complete("prompt", max_tokens=6, beams=beams))
    engine.run(answer)
    assert answers(answer) == expected("prompt", beams, 6)
    assert len(answer.chunks) == 1
    best = answer.last.hypotheses[0]
    assert (answer.last.text, answer.last.token_ids) == (best.text, best.token_ids)
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == sum(h.n_tokens for h in answer.last.hypotheses)
    engine.assert_idle()
    assert len(engine.session.kv) <= 1  # the best one's place, as after any answer


def test_the_beams_of_a_request_share_a_step_and_the_prompt_is_computed_once() -> None:
    engine = bench()
    answer = engine.ask(complete("x" * 40, max_tokens=5, beams=Beams(n_beams=4)))
    engine.run(answer)
    prompt, *steps = engine.session.batches
    assert sum(len(rows.token_ids) for rows in prompt) == 40
    assert [len(batch) for batch in steps] == [4] * len(steps)


requests = st.lists(
    st.tuples(
        st.text("abc", min_size=1, max_size=40),
        st.integers(0, 4),  # beams; none: a plain request
        st.integers(1, 12),
        st.integers(0, 20),  # the step it comes at
        st.integers(0, 9),  # 0: cancelled after five steps
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(requests, st.sampled_from([200, 512]), st.sampled_from([4, 5]), st.sampled_from([0, 15]))
def test_in_any_company_it_finds_what_it_finds_alone(
    cases: list[tuple[str, int, int, int, int]], n_ctx: int, n_seq_max: int, max_draft: int
) -> None:
    engine = bench(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=16, max_draft=max_draft)
    asked: dict[int, Answer] = {}
    for step in range(4000):
        for i, (prompt, n_beams, n, at, luck) in enumerate(cases):
            if step == at:
                beams = Beams(n_beams=n_beams, n_best=n_beams) if n_beams else None
                asked[i] = engine.ask(complete(prompt, f"{i}", max_tokens=n, beams=beams))
            if step == at + 5 and luck == 0:
                engine.engine.cancel(f"{i}")
        engine.engine.step()
        stats = engine.engine.stats()
        if step > 30 and not (stats.running or stats.waiting):
            break
    engine.assert_idle()
    for i, (prompt, n_beams, n, _, luck) in enumerate(cases):
        answer = asked[i]
        try:
            alone = expected(prompt, Beams(n_beams=n_beams or 1, n_best=n_beams or 1), n)
        except NearTie:
            continue
        if luck == 0 and not answer.is_over:
            continue
        assert answer.is_over
        if n_beams:
            assert answers(answer) == alone
        else:
            ids = [token_id for chunk in answer.chunks for token_id in chunk.token_ids]
            assert ids == [token_id for token_id in alone[0] if token_id != EOS]


def test_a_search_that_is_preempted_finds_the_same() -> None:
    engine = bench(n_ctx=128)
    first = engine.ask(complete("x" * 20, "a", max_tokens=90, ignore_eos=True))
    for _ in range(3):
        engine.engine.step()
    beams = Beams(n_beams=3, n_best=3)
    second = engine.ask(complete("y" * 10, "b", max_tokens=20, beams=beams, ignore_eos=True))
    engine.run(first, second)
    assert engine.engine.stats().preempted_total > 0
    found = beam_reference.search(model, b"y" * 10, beams, max_answer=20, eog_ids=frozenset())
    assert [hypothesis.token_ids for hypothesis in second.last.hypotheses] == [each.token_ids for each in found]


def search_that_is_preempted(engine: Bench) -> None:
    """Search in "y" * 50 beside an urgent request that takes its cells; its beams are those of a search alone."""
    beams = Beams(n_beams=3, n_best=3)
    search = engine.ask(complete("y" * 50, "b", max_tokens=60, beams=beams, ignore_eos=True, priority="background"))
    for _ in range(45):
        engine.engine.step()
    urgent = engine.ask(complete("x" * 300, "a", max_tokens=100, ignore_eos=True, priority="interactive"))
    engine.run(search, urgent)
    assert engine.engine.stats().preempted_total > 0
    found = beam_reference.search(model, b"y" * 50, beams, max_answer=60, eog_ids=frozenset())
    assert [hypothesis.token_ids for hypothesis in search.last.hypotheses] == [each.token_ids for each in found]


@pytest.mark.parametrize("max_prefix_bytes", [2**20, 0])
def test_a_preempted_search_goes_on_where_it_was_if_what_it_had_is_kept(max_prefix_bytes: int) -> None:
    engine = bench(n_ctx=512, max_prefix_bytes=max_prefix_bytes)
    search_that_is_preempted(engine)
    n_first_steps = sum(
        any(rows.start == 50 and rows.want_logits and rows.token_ids != [ord("x")] for rows in batch)
        for batch in engine.session.batches
    )
    assert n_first_steps == (1 if max_prefix_bytes else 2)
    engine.assert_idle()


class Forgetful(Chancy, Whole):
    """Restores a sequence and then, as where cells run out, no more for a while."""

    n_loads = 0

    def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
        self.n_loads += 1
        if self.n_loads > 1:
            raise BackendStepError(reason="no cells")
        super().seq_load(seq_id, state)


def test_a_search_of_which_only_the_first_beam_was_kept_begins_again_behind_its_prompt() -> None:
    engine = Bench(session_type=Forgetful, n_ctx=512, max_prefix_bytes=2**20)
    search_that_is_preempted(engine)
    rows_of_prompt = [rows for rows in chain(*engine.session.batches) if rows.start < 49 and ord("y") in rows.token_ids]
    assert [len(rows.token_ids) for rows in rows_of_prompt] == [50]  # nor is it computed again
    engine.assert_idle()


def test_what_was_not_kept_of_the_beams_is_computed_before_they_go_on() -> None:
    engine = bench(n_ctx=512)
    beams = Beams(n_beams=2)
    engine.ask(complete("y" * 8, max_tokens=60, beams=beams, ignore_eos=True))
    for _ in range(6):
        engine.engine.step()
    (sequence,) = engine.engine._running
    assert isinstance(sequence, BeamSequence)
    first, second = sequence._beam_ids()
    sequence.give_back()
    sequence.slot = Slot(0, first[:-1])
    sequence.begin_in(sequence.slot, lambda ids: Slot(1, ids[:9]), engine.engine._slots.cut)
    n_missing = len(second) - 9
    seen = []
    for _ in range(2):
        rows = sequence.rows(2 * (n_missing - 2), ())
        assert [(each.seq_id, each.want_logits) for each in rows] == [(1, False)]  # the first lacks its last token only
        seen += rows[0].token_ids
        sequence.took(rows)
    assert seen == second[9:-1]
    assert [(r.seq_id, r.token_ids, r.want_logits) for r in sequence.rows(1, ())] == [
        (0, first[-1:], True),
        (1, second[-1:], True),
    ]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_cancelled_search_leaves_nothing(steps: int) -> None:
    engine = bench()
    answer = engine.ask(complete("prompt", max_tokens=50, beams=Beams(n_beams=4)))
    for _ in range(steps):
        engine.engine.step()
    engine.engine.cancel("r")
    engine.engine.step()
    assert answer.chunks == []
    engine.assert_idle()
    after = engine.ask(complete("prompt", max_tokens=4, beams=Beams(n_beams=4)))
    engine.run(after)
    assert answers(after) == expected("prompt", Beams(n_beams=4), 4)


def test_broken_logits_end_a_search() -> None:
    class Broken(Chancy):
        def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
            outputs = super().decode(batch)
            return [np.full_like(output, np.nan) for output in outputs] if len(batch) > 1 else outputs

    engine = Bench(session_type=Broken)
    answer = engine.ask(complete("prompt", max_tokens=9, beams=Beams(n_beams=2)))
    engine.run(answer)
    assert answer.error is not None
    engine.assert_idle()
    assert engine.session.kv == {}


def test_more_beams_than_places_are_refused() -> None:
    answer = bench(n_seq_max=2).ask(complete("x", beams=Beams(n_beams=3)))
    assert isinstance(answer.error, InvalidRequestError)
    assert answer.error.param == "num_beams"


def test_a_prompt_that_leaves_no_room_for_its_beams_is_refused() -> None:
    answer = bench(n_ctx=100).ask(complete("x" * 30, beams=Beams(n_beams=4)))
    assert isinstance(answer.error, ContextLengthError)
    assert (answer.error.prompt_tokens, answer.error.n_ctx) == (30, 25)


def test_answers_end_where_the_cells_do() -> None:
    engine = bench(n_ctx=100)
    answer = engine.ask(complete("x" * 20, beams=Beams(n_beams=4, n_best=4, early_stopping="never"), ignore_eos=True))
    engine.run(answer)
    assert [(h.n_tokens, h.finish_reason) for h in answer.last.hypotheses] == [(5, "length")] * 4


def test_a_search_that_no_cell_is_left_for_says_what_it_needed() -> None:
    class Full(Chancy):
        def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
            if len(batch) > 1:
                raise NoCellsError
            return super().decode(batch)

    engine = Bench(session_type=Full, n_ctx=128)
    answer = engine.ask(complete("x" * 20, max_tokens=9, beams=Beams(n_beams=3)))
    engine.run(answer)
    error = answer.error
    assert isinstance(error, CellsExhaustedError)
    assert (error.n_beams, error.n_ctx) == (3, 128)
    assert error.needed_cells == 3 * (20 + 1 + 1)
    assert "3 beams would need 66 cells" in str(error)
