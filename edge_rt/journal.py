"""Lines for systemd's journal: each begins with its priority. Standard library only."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Final, TextIO

# Levels of logging as the <N> that systemd takes off a line's beginning, see sd-daemon(3).
_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG: Final = 7


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Say whether a stream goes straight to the journal: JOURNAL_STREAM names its device and inode."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM", "") == f"{found.st_dev}:{found.st_ino}"


def priority(level: int) -> int:
    """Give the journal's number for a level of logging: 3 for errors, 4 warnings, 6 information, 7 debugging."""
    return next((number for least, number in _PRIORITIES if level >= least), _DEBUG)


class JournalFormatter(logging.Formatter):
    """Puts <N> before each line that another formatter writes; without it a traceback's lines were information."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{priority(record.levelno)}>"
        return "\n".join(prefix + line for line in self._inner.format(record).split("\n"))
