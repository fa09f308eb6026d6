from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from edge_rt.api.choices import Collected, Plan, account, kept, merged, plan
from edge_rt.errors import BackendStepError, InvalidRequestError
from edge_rt.types import CacheWishes, Chunk, Energy, GenerateRequest, Sampling, Timings, TokenLogprob, Usage

ASKED = GenerateRequest(id="r", model="m", prompt="a", stream=False, sampling=Sampling(temperature=1.0, seed=5))
TIMINGS = Timings(queue_s=0.1, prefill_s=0.5, prefill_tokens=10, decode_s=0.2, decode_tokens=4, ttft_s=0.6)


def planned(*prompts: GenerateRequest, n: int | None = None, best_of: int | None = None) -> Plan:
    return plan(prompts or (ASKED,), n=n, best_of=best_of, max_choices=8)


def test_each_answer_has_a_seed_and_an_id_of_its_own() -> None:
    requests = planned(n=3).requests
    assert [request.sampling.seed for request in requests] == [5, 6, 7]
    assert [request.id for request in requests] == ["r", "r-1", "r-2"]
    assert (
        planned(replace(ASKED, sampling=Sampling(temperature=1.0, seed=2**63 - 1)), n=2).requests[1].sampling.seed == 0
    )


def test_one_answer_is_asked_for_as_it_is() -> None:
    assert planned() == planned(n=1, best_of=1) == Plan(requests=(ASKED,))


def test_answers_without_a_seed_are_no_copies_of_a_stored_one() -> None:
    asked = replace(ASKED, sampling=Sampling(temperature=1.0), cache=CacheWishes(sampled=True))
    assert [request.cache.no_store for request in planned(asked, n=3).requests] == [False, True, True]


def test_greedy_answers_are_the_same_and_share() -> None:
    requests = planned(replace(ASKED, sampling=Sampling()), n=2).requests
    assert replace(requests[1], id="r") == requests[0]


@pytest.mark.parametrize(
    ("n", "best_of", "param"), [(0, None, "n"), (1, 0, "best_of"), (3, 2, "best_of"), (9, None, "n"), (1, 9, "best_of")]
)
def test_counts_out_of_range(n: int, best_of: int | None, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        planned(n=n, best_of=best_of)
    assert caught.value.param == param


def test_prompts_count_as_well() -> None:
    assert len(planned(ASKED, ASKED, n=4).requests) == 8
    with pytest.raises(InvalidRequestError, match="15 answers to 3 prompts, the limit is 8"):
        planned(ASKED, ASKED, ASKED, n=5)


def test_the_best_cannot_be_streamed() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be streamed"):
        planned(replace(ASKED, stream=True), n=1, best_of=2)
    assert planned(replace(ASKED, stream=True), n=2, best_of=2).n_kept == 2


def collected(*logprobs: float, usage: Usage | None = None, timings: Timings = TIMINGS) -> Collected:
    usage = usage or Usage(prompt_tokens=3, completion_tokens=len(logprobs))
    answer = Collected()
    tokens = tuple(TokenLogprob(token_id=1, raw=b"x", logprob=logprob) for logprob in logprobs)
    answer.add(Chunk(text="x", logprobs=tokens, finish_reason="stop", usage=usage, timings=timings))
    return answer


def test_the_likeliest_are_kept_by_their_mean() -> None:
    answers = [collected(-1.0), collected(-0.5, -0.7), collected(), collected(-0.1, -3.0)]
    assert kept(answers, planned(n=2, best_of=4)) == [answers[1], answers[0]]


def test_a_prompt_counts_once() -> None:
    usages = [
        Usage(prompt_tokens=3, completion_tokens=2, energy=Energy(total_j=1.0)),
        Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=3, energy=Energy(total_j=2.0)),
        Usage(prompt_tokens=5, completion_tokens=1, cached_tokens=4),
        Usage(prompt_tokens=5, completion_tokens=1, cached_tokens=2),
    ]
    late = replace(TIMINGS, queue_s=0.3, prefill_s=0.4, ttft_s=0.7, decode_s=0.5)
    answers = [collected(usage=usage, timings=times) for usage, times in zip(usages, [TIMINGS, late] * 2, strict=True)]
    usage, timings = account(answers, planned(ASKED, ASKED, n=2))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (8, 8, 2)
    assert usage.energy is not None
    assert usage.energy.total_j == 3.0
    assert (timings.queue_s, timings.prefill_s, timings.ttft_s, timings.decode_s) == (0.1, 0.5, 0.6, 0.5)
    assert (timings.prefill_tokens, timings.decode_tokens) == (40, 16)


def test_an_answer_without_an_end_is_an_error() -> None:
    with pytest.raises(BackendStepError, match="broke off"):
        account([collected(-1.0), Collected()], planned(n=2))


class Models:
    """Answers request i with i chunks; the one named broken fails after its first."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.n_open = broken, 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        self.n_open += 1
        try:
            for i in range(3):
                if request.id == self.broken and i:
                    raise BackendStepError(reason="broken")
                yield Chunk(text=f"{request.id}{i}")
                await asyncio.sleep(0)
        finally:
            self.n_open -= 1


def test_chunks_come_with_the_number_of_their_answer() -> None:
    async def run() -> dict[int, str]:
        texts: dict[int, str] = {}
        models = Models()
        async for i, chunk in merged(models.generate, [replace(ASKED, id=c) for c in "abc"]):
            texts[i] = texts.get(i, "") + chunk.text
        assert models.n_open == 0
        return texts

    assert asyncio.run(run()) == {0: "a0a1a2", 1: "b0b1b2", 2: "c0c1c2"}


@pytest.mark.parametrize("broken", ["", "b"])
def test_all_are_closed_when_the_reader_leaves_or_one_fails(broken: str) -> None:
    async def run() -> None:
        models = Models(broken)
        chunks = merged(models.generate, [replace(ASKED, id=c) for c in "abc"])
        if broken:
            with pytest.raises(BackendStepError, match="broken"):
                async for _ in chunks:
                    pass
        else:
            await anext(chunks)
            await chunks.aclose()
        assert models.n_open == 0

    asyncio.run(run())
