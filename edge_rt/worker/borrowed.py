"""Clients' connections that the front process has lent to this worker; api/loans.py says who may write when."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from edge_rt.tensor_types import Data
from edge_rt.worker.channel import SentReply, SentTensor


class Borrowed:
    """The connections by their numbers. Any thread may write."""

    def __init__(self) -> None:
        self._fds: dict[int, tuple[int, int]] = {}  # of the connection, which does not block, and its permit
        self._lock = threading.Lock()  # a descriptor that is written to must not be closed: its number is used again

    def add(self, number: int, fds: tuple[int, int]) -> None:
        self._fds[number] = fds

    def give_back(self, number: int) -> None:
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
                os.eventfd_read(permit)
            except BlockingIOError:
                return 0
            try:
                return os.writev(connection, (reply.head, *data))
            except OSError:
                os.eventfd_write(permit, 1)
                return 0
