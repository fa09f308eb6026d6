"""A client's connection, lent to workers: one answer at a time may be written by the worker that computes it.

The front process and the worker would else both wake up for an answer that the worker could have written at once. An
eventfd(2) beside the connection decides who writes: it holds one permit while an answer is lent out, and whoever takes
it has the connection. So the front process can take an answer back at any time, and knows of a worker that has died
whether the client has all of it, or may have seen a part.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Final

from edge_rt.tensor_types import PERMIT

MAX_LOANS: Final = 64  # at a time: each takes a descriptor, which another connection may need


class Loan:
    """One connection. Its descriptors stay the owner's; close it before the connection is."""

    __slots__ = ("_borrowers", "_closed", "_is_out", "_permit", "_sock", "is_written")

    def __init__(self, sock: socket.socket, closed: Callable[[], None]) -> None:
        """sock must not block. Raises OSError where there are no more descriptors."""
        self._sock, self._closed = sock, closed
        self._permit = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_out = False
        self.is_written = False  # the answer that is out, all of it: found by take_back
        self._borrowers: dict[object, Callable[[Loan], None]] = {}

    def fds(self) -> tuple[int, int]:
        return self._sock.fileno(), self._permit

    def lent_to(self, borrower: object, ended: Callable[[Loan], None]) -> None:
        """Remember who has copies of the descriptors, and must hear of their end."""
        self._borrowers[borrower] = ended

    def returned_by(self, borrower: object) -> None:
        self._borrowers.pop(borrower, None)

    def permit(self) -> None:
        """Let one answer be written."""
        if not self._is_out:  # else nobody could be asked with it
            os.eventfd_write(self._permit, PERMIT)
        self._is_out, self.is_written = True, False

    def written(self) -> None:
        """Hear from the worker that it has taken the permit, and writes nothing more."""
        self._is_out = False

    def take_back(self) -> bool:
        """Take the permit back, if it is out. False: a worker has it; is_written, or a part maybe is."""
        if not self._is_out:
            return True
        try:
            if not os.eventfd_read(self._permit) & PERMIT:
                self.is_written = True
                return False
        except BlockingIOError:
            return False
        self._is_out = False
        return True

    def close(self) -> None:
        """End the connection also where workers still have its descriptor."""
        for ended in list(self._borrowers.values()):
            ended(self)
        self._borrowers.clear()
        self._is_out = False  # the permit is gone, and its descriptor's number soon another's
        os.close(self._permit)
        self._closed()


class Loans:
    """Makes the loans of a server, no more than MAX_LOANS at a time."""

    def __init__(self) -> None:
        self._n_loans = 0

    def make(self, sock: socket.socket) -> Loan | None:
        """Make one; None: there are as many as there may be, or no descriptor for it."""
        if self._n_loans == MAX_LOANS:
            return None
        try:
            loan = Loan(sock, self._closed)
        except OSError:
            return None
        self._n_loans += 1
        return loan

    def _closed(self) -> None:
        self._n_loans -= 1
