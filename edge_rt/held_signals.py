"""Signals that come before a process can act on them: held by the kernel until it can. Standard library only.

Without this a SIGHUP or SIGTERM in the first third of a second, while Python imports, ends the process by the signal.
"""

from __future__ import annotations

import signal
from typing import Final

HELD: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def hold() -> None:
    """Let them wait. Threads and processes begun meanwhile hold them too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def release() -> None:
    """Let those come that have waited; their handlers stand."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
