"""Several answers to one request: n of them, the best of more, those to several prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from edge_rt.errors import BackendStepError, InvalidRequestError
from edge_rt.types import (
    Beams,
    Chunk,
    Energy,
    FinishReason,
    GenerateRequest,
    Hypothesis,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

_MAX_SEED: Final = 2**63 - 1


class Searched(Protocol):
    """What a request's body may say of a beam search; schemas.ChatRequest and CompletionRequest do."""

    stream: bool | None
    use_beam_search: bool | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None


_DRAWING: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is computed for one request, and what of it the client sees.

    requests   one for each answer, those to one prompt together
    n_each     answers to each prompt; n_kept are given, the ones that the model found likeliest
    with_logprobs  the client asked for logprobs: choosing the likeliest needs them in any case
    echo       an answer begins with its prompt
    """

    requests: tuple[GenerateRequest, ...]
    n_each: int = 1
    n_kept: int = 1
    with_logprobs: bool = False
    echo: bool = False

    @property
    def first(self) -> GenerateRequest:
        return self.requests[0]


def plan(
    prompts: Sequence[GenerateRequest],
    *,
    n: int | None,
    best_of: int | None = None,
    echo: bool = False,
    max_choices: int,
) -> Plan:
    """Ask for n answers to each prompt, or for best_of of which the n likeliest are kept.

    Answer i is drawn with the seed + i. Without a seed each is drawn afresh, so that no stored answer is given n times.
    Raises InvalidRequestError.
    """
    n_kept = 1 if n is None else n
    n_each = n_kept if best_of is None else best_of
    for name, value in (("n", n_kept), ("best_of", n_each)):
        if value < 1:
            raise InvalidRequestError(param=name, problem=f"must be at least 1, got {value}")
    if n_each < n_kept:
        raise InvalidRequestError(param="best_of", problem=f"must be at least n, got {n_each} for {n_kept}")
    if len(prompts) * n_each > max_choices:
        of_prompts = f" to {len(prompts)} prompts" if len(prompts) > 1 else ""
        problem = f"asks for {len(prompts) * n_each} answers{of_prompts}, the limit is {max_choices}"
        raise InvalidRequestError(
            param="prompt" if n_each == 1 else "best_of" if best_of is not None else "n",
            problem=f"{problem} (limits.max_choices)",
        )
    if n_each > n_kept and prompts[0].stream:
        raise InvalidRequestError(
            param="best_of", problem="cannot be streamed: which answers are best shows at their ends; leave out stream"
        )
    if prompts[0].beams is not None:
        if best_of is not None:
            raise InvalidRequestError(param="best_of", problem="does not go with a beam search; num_beams is its width")
        n_each = n_kept = 1  # the request itself is answered n times
    asked = [_numbered(request, i) for request in prompts for i in range(n_each)]
    with_logprobs = prompts[0].top_logprobs is not None
    if n_each > n_kept and not with_logprobs:
        asked = [replace(request, top_logprobs=0) for request in asked]
    named = (replace(request, id=f"{request.id}-{k}") if k else request for k, request in enumerate(asked))
    return Plan(requests=tuple(named), n_each=n_each, n_kept=n_kept, with_logprobs=with_logprobs, echo=echo)


def _numbered(request: GenerateRequest, i: int) -> GenerateRequest:
    sampling = request.sampling
    if i == 0 or sampling.temperature == 0:
        return request
    if sampling.seed is not None:
        return replace(request, sampling=replace(sampling, seed=(sampling.seed + i) & _MAX_SEED))
    return replace(request, cache=replace(request.cache, no_store=True))


def beams(wire: Searched, n: int | None) -> Beams | None:
    """Read what a request says of a beam search; None where it asks for none. Raises InvalidRequestError.

    vLLM keeps as many beams as answers are asked for, Hugging Face has a number of its own: both are understood.
    """
    wanted = wire.use_beam_search if wire.use_beam_search is not None else (wire.num_beams or 1) > 1
    if not wanted:
        for name in ("length_penalty", "early_stopping"):
            if getattr(wire, name) is not None:
                raise InvalidRequestError(param=name, problem="needs num_beams or use_beam_search")
        if wire.num_beams is not None and wire.num_beams != 1:
            problem = f"must be 1 without use_beam_search, got {wire.num_beams}"
            raise InvalidRequestError(param="num_beams", problem=problem)
        return None
    for name in _DRAWING:
        if getattr(wire, name) not in (None, 0):
            problem = "does not go with a beam search, which draws nothing; leave it out"
            raise InvalidRequestError(param=name, problem=problem)
    if wire.stream:
        problem = "cannot be had of a beam search: its answers show at its end; leave out stream"
        raise InvalidRequestError(param="stream", problem=problem)
    early: dict[bool | str | None, Literal["first", "likely", "never"]] = {True: "first", "never": "never"}
    return Beams(
        n_beams=(n or 1) if wire.num_beams is None else wire.num_beams,
        n_best=1 if n is None else n,
        length_penalty=1.0 if wire.length_penalty is None else wire.length_penalty,
        early_stopping=early.get(wire.early_stopping, "likely"),
    )


async def merged(
    generate: Callable[[GenerateRequest], AsyncGenerator[Chunk]], requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, Chunk]]:
    """Compute all at once and give their chunks as they come, with their numbers. The first error ends all."""
    if len(requests) == 1:
        async with aclosing(generate(requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    arrived: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(maxsize=len(requests))

    async def read(i: int) -> None:
        try:
            async with aclosing(generate(requests[i])) as chunks:
                async for chunk in chunks:
                    await arrived.put((i, chunk))
        except Exception as exc:  # noqa: BLE001 - whatever it is, the reader raises it
            await arrived.put((i, exc))
        else:
            await arrived.put((i, None))

    tasks = [asyncio.create_task(read(i)) for i in range(len(requests))]
    try:
        n_left = len(tasks)
        while n_left:
            i, item = await arrived.get()
            if item is None:
                n_left -= 1
            elif isinstance(item, Chunk):
                yield i, item
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Collected:
    """One answer as far as it has come."""

    texts: list[str] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    last: Chunk | None = None
    hypothesis: Hypothesis | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.prompt_logprobs += chunk.prompt_logprobs
        self.logprobs += chunk.logprobs
        self.tool_calls += chunk.tool_calls
        self.last = chunk

    @classmethod
    def of(cls, hypothesis: Hypothesis, answer: Collected) -> Collected:
        """Give one of the answers that a beam search has found."""
        assert answer.last is not None
        last = replace(answer.last, finish_reason=hypothesis.finish_reason)
        return cls(texts=[hypothesis.text], logprobs=list(hypothesis.logprobs), last=last, hypothesis=hypothesis)

    @property
    def found(self) -> tuple[Hypothesis, ...]:
        return self.last.hypotheses if self.last is not None else ()

    @property
    def mean_logprob(self) -> float:
        return math.fsum(token.logprob for token in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf

    def end(self) -> tuple[FinishReason, Usage, Timings]:
        """Give how it ended. Raises BackendStepError if it just broke off."""
        return ending(self.last)


def ending(last: Chunk | None) -> tuple[FinishReason, Usage, Timings]:
    """Tell by its last chunk how an answer ended. Raises BackendStepError if it just broke off."""
    if last is None or last.finish_reason is None or last.usage is None or last.timings is None:
        raise BackendStepError(reason="the answer broke off without finish reason, usage and timings")
    return last.finish_reason, last.usage, last.timings


def kept(answers: Sequence[Collected], plan: Plan) -> list[Collected]:
    """Give the likeliest answers to each prompt, by the mean logprob of their tokens, the likeliest first.

    A beam search's are in its order, and n of them come with one request.
    """
    if plan.first.beams is not None:
        return [Collected.of(found, answer) for answer in answers for found in answer.found]
    if plan.n_each == plan.n_kept:
        return list(answers)
    best: list[Collected] = []
    for start in range(0, len(answers), plan.n_each):
        group = answers[start : start + plan.n_each]
        best += sorted(group, key=lambda answer: -answer.mean_logprob)[: plan.n_kept]
    return best


def account(answers: Sequence[Collected], plan: Plan) -> tuple[Usage, Timings]:
    """Add up what all answers took; a prompt counts once, as cached only what none of its answers computed.

    The times are those from the first to the last of what ran at the same time.
    """
    ends = [answer.end() for answer in answers]
    usages, timings = [usage for _, usage, _ in ends], [times for _, _, times in ends]
    if len(ends) == 1:
        return usages[0], timings[0]
    energy: Energy | None = None
    for usage in usages:
        if usage.energy is not None:
            energy = usage.energy if energy is None else energy.plus(usage.energy)
    groups = [usages[start : start + plan.n_each] for start in range(0, len(usages), plan.n_each)]
    usage = Usage(
        prompt_tokens=sum(group[0].prompt_tokens for group in groups),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(min(usage.cached_tokens for usage in group) for group in groups),
        is_estimate=any(usage.is_estimate for usage in usages),
        energy=energy,
    )
    return usage, Timings(
        queue_s=min(each.queue_s for each in timings),
        prefill_s=max(each.prefill_s for each in timings),
        prefill_tokens=sum(each.prefill_tokens for each in timings),
        decode_s=max(each.decode_s for each in timings),
        decode_tokens=sum(each.decode_tokens for each in timings),
        ttft_s=min(each.ttft_s for each in timings),
        drafted_tokens=sum(each.drafted_tokens for each in timings),
        accepted_tokens=sum(each.accepted_tokens for each in timings),
        prefill_engine_s=sum(each.prefill_engine_s for each in timings),
        decode_engine_s=sum(each.decode_engine_s for each in timings),
    )
