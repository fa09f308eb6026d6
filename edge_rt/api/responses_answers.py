"""Chunks → OpenAI's responses: output items, and the numbered events of a stream that builds them up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from edge_rt.api.answers import chat_logprob, wire_origin
from edge_rt.api.outcome import Outcome
from edge_rt.api.responses_wire import ResponsesRequest
from edge_rt.api.schemas import ChatLogprob, WireEnergy, WireOrigin, encode, wire_energy
from edge_rt.api.sse import EVENT_STREAM, named_event
from edge_rt.api.status import ErrorReply
from edge_rt.api.tools import joined
from edge_rt.types import Chunk, GenerateRequest, Timings, TokenLogprob, ToolCallDelta, Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatLogprob]


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = OutputMessage | FunctionCall


class InputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int
    energy: WireEnergy | UnsetType = UNSET  # edge_rt's own; absent where nothing was measured


class Incomplete(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Failure(msgspec.Struct, kw_only=True):
    code: str
    message: str


class Reasoning(msgspec.Struct, kw_only=True):
    effort: None = None
    summary: None = None


class Response(msgspec.Struct, kw_only=True):
    """A response, as far as it has come. What the request asked for is given back with it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    model: str
    output: list[OutputItem]
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    text: Any
    tool_choice: Any
    tools: list[Any]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    background: Literal[False] = False
    previous_response_id: None = None
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    origin: WireOrigin | UnsetType = UNSET  # edge_rt's own


class Event(msgspec.Struct, kw_only=True):
    """One event of a stream; which fields it has its type says."""

    type: str
    sequence_number: int = 0
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class Items:
    """Builds a response's output from chunks, and tells each step as an event.

    Of its items only the last is open: a text ends where a call begins, and a call where the next one does.
    """

    def __init__(self, request_id: str) -> None:
        self.output: list[OutputItem] = []
        self._request_id = request_id
        self._is_open = False
        self._said: list[str] = []  # of the open item: its text or arguments, until it is closed

    def add(self, chunk: Chunk) -> Iterator[Event]:
        if chunk.text or chunk.logprobs:
            yield from self._add_text(chunk.text, chunk.logprobs)
        for delta in joined(chunk.tool_calls):
            yield from self._add_call(delta)

    def end(self, status: Status) -> Iterator[Event]:
        """Close the last item; an answer without any has an empty text."""
        if not self.output:
            yield from self._add_text("", ())
        yield from self._close(status)

    def cut(self) -> None:
        """Close the last item without a word: what it had come to belongs to a response that failed."""
        for _ in self._close("incomplete"):
            pass

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        if not (self._is_open and isinstance(self.output[-1], OutputMessage)):
            message = OutputMessage(id=self._id("msg"), status="in_progress", content=[])
            yield from self._open(message)
            part = OutputText(text="", logprobs=[])
            yield self._event("response.content_part.added", content_index=0, part=part)
            message.content.append(part)
        shown = [chat_logprob(token) for token in logprobs]
        self._said.append(text)
        self._last_message().content[0].logprobs += shown
        if text or shown:
            yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=shown)

    def _add_call(self, delta: ToolCallDelta) -> Iterator[Event]:
        if delta.id:
            call = FunctionCall(
                id=self._id("fc"), call_id=delta.id, name=delta.name, arguments="", status="in_progress"
            )
            yield from self._open(call)
        self._said.append(delta.arguments)
        if delta.arguments:
            yield self._event("response.function_call_arguments.delta", delta=delta.arguments)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self.output.append(item)
        self._is_open = True
        yield Event(type="response.output_item.added", output_index=len(self.output) - 1, item=item)

    def _close(self, status: Status) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item.status = status
        said, self._said = "".join(self._said), []
        if isinstance(item, FunctionCall):
            item.arguments = said
            yield self._event("response.function_call_arguments.done", arguments=item.arguments)
        else:
            part = item.content[0]
            part.text = said
            done = "response.output_text.done"
            yield self._event(done, content_index=0, text=part.text, logprobs=part.logprobs)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield Event(type="response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        return Event(type=kind, output_index=len(self.output) - 1, item_id=self.output[-1].id, **fields)

    def _last_message(self) -> OutputMessage:
        item = self.output[-1]
        assert isinstance(item, OutputMessage)
        return item

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id.removeprefix('resp_')}_{len(self.output)}"


