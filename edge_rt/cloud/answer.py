"""What has come of one answer: texts, the first end, usage and times."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final, cast

from edge_rt.cloud import wire
from edge_rt.cloud.credential import Key
from edge_rt.cloud.events import DONE, CallDelta, Called, Event, EventError, decode, error_text
from edge_rt.errors import CloudAnswerError, CloudDeclinedError
from edge_rt.types import Chunk, FinishReason, GenerateRequest, Timings, ToolCallDelta, Usage

_log = logging.getLogger(__name__)

# A token is a byte at least. Models also count what they thought unseen, and templates add tokens of their own.
_MAX_HIDDEN_TOKENS: Final = 32_768
_MAX_TEMPLATE_TOKENS: Final = 1024


class Answer:
    """One answer being read. Errors name the endpoint, and show nothing of its key."""

    def __init__(self, endpoint: str, began_s: float, key: Key | None = None) -> None:
        self.began_s = began_s
        self.has_begun = False  # an event has come
        self.is_over = False  # nothing more is wanted
        self.finish_reason: FinishReason | None = None
        self.n_texts = 0
        self._endpoint, self.key = endpoint, key
        self._n_text_bytes = 0
        self._usage: Usage | None = None
        self._call_ids: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._first_text_s = self._last_text_s = began_s

    def take(self, events: list[bytes], now_s: float) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Read events and give the text in them, and the pieces of tool calls. Raises CloudAnswerError."""
        texts: list[str] = []
        for data in events:
            if data == DONE:
                self.is_over = True
                break
            try:
                event = decode(data)
            except EventError as exc:
                raise CloudAnswerError(
                    endpoint=self._endpoint, problem=f"it sent {wire.shown(str(exc), self.key)}"
                ) from exc
            self.has_begun = True
            self._read(event, texts)
        calls, self._deltas = tuple(self._deltas), []
        said = [*texts, *(delta.name + delta.arguments for delta in calls)]
        if said:
            self._first_text_s = self._first_text_s if self.n_texts else now_s
            self._last_text_s = now_s
            self.n_texts += len(said)
            self._n_text_bytes += sum(len(text.encode("utf-8", "replace")) for text in said)
        return "".join(texts), calls

    def _read(self, event: Event, texts: list[str]) -> None:
        if event.error is not None:
            problem = f"it broke off with an error: {wire.shown(error_text(event.error), self.key)}"
            raise CloudAnswerError(endpoint=self._endpoint, problem=problem)
        if event.usage is not None:
            details = event.usage.prompt_tokens_details
            cached = (details.cached_tokens if details is not None else None) or 0
            self._usage = Usage(
                prompt_tokens=event.usage.prompt_tokens,
                completion_tokens=event.usage.completion_tokens,
                cached_tokens=min(cached, event.usage.prompt_tokens),
            )
        for choice in event.choices or ():
            # The first end counts: what a server says after it is not part of the answer.
            if choice.index != 0 or self.finish_reason is not None:
                continue
            if text := choice.said():
                texts.append(text)
            for delta in (choice.delta.tool_calls if choice.delta is not None else None) or ():
                self._read_call(delta)
            if choice.finish_reason is not None:
                self.finish_reason = self._ended(choice.finish_reason)

    def _read_call(self, delta: CallDelta) -> None:
        """Take a piece of a call. Raises CloudAnswerError for one that no client could put together."""
        called = delta.function or Called()
        at = len(self._call_ids) if delta.index is None else delta.index
        is_new = at == len(self._call_ids)
        if at > len(self._call_ids) or (is_new and not (delta.id and called.name)):
            raise CloudAnswerError(endpoint=self._endpoint, problem="it sent a piece of a tool call without beginning")
        if is_new:
            self._call_ids.append(delta.id or "")
        self._deltas.append(
            ToolCallDelta(
                index=at,
                id=(delta.id or "") if is_new else "",
                name=(called.name or "") if is_new else "",
                arguments=called.arguments or "",
            )
        )

    def _ended(self, reason: str) -> FinishReason:
        if reason in ("stop", "length") or (reason == "tool_calls" and self._call_ids):
            return cast("FinishReason", reason)
        if reason == "content_filter":
            raise CloudDeclinedError(endpoint=self._endpoint, problem="its filter cut the answer off")
        problem = f"its answer ended with {wire.shown(reason, self.key)!r}, which was not asked for"
        raise CloudDeclinedError(endpoint=self._endpoint, problem=problem)

    def last(self, request: GenerateRequest, n_sent_bytes: int) -> Chunk:
        """Give the answer's last chunk. Raises CloudAnswerError for one that was cut."""
        if self.finish_reason is None:
            raise CloudAnswerError(endpoint=self._endpoint, problem="the answer was cut off: it ended without an end")
        usage = self.usage(wire.estimated_tokens(request), request.max_tokens, n_sent_bytes)
        ttft_s = self._first_text_s - self.began_s
        timings = Timings(
            queue_s=0.0,
            prefill_s=ttft_s,
            prefill_tokens=usage.prompt_tokens - usage.cached_tokens,
            decode_s=self._last_text_s - self._first_text_s,
            decode_tokens=max(usage.completion_tokens - 1, 0),
            ttft_s=ttft_s,
        )
        return Chunk(text="", finish_reason=self.finish_reason, usage=usage, timings=timings)

    def usage(self, n_prompt_tokens: int, max_tokens: int | None, n_sent_bytes: int) -> Usage:
        """Give what the endpoint counted, or where it counted nothing this estimate of the prompt and the texts."""
        usage = self._usage or Usage(prompt_tokens=n_prompt_tokens, completion_tokens=self.n_texts, is_estimate=True)
        return self._believed(usage, max_tokens, n_sent_bytes)

    def _believed(self, usage: Usage, max_tokens: int | None, n_sent_bytes: int) -> Usage:
        """Bound what an endpoint says it counted by what can be: one such figure would else spend a day's budget."""
        most_out = self._n_text_bytes + _MAX_HIDDEN_TOKENS if max_tokens is None else max_tokens
        most_in = n_sent_bytes + _MAX_TEMPLATE_TOKENS
        if usage.completion_tokens <= most_out and usage.prompt_tokens <= most_in:
            return usage
        _log.warning(
            "cloud endpoint %s counted %d and %d tokens where at most %d and %d can be; it is believed as far as these",
            self._endpoint,
            usage.prompt_tokens,
            usage.completion_tokens,
            most_in,
            most_out,
        )
        n_prompt = min(usage.prompt_tokens, most_in)
        return replace(
            usage,
            prompt_tokens=n_prompt,
            completion_tokens=min(usage.completion_tokens, most_out),
            cached_tokens=min(usage.cached_tokens, n_prompt),
            is_estimate=True,
        )
