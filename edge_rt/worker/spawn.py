"""Start the worker's Python process and keep what it says last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket

from edge_rt.same_package import command
from edge_rt.worker.process import Handle

_log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 400
_LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+: ")
_SEND_BYTES = 1024 * 1024  # a picture's tensor goes in one write; net.core.wmem_max may allow less


async def spawn() -> tuple[socket.socket, Handle]:
    """Start a worker in a session of its own; give our end of its channel and its process."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command("edge_rt.worker.main", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return ours, _Child(process)


class _Child:
    """A spawned worker. Its output is logged line by line; the last that it did not log is kept as its last words.

    What it logs it lives on after, so that an error of long ago is no reason for its end.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._last = ""
        self._output = asyncio.get_running_loop().create_task(self._read())

    def kill(self) -> None:
        # Until wait has reaped it the pid is its own, and so is the group it leads.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        status = await self._process.wait()
        await asyncio.wait([self._output])
        return status

    def last_words(self) -> str:
        return self._last

    async def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(4096):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._say(line)
            rest = rest[:_MAX_LINE_BYTES]
        self._say(rest)

    def _say(self, raw: bytes) -> None:
        if line := raw[:_MAX_LINE_BYTES].decode("utf-8", "replace").strip():
            if not is_logged(line):
                self._last = line
            _log.log(level(line), "worker %d: %s", self.pid, line)


def is_logged(line: str) -> bool:
    """Say whether a line is the worker's logging's, as worker/main.py sets it up, and not what broke out of it."""
    return _LOGGED.match(line) is not None


def level(line: str) -> int:
    """Give the level at which a worker has logged a line; what it has printed is a warning."""
    return logging.INFO if line.startswith("INFO edge_rt.") else logging.WARNING
