"""What connections read to. A body that is used where it lies takes its buffer along, and brings it back.

Those of connections that ask tensor models again and again lie in memory that these models' workers may read: such a
body is not sent to its worker, which saves two copies of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

READ_BYTES: Final = 256 * 1024  # a picture's tensor and its head
MAX_LENT_BUFFERS: Final = 32  # at a time: each takes two descriptors, one of them mmap's
_MAX_SPARE: Final = 2
_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE of <linux/fcntl.h>: only mappings that are there can be written to
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _FUTURE_WRITE


class Buffer:
    """READ_BYTES of memory."""

    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory: bytearray | mmap.mmap = bytearray(READ_BYTES)

    def drop(self) -> None:
        """Hear that it is read to no more; somebody may still look at it."""


class LentBuffer(Buffer):
    """READ_BYTES that one model's workers may read, and only read. Raises OSError where there is no such memory."""

    __slots__ = ("_borrowers", "_fd", "model")
    n_alive: ClassVar[int] = 0

    def __init__(self, model: str = "") -> None:
        self.model = model
        self._borrowers: dict[object, Callable[[LentBuffer], None]] = {}
        self._fd = os.memfd_create("edge_rt-bodies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        LentBuffer.n_alive += 1
        os.ftruncate(self._fd, READ_BYTES)
        self.memory = mmap.mmap(self._fd, READ_BYTES)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)

    def fds(self) -> tuple[int]:
        return (self._fd,)

    def lent_to(self, borrower: object, ended: Callable[[LentBuffer], None]) -> None:
        """Remember who has a copy of the descriptor, and must hear of its end."""
        self._borrowers[borrower] = ended

    def returned_by(self, borrower: object) -> None:
        self._borrowers.pop(borrower, None)

    def drop(self) -> None:
        for ended in list(self._borrowers.values()):
            ended(self)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            os.close(self._fd)
            LentBuffer.n_alive -= 1


def lent_buffer(model: str = "") -> Buffer:
    """Make a buffer that can be lent, or one that cannot where there is no memory or no descriptor for it."""
    if LentBuffer.n_alive < MAX_LENT_BUFFERS:
        with contextlib.suppress(OSError):
            return LentBuffer(model)
    return Buffer()


class ReadBuffers:
    """The one that is read to, and a few that have come back."""

    def __init__(self, make: Callable[[], Buffer] = Buffer) -> None:
        self._make = make
        self._spare: list[Buffer] = []
        self.current = make()

    def take(self) -> Buffer:
        taken, self.current = self.current, self._spare.pop() if self._spare else self._make()
        return taken

    def use(self, buffer: Buffer) -> None:
        """Read to a buffer that was taken, or out of which the next bytes shall be taken."""
        self.give_back(self.current)
        self.current = buffer

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer that nobody looks at any more."""
        if len(self._spare) < _MAX_SPARE:
            self._spare.append(buffer)
        else:
            buffer.drop()


class LentBuffers:
    """Buffers by model: a worker may look into what it was lent as long as it lives, whoever reads to it then."""

    def __init__(self) -> None:
        self._of: dict[str, ReadBuffers] = {}

    def of(self, model: str) -> ReadBuffers:
        """Give the buffers of a model that has answered before, of which there are few."""
        if model not in self._of:
            self._of[model] = ReadBuffers(partial(lent_buffer, model))
        return self._of[model]
