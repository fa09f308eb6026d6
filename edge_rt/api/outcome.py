"""Answering in the shape of another protocol: chunks are gathered, and a Writer says how they look on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_rt.api.answers import origin_headers
from edge_rt.api.choices import ending
from edge_rt.api.context import Api
from edge_rt.api.fields import named_as
from edge_rt.api.sse import EventSender, StopOnHangUp
from edge_rt.api.status import ErrorReply
from edge_rt.types import Chunk, FinishReason, GenerateRequest, Origin, Timings, TokenLogprob, ToolCall, Usage


class Outcome:
    """What an answer has come to so far."""

    def __init__(self) -> None:
        self.logprobs: list[TokenLogprob] = []
        self.origin: Origin | None = None
        self._texts: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}  # by index: id, name, pieces of the arguments
        self._last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        self.origin = chunk.origin or self.origin
        self._texts.append(chunk.text)
        self.logprobs.extend(chunk.logprobs)
        for delta in chunk.tool_calls:
            call = self._calls.setdefault(delta.index, (delta.id, delta.name, []))
            call[2].append(delta.arguments)
        self._last = chunk

    @property
    def is_empty(self) -> bool:
        """Say whether no chunk has come yet."""
        return self._last is None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def stopped_by(self) -> str:
        """Give the stop string that ended the answer, "" if none did."""
        return "" if self._last is None else self._last.stopped_by

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(id=id_, name=name, arguments="".join(said)) for id_, name, said in self._calls.values())

    def end(self) -> tuple[FinishReason, Usage, Timings]:
        """Tell how the answer ended. Raises BackendStepError if it just broke off."""
        return ending(self._last)


class Writer(Protocol):
    """How a protocol writes one answer: as a stream's opening, pieces and closing, or whole.

    piece    may be b"" where there is nothing to say
    opening  usage is the prompt's, None where nothing was counted before the answer, as a cloud does
    closing  comes after the pieces of all chunks
    failed   ends a stream that breaks off
    names    what the protocol calls the fields that errors of runtime and engine name
    """

    @property
    def content_type(self) -> bytes:
        """Give the stream's."""
        ...

    @property
    def names(self) -> Mapping[str, str]: ...

    def opening(self, usage: Usage | None) -> bytes: ...

    def piece(self, chunk: Chunk) -> bytes: ...

    def closing(self, outcome: Outcome) -> bytes: ...

    def whole(self, outcome: Outcome) -> bytes: ...

    def failed(self, error: ErrorReply) -> bytes: ...


class Written:
    """Answer one request by a writer: an ASGI app. A client that hangs up stops the work.

    begun  is called when the first chunk has come: a model that answers is in memory then
    """

    def __init__(
        self, api: Api, request: GenerateRequest, writer: Writer, *, begun: Callable[[], None] = lambda: None
    ) -> None:
        self._api, self._request, self._writer, self._begun = api, request, writer, begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with named_as(self._writer.names):
            if self._request.stream:
                scope["state"]["stream_error"] = self._writer.failed
                await self._stream(receive, EventSender(send, self._writer.content_type))
            else:
                await (await self._whole(receive))(scope, receive, send)

    async def _whole(self, receive: Receive) -> Response:
        outcome = Outcome()
        async with StopOnHangUp(receive), aclosing(self._api.runtime.generate(self._request)) as chunks:
            async for chunk in chunks:
                self._take(chunk, outcome)
        outcome.end()
        answer = Response(self._writer.whole(outcome), media_type="application/json")
        answer.raw_headers += origin_headers(outcome.origin)
        return answer

    async def _stream(self, receive: Receive, sender: EventSender) -> None:
        outcome, events = Outcome(), b""
        async with StopOnHangUp(receive), aclosing(self._api.runtime.generate(self._request)) as chunks:
            async for chunk in chunks:
                if outcome.is_empty:
                    events = self._writer.opening(chunk.usage)
                self._take(chunk, outcome)
                if chunk.origin is not None:
                    sender.headers = origin_headers(chunk.origin)
                events += self._writer.piece(chunk)
                if events and chunk.finish_reason is None:  # the end leaves in one write, when the engine has let go
                    await sender.put(events)
                    events = b""
        outcome.end()
        await sender.put(events + self._writer.closing(outcome), more=False)

    def _take(self, chunk: Chunk, outcome: Outcome) -> None:
        if outcome.is_empty:
            self._begun()
        outcome.add(chunk)
