"""Chunks → wire answers, streamed or whole, in the two shapes OpenAI's endpoints have."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final, Literal

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_rt.api import schemas
from edge_rt.api.choices import Collected, Plan, account, kept, merged
from edge_rt.api.context import Api
from edge_rt.api.sse import DONE, EventSender, StopOnHangUp, event
from edge_rt.api.tools import answered_calls, call_deltas
from edge_rt.types import FinishReason, GenerateRequest, Origin, Timings, TokenLogprob, ToolCallDelta, Usage


class ChatShape:
    """How chat answers are dressed: what a stream opens with, its pieces and its close, and a whole answer."""

    prefix = "chatcmpl-"
    unary: Final = "chat.completion"
    streamed: Final = "chat.completion.chunk"

    def opening(self) -> schemas.Choice | None:
        return schemas.Choice(delta=schemas.Delta(role="assistant", content=""))

    def piece(
        self,
        text: str,
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob] = (),
        calls: Sequence[ToolCallDelta] = (),
    ) -> schemas.Choice:
        del prompt_logprobs  # a chat repeats no prompt
        delta = schemas.Delta(content=text) if text or not calls else schemas.Delta()
        if calls:
            delta.tool_calls = call_deltas(calls)
        return schemas.Choice(delta=delta, logprobs=self._logprobs(logprobs))

    def closing(self, reason: FinishReason) -> schemas.Choice:
        return schemas.Choice(delta=schemas.Delta(), finish_reason=reason)

    def whole(
        self,
        text: str,
        logprobs: Sequence[TokenLogprob],
        reason: FinishReason,
        prompt_logprobs: Sequence[TokenLogprob] = (),
        calls: Sequence[ToolCallDelta] = (),
    ) -> schemas.Choice:
        del prompt_logprobs
        message = schemas.AnswerMessage(content=text or None if calls else text)
        if calls:
            message.tool_calls = answered_calls(calls)
        return schemas.Choice(message=message, logprobs=self._logprobs(logprobs), finish_reason=reason)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> schemas.ChatLogprobs | None:
        if not logprobs:
            return None
        return schemas.ChatLogprobs(content=[chat_logprob(token) for token in logprobs])


class CompletionShape:
    """How text completions are dressed; see ChatShape."""

    prefix = "cmpl-"
    unary: Final = "text_completion"
    streamed: Final = "text_completion"

    def __init__(self) -> None:
        self._offset = 0  # characters of the answer before the next token
        self._has_begun = False

    def opening(self) -> schemas.Choice | None:
        return None

    def piece(
        self,
        text: str,
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob] = (),
        calls: Sequence[ToolCallDelta] = (),
    ) -> schemas.Choice:
        del calls  # a completion has no tools
        return schemas.Choice(text=text, logprobs=self._logprobs(prompt_logprobs, logprobs))

    def closing(self, reason: FinishReason) -> schemas.Choice:
        return schemas.Choice(text="", finish_reason=reason)

    def whole(
        self,
        text: str,
        logprobs: Sequence[TokenLogprob],
        reason: FinishReason,
        prompt_logprobs: Sequence[TokenLogprob] = (),
        calls: Sequence[ToolCallDelta] = (),
    ) -> schemas.Choice:
        del calls
        return schemas.Choice(text=text, logprobs=self._logprobs(prompt_logprobs, logprobs), finish_reason=reason)

    def _logprobs(
        self, prompt: Sequence[TokenLogprob], answer: Sequence[TokenLogprob]
    ) -> schemas.CompletionLogprobs | None:
        """Write the tokens of an echoed prompt and of the answer; the first of a prompt has no logprob."""
        if not (prompt or answer):
            return None
        tokens = [_text(token.raw) for token in (*prompt, *answer)]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        scored: list[TokenLogprob | None] = [*prompt, *answer]
        if prompt and not self._has_begun:
            scored[0] = None
        self._has_begun = True
        return schemas.CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if token is None else token.logprob for token in scored],
            top_logprobs=[None if token is None else _rivals(token) for token in scored],
            text_offset=offsets,
        )


Shape = ChatShape | CompletionShape


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def chat_logprob(token: TokenLogprob) -> schemas.ChatLogprob:
    return schemas.ChatLogprob(
        token=_text(token.raw),
        logprob=token.logprob,
        bytes=list(token.raw),
        top_logprobs=[
            schemas.TopLogprob(token=_text(raw), logprob=logprob, bytes=list(raw)) for _, raw, logprob in token.top
        ],
    )


def _rivals(token: TokenLogprob) -> dict[str, float]:
    """Give the likeliest texts and the token's own; of parts of characters, which are written alike, the likeliest."""
    rivals: dict[str, float] = {}
    for _, raw, logprob in token.top:
        rivals.setdefault(_text(raw), logprob)
    rivals.setdefault(_text(token.raw), token.logprob)
    return rivals


