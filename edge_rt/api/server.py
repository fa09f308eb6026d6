"""uvicorn fitted for a daemon: peer credentials, deadlines on request heads, no idle wake-ups, a bounded shutdown.

httptools instead of uvicorn's default h11: half the CPU per event of a stream, a third per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import ClassVar, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge_rt.api.callers import Peer

MAX_HEAD_BYTES: Final = 64 * 1024
_KEEP_ALIVE_S: Final = 75
_LAST_WORD_S: Final = 0.2


class PeerProtocol(HttpToolsProtocol):
    """One connection. Puts its Peer into every request's scope state.

    head_timeout_s  for a request's line and headers, counted from the connection or from its first byte
    """

    head_timeout_s: ClassVar[float] = 30.0
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, "peer": Peer.of(transport.get_extra_info("socket"))}
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_between_requests():
            self._stop_head_timer()
            self._head_bytes = 0
            return
        # What came belongs to a head that is not whole yet.
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
        elif self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        # uvicorn's own main loop does this ten times a second, also when nobody asks.
        now_s = int(time.time())
        if self.server_state.date_s != now_s:  # type: ignore[attr-defined]
            self.server_state.date_s = now_s  # type: ignore[attr-defined]
            self.server_state.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: uvicorn would recommend a package that this API has no use for."""

    def _is_between_requests(self) -> bool:
        # None before the first request, whatever uvicorn's annotation says
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if self._is_between_requests():
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class Server(uvicorn.Server):
    """Serve an app on sockets that are bound already, until stop is called. Signals are the daemon's."""

    def __init__(self, app: ASGIApp, *, protocol: type[PeerProtocol] = PeerProtocol) -> None:
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
        self.ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._grace_s = 0.0

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
            connection.transport.abort()
