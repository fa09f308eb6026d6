"""The worker's own end of its channel, blocking. asyncio, which the other end needs, stays out of the worker."""

from __future__ import annotations

import queue
import select
import socket
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

from edge_rt.tensor_types import Data
from edge_rt.worker.channel import FrameReader, FromWorker, ToWorker, encode

_CONTROL_BYTES: Final = socket.CMSG_SPACE(2 * 4)  # two descriptors


class WorkerChannel:
    """The worker's blocking end. One thread receives; any thread may send, and none of them blocks in it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        # A timeout of the socket object would bind the writer thread too, hence poll.
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._reader: FrameReader[ToWorker] = FrameReader(ToWorker)
        self._fds: deque[int] = deque()  # that have come, and whose message nobody has taken
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._n_queued = 0  # frames that the writer has or shall have; those sent at once come after them
        self._order = threading.Lock()
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)
        self._writer.start()

    def receive(self, timeout_s: float | None = None) -> list[ToWorker] | None:
        """Wait for messages; [] after timeout_s without one, None when the front process is gone."""
        reader = self._reader
        while True:
            try:
                if reader.is_in_long_frame:
                    n_bytes = self._sock.recv_into(reader.room(), 0, socket.MSG_WAITALL)  # the rest of it is on its way
                elif self._readable.poll(None if timeout_s is None else timeout_s * 1000):
                    n_bytes = self._receive(reader.room())
                else:
                    return []
            except OSError:
                return None
            if not n_bytes:
                return None
            if messages := reader.received(n_bytes):
                return messages

    def _receive(self, room: memoryview) -> int:
        n_bytes, control, _, _ = self._sock.recvmsg_into([room], _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(array("i", data))
        return n_bytes

    def take_fd(self) -> int:
        """Give the next descriptor of those that came with a message, for whoever takes it."""
        return self._fds.popleft()

    def is_quiet(self) -> bool:
        """Say whether nothing has come that receive has not given; for the thread that receives."""
        return self._reader.is_empty and not self._readable.poll(0)

    def send(self, message: FromWorker, attached: Sequence[Data] = (), *, at_once: bool = False) -> None:
        """Queue a message for the writer thread. Raises ChannelError if it is too large.

        attached  its tensors' bytes
        at_once   write it here as far as the socket takes it, if nothing is queued: one thread less has to wake up, but
                  messages of one moment are not joined
        """
        parts: list[Data | bytearray] = [encode(message, attached), *attached]
        with self._order:
            n_sent = self._sent_at_once(parts) if at_once and not self._n_queued else 0
            if n_sent < sum(map(len, parts)):
                self._n_queued += 1
                self._outbox.put(b"".join(parts)[n_sent:])

    def flush(self) -> None:
        """Write out what is queued and end the writer; nothing can be sent after it."""
        self._outbox.put(None)
        self._writer.join()

    def _sent_at_once(self, parts: Sequence[Data | bytearray]) -> int:
        """Give how many bytes the socket took; the writer meets an error again."""
        try:
            return self._sock.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def _write(self) -> None:
        closing = False
        while not closing:
            frames = [self._outbox.get()]
            while not self._outbox.empty():
                frames.append(self._outbox.get())
            closing = None in frames
            try:
                self._sock.sendall(b"".join(frame for frame in frames if frame is not None))
            except OSError:
                return  # the front process is gone; receive sees it too and ends this one
            with self._order:
                self._n_queued -= sum(frame is not None for frame in frames)
