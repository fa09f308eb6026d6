"""A draft model on the real engines, also one on each: the same answers, sooner by the clock that a test moves.

The model of the catalog drafts for itself, Q4_0 for Q4_1: mostly right, and as dear as it is. What steps take is what a
test says, so that nothing here depends on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.engine.session_drafts import SessionDrafts
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.errors import DraftVocabularyError
from edge_rt.types import GenerateRequest, ResponseFormat, Sampling
from edge_rt.worker.draft import check_vocabulary
from tests import byte_model
from tests.fakes import FakeClock
from tests.unit.engine.null_engine import Answer

pytestmark = pytest.mark.model

STEP_S, ROW_S = 0.02, 0.001
BACKENDS = ("native", "llama_cpu")
TEXTS = (
    "Once upon a time, in a small village by the sea, there was",
    "The history of the steam engine begins",
    "Water boils at a lower temperature in the mountains because",
)
SEEDED = Sampling(temperature=0.6, top_k=40, top_p=0.95, seed=5)


class Timed:
    """A session whose steps take what a test says."""

    def __init__(self, session: TokenSession, clock: FakeClock, step_s: float) -> None:
        self._session, self._clock, self._step_s = session, clock, step_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def close(self) -> None:
        """Leave it to the fixture, which lends it to several tests."""
        for seq_id in range(self._session.caps.n_seq_max):
            self._session.seq_trim(seq_id, 0)

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        n_rows = sum(len(rows.token_ids) for rows in batch)
        self._clock.advance(self._step_s * (1 + n_rows * ROW_S / STEP_S))
        return self._session.decode(batch)


@dataclass
class Sessions:
    by_name: dict[str, TokenSession]

    def of(self, backend: str) -> TokenSession:
        if backend not in self.by_name:
            pytest.skip(f"{backend} is not here")
        return self.by_name[backend]


def opened(path: Path, n_seq_max: int) -> Iterator[Sessions]:
    sessions: dict[str, TokenSession] = {}
    for name in BACKENDS:
        backend = registry.get(name)
        if not isinstance(backend.probe(), Absent):
            file = ModelFile(model=path.stem, variant="", path=path, quant="")
            options = LoadOptions(n_ctx=1024, n_seq_max=n_seq_max, n_batch=256, n_threads=1)
            sessions[name] = backend.load(file, options)
    yield Sessions(sessions)
    for session in sessions.values():
        session.close()


def form(forms: dict[str, Path], name: str) -> Path:
    if name not in forms:
        pytest.skip(f"the form {name} is not in the store; `make test` pulls it")
    return forms[name]


@pytest.fixture(scope="module")
def models(model_forms: dict[str, Path]) -> Iterator[Sessions]:
    yield from opened(form(model_forms, "q4_1"), 3)


@pytest.fixture(scope="module")
def children(model_forms: dict[str, Path]) -> Iterator[Sessions]:
    yield from opened(form(model_forms, "q4_0"), 3)


def run(
    session: TokenSession,
    requests: Sequence[GenerateRequest],
    child: TokenSession | None = None,
    *,
    draft_step_s: float = 0.0,
    max_draft: int = 8,
) -> tuple[list[Answer], TokenEngine, float]:
    """Answer requests, which begin together; give the seconds it took by the test's clock."""
    clock = FakeClock()
    draft = None
    if child is not None:
        draft = SessionDrafts(Timed(child, clock, draft_step_s), name="child", max_draft=max_draft)
    settings = EngineSettings(max_prefix_bytes=0, max_draft=max_draft if child is not None else 0)
    engine = TokenEngine(
        Timed(session, clock, STEP_S), settings, ThreadChoice((1,)), clock=clock, entropy=lambda: 7, draft_model=draft
    )
    answers = [Answer() for _ in requests]
    begun_s = clock()
    for request, answer in zip(requests, answers, strict=True):
        engine.submit(request, answer)
    while not all(answer.is_over for answer in answers):
        engine.step()
    seconds = clock() - begun_s
    engine.stop(0.0)
    while engine.step():
        pass
    for seq_id in range(session.caps.n_seq_max):
        session.seq_trim(seq_id, 0)
    return answers, engine, seconds


