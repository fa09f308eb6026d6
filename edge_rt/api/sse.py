"""Server-sent events, and work that stops when its client hangs up.

Raw ASGI: starlette's StreamingResponse and its exception wrappers cost a third more CPU per event, and these events
share two cores with the decoding worker.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

import msgspec
from starlette.types import Receive, Send

from edge_rt.api import schemas

DONE: Final = b"data: [DONE]\n\n"


def event(value: msgspec.Struct) -> bytes:
    """Encode one event; JSON escapes line breaks, so one data line holds it."""
    return b"data: %b\n\n" % schemas.encode(value)


def error_event(body: bytes) -> bytes:
    """Encode the event that ends a stream early; [DONE] does not follow it."""
    return b"data: %b\n\n" % body


class EventSender:
    """Write events to one response.

    The response starts with the first event, so that an error before it is an ordinary HTTP error.

    headers  more of them, until then
    """

    def __init__(self, send: Send) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._send = send
        self._started = False

    async def put(self, events: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                *self.headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": more})


class HungUpError(Exception):
    """The client closed the connection before its answer was whole. Never leaves the API."""


class StopOnHangUp:
    """Cancel the body of an `async with` when the client disconnects, and raise HungUpError from it.

    The request's body must have been read. receive is called by this only until the block ends.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._seen = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("StopOnHangUp needs a task to cancel")
        self._task = task
        self._watch = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._seen = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.cancel()
        # Another cancellation (the server's) beside ours goes on as what it is.
        if self._seen and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise HungUpError from error
