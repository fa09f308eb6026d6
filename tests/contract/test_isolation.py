"""What one user asks is in nobody else's logits, where prefixes are isolated; on the real model and both engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, TokenSession
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.types import GenerateRequest, TokenLogprob
from tests.unit.engine.null_engine import Answer

pytestmark = pytest.mark.model

CANARY, OTHER, GUESS = "8261", "0000", "8260"  # as many tokens each
PROMPT = (
    "Listen with care, and answer with nothing but the number that you have been told by the keeper. "
    + "The vault of the northern lighthouse opens with the number {}. " * 6
    + "The number is"
)


@pytest.fixture(scope="module", params=["native", "llama_cpu"])
def session(request: pytest.FixtureRequest, model_store: Path) -> Iterator[TokenSession]:
    backend = registry.get(request.param)
    if isinstance(found := backend.probe(), Absent):
        pytest.skip(found.reason)
    file = ModelFile(model="m", variant="", path=model_store, quant="")
    loaded = backend.load(file, LoadOptions(n_ctx=1024, n_seq_max=4, n_batch=64, n_threads=1))
    yield loaded
    loaded.close()


def thief(
    session: TokenSession, secret: str, *, is_beside: bool, is_isolated: bool = True
) -> tuple[int, list[TokenLogprob]]:
    """Ask a guess after another user's prompt, or while it is answered; give its cached tokens and its logprobs."""
    for seq_id in range(session.caps.n_seq_max):
        session.seq_trim(seq_id, 0)
    engine = TokenEngine(session, EngineSettings(isolate_prefixes=is_isolated, max_draft=0), ThreadChoice((1,)))
    asked, answers = (PROMPT.format(*[secret] * 6), PROMPT.format(*[GUESS] * 6)), (Answer(), Answer())
    for tenant, (text, answer) in enumerate(zip(asked, answers, strict=True)):
        request = GenerateRequest(
            id=str(tenant),
            model="m",
            prompt=text,
            tenant=f"uid:{tenant}",
            max_tokens=12,
            ignore_eos=True,
            top_logprobs=20,
        )
        engine.submit(request, answer)
        while not (is_beside or answer.is_over):
            engine.step()
    while not all(answer.is_over for answer in answers):
        engine.step()
    (last,) = [chunk.usage for chunk in answers[1].chunks if chunk.finish_reason]
    assert last is not None
    return last.cached_tokens, [logprob for chunk in answers[1].chunks for logprob in chunk.logprobs]


@pytest.mark.parametrize("is_beside", [False, True], ids=["after", "beside"])
def test_a_canary_is_in_no_logit_of_another_user(session: TokenSession, is_beside: bool) -> None:
    n_cached, with_canary = thief(session, CANARY, is_beside=is_beside)
    assert n_cached == 0
    assert len(with_canary) == 12
    assert (0, with_canary) == thief(session, OTHER, is_beside=is_beside)


def test_who_shares_would_see_it(session: TokenSession) -> None:
    """The test above can fail: the beginning that both prompts have is taken from the other user's."""
    n_cached, _ = thief(session, CANARY, is_beside=False, is_isolated=False)
    assert n_cached > 8