def asked(n: int, sampling: Sampling, n_tokens: int = 80, **fields: Any) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            id=text,
            model="m",
            prompt=text,
            max_tokens=n_tokens,
            sampling=sampling,
            ignore_eos=True,
            max_draft=8,
            **fields,
        )
        for text in TEXTS[:n]
    ]


def ids(answer: Answer) -> list[int]:
    assert answer.error is None
    return [i for chunk in answer.chunks for i in chunk.token_ids]


@pytest.mark.parametrize("child", BACKENDS)
@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
def test_native_answers_the_same_and_sooner(
    models: Sessions, children: Sessions, child: str, sampling: Sampling
) -> None:
    plain, _, plain_s = run(models.of("native"), asked(2, sampling))
    drafted, engine, drafted_s = run(models.of("native"), asked(2, sampling), children.of(child), draft_step_s=0.001)
    assert [ids(answer) for answer in drafted] == [ids(answer) for answer in plain]
    stats = engine.stats()
    assert stats.model_accepted_tokens_total > 0.5 * stats.model_drafted_tokens_total > 20
    assert drafted_s < 0.9 * plain_s


@pytest.mark.parametrize("child", BACKENDS)
def test_llama_cpu_is_drafted_for_too(models: Sessions, children: Sessions, child: str) -> None:
    """Its rows round differently in company, so a near tie may turn; up to there the answer is the same."""
    plain, _, plain_s = run(models.of("llama_cpu"), asked(1, Sampling(), 48))
    drafted, engine, drafted_s = run(
        models.of("llama_cpu"), asked(1, Sampling(), 48), children.of(child), draft_step_s=0.001
    )
    assert ids(drafted[0])[:12] == ids(plain[0])[:12]
    stats = engine.stats()
    assert stats.model_accepted_tokens_total > 0.5 * stats.model_drafted_tokens_total > 10
    assert drafted_s < 0.9 * plain_s


def test_a_draft_as_dear_as_the_model_is_switched_off(models: Sessions, children: Sessions) -> None:
    plain, _, plain_s = run(models.of("native"), asked(1, Sampling(), 250))
    drafted, engine, drafted_s = run(
        models.of("native"), asked(1, Sampling(), 250), children.of("native"), draft_step_s=STEP_S
    )
    assert ids(drafted[0]) == ids(plain[0])
    assert plain_s / drafted_s > 0.95  # of a run of 250 tokens, 24 of which may be lost at first
    assert engine.stats().model_drafted_tokens_total < 60


def test_an_answer_of_a_form_is_drafted_under_it(models: Sessions, children: Sessions) -> None:
    pytest.importorskip("llguidance")
    form = ResponseFormat(kind="regex", text='\\{"name": "[a-z ]{20,40}", "story": "[A-Za-z ,.]{150,200}"\\}')
    request = replace(asked(1, Sampling(), 160)[0], ignore_eos=False, response_format=form)
    plain, _, _ = run(models.of("native"), [request])
    drafted, engine, _ = run(models.of("native"), [request], children.of("native"), draft_step_s=0.001)
    assert ids(drafted[0]) == ids(plain[0])
    assert engine.stats().model_accepted_tokens_total > 10


def test_another_vocabulary_is_refused(models: Sessions, tmp_path: Path) -> None:
    path = byte_model.write(tmp_path / "bytes.gguf").path
    for backend in BACKENDS:
        if backend not in models.by_name:
            continue
        other = registry.get("llama_cpu").load(
            ModelFile(model="bytes", variant="", path=Path(path), quant=""), LoadOptions(n_ctx=64, n_seq_max=1)
        )
        try:
            with pytest.raises(DraftVocabularyError) as caught:
                check_vocabulary("m", models.of(backend), "bytes", other)
            assert "token 0 is" in caught.value.difference
        finally:
            other.close()


def test_the_same_vocabulary_in_other_weights_is_taken(models: Sessions, children: Sessions) -> None:
    check_vocabulary("m", models.of("native"), "child", children.of("llama_cpu"))
