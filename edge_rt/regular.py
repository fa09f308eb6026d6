"""Open files that others have named: a pipe would be waited for, a device has no end. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, for a pipe or device too: opening one could wait for ever."""
    file = open(path, "rb", buffering=buffering, opener=_open)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole file. Raises OSError, for one that is not regular or has more than max_bytes too."""
    with open_regular(path, buffering=0) as file:
        raw = b""
        # Not by the size that it tells: it may grow meanwhile, and files of /proc tell 0.
        while len(raw) <= max_bytes and (part := file.read(max_bytes + 1 - len(raw))):
            raw += part
    if len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return raw


def _open(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
