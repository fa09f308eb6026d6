from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from edge_rt.engine.beams import BeamSearch, max_answer, moves
from edge_rt.errors import BackendStepError
from edge_rt.types import Beams, Capabilities, Hypothesis
from tests import beam_reference
from tests.beam_reference import Logits, NearTie, random_logits

N_VOCAB = 9
PROMPT = (1, 2)
CAPS = Capabilities(n_ctx=100, n_seq_max=8, n_vocab=9, n_batch=32, can_trim=True, can_copy=True, can_save=True)

beams = st.builds(
    lambda n_beams, n_best, penalty, early: Beams(
        n_beams=n_beams, n_best=min(n_best, n_beams), length_penalty=penalty, early_stopping=early
    ),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    st.sampled_from(["first", "likely", "never"]),
)


def begin(settings: Beams, n: int, eog_ids: frozenset[int] = frozenset({0}), **more: object) -> BeamSearch:
    return BeamSearch(
        settings=settings,
        n_vocab=N_VOCAB,
        max_answer=n,
        eog_ids=eog_ids,
        stop=more.pop("stop", ()),  # type: ignore[arg-type]
        piece=lambda token_id, special=False: bytes((ord("a") + token_id,)),
        **more,  # type: ignore[arg-type]
    )


def run(search: BeamSearch, logits: Logits) -> tuple[Hypothesis, ...]:
    for _ in range(100):
        rows = [logits([*PROMPT, *beam.token_ids]) for beam in search.beams]
        before = search.beams
        parents = search.advance(rows)
        if not parents:
            return search.best()
        for parent, beam in zip(parents, search.beams, strict=True):
            assert beam.token_ids[:-1] == before[parent].token_ids
    pytest.fail("the search did not end")


@given(beams, st.integers(0, 10**6), st.integers(1, 7), st.frozensets(st.integers(0, 8), max_size=3))
def test_it_finds_what_the_plain_way_of_writing_it_finds(
    settings: Beams, seed: int, n: int, eog_ids: frozenset[int]
) -> None:
    logits = random_logits(N_VOCAB, seed)
    try:
        expected = beam_reference.search(logits, PROMPT, settings, max_answer=n, eog_ids=eog_ids)
    except NearTie:
        reject()
    found = run(begin(settings, n, eog_ids), logits)
    assert [hypothesis.finish_reason for hypothesis in found] == [each.reason for each in expected]
    for hypothesis, each in zip(found, expected, strict=True):
        n_end = each.token_ids[-1] in eog_ids
        assert hypothesis.token_ids == each.token_ids[: len(each.token_ids) - n_end]
        assert hypothesis.n_tokens == len(each.token_ids)
        assert hypothesis.logprob == pytest.approx(each.logprob, abs=1e-4)
        assert hypothesis.score == pytest.approx(each.score, abs=1e-4 * max(1.0, hypothesis.n_tokens**2))


@given(st.integers(0, 10**6))
def test_enough_beams_find_the_likeliest_of_all_answers(seed: int) -> None:
    logits = random_logits(N_VOCAB, seed)
    settings = Beams(n_beams=N_VOCAB**2, n_best=5, length_penalty=0.0)
    found = run(begin(settings, 3, frozenset()), logits)
    sums = []
    for answer in itertools.product(range(N_VOCAB), repeat=3):
        total = 0.0
        for i, token_id in enumerate(answer):
            row = logits([*PROMPT, *answer[:i]]).astype(np.float64)
            total += float(row[token_id] - np.log(np.exp(row).sum()))
        sums.append(total)
    assert [hypothesis.logprob for hypothesis in found] == pytest.approx(sorted(sums, reverse=True)[:5], abs=1e-5)


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_one_beam_is_greedy(seed: int, n: int) -> None:
    logits = random_logits(N_VOCAB, seed)
    [found] = run(begin(Beams(n_beams=1), n), logits)
    greedy: list[int] = []
    while len(greedy) < n and (token_id := int(logits([*PROMPT, *greedy]).argmax())) != 0:
        greedy.append(token_id)
    assert found.token_ids == tuple(greedy)


