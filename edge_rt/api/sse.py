"""Server-sent events and other streams, and work that stops when its client hangs up.

Raw ASGI: starlette's StreamingResponse and its exception wrappers cost a third more CPU per event, and these events
share two cores with the decoding worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final

import msgspec
from starlette.types import Receive, Send

from edge_rt.api import schemas

DONE: Final = b"data: [DONE]\n\n"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
JSON_LINES: Final = b"application/x-ndjson"


def event(value: msgspec.Struct) -> bytes:
    """Encode one event; JSON escapes line breaks, so one data line holds it."""
    return b"data: %b\n\n" % schemas.encode(value)


def error_event(body: bytes) -> bytes:
    """Encode the event that ends a stream early; [DONE] does not follow it."""
    return b"data: %b\n\n" % body


def named_event(name: str, value: msgspec.Struct) -> bytes:
    """Encode one event that has a name of its own."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), schemas.encode(value))


class EventSender:
    """Write events to one response.

    The response starts with the first event, so that an error before it is an ordinary HTTP error.

    headers  more of them, until then
    """

    def __init__(self, send: Send, content_type: bytes = EVENT_STREAM) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._send, self._content_type = send, content_type
        self._started = False

    async def put(self, events: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", self._content_type),
                (b"cache-control", b"no-cache"),
                *self.headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": more})


class HungUpError(Exception):
    """The client closed the connection before its answer was whole. Never leaves the API."""


class HangUps:
    """Who shall hear that a connection is lost. One for each connection, in the scope state of its requests."""

    def __init__(self) -> None:
        self._is_lost = False
        self._listeners: set[Callable[[], None]] = set()

    def add(self, listener: Callable[[], None]) -> None:
        """Call the listener once the connection is lost, at once if it is."""
        if self._is_lost:
            listener()
        else:
            self._listeners.add(listener)

    def remove(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def tell(self) -> None:
        self._is_lost = True
        while self._listeners:
            self._listeners.pop()()


class StopOnHangUp:
    """Cancel the body of an `async with` when the client disconnects, and raise HungUpError from it.

    The request's body must have been read. receive is called by this only until the block ends.

    hang_ups  tells of it without a task that waits for receive, which short requests feel; one of the two is needed
    """

    def __init__(self, receive: Receive | None, hang_ups: HangUps | None = None) -> None:
        self._receive = receive
        self._hang_ups = hang_ups
        self._watch: asyncio.Task[None] | None = None
        self._seen = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("StopOnHangUp needs a task to cancel")
        self._task = task
        if self._hang_ups is not None:
            self._hang_ups.add(self._stop)
        else:
            self._watch = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        assert self._receive is not None
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._stop()

    def _stop(self) -> None:
        self._seen = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hang_ups is not None:
            self._hang_ups.remove(self._stop)
        if self._watch is not None:
            self._watch.cancel()
        # Another cancellation (the server's) beside ours goes on as what it is.
        if self._seen and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise HungUpError from error