class Generation:
    """Answer one request: an ASGI app of its own, so that streams skip every wrapper."""

    def __init__(self, api: Api, request: GenerateRequest | Plan, shape: Shape, *, include_usage: bool) -> None:
        self._api = api
        self._plan = request if isinstance(request, Plan) else Plan(requests=(request,), with_logprobs=True)
        self._request = self._plan.first
        self._shapes = [shape, *(type(shape)() for _ in self._plan.requests[1:])]
        self._shape = shape
        self._include_usage = include_usage
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._request.stream:
            await self._stream(receive, EventSender(send))
        else:
            body, origin = await self._whole(receive)
            answer = Response(body, media_type="application/json")
            answer.raw_headers += origin_headers(origin)
            await answer(scope, receive, send)

    async def _stream(self, receive: Receive, sender: EventSender) -> None:
        # The other events of a stream with usage say null, as OpenAI's do.
        no_usage = None if self._include_usage else UNSET
        answers = [Collected() for _ in self._plan.requests]
        events = b""
        for i, text in enumerate(await self._echoes()):
            opening = self._shapes[i].piece(text, ()) if text else self._shapes[i].opening()
            events += b"" if opening is None else self._event(i, opening, no_usage)
        n_left, i = len(answers), 0
        origin: Origin | None = None
        async with StopOnHangUp(receive), aclosing(merged(self._api.runtime.generate, self._plan.requests)) as chunks:
            async for i, chunk in chunks:
                if chunk.origin is not None:
                    origin = chunk.origin
                    sender.headers = origin_headers(origin)
                scores = chunk.logprobs or (chunk.prompt_logprobs and self._plan.with_logprobs)
                if chunk.text or chunk.tool_calls or scores:
                    piece = self._shapes[i].piece(chunk.text, chunk.logprobs, chunk.prompt_logprobs, chunk.tool_calls)
                    events += self._event(i, piece, no_usage)
                answers[i].last = chunk
                if chunk.finish_reason is not None:
                    n_left -= 1
                    if n_left:
                        events += self._event(i, self._shapes[i].closing(chunk.finish_reason), no_usage)
                if events and n_left:  # the end leaves in one write, when the engine has let go
                    await sender.put(events)
                    events = b""
        usage, timings = self._account(answers)
        closing = self._shapes[i].closing(answers[i].end()[0])
        if self._include_usage:
            events += self._event(i, closing, None) + self._event(0, None, usage, timings, wire_origin(origin))
        else:
            events += self._event(i, closing, UNSET, timings, wire_origin(origin))
        await sender.put(events + DONE, more=False)

    async def _echoes(self) -> list[str]:
        """Give what each answer begins with: its prompt where that is echoed."""
        if not self._plan.echo:
            return [""] * len(self._plan.requests)
        texts: list[str] = []
        for i, request in enumerate(self._plan.requests):
            if i % self._plan.n_each:
                texts.append(texts[-1])
            elif request.prompt_token_ids is not None:
                texts.append(await self._api.runtime.detokenize(request.model, list(request.prompt_token_ids)))
            else:
                texts.append(request.prompt or "")
        return texts

    def _account(self, answers: Sequence[Collected]) -> tuple[schemas.WireUsage, schemas.WireTimings]:
        usage, timings = account(answers, self._plan)
        return wire_usage(usage, timings), wire_timings(usage, timings)

    def _event(
        self,
        index: int,
        choice: schemas.Choice | None,
        usage: schemas.WireUsage | UnsetType | None,
        timings: schemas.WireTimings | UnsetType = UNSET,
        origin: schemas.WireOrigin | UnsetType = UNSET,
    ) -> bytes:
        if choice is not None:
            choice.index = index
        choices = [] if choice is None else [choice]
        return event(self._answer(self._shape.streamed, choices, usage=usage, timings=timings, origin=origin))

    async def _whole(self, receive: Receive) -> tuple[bytes, Origin | None]:
        answers = [Collected() for _ in self._plan.requests]
        origin: Origin | None = None
        async with StopOnHangUp(receive), aclosing(merged(self._api.runtime.generate, self._plan.requests)) as chunks:
            async for i, chunk in chunks:
                origin = chunk.origin or origin
                answers[i].add(chunk)
            echoes = await self._echoes()
        usage, timings = self._account(answers)
        for answer, text in zip(answers, echoes, strict=True):
            answer.texts.insert(0, text)
        choices = []
        for i, answer in enumerate(kept(answers, self._plan)):
            shape = type(self._shape)()
            logprobs = answer.logprobs if self._plan.with_logprobs else []
            prompt_logprobs = answer.prompt_logprobs if self._plan.with_logprobs else []
            text, reason = "".join(answer.texts), answer.end()[0]
            choice = shape.whole(text, logprobs, reason, prompt_logprobs, answer.tool_calls)
            choice.index = i
            if answer.hypothesis is not None:
                choice.cumulative_logprob, choice.score = answer.hypothesis.logprob, answer.hypothesis.score
            choices.append(choice)
        whole = self._answer(self._shape.unary, choices, usage=usage, timings=timings, origin=wire_origin(origin))
        return schemas.encode(whole), origin

    def _answer(
        self,
        kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"],
        choices: list[schemas.Choice],
        *,
        usage: schemas.WireUsage | UnsetType | None,
        timings: schemas.WireTimings | UnsetType,
        origin: schemas.WireOrigin | UnsetType,
    ) -> schemas.Answer:
        return schemas.Answer(
            id=self._request.id,
            object=kind,
            created=self._created,
            model=self._request.model,
            choices=choices,
            usage=usage,
            timings=timings,
            origin=origin,
        )


