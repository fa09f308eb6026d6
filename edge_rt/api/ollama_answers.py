"""Chunks → Ollama's answers: one JSON object a line, or one for all."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from edge_rt.api.outcome import Outcome
from edge_rt.api.schemas import WireEnergy, encode, wire_energy
from edge_rt.api.sse import JSON_LINES
from edge_rt.api.status import ErrorReply
from edge_rt.api.tools import is_object
from edge_rt.types import Chunk, TokenLogprob, ToolCall, Usage


class Function(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: Raw  # an object, where OpenAI has its text


class Called(msgspec.Struct, kw_only=True):
    id: str
    function: Function


class Message(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    tool_calls: list[Called] | UnsetType = UNSET


class Logprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Logprob] | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """One line of a stream, or a whole answer; response is of generate, message of chat. Durations in ns."""

    model: str
    created_at: datetime
    response: str | UnsetType = UNSET
    message: Message | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    energy: WireEnergy | UnsetType = UNSET  # edge_rt's own; absent where nothing was measured


class OneEmbedding(msgspec.Struct, kw_only=True):
    embedding: tuple[float, ...]


class Embeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[tuple[float, ...]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


NAMES: Final = {
    "max_tokens": "options.num_predict",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "speculative.n_max": "options.draft_num_predict",
    **{
        name: f"options.{name}"
        for name in (
            "frequency_penalty",
            "min_p",
            "presence_penalty",
            "repeat_last_n",
            "repeat_penalty",
            "seed",
            "stop",
            "temperature",
            "top_k",
            "top_p",
        )
    },
}


class TextWriter:
    """Writes what generate answers. model is what the request called it."""

    content_type = JSON_LINES
    names = NAMES

    def __init__(self, model: str) -> None:
        self._model, self._begun_s = model, time.monotonic()
        self._held: tuple[str, str, list[str]] | None = None  # a call that is not whole yet: id, name, arguments
        self._n_calls = 0

    def opening(self, usage: Usage | None) -> bytes:  # noqa: ARG002 - told at the end
        return b""

    def piece(self, chunk: Chunk) -> bytes:
        """Write a chunk's text and the calls that are whole with it: Ollama's are never in pieces."""
        calls = self._whole_calls(chunk)
        if not (chunk.text or chunk.logprobs or calls):
            return b""
        return self._line(self._said(chunk.text, calls, chunk.logprobs))

    def closing(self, outcome: Outcome) -> bytes:
        calls = [] if self._held is None else _objects([self._take()], self._n_calls)
        said = self._line(self._said("", calls, ())) if calls else b""
        return said + self._line(self._ended(self._said("", [], ()), outcome))

    def whole(self, outcome: Outcome) -> bytes:
        said = self._said(outcome.text, _objects(outcome.calls, 0), outcome.logprobs)
        return encode(self._ended(said, outcome))

    def failed(self, error: ErrorReply) -> bytes:
        return error_body(error) + b"\n"

    def said(self, text: str, calls: list[Called]) -> Line:  # noqa: ARG002 - a text has none
        """Give a line with nothing but what was said."""
        return Line(model=self._model, created_at=datetime.now(UTC), response=text, done=False)

    def _said(self, text: str, calls: list[Called], logprobs: Iterable[TokenLogprob]) -> Line:
        line = self.said(text, calls)
        if shown := [_logprob(token) for token in logprobs]:
            line.logprobs = shown
        return line

    def _line(self, line: Line) -> bytes:
        return encode(line) + b"\n"

    def _ended(self, line: Line, outcome: Outcome) -> Line:
        reason, usage, timings = outcome.end()
        line.done, line.done_reason = True, "stop" if reason == "tool_calls" else reason
        line.total_duration = _ns(time.monotonic() - self._begun_s)
        line.load_duration = _ns(timings.queue_s)  # the wait for a place and the model, as Ollama's
        line.prompt_eval_count = usage.prompt_tokens
        line.prompt_eval_duration = _ns(timings.prefill_s)
        line.eval_count = usage.completion_tokens
        line.eval_duration = _ns(timings.decode_s)
        line.energy = wire_energy(usage.energy, timings.prefill_tokens, timings.decode_tokens)
        return line

    def _whole_calls(self, chunk: Chunk) -> list[Called]:
        whole = []
        for delta in chunk.tool_calls:
            if delta.id:
                if self._held is not None:
                    whole.append(self._take())
                self._held = (delta.id, delta.name, [])
            assert self._held is not None
            self._held[2].append(delta.arguments)
        calls = _objects(whole, self._n_calls)
        self._n_calls += len(whole)
        return calls

    def _take(self) -> ToolCall:
        assert self._held is not None
        (call_id, name, arguments), self._held = self._held, None
        return ToolCall(id=call_id, name=name, arguments="".join(arguments))


class ChatWriter(TextWriter):
    """Writes what chat answers."""

    def said(self, text: str, calls: list[Called]) -> Line:
        message = Message(content=text, tool_calls=calls or UNSET)
        return Line(model=self._model, created_at=datetime.now(UTC), message=message, done=False)


def loaded(writer: TextWriter, *, load_s: float, reason: Literal["load", "unload"]) -> bytes:
    """Write the answer to a request without a prompt."""
    line = writer.said("", [])
    line.done, line.done_reason = True, reason
    line.total_duration = line.load_duration = _ns(load_s)
    return encode(line) + b"\n"


def error_body(error: ErrorReply) -> bytes:
    return msgspec.json.encode({"error": error.message})


def _objects(calls: Iterable[ToolCall], n_before: int) -> list[Called]:
    """Write calls. One that an answer's end cut off has no object to show, and done_reason says length."""
    found = []
    for index, call in enumerate(calls, n_before):
        if is_object(call.arguments):
            function = Function(index=index, name=call.name, arguments=Raw(call.arguments.encode()))
            found.append(Called(id=call.id, function=function))
    return found


def _logprob(token: TokenLogprob) -> Logprob:
    return Logprob(
        token=token.raw.decode(errors="replace"),
        logprob=token.logprob,
        bytes=list(token.raw),
        top_logprobs=[
            Logprob(token=raw.decode(errors="replace"), logprob=logprob, bytes=list(raw))
            for _, raw, logprob in token.top
        ]
        or UNSET,
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
