"""Clients that leave while nothing is read from them: behind requests that wait for the one ahead, or a body too long.

Reading would tell it by an end of the stream, but only behind everything that was sent. The kernel says it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

_LEFT: Final = select.EPOLLRDHUP | select.EPOLLONESHOT  # an error and the end of both directions are told unasked
_MAX_EVENTS: Final = 64


class Departures:
    """Connections that wait to hear of it; one for a server."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._left: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, left: Callable[[], None]) -> None:
        """Call left once the client at the other end of a socket sends nothing more. Forget it before it is closed."""
        if not self._left:
            asyncio.get_running_loop().add_reader(self._poll.fileno(), self._tell)
        self._left[fd] = left
        self._poll.register(fd, _LEFT)

    def forget(self, fd: int) -> None:
        if self._left.pop(fd, None) is None:
            return
        with contextlib.suppress(OSError):  # closed already, which ends it too
            self._poll.unregister(fd)
        if not self._left:
            asyncio.get_running_loop().remove_reader(self._poll.fileno())

    def _tell(self) -> None:
        for fd, _ in self._poll.poll(0, _MAX_EVENTS):
            if (left := self._left.get(fd)) is not None:
                left()


class WatchedFlow(FlowControl):
    """uvicorn's flow control that hears of a client that leaves while reading is paused."""

    def __init__(self, transport: asyncio.Transport, departures: Departures) -> None:
        super().__init__(transport)
        self._departures = departures
        self._fd: int = transport.get_extra_info("socket").fileno()

    def pause_reading(self) -> None:
        if not self.read_paused and not self._transport.is_closing():
            self._departures.watch(self._fd, self._transport.abort)
        super().pause_reading()

    def resume_reading(self) -> None:
        self._departures.forget(self._fd)
        super().resume_reading()

    def lost(self) -> None:
        """Hear that the connection is gone."""
        self._departures.forget(self._fd)
