"""Chunks → Anthropic's messages: content blocks, and the events of a stream that builds them up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from edge_rt import logs
from edge_rt.api.answers import wire_origin
from edge_rt.api.outcome import Outcome
from edge_rt.api.schemas import WireEnergy, WireOrigin, encode, wire_energy
from edge_rt.api.sse import EVENT_STREAM, named_event
from edge_rt.api.status import ErrorReply
from edge_rt.api.tools import is_object, joined
from edge_rt.errors import ContextLengthError
from edge_rt.types import Chunk, GenerateRequest, ToolCallDelta, Usage

# Of a status; 4xx and 5xx that are not here are invalid_request_error and api_error.
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageUsage(msgspec.Struct, kw_only=True):
    """input_tokens are those that were computed; the ones that had been are told apart from them."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    energy: WireEnergy | UnsetType = UNSET  # edge_rt's own; absent where nothing was measured


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw


class AnswerMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUse]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    origin: WireOrigin | UnsetType = UNSET  # edge_rt's own


class Delta(msgspec.Struct, kw_only=True):
    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class Event(msgspec.Struct, kw_only=True):
    """One event of a stream; which fields it has its type says."""

    type: str
    message: AnswerMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: TextBlock | ToolUse | UnsetType = UNSET
    delta: Delta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class _Error(msgspec.Struct, kw_only=True):
    type: str
    message: str


class _ErrorBody(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: _Error
    request_id: str


NAMES: Final = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "messages[": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "tool_choice.function": "tool_choice",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


class MessageWriter:
    """Writes the answer to one request; see outcome.Writer."""

    content_type = EVENT_STREAM
    names = NAMES

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._n_blocks = 0
        self._open: Literal["", "text", "tool_use"] = ""  # the type of the block that is being written

    def opening(self, usage: Usage | None) -> bytes:
        counted = MessageUsage() if usage is None else _usage(usage)
        counted.output_tokens = 0
        message = self._message([], counted)
        return _written(Event(type="message_start", message=message)) + _written(Event(type="ping"))

    def piece(self, chunk: Chunk) -> bytes:
        return b"".join(map(_written, self._add(chunk)))

    def closing(self, outcome: Outcome) -> bytes:
        events = [] if self._n_blocks else list(self._begin("text", TextBlock(text="")))
        events += self._end_block()
        reason, stop_sequence = self._stop(outcome)
        delta = Delta(stop_reason=reason, stop_sequence=stop_sequence)
        events += [Event(type="message_delta", delta=delta, usage=_final_usage(outcome)), Event(type="message_stop")]
        return b"".join(map(_written, events))

    def whole(self, outcome: Outcome) -> bytes:
        content: list[TextBlock | ToolUse] = []
        if outcome.text or not outcome.calls:
            content.append(TextBlock(text=outcome.text))
        for call in outcome.calls:
            if not is_object(call.arguments):  # cut off, as stop_reason says
                continue
            content.append(ToolUse(id=call.id, name=call.name, input=Raw(call.arguments.encode())))
        message = self._message(content, _final_usage(outcome))
        message.stop_reason, message.stop_sequence = self._stop(outcome)
        message.origin = wire_origin(outcome.origin)
        return encode(message)

    def failed(self, error: ErrorReply) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error)

    def _add(self, chunk: Chunk) -> Iterator[Event]:
        if chunk.text:
            if self._open != "text":
                yield from self._begin("text", TextBlock(text=""))
            yield self._delta(Delta(type="text_delta", text=chunk.text))
        for call in joined(chunk.tool_calls):
            yield from self._add_call(call)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id:
            yield from self._begin("tool_use", ToolUse(id=call.id, name=call.name, input=Raw(b"{}")))
        if call.arguments:
            yield self._delta(Delta(type="input_json_delta", partial_json=call.arguments))

    def _begin(self, kind: Literal["text", "tool_use"], block: TextBlock | ToolUse) -> Iterator[Event]:
        yield from self._end_block()
        self._open = kind
        self._n_blocks += 1
        yield Event(type="content_block_start", index=self._n_blocks - 1, content_block=block)

    def _end_block(self) -> Iterator[Event]:
        if self._open:
            self._open = ""
            yield Event(type="content_block_stop", index=self._n_blocks - 1)

    def _delta(self, delta: Delta) -> Event:
        return Event(type="content_block_delta", index=self._n_blocks - 1, delta=delta)

    def _stop(self, outcome: Outcome) -> tuple[str, str | None]:
        """Say why the answer ended, and by which stop sequence."""
        reason, usage, _ = outcome.end()
        if reason == "tool_calls":
            return "tool_use", None
        if reason == "length":
            is_asked = usage.completion_tokens >= (self._request.max_tokens or 0)
            return ("max_tokens" if is_asked else "model_context_window_exceeded"), None
        return ("stop_sequence", outcome.stopped_by) if outcome.stopped_by else ("end_turn", None)

    def _message(self, content: list[TextBlock | ToolUse], usage: MessageUsage) -> AnswerMessage:
        return AnswerMessage(id=self._request.id, model=self._request.model, content=content, usage=usage)


def error_body(error: ErrorReply) -> bytes:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == ContextLengthError.code:  # Anthropic's words: at them its clients shorten a conversation
        message = (
            f"prompt is too long: {error.details['prompt_tokens']} tokens > {error.details['n_ctx']} maximum. {message}"
        )
    body = _ErrorBody(error=_Error(type=kind, message=message), request_id=logs.request_id.get())
    return encode(body)


def _written(event: Event) -> bytes:
    return named_event(event.type, event)


def _usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _final_usage(outcome: Outcome) -> MessageUsage:
    _, usage, timings = outcome.end()
    told = _usage(usage)
    told.energy = wire_energy(usage.energy, timings.prefill_tokens, timings.decode_tokens)
    return told
