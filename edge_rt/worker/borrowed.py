"""What the front process has lent to this worker: clients' connections to answer, and memory that bodies lie in.

api/loans.py says who may write when. The front process' side is lending.py.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

from edge_rt.tensor_types import PERMIT, WRITTEN, Data
from edge_rt.worker.channel import Infer, SentReply, SentTensor


class Borrowed:
    """Connections and memory by the numbers they were lent by. Any thread may write; the reader does all else."""

    def __init__(self) -> None:
        self._fds: dict[int, tuple[int, int]] = {}  # of the connection, which does not block, and its permit
        self._memories: dict[int, memoryview] = {}
        self._lock = threading.Lock()  # a descriptor that is written to must not be closed: its number is used again

    def add(self, number: int, fds: tuple[int, int]) -> None:
        self._fds[number] = fds

    def add_memory(self, number: int, fd: int) -> None:
        """Map memory, which cannot shrink. Raises OSError."""
        try:
            self._memories[number] = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def fetch(self, request: Infer) -> None:
        """Give a request what is not attached to it, but in memory that was lent."""
        if request.memory is not None:
            number, start = request.memory
            request.attached = self._memories[number][start:]

    def give_back(self, number: int) -> None:
        self._memories.pop(number, None)  # which is unmapped when nobody looks at it any more
        with self._lock:
            for fd in self._fds.pop(number, ()):
                os.close(fd)

    def write(self, reply: SentReply, outputs: tuple[SentTensor, ...], data: Sequence[Data]) -> int:
        """Write an answer to its client if it is the expected one and may be written; give how many bytes went out.

        The front process does the rest, also where the client is gone.
        """
        if outputs != reply.outputs:
            return 0
        with self._lock:
            if (fds := self._fds.get(reply.loan)) is None:
                return 0
            connection, permit = fds
            try:
                found = os.eventfd_read(permit)
            except BlockingIOError:
                return 0
            if not found & PERMIT:
                os.eventfd_write(permit, found)
                return 0
            try:
                n_written = os.writev(connection, (reply.head, *data))
            except OSError:
                os.eventfd_write(permit, PERMIT)
                return 0
            if n_written == len(reply.head) + sum(map(len, data)):
                os.eventfd_write(permit, WRITTEN)  # the word of it may be lost with this process
            return n_written
