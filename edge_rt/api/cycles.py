"""Between uvicorn's protocol and the connection: heads that wait for their bodies, and requests on the short way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import ClassVar, Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from edge_rt.api.kserve_infer import Headers
from edge_rt.api.loans import Loan
from edge_rt.api.short_way import ShortRequest
from edge_rt.api.status import reply
from edge_rt.errors import EdgeRtError
from edge_rt.tensor_types import Data

_log = logging.getLogger("edge_rt.api")

_CONTINUE: Final = b"HTTP/1.1 100"
_JOINED_BYTES: Final = 64 * 1024  # of a body that is written together with its head


class HeadHolder:
    """What an answer is written to: its head waits for its body, so that both wake the client once.

    uvicorn writes them apart.
    """

    __slots__ = ("_head", "_is_past", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._is_past = False

    def write(self, data: bytes) -> None:
        if self._is_past or data.startswith(_CONTINUE):
            self._transport.write(data)
        elif not self._head:
            self._head = data
        elif len(data) <= _JOINED_BYTES:
            self._is_past = True
            self._transport.write(self._head + data)
        else:  # a copy would cost more
            self._flush()
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if not self._is_past:
            self._is_past = True
            self._transport.write(self._head)


def refuse(transport: asyncio.Transport, error: EdgeRtError) -> None:
    """Answer a connection whose requests are not even read, and close it."""
    answer = reply(error)
    headers = [
        *answer.headers,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(answer.body)),
        (b"connection", b"close"),
    ]
    lines = [STATUS_LINE[answer.status].removesuffix(b"\r\n"), *(b"%b: %b" % header for header in headers)]
    transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + answer.body)
    transport.close()


class _Connection(Protocol):
    """What a ShortCycle uses of its protocol; server.PeerProtocol is one."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    server_state: ServerState
    tasks: set[asyncio.Task[None]]

    def tell_date(self) -> None: ...

    def loan(self, model: str) -> Loan | None: ...

    def on_response_complete(self) -> None: ...


class _NoEvent:
    """Nobody waits for the events of the short way."""

    def set(self) -> None: ...


class ShortCycle:
    """A request on the short way, where HttpToolsProtocol looks for its own cycle; and what it is answered to."""

    __slots__ = (
        "_loan",
        "before",
        "disconnected",
        "head",
        "keep_alive",
        "more_body",
        "protocol",
        "request",
        "response_complete",
        "timer",
    )
    message_event: ClassVar = _NoEvent()

    def __init__(
        self, protocol: _Connection, request: ShortRequest, before: RequestResponseCycle | None, head: bytes
    ) -> None:
        self.protocol, self.request, self.before = protocol, request, before
        self.head = head  # that the parser has not seen, b"": it has
        self.keep_alive = self.more_body = True
        self.disconnected = self.response_complete = False
        self.timer: asyncio.TimerHandle | None = None
        self._loan: Loan | None = None

    def is_whole(self) -> None:
        self.more_body = False
        self.before = None  # which would keep the one before it, and so on
        self.stop_timer()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    # short_way.Connection

    def write_now(self, status: int, headers: Headers, parts: Sequence[Data]) -> bool:
        if self.protocol.flow.write_paused or len(parts) != 1 or len(parts[0]) > _JOINED_BYTES:
            return False
        if not self.disconnected:
            self.protocol.transport.write(b"".join((self.head_of(status, headers), parts[0])))
            self._is_complete()
        return True

    async def write(self, status: int, headers: Headers, parts: Sequence[Data]) -> None:
        if self.write_now(status, headers, parts):
            return
        for data in (self.head_of(status, headers), *parts):
            if self.protocol.flow.write_paused and not self.disconnected:
                await self.protocol.flow.drain()
            if self.disconnected:
                return
            self.protocol.transport.write(data)
        self._is_complete()

    def spawn(self, answering: Coroutine[None, None, None]) -> None:
        task = self.protocol.loop.create_task(self._run(answering))
        self.protocol.tasks.add(task)
        task.add_done_callback(self.protocol.tasks.discard)

    async def _run(self, answering: Coroutine[None, None, None]) -> None:
        try:
            await answering
        except BaseException:  # noqa: BLE001  as uvicorn does for the app; errors are answered before this
            _log.exception("an answer cannot be written")
        if not self.response_complete and not self.disconnected:
            self.protocol.transport.close()

    def loan(self, model: str) -> Loan | None:
        self._loan = self.protocol.loan(model) if self.keep_alive else None
        return self._loan

    def reclaim(self) -> bool:
        """Take the answer back if a worker has not begun to write it; False: it has, and has not told yet."""
        return self.response_complete or self._loan is None or self._loan.take_back()

    def take_back(self) -> bool:
        if self.reclaim():
            return True
        assert self._loan is not None
        if self._loan.is_written:
            self.written(b"")
        else:
            self.protocol.transport.abort()
        return False

    def is_answered(self) -> bool:
        return self.response_complete

    def shutdown(self) -> None:
        """Hear that this is the connection's last answer: one that a worker writes would not say so."""
        self.reclaim()

    def written(self, rest: bytes) -> None:
        assert self._loan is not None
        self._loan.written()
        if self.disconnected:
            return
        if rest:
            self.protocol.transport.write(rest)
        self._is_complete()

    def head_of(self, status: int, headers: Headers) -> bytes:
        """Write a response's head as uvicorn does."""
        self.protocol.tell_date()
        content = [STATUS_LINE[status]]
        for name, value in (*self.protocol.server_state.default_headers, *headers):
            content += (name, b": ", value, b"\r\n")
        content.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        return b"".join(content)

    def _is_complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self.protocol.transport.close()
        self.protocol.on_response_complete()
