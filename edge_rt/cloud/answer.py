"""What has come of one answer: texts, the first end, usage and times."""

from __future__ import annotations

from typing import cast

from edge_rt.cloud import wire
from edge_rt.cloud.events import DONE, Event, EventError, decode, error_text
from edge_rt.errors import CloudAnswerError
from edge_rt.types import Chunk, FinishReason, GenerateRequest, Timings, Usage


class Answer:
    """One answer being read. Errors name the endpoint."""

    def __init__(self, endpoint: str, began_s: float) -> None:
        self.began_s = began_s
        self.has_begun = False  # an event has come
        self.is_over = False  # nothing more is wanted
        self.finish_reason: FinishReason | None = None
        self.n_texts = 0
        self._endpoint = endpoint
        self._usage: Usage | None = None
        self._first_text_s = self._last_text_s = began_s

    def take(self, events: list[bytes], now_s: float) -> str:
        """Read events and give the text in them. Raises CloudAnswerError."""
        texts: list[str] = []
        for data in events:
            if data == DONE:
                self.is_over = True
                self.finish_reason = self.finish_reason or "stop"
                break
            try:
                event = decode(data)
            except EventError as exc:
                raise CloudAnswerError(endpoint=self._endpoint, problem=f"it sent {exc}") from exc
            self.has_begun = True
            self._read(event, texts)
        if texts:
            self._first_text_s = self._first_text_s if self.n_texts else now_s
            self._last_text_s = now_s
            self.n_texts += len(texts)
        return "".join(texts)

    def _read(self, event: Event, texts: list[str]) -> None:
        if event.error is not None:
            problem = f"it broke off with an error: {wire.shown(error_text(event.error), None)}"
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
            if choice.finish_reason is not None:
                self.finish_reason = self._ended(choice.finish_reason)

    def _ended(self, reason: str) -> FinishReason:
        if reason in ("stop", "length"):
            return cast("FinishReason", reason)
        if reason == "content_filter":
            raise CloudAnswerError(endpoint=self._endpoint, problem="its filter cut the answer off")
        problem = f"its answer ended with {wire.shown(reason, None)!r}, which was not asked for"
        raise CloudAnswerError(endpoint=self._endpoint, problem=problem)

    def last(self, request: GenerateRequest) -> Chunk:
        """Give the answer's last chunk. Raises CloudAnswerError for one that was cut."""
        if self.finish_reason is None:
            raise CloudAnswerError(endpoint=self._endpoint, problem="the answer was cut off: it ended without an end")
        usage = self._usage or Usage(
            prompt_tokens=wire.estimated_tokens(request), completion_tokens=self.n_texts, is_estimate=True
        )
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
