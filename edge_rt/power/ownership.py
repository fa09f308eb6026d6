"""One process at a time sets clocks: whoever holds the lock beside the snapshot. Standard library only.

A second one would give back as leftovers what the first one has set, and remove the file that says what the machine's
own limits were. The lock ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

_BUSY: Final = "another process sets clocks already (process {}): stop it first, or ask it with `edge_rt power status`"
_MAX_BYTES: Final = 32


class ClocksTakenError(Exception):
    """Another process sets clocks; the text says which and what to do."""


def take(snapshot_file: str) -> int:
    """Take the lock; gives the descriptor that holds it. Raises ClocksTakenError, and OSError where it cannot lie."""
    file = f"{snapshot_file}.lock"
    Path(file).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClocksTakenError(_BUSY.format(_holder(fd))) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _holder(fd: int) -> str:
    text = os.pread(fd, _MAX_BYTES, 0).decode("ascii", "replace").strip()
    return text if text.isdecimal() else "unknown"
