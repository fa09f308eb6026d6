"""What a vendor's library prints, C++ included; for drivers, under whatever Python a host process has."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from typing import Any

_MAX_BYTES = 2**24
_MAX_TOLD = 20_000  # characters that go on


class Printed:
    """Takes what is printed within; the end of it goes on to stderr afterwards."""

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> Any:  # Python 3.8 knows no Self
        sys.stdout.flush()
        sys.stderr.flush()
        self._file = tempfile.TemporaryFile()
        self._kept = os.dup(1), os.dup(2)
        os.dup2(self._file.fileno(), 1)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *_: Any) -> None:
        self._read()
        for number, fd in zip((1, 2), self._kept):  # noqa: B905 - Python 3.8 has none
            os.dup2(fd, number)
            os.close(fd)
        self._file.close()
        os.write(2, self.text[-_MAX_TOLD:].encode(errors="replace"))

    def plain(self) -> str:
        """Give what has been printed so far, without colours."""
        if not self._file.closed:
            self._read()
        return re.sub(r"\x1b\[[\d;]*m", "", self.text)

    def _read(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.text = os.pread(self._file.fileno(), _MAX_BYTES, 0).decode(errors="replace")
