"""Open files that others have named."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, for a pipe or device too: opening one could wait for ever."""
    file = open(path, "rb", buffering=buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file
