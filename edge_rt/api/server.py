"""uvicorn fitted for a daemon: peer credentials, bounds on what clients hold, no idle wake-ups, a bounded shutdown.

httptools instead of uvicorn's default h11: half the CPU per event of a stream, a third per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import socket
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import ClassVar, Final, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from edge_rt.api.callers import Peer
from edge_rt.api.cycles import HeadHolder, ShortCycle, refuse
from edge_rt.api.departures import Departures, WatchedFlow
from edge_rt.api.loans import Loan, Loans
from edge_rt.api.read_buffers import READ_BYTES, Buffer, LentBuffers, ReadBuffers
from edge_rt.api.rest import Rest
from edge_rt.api.short_way import ShortRequest, ShortWay
from edge_rt.api.sse import HangUps
from edge_rt.errors import OverloadedError
from edge_rt.tensor_types import Data

_log = logging.getLogger("edge_rt.api")

MAX_HEAD_BYTES: Final = 64 * 1024
_KEEP_ALIVE_S: Final = 75
_LAST_WORD_S: Final = 0.2
_HEAD_END: Final = b"\r\n\r\n"


class PeerProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection. Puts its Peer into every request's scope state.

    head_timeout_s  for a request's line and headers, counted from the connection or from its first byte
    send_timeout_s  for a client to read on once its socket and our buffer are full
    whole_s         for a body on the short way; one that takes longer goes the long way, whose limits count
    """

    head_timeout_s: ClassVar[float] = 30.0
    send_timeout_s: ClassVar[float] = 30.0
    whole_s: ClassVar[float] = 1.0
    idle_since_s = 0.0
    _unparsed_bytes = 0
    _has_moved = False
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _is_head_alone = False  # given to the parser
    _is_in_message = False  # the parser
    _arriving: ShortCycle | None = None  # whose body is not whole
    _loan: Loan | None = None
    _early: Buffer | None = None  # what has come before the word of an answer
    _n_early = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._ahead: list[RequestResponseCycle] = []  # not answered yet, of which uvicorn only knows the last
        self._hang_ups = HangUps()
        self._buffers: ReadBuffers = self.server_state.buffers  # type: ignore[attr-defined]
        self._peer = Peer.of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "peer": self._peer, "hang_ups": self._hang_ups}
        super().connection_made(transport)
        self.flow = WatchedFlow(transport, self.server_state.departures)  # type: ignore[attr-defined]
        self.idle_since_s = self.loop.time()
        self._await_head()
        limit: int = self.server_state.max_connections  # type: ignore[attr-defined]
        if len(self.connections) > limit:
            self._make_room(limit)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        if (cycle := self._arriving) is not None:
            self._arriving = None
            cycle.is_whole()
            cycle.request.hung_up()
        for ahead in self._ahead:
            ahead.disconnected = True
        cast("WatchedFlow", self.flow).lost()
        if self._early is not None:
            self._buffers.use(self._early)
            self._early = None
        if self._loan is not None:
            self._loan.close()
            with contextlib.suppress(OSError):  # the client may have ended it
                self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # also where workers have copies
        self._hang_ups.tell()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview | bytearray | mmap.mmap:  # noqa: ARG002 - the protocol's
        if self._arriving is not None:
            return self._arriving.request.room()
        if self._early is not None:
            return memoryview(self._early.memory)[self._n_early :]
        return self._buffers.current.memory

    def buffer_updated(self, nbytes: int) -> None:
        if self._arriving is not None:
            self._take_body(nbytes)
            return
        buffers = self._buffers
        if self._early is None and isinstance(self.cycle, ShortCycle) and not self.cycle.reclaim():
            self._early = buffers.take()  # a worker has answered, and the word of it comes in a moment
        if self._early is not None:
            self._n_early += nbytes
            if self._n_early == READ_BYTES:
                self.flow.pause_reading()
            return
        data = memoryview(buffers.current.memory)[:nbytes]
        end = buffers.current.memory.find(_HEAD_END, 0, nbytes) + len(_HEAD_END) if self.is_between_requests() else 0
        if end < len(_HEAD_END):
            self.data_received(data)
            return
        self._take_head(bytes(data[:end]))  # alone: the parser would copy a body
        if (cycle := self._arriving) is not None:
            n_bytes = cycle.request.begin_body(buffers, end, nbytes - end)
            self._take_body(n_bytes)
            end += n_bytes
        if end < nbytes and not self.transport.is_closing() and not self.parser.should_upgrade():
            self.data_received(data[end:])

    def _take_head(self, head: bytes) -> None:
        """Take what ends as a head does. The parser does not see a request whose whole head has come before."""
        way: ShortWay | None = self.server_state.short_way  # type: ignore[attr-defined]
        is_whole = not self._is_in_message and not self._unparsed_bytes
        if way is not None and is_whole and (request := way.begin_again(head, self._peer, self._hang_ups)) is not None:
            self._stop_head_timer()
            self._begin_short(request, head)
            return
        self._is_head_alone = True
        self.data_received(head)
        self._is_head_alone = False
        if way is not None and is_whole and self._arriving is not None:
            way.remember(head)

    def _begin_short(self, request: ShortRequest, head: bytes) -> None:
        self._arriving = ShortCycle(self, request, self.cycle, head)
        self.cycle = cast("RequestResponseCycle", self._arriving)

    def data_received(self, data: Data) -> None:
        self._has_moved = False
        super().data_received(data)  # type: ignore[arg-type]
        # The parser keeps what belongs to a head, or to the trailers behind a body, until that is whole.
        self._unparsed_bytes = 0 if self._has_moved else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES and self._is_in_message:  # else nobody keeps it
            self.transport.abort()
        elif not self.is_between_requests():
            self._stop_head_timer()
        elif self._head_timer is None:
            self._await_head()

    def _take_body(self, n_bytes: int) -> None:
        """Take what has come of a body on the short way."""
        cycle = self._arriving
        assert cycle is not None
        if not cycle.request.received(n_bytes):
            self._go_the_long_way(n_bytes)
        elif cycle.request.is_whole():
            self._arriving = None
            cycle.is_whole()
            if not cycle.head:
                self._make_parser()  # the old one waits for the body
            cycle.request.answer(cycle)
        elif cycle.timer is None:
            cycle.timer = self.loop.call_later(self.whole_s, self._go_the_long_way)

    def _make_parser(self) -> None:
        self._is_in_message = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def on_body(self, body: bytes) -> None:
        if self._arriving is not None:  # a head that ends in another way than is looked for
            self._go_the_long_way()
        self._has_moved = not self.cycle.response_complete
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._is_in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._is_in_message = False
        super().on_message_complete()

    def tell_date(self) -> None:
        """Set the date that answers bear. uvicorn's own main loop does it ten times a second, also when nobody asks."""
        now_s = int(time.time())
        if self.server_state.date_s != now_s:  # type: ignore[attr-defined]
            self.server_state.date_s = now_s  # type: ignore[attr-defined]
            self.server_state.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]

    def on_headers_complete(self) -> None:
        self.tell_date()
        self._has_moved = True
        if (request := self._short_request()) is not None:
            self._begin_short(request, b"")
            return
        self._begin_cycle()

    def _short_request(self) -> ShortRequest | None:
        way: ShortWay | None = self.server_state.short_way  # type: ignore[attr-defined]
        if (
            way is None
            or not self._is_head_alone
            or not self.is_between_requests()
            or self.parser.get_method() != b"POST"
        ):
            return None
        if self.parser.get_http_version() != "1.1" or not self.parser.should_keep_alive():
            return None
        return way.begin(self.url, self.headers, self._peer, self._hang_ups)

    def _begin_cycle(self) -> None:
        self._buffers = self.server_state.buffers  # type: ignore[attr-defined]  # what is read there is nobody else's
        before = self.cycle
        if not self.is_between_requests():
            self._ahead.append(before)
        super().on_headers_complete()
        if self.cycle is not before and self.scope["method"] != "HEAD":  # whose answer is a head only
            self.cycle.transport = cast("asyncio.Transport", HeadHolder(self.transport))

    def on_response_complete(self) -> None:
        """Go on as uvicorn does, but leave the timer of an idle connection alone: it would be set for each request."""
        self.server_state.total_requests += 1
        self.server_state.rest.answered()  # type: ignore[attr-defined]
        self.idle_since_s = self.loop.time()
        self._ahead = [cycle for cycle in self._ahead if not cycle.response_complete]
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._early is not None:
            self.loop.call_soon(self._take_early)
        elif self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self._idle)

    def _take_early(self) -> None:
        if (buffer := self._early) is not None:
            n_bytes, self._early, self._n_early = self._n_early, None, 0
            self._buffers.use(buffer)
            if not self.transport.is_closing():
                self.buffer_updated(n_bytes)

    def _unset_keepalive_if_required(self) -> None:
        """Say nothing to the timer: see _idle."""

    def _idle(self) -> None:
        """Close a connection that nothing has come over since its last answer."""
        self.timeout_keep_alive_task = None
        if self.transport.is_closing() or not self.is_between_requests() or self._unparsed_bytes:
            return  # the end of the next answer sets the timer again
        due_at_s = self.idle_since_s + self.timeout_keep_alive
        if self.loop.time() < due_at_s:
            self.timeout_keep_alive_task = self.loop.call_at(due_at_s, self._idle)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.send_timeout_s, self._send_late)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: uvicorn would recommend a package that this API has no use for."""

    def is_between_requests(self) -> bool:
        # None before the first request, whatever uvicorn's annotation says
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _go_the_long_way(self, n_more: int = 0) -> None:
        """Let uvicorn and the app have a request whose body is not whole; n_more bytes of it have not been counted."""
        cycle = self._arriving
        assert cycle is not None
        body = cycle.request.give_up(n_more)
        self._arriving = None
        cycle.stop_timer()
        self.cycle = cast("RequestResponseCycle", cycle.before)
        if cycle.head:
            self.data_received(cycle.head)
        else:
            self._begin_cycle()
        if not cycle.keep_alive:  # a shutdown has begun since
            self.cycle.keep_alive = False
        if body:
            self.data_received(body)

    def loan(self, model: str) -> Loan | None:
        """Give the connection to be lent; None: it cannot be, or what was written before is still here."""
        if self.transport.get_write_buffer_size():
            return None
        if self._loan is None:
            self._loan = self.server_state.loans.make(self.transport.get_extra_info("socket"))  # type: ignore[attr-defined]
        if self._loan is not None:
            self._buffers = self.server_state.lent_buffers.of(model)  # type: ignore[attr-defined]
        return self._loan

    def shutdown(self) -> None:
        super().shutdown()
        if isinstance(self.cycle, ShortCycle):
            self.cycle.shutdown()

    def cut_off(self) -> None:
        """End what is computed without a task, in a shutdown that cannot wait any longer."""
        for cycle in (*self._ahead, self.cycle):
            if isinstance(cycle, ShortCycle):
                cycle.request.cut_off()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if self.is_between_requests():
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _send_late(self) -> None:
        # A client that does not read its answer would hold a place among its model's running requests for ever.
        _log.warning("a client did not read its answer for %g s and is cut off", self.send_timeout_s)
        self.transport.abort()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _make_room(self, limit: int) -> None:
        """Close a connection that is not being answered: an idle one before one whose request is not whole.

        So clients that only sit there cannot keep out those that ask, or a health probe.
        """
        others = [c for c in self.connections if isinstance(c, PeerProtocol) and c is not self and c.is_sheddable()]
        if others:
            min(others, key=lambda c: (not c.is_between_requests(), c.idle_since_s)).transport.abort()
            return
        refuse(self.transport, OverloadedError(resource="connections", limit=limit, setting="server.max_connections"))

    def is_sheddable(self) -> bool:
        return not self.transport.is_closing() and (self.is_between_requests() or self.cycle.more_body)


class Server(uvicorn.Server):
    """Serve an app on sockets that are bound already, until stop is called. Signals are the daemon's.

    short_way  for the requests that it takes
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int = 512,
        protocol: type[PeerProtocol] = PeerProtocol,
        short_way: ShortWay | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self.server_state.date_s = 0  # type: ignore[attr-defined]
        self.server_state.max_connections = max_connections  # type: ignore[attr-defined]
        self.server_state.short_way = short_way  # type: ignore[attr-defined]
        self.server_state.buffers = ReadBuffers()  # type: ignore[attr-defined]
        self.server_state.lent_buffers = LentBuffers()  # type: ignore[attr-defined]
        self.server_state.loans = Loans()  # type: ignore[attr-defined]
        self.server_state.departures = Departures()  # type: ignore[attr-defined]
        self.server_state.rest = Rest()  # type: ignore[attr-defined]
        self.ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._grace_s = 0.0

    def use(self, app: ASGIApp, short_way: ShortWay | None) -> None:
        """Let another app answer all requests from now on; those that have begun are answered by the one before."""
        self.config.loaded_app = app
        self.server_state.short_way = short_way  # type: ignore[attr-defined]
        for connection in self.server_state.connections:
            cast("HttpToolsProtocol", connection).app = app

    def stop(self, grace_s: float) -> None:
        """Close the sockets and idle connections now, the others when they have answered or after grace_s."""
        self._grace_s = grace_s
        self._stop.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        self.ready.set()
        await self._stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        for sock in sockets or ():
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        due_at_s = loop.time() + self._grace_s
        if tasks := list(self.server_state.tasks):
            _, late = await asyncio.wait(tasks, timeout=self._grace_s)
            for task in late:
                task.cancel()  # the boundary answers what it can
            if late:
                await asyncio.wait(late, timeout=_LAST_WORD_S)
        # Answers may still be on their way to clients that read slowly; uvicorn closes each connection behind its own.
        while self.server_state.connections and loop.time() < due_at_s:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            if isinstance(connection, PeerProtocol):
                connection.cut_off()
        if tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=_LAST_WORD_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