def test_a_stop_string_ends_a_beam_and_is_no_part_of_it() -> None:
    path = {(): 1, (1,): 2, (1, 2): 3, (1, 2, 3): 4}  # b c d e

    def logits(context: object) -> np.ndarray:
        answer = tuple(context)[2:]  # type: ignore[arg-type, var-annotated]
        row = np.zeros(N_VOCAB, np.float32)
        row[path.get(answer, 8)] = 9.0
        return row

    [found] = run(begin(Beams(n_beams=1), 6, stop=("cd",)), logits)
    assert (found.text, found.finish_reason, found.n_tokens) == ("b", "stop", 3)
    [found] = run(begin(Beams(n_beams=1), 4, stop=("cde!", "x")), logits)
    assert (found.text, found.finish_reason) == ("bcde", "length")


def test_tokens_come_with_their_logprobs_and_rivals() -> None:
    settings = Beams(n_beams=3, n_best=3)
    found = run(begin(settings, 4, top_logprobs=2), random_logits(N_VOCAB, 5))
    for hypothesis in found:
        assert tuple(token.token_id for token in hypothesis.logprobs) == hypothesis.token_ids
        assert all(len(token.top) == 2 for token in hypothesis.logprobs)
        n_end = hypothesis.n_tokens - len(hypothesis.token_ids)
        if not n_end:
            total = sum(token.logprob for token in hypothesis.logprobs)
            assert hypothesis.logprob == pytest.approx(total, abs=1e-5)


def test_a_search_that_begins_again_finds_the_same() -> None:
    logits = random_logits(N_VOCAB, 6)
    search = begin(Beams(n_beams=3, n_best=2), 5)
    first = run(search, logits)
    search.restart()
    assert run(search, logits) == first


def test_broken_logits_are_an_error() -> None:
    search = begin(Beams(n_beams=2), 5)
    with pytest.raises(BackendStepError):
        search.advance([np.full(N_VOCAB, np.nan, np.float32)])


@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=n)))
)
def test_each_beam_gets_a_place_of_its_own(case: tuple[int, list[int]]) -> None:
    n, parents = case
    places, copies = moves(parents, n)
    assert len(set(places)) == len(places) == len(parents)
    held = list(range(n))  # whose KV is where
    for source, place in copies:
        assert place not in parents  # nothing that is needed is written over
        held[place] = held[source]
    assert [held[place] for place in places] == parents


def cells_of(caps: Capabilities, n_beams: int, n_prompt: int, n_answer: int) -> int:
    block = caps.n_cell_block
    if not caps.copies_share:
        return n_beams * caps.n_cells(n_prompt + n_answer)
    shared = n_prompt // block * block
    return shared + n_beams * caps.n_cells(n_prompt - shared + n_answer)


@given(st.booleans(), st.sampled_from([1, 8, 32]), st.integers(1, 6), st.integers(1, 99), st.integers(1, 50))
def test_answers_are_as_long_as_the_cells_hold(share: bool, block: int, n_beams: int, n_prompt: int, n: int) -> None:
    caps = Capabilities(
        n_ctx=96, n_seq_max=8, n_vocab=9, n_batch=32, can_trim=True, can_copy=True, can_save=True,
        n_cell_block=block, copies_share=share,
    )  # fmt: skip
    longest = max_answer(caps, n_beams=n_beams, n_prompt=n_prompt, max_tokens=None)
    if longest > 0:
        assert cells_of(caps, n_beams, n_prompt, longest) <= 96
        assert n_prompt + longest <= 96
    assert max_answer(caps, n_beams=n_beams, n_prompt=n_prompt, max_tokens=n) == min(n, longest)
    assert n_prompt + longest == 96 or cells_of(caps, n_beams, n_prompt, max(longest, 0) + block) > 96