def origin_headers(origin: Origin | None) -> list[tuple[bytes, bytes]]:
    """Say in headers where an answer comes from."""
    if origin is None:
        return []
    named = {
        "x-edge-route": "cloud" if origin.endpoint else "local",
        "x-edge-route-reason": origin.reason,
        "x-edge-endpoint": origin.endpoint,
        "x-edge-cache": origin.cache or "",
        "age": "" if origin.age_s is None else f"{origin.age_s:.0f}",
        "x-edge-similarity": "" if origin.similarity is None else f"{origin.similarity:.3f}",
        "x-edge-cost": "" if origin.cost is None else f"{origin.cost:.6f}",
    }
    return [(name.encode(), value.encode()) for name, value in named.items() if value]


def wire_origin(origin: Origin | None) -> schemas.WireOrigin | UnsetType:
    if origin is None:
        return UNSET
    return schemas.WireOrigin(
        route="cloud" if origin.endpoint else "local",
        reason=origin.reason,
        endpoint=origin.endpoint or UNSET,
        cost=UNSET if origin.cost is None else origin.cost,
        cache=origin.cache or UNSET,
    )


def wire_usage(usage: Usage, timings: Timings) -> schemas.WireUsage:
    return schemas.WireUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=usage.cached_tokens),
        energy=schemas.wire_energy(usage.energy, timings.prefill_tokens, timings.decode_tokens),
    )


def wire_timings(usage: Usage, timings: Timings) -> schemas.WireTimings:
    """Name the times as llama-server does.

    predicted_n counts all tokens; the rate is that of the steps after the first token, which came with the prefill.
    """
    prefill_ms, n_prefill, tpot_s = timings.prefill_s * 1e3, timings.prefill_tokens, timings.tpot_s
    return schemas.WireTimings(
        cache_n=usage.cached_tokens,
        prompt_n=n_prefill,
        prompt_ms=round(prefill_ms, 3),
        prompt_per_token_ms=_rounded(prefill_ms / n_prefill if n_prefill else None),
        prompt_per_second=_rounded(timings.prefill_tps),
        predicted_n=usage.completion_tokens,
        predicted_ms=round(timings.decode_s * 1e3, 3),
        predicted_per_token_ms=_rounded(None if tpot_s is None else tpot_s * 1e3),
        predicted_per_second=_rounded(timings.decode_tps),
        draft_n=timings.drafted_tokens or UNSET,
        draft_n_accepted=timings.accepted_tokens if timings.drafted_tokens else UNSET,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def new_id(shape: Shape) -> str:
    return shape.prefix + uuid.uuid4().hex
