"""llama-server as a rival: compiled from the sources of the pinned llama-cpp-python, on a Unix socket of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import sse_load

from tools import llama_server

_START_S = 120.0


@contextmanager
def rival(model: Path, flags: Sequence[str]) -> Iterator[Path]:
    """Start it with one model; yields its socket. The program is compiled where there is none yet."""
    program = llama_server.ensure(Path(sys.executable))
    with tempfile.TemporaryDirectory(prefix="ert-") as folder, tempfile.TemporaryFile() as said:
        socket = Path(folder) / "llama.sock"  # it takes names that end so for Unix sockets
        command = [str(program), "--model", str(model), "--host", str(socket), "--offline", *flags]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            asyncio.run(_wait(socket, process))
            yield socket
            if process.poll() is not None:
                raise RuntimeError(f"llama-server has ended by itself, status {process.returncode}")
        except BaseException:
            said.seek(0)
            sys.stderr.write(said.read()[-2000:].decode(errors="replace"))
            raise
        finally:
            process.terminate()
            process.wait()


async def _wait(socket: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if (await sse_load.get(socket, "/health"))[0] == 200:
                return
        except (OSError, IndexError):
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError("llama-server is not ready")