NAMES: Final = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "messages[": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "tools[].function": "tools[]",
}


class ResponseWriter:
    """Writes the answer to one request; see outcome.Writer."""

    content_type = EVENT_STREAM
    names = NAMES

    def __init__(self, wire: ResponsesRequest, request: GenerateRequest) -> None:
        self._wire, self._request = wire, request
        self._created_at = int(time.time())
        self._items = Items(request.id)
        self._n_events = 0

    def opening(self, usage: Usage | None) -> bytes:  # noqa: ARG002 - told at the end
        begun = self._response("in_progress")
        return self._events(
            Event(type="response.created", response=begun), Event(type="response.in_progress", response=begun)
        )

    def piece(self, chunk: Chunk) -> bytes:
        return b"".join(self._events(event) for event in self._items.add(chunk))

    def closing(self, outcome: Outcome) -> bytes:
        response, events = self._ended(outcome)
        return events + self._events(Event(type=f"response.{response.status}", response=response))

    def whole(self, outcome: Outcome) -> bytes:
        deltas = [
            ToolCallDelta(index=i, id=call.id, name=call.name, arguments=call.arguments)
            for i, call in enumerate(outcome.calls)
        ]
        self.piece(Chunk(text=outcome.text, logprobs=tuple(outcome.logprobs), tool_calls=tuple(deltas)))
        return encode(self._ended(outcome)[0])

    def failed(self, error: ErrorReply) -> bytes:
        """Write the two events that end a stream early: what went wrong, and the response that it has become."""
        self._items.cut()
        response = self._response("failed")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response.error = Failure(code=code, message=error.message)
        return self._events(
            Event(type="error", code=error.code, message=error.message, param=None),
            Event(type="response.failed", response=response),
        )

    def _ended(self, outcome: Outcome) -> tuple[Response, bytes]:
        reason, usage, timings = outcome.end()
        status: Status = "incomplete" if reason == "length" else "completed"
        events = b"".join(self._events(event) for event in self._items.end(status))
        response = self._response(status)
        response.completed_at = int(time.time())
        response.incomplete_details = Incomplete() if reason == "length" else None
        response.usage = _usage(usage, timings)
        response.origin = wire_origin(outcome.origin)
        return response, events

    def _events(self, *events: Event) -> bytes:
        written = b""
        for event in events:
            event.sequence_number = self._n_events
            self._n_events += 1
            written += named_event(event.type, event)
        return written

    def _response(self, status: Status) -> Response:
        wire, request = self._wire, self._request
        return Response(
            id=request.id,
            created_at=self._created_at,
            status=status,
            model=request.model,
            output=self._items.output,
            instructions=wire.instructions,
            max_output_tokens=wire.max_output_tokens,
            max_tool_calls=wire.max_tool_calls,
            metadata=wire.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_logprobs=request.top_logprobs or 0,
            text={"format": _text_format(wire)},
            tool_choice=_tool_choice(request),
            tools=[
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": Raw(tool.parameters.encode()),
                    "strict": True,  # as it is
                }
                for tool in request.tools
            ],
            user=wire.user,
            safety_identifier=wire.safety_identifier,
            prompt_cache_key=wire.prompt_cache_key,
        )


def _text_format(wire: ResponsesRequest) -> Any:
    asked = wire.text.format if wire.text is not None else None
    if asked is None or asked.type != "json_schema":
        return {"type": "text" if asked is None else asked.type}
    return {
        "type": "json_schema",
        "name": asked.name or "",
        "description": asked.description,
        "schema": asked.schema,
        "strict": True,  # as it is
    }


def _tool_choice(request: GenerateRequest) -> Any:
    return {"type": "function", "name": request.tool_name} if request.tool_name else request.tool_choice


def _usage(usage: Usage, timings: Timings) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        energy=wire_energy(usage.energy, timings.prefill_tokens, timings.decode_tokens),
    )
