"""The other end of a host process: starts it, asks it within time limits, and tells how it ended.

A host that crashes, hangs or is killed is AcceleratorLostError; the next call starts another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edge_rt.backends.npu import host
from edge_rt.errors import AcceleratorLostError

_MAX_LINE_BYTES = 400
_MAX_TOOK_S = 86_400.0
_REAP_S = 2.0
_LOOK_MS = 1000
_WORDS_S = 0.2  # for the last lines of a process that has ended


class HostAnswerError(Exception):
    """The driver raised. kind: memory, absent, unsupported, failed or a driver's own. Never leaves backends/npu."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind, self.said = kind, said


class Client:
    """Runs driver under a Python, which may be another environment's. One thread at a time calls it.

    backend  that errors name
    noise    how lines begin that are no last words
    """

    def __init__(self, backend: str, driver: Path, python: Sequence[str], *, noise: tuple[str, ...] = ()) -> None:
        self._backend, self._noise = backend, noise
        self._driver, self._python = driver, tuple(python)
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: host.Frames | None = None
        self._fds: tuple[int, ...] = ()
        self._words: deque[str] = deque(maxlen=20)
        self._reader: threading.Thread | None = None
        self._n_calls = 0

    @property
    def pid(self) -> int | None:
        """The host's, while there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the host, unless there is one. Raises AcceleratorLostError."""
        self._started()

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        timeout_s: float,
    ) -> tuple[Any, dict[str, NDArray[Any]], float]:
        """Call the driver's method; give its result, the arrays with it, and how long the host took.

        Raises HostAnswerError for what the driver raises, and AcceleratorLostError; then the host is gone. ValueError
        for arrays that cannot be sent.
        """
        until_s = time.monotonic() + timeout_s
        frames = self._started()
        self._n_calls += 1
        try:
            frames.send({"id": self._n_calls, "call": name, "with": arguments}, arrays or {}, until_s=until_s)
            answer, given = frames.receive(until_s=until_s)
            if answer.get("id") != self._n_calls:
                raise host.FrameError(f"an answer to call {answer.get('id')}, this is {self._n_calls}")
            if (error := answer.get("error")) is not None:
                raise HostAnswerError(str(error["kind"]), _printable(str(error["said"])))
            return answer["result"], given, _seconds(answer["took_s"])
        except host.EndedError as exc:
            raise self._lost(self._ended()) from exc
        except host.LateError as exc:
            raise self._lost(f"its process did not answer {name} within {timeout_s:g} s") from exc
        except (host.FrameError, KeyError, TypeError) as exc:
            raise self._lost(f"its process does not keep to the protocol: {exc}") from exc
        except (OSError, MemoryError) as exc:  # half a message may have gone: nothing more can be said there
            raise self._lost(f"arrays cannot be shared with its process: {exc}") from exc

    def close(self) -> None:
        """End the host; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        # With what the vendor's code has started, which may be there when the host is not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        # One that hangs in the kernel, in its driver, cannot be waited for; init takes it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
        if self._reader is not None:
            self._reader.join(_WORDS_S)  # it ends by itself where something has left the host's group with its stderr
        self._frames = None
        for fd in self._fds:
            os.close(fd)
        self._fds = ()

    def _started(self) -> host.Frames:
        if self._frames is not None and self._process is not None:
            return self._frames
        end, life = os.pipe()  # life closes with us, however we end
        fds = (_shared("npu-in"), _shared("npu-out"), life)
        passed = (*fds[:2], end)
        command = [*self._python, host.__file__, str(self._driver), *map(str, passed)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as exc:
            for fd in fds:
                os.close(fd)
            raise AcceleratorLostError(backend=self._backend, reason=f"its process cannot be started: {exc}") from exc
        finally:
            os.close(end)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._words.clear()
        self._reader = threading.Thread(target=self._read_words, args=(process,), name="npu-host", daemon=True)
        self._reader.start()
        self._process, self._fds = process, fds
        self._frames = host.Frames(process.stdout.fileno(), process.stdin.fileno(), *fds[:2])
        return self._frames

    def _read_words(self, process: subprocess.Popen[bytes]) -> None:
        """Keep what the vendor's code says last; to read it all keeps it from waiting for us."""
        assert process.stderr is not None
        with process.stderr as pipe:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            while True:
                if not poll.poll(_LOOK_MS):
                    if process.returncode is not None:
                        return  # what holds the pipe is not the host
                    continue
                if not (line := pipe.readline(_MAX_LINE_BYTES)):
                    return
                text = _printable(line.decode("utf-8", "replace").strip())
                if text and not text.startswith(self._noise):
                    self._words.append(text)

    def _ended(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return "its process has closed its end"
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        with contextlib.suppress(ValueError):
            how = signal.Signals(-status).name if status < 0 else how
        return f"its process ended with {how}"

    def _lost(self, reason: str) -> AcceleratorLostError:
        self.close()
        words = self._words[-1] if self._words else ""
        return AcceleratorLostError(backend=self._backend, reason=f"{reason}: {words}" if words else reason)


def _printable(text: str) -> str:
    """Leave out of a vendor's words what would be a command to a terminal, or another line of a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _seconds(told: Any) -> float:
    if type(told) not in (int, float) or not 0 <= told <= _MAX_TOOK_S:
        raise host.FrameError(f"{str(told)[:40]} is no time that a call takes")
    return float(told)


def _shared(name: str) -> int:
    """Make memory that grows and never shrinks: a page that went would be our end as well."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd
