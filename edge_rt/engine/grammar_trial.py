"""Find out what a grammar takes to compile before this process compiles it.

The library bounds most of its work, not all: a schema of a hundred patterns in an allOf took five minutes, and no
thread can be ended from outside. A process can. So each grammar that is new is compiled once in a child
(grammar_child.py), which the kernel ends when it takes too much; what passes takes as long again here, and no longer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final

from edge_rt import same_package
from edge_rt.errors import BackendStepError

# What one grammar may take while it is compiled and with each token; the library's defaults suit a server farm.
LIMITS: Final[Mapping[str, Any]] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 2_000,
    # With these three the hardest of 60 hostile grammars took 6 ms a token, and grew to 14 MB.
    "max_lexer_states": 16_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 3_000,
    "verbose_errors": True,  # they tell what a grammar has grown by: grammar.py
}
MAX_COMPILE_S: Final = 1.0  # of CPU time
MAX_COMPILE_BYTES: Final = 256 * 2**20
_MAX_WAIT_S: Final = 30.0  # on a machine that leaves the child no CPU
# An allocation that fails, or a stack that is too deep.
_OUT_OF_MEMORY: Final = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)
_MAX_LINE: Final = 2**16
_TOKEN: Final = re.compile(r"<\[\d+\]>")  # a control token of the model; the child's vocabulary has one
_CONTROL: Final = "<[257]>"


@dataclass(frozen=True, slots=True)
class Trial:
    """What compiling a grammar came to.

    problem  what the library says is wrong with it; "" if nothing is
    limit    what it takes more of than it may, with the limit; "" if it took no more
    n_bytes  memory of the compiled grammar
    """

    problem: str = ""
    limit: str = ""
    n_bytes: int = 0


class Trials:
    """The child process, started with the first grammar. Any thread may ask; one grammar is tried at a time."""

    def __init__(
        self,
        *,
        max_s: float = MAX_COMPILE_S,
        max_bytes: int = MAX_COMPILE_BYTES,
        max_wait_s: float = _MAX_WAIT_S,
        start: Callable[[Sequence[str]], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._max_s, self._max_bytes, self._max_wait_s = max_s, max_bytes, max_wait_s
        self._start = start or _start
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        atexit.register(self.close)

    def prepare(self) -> None:
        """Start the child now, so that it is there when the first grammar comes. Raises BackendStepError."""
        with self._lock:
            self._running()

    def compile(self, text: str) -> Trial:
        """Compile a grammar on trial. Raises BackendStepError if no child can be had or it gives no answer, which
        passes and says nothing of the grammar.
        """
        raw = _TOKEN.sub(_CONTROL, text).encode()
        with self._lock:
            for _ in range(2):  # it may have ended for want of work, just now
                process = self._running()
                try:
                    answer = self._ask(process, len(raw).to_bytes(4, "little") + raw)
                except BrokenPipeError:
                    answer = b""
                if answer:
                    found = json.loads(answer)
                    return Trial(problem=found["problem"] or "", n_bytes=found["n_bytes"])
                if limit := self._ended_by():
                    return Trial(limit=limit)
        raise BackendStepError(reason="the process that compiles grammars ends before it does")

    def close(self) -> None:
        """End the child; the next grammar starts another."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            arguments = json.dumps(dict(LIMITS)), repr(self._max_s), str(self._max_bytes)
            try:
                self._process = self._start(same_package.command("edge_rt.engine.grammar_child", *arguments))
            except OSError as exc:
                raise BackendStepError(reason=f"the process that compiles grammars does not start: {exc}") from exc
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], message: bytes) -> bytes:
        """Send a grammar and give the answer; empty if the child ended. Raises BackendStepError if it gives none."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(message)
        process.stdin.flush()
        if not select.select([process.stdout], [], [], self._max_wait_s)[0]:
            self._end()
            # The kernel bounds its CPU time, so the machine has left it none.
            reason = f"the process that compiles grammars got no time to in {self._max_wait_s:g} s; try again later"
            raise BackendStepError(reason=reason)
        return process.stdout.readline(_MAX_LINE)

    def _ended_by(self) -> str:
        """Say which limit the child met that has ended; "" if it ended by itself, or somebody else has ended it."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=self._max_wait_s)
        status = process.returncode
        self._end()
        if status == -signal.SIGPROF:
            return f"{self._max_s:g} s of computing"
        if status in _OUT_OF_MEMORY:
            return f"{self._max_bytes // 2**20} MiB of memory"
        return ""  # SIGKILL comes when the thread that has started it ends

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                pipe.close()


@cache
def shared() -> Trials:
    """Give this process's child: one is enough for all models."""
    return Trials()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
