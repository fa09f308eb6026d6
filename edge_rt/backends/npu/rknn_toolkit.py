"""Calls of rknn-toolkit2: what it says of failures, the folder that it writes into, and what it leaves running.

Runs in the toolkit's host process, under its Python. Standard library and the toolkit only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from typing import Any, Iterator  # noqa: UP035 - Python 3.8 knows no others at run time

from .printed import Printed


class RknnError(Exception):
    """What the toolkit says; kind: memory, unsupported or failed."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.kind = "unsupported" if "not support" in said else "failed"


class Said(Printed):
    """What the toolkit prints within."""

    def words(self) -> str:
        """Give the last lines that tell of an error."""
        lines = [line.strip() for line in self.plain().splitlines()]
        telling = [line for line in lines if re.match(r"E (?!rknn-toolkit2 version)|\w*Error\b", line)]
        return " | ".join(dict.fromkeys(telling[-3:]))[:600] or "it said nothing"


def must(code: Any, said: Said, call: str) -> None:
    """Raise RknnError unless the toolkit says that a call went well."""
    if code != 0:
        raise RknnError(f"{call} gave {code}: {said.words()}")


def called(call: Any, **arguments: Any) -> Any:
    """Call the toolkit, and give what it gives. Raises RknnError with the last line of what it raises."""
    try:
        return call(**arguments)
    except Exception as exc:
        # The toolkit puts its whole traceback into the message.
        last = [line.strip() for line in str(exc).splitlines() if line.strip()][-1:]
        raise RknnError(f"{call.__name__}: {' '.join(last)[:600] or type(exc).__name__}") from exc


def toolkit() -> Any:
    """Import the toolkit, which prints as it loads, and give its class. Raises ImportError."""
    with Said():
        from rknn.api import RKNN
    return RKNN


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Work in folder: the toolkit writes into the working folder whatever it likes."""
    before = os.getcwd()  # noqa: PTH109
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def stopping_adb() -> Iterator[None]:
    """End an adb server that the toolkit has started within, and leaves running on TCP 5037; nobody else's is ended."""
    before = set(adb_servers())
    try:
        yield
    finally:
        for pid in set(adb_servers()) - before:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)


def adb_servers() -> list[int]:
    """List the processes that run the adb of this environment."""
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{entry}/exe")  # noqa: PTH115
                if path.startswith(sys.prefix + os.sep) and path.endswith("/adb"):
                    found.append(int(entry))
    return found
