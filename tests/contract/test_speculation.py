"""Guesses on the real model: the native engine answers the same with and without, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.types import Chunk, GenerateRequest, Sampling
from tests.unit.engine.null_engine import Answer

pytestmark = pytest.mark.model

PROSE = (Path(__file__).resolve().parents[1] / "golden" / "prose.txt").read_text(encoding="utf-8").split("\n\n")
COPY = (
    f"Text:\n{PROSE[1][:300]}\n\nThe same text again:\n{PROSE[1][:300]}\n\nText:\n{PROSE[2]}\n\nThe same text again:\n"
)
FREE = "Once upon a time, in a small village by the sea, there was"
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=5),
    Sampling(temperature=0.3, repeat_penalty=1.02, presence_penalty=0.1, seed=6),
)


@pytest.fixture(scope="module")
def native(model_store: Path) -> Iterator[TokenEngine]:
    backend = registry.get("native")
    if isinstance(found := backend.probe(), Absent):
        pytest.skip(found.reason)
    file = ModelFile(model="m", variant="", path=model_store, quant="")
    session = backend.load(file, LoadOptions(n_ctx=1024, n_seq_max=4, n_threads=1))
    ticks = count()  # every step takes as long as any other, so each likely guess is checked
    engine = TokenEngine(
        session, EngineSettings(max_prefix_bytes=0), ThreadChoice((1,)), clock=lambda: float(next(ticks))
    )
    engine.warm_up()
    yield engine
    session.close()


def answers(engine: TokenEngine, *requests: GenerateRequest) -> list[Answer]:
    found = [Answer() for _ in requests]
    for request, answer in zip(requests, found, strict=True):
        engine.submit(request, answer)
    while not all(answer.is_over for answer in found):
        engine.step()
    return found


def request(name: str, text: str, sampling: Sampling, max_draft: int) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        model="m",
        prompt=text,
        max_tokens=64,
        sampling=sampling,
        ignore_eos=True,
        top_logprobs=2,
        max_draft=max_draft,
    )


def chunks(answer: Answer) -> tuple[list[int], list[object]]:
    parts: list[Chunk] = answer.chunks
    return [i for c in parts for i in c.token_ids], [p for c in parts for p in c.logprobs]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seed", "penalties"])
def test_the_native_engine_gives_the_same_tokens_and_log_probabilities(native: TokenEngine, sampling: Sampling) -> None:
    (plain,) = answers(native, request("plain", COPY, sampling, 0))
    (guessed,) = answers(native, request("guessed", COPY, sampling, 15))
    assert chunks(guessed) == chunks(plain)
    assert guessed.text == plain.text
    assert guessed.last.timings is not None
    assert 0 < guessed.last.timings.accepted_tokens < guessed.last.timings.drafted_tokens


def test_in_company_too(native: TokenEngine) -> None:
    texts = {"copy": COPY, "free": FREE, "again": COPY}
    alone = [answers(native, request(name, text, SAMPLINGS[1], 0))[0] for name, text in texts.items()]
    together = answers(native, *(request(name, text, SAMPLINGS[1], 15) for name, text in texts.items()))
    assert [chunks(answer) for answer in together] == [chunks(answer) for answer in alone]
