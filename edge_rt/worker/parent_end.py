"""The front process' end of a worker's channel, on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

from edge_rt.tensor_types import Data
from edge_rt.worker.channel import ChannelError, FrameReader, FromWorker, ToWorker, encode


class ParentChannel(asyncio.BufferedProtocol):
    """The front process' end. Callbacks run on the event loop and must not block."""

    def __init__(self, on_message: Callable[[FromWorker], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader: FrameReader[FromWorker] = FrameReader(FromWorker)
        self._transport: asyncio.WriteTransport | None = None
        self._sock: socket.socket
        self._problem = ""

    async def connect(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        sock.setblocking(False)
        self._sock = sock
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def send(self, message: ToWorker, attached: Sequence[Data] = ()) -> None:
        """Queue a message; one to a lost worker is dropped, on_lost tells of it. Raises ChannelError if too large.

        attached  its tensors' bytes; they may be sent when the call has ended, and must not change
        """
        frame = encode(message, attached)
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not attached:
            transport.write(frame)
            return
        parts = [memoryview(part) for part in (frame, *attached)]
        n_sent = 0
        if not transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # the transport meets it again
                n_sent = self._sock.sendmsg(parts)
        for part in parts:
            if n_sent < len(part):
                transport.write(part[n_sent:])
            n_sent = max(0, n_sent - len(part))

    def send_fds(self, message: ToWorker, fds: Sequence[int]) -> bool:
        """Send a message and descriptors with it. False: it cannot be sent at once, or not these."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        frame = encode(message)
        try:
            n_sent = socket.send_fds(self._sock, [frame], list(fds))
        except OSError:
            return False
        if n_sent < len(frame):
            transport.write(frame[n_sent:])
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            messages = self._reader.received(nbytes)
        except ChannelError as exc:
            self._problem = str(exc)
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._problem or (str(exc) if exc is not None else "it closed its channel"))
