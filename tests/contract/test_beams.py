"""Beam search in the step loop over each back end that is present, against whole contexts computed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.types import Beams, GenerateRequest
from tests import beam_reference
from tests.unit.engine.null_engine import Answer

PROMPT = "The capital of France is Paris. The capital of"


@pytest.fixture(params=["null", *(pytest.param(n, marks=pytest.mark.model) for n in ("llama_cpu", "native"))])
def session(request: pytest.FixtureRequest) -> Iterator[TokenSession]:
    name = request.param
    if isinstance(absent := registry.get(name).probe(), Absent):
        pytest.skip(f"{name}: {absent.reason}")
    path = request.getfixturevalue("model_store") if name != "null" else Path("none")
    file = ModelFile(model="m", variant="", path=path, quant="")
    loaded = registry.get(name).load(file, LoadOptions(n_ctx=256, n_seq_max=5, n_batch=64, n_threads=1))
    yield loaded
    loaded.close()


def engine_of(session: TokenSession) -> TokenEngine:
    return TokenEngine(session, EngineSettings(stream_interval_s=0.0), ThreadChoice((1,)))


def ask(engine: TokenEngine, request_id: str, **fields: object) -> Answer:
    answer = Answer()
    request = GenerateRequest(id=request_id, model="m", prompt=PROMPT, **fields)  # type: ignore[arg-type]
    engine.submit(request, answer)
    return answer


def run(engine: TokenEngine, *answers: Answer) -> None:
    for _ in range(1000):
        if all(answer.is_over for answer in answers):
            return
        engine.step()
    pytest.fail("the engine did not finish")


def rescored(session: TokenSession, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """What an answer's tokens are likely to be, computed in one go in an empty sequence."""
    logits = session.decode([SeqRows(0, 0, [*prompt, *answer], want_logits=False, want_all=True)])[0].astype(np.float64)
    session.seq_trim(0, 0)
    rows = logits[len(prompt) - 1 : -1]
    peaks = rows.max(axis=1)
    totals = np.log(np.exp(rows - peaks[:, None]).sum(axis=1)) + peaks
    return float((rows[np.arange(len(answer)), list(answer)] - totals).sum())


def test_the_answers_are_those_of_the_plain_way(session: TokenSession) -> None:
    engine = engine_of(session)
    beams = Beams(n_beams=4, n_best=4, length_penalty=1.0)
    answer = ask(engine, "a", max_tokens=6, beams=beams, ignore_eos=True)
    run(engine, answer)
    assert answer.error is None
    found = answer.last.hypotheses
    for seq_id in range(session.caps.n_seq_max):
        session.seq_trim(seq_id, 0)
    prompt = session.tokenize(PROMPT, special=True, add_bos=True)

    def logits(context: Sequence[int]) -> NDArray[np.float32]:
        row = session.decode([SeqRows(0, 0, list(context), want_logits=True)])[0].copy()
        session.seq_trim(0, 0)
        return row

    try:
        expected = beam_reference.search(logits, prompt, beams, max_answer=6, eog_ids=frozenset())
    except beam_reference.NearTie:  # the null model's: all rivals are alike
        expected = []
    if expected and session.caps.is_batch_invariant:
        assert [hypothesis.token_ids for hypothesis in found] == [each.token_ids for each in expected]
    # Where rows round differently in company a near tie may turn, and the answers' own likelihoods still hold.
    for hypothesis in found:
        assert hypothesis.logprob == pytest.approx(rescored(session, prompt, hypothesis.token_ids), abs=0.02)
    assert list(found) == sorted(found, key=lambda hypothesis: -hypothesis.score)
    if expected:
        assert found[0].score >= expected[0].score - 0.02


def test_company_changes_nothing_where_the_back_end_says_so(session: TokenSession) -> None:
    if not session.caps.is_batch_invariant:
        pytest.skip("rows round differently in company")
    beams = Beams(n_beams=3, n_best=2)
    alone = engine_of(session)
    search = ask(alone, "a", max_tokens=8, beams=beams)
    run(alone, search)
    plain = ask(alone, "b", max_tokens=12)
    run(alone, plain)
    together = [ask(alone, "c", max_tokens=12), ask(alone, "d", max_tokens=8, beams=beams)]
    run(alone, *together)
    assert together[1].last.hypotheses == search.last.hypotheses
    assert together[0].text == plain.text
    assert alone.stats().cells_used == 0


def test_a_prompt_is_scored_as_whole_contexts_are(session: TokenSession) -> None:
    engine = engine_of(session)
    answer = ask(engine, "a", max_tokens=0, prompt_logprobs=1)
    run(engine, answer)
    tokens = [token for chunk in answer.chunks for token in chunk.prompt_logprobs]
    for seq_id in range(session.caps.n_seq_max):
        session.seq_trim(seq_id, 0)
    ids = [token.token_id for token in tokens]
    assert ids == session.tokenize(PROMPT, special=True, add_bos=True)
    total = sum(token.logprob for token in tokens)
    assert total == pytest.approx(rescored(session, ids[:1], ids[1:]), abs=0.02 * len(ids))
