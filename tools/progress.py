"""Run a long command and show where it is on one line; its whole output goes to a log file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

PLAIN_INTERVAL_S = 10.0
TAIL_LINES = 25

Stage = Callable[[str], str | None]


class CommandError(Exception):
    """The command failed; tail holds the end of its output."""

    def __init__(self, command: Sequence[str], returncode: int, tail: str, log: Path) -> None:
        super().__init__(f"{' '.join(command)} ended with {returncode}")
        self.returncode = returncode
        self.tail = tail
        self.log = log


class StatusLine:
    """One line that is drawn again on a terminal, and printed again every ten seconds elsewhere."""

    def __init__(self, title: str, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = title
        self.stage = ""
        self._out = out
        self._clock = clock
        self._tty = out.isatty()
        self._began_s = clock()
        self._printed_s = -PLAIN_INTERVAL_S

    def update(self, stage: str | None = None) -> None:
        if stage is not None:
            self.stage = stage
        if self._tty:
            width = shutil.get_terminal_size().columns - 1
            self._out.write("\r\033[K" + self._text()[:width])
            self._out.flush()
        elif self._clock() - self._printed_s >= PLAIN_INTERVAL_S:
            self._printed_s = self._clock()
            print(self._text(), file=self._out, flush=True)

    def finish(self, outcome: str) -> None:
        self.stage = outcome
        print(("\r\033[K" if self._tty else "") + self._text(), file=self._out, flush=True)

    def _text(self) -> str:
        elapsed_s = int(self._clock() - self._began_s)
        return f"{self.title}  {elapsed_s // 60}:{elapsed_s % 60:02}  {self.stage}".rstrip()


def run(title: str, command: Sequence[str], *, stage: Stage, log: Path, env: Mapping[str, str] | None = None) -> None:
    """Run command; stage turns an output line into what to show, or None to keep what is shown.

    Raises CommandError. Ctrl-C ends the command and everything it started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    status = StatusLine(title, sys.stderr)
    status.update("")
    with log.open("w", encoding="utf-8", errors="replace") as sink:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        )
        assert process.stdout is not None
        done = threading.Event()
        ticker = threading.Thread(target=_tick, args=(status, done), daemon=True)
        ticker.start()
        try:
            for line in process.stdout:
                sink.write(line)
                if (shown := stage(line)) is not None:
                    status.stage = shown
            returncode = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        finally:
            done.set()
            ticker.join()
            process.stdout.close()
    if returncode:
        status.finish("failed")
        tail = "".join(log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-TAIL_LINES:])
        raise CommandError(command, returncode, tail, log)
    status.finish("done")


def _tick(status: StatusLine, done: threading.Event) -> None:
    while not done.wait(0.2):
        status.update()


def compile_stage(line: str) -> str | None:
    """Read how far ninja ([3/120] …) or make ([ 42%] …) is, and what it builds; before that, what pip does."""
    if found := re.match(r"\s*\[(\d+)/(\d+)\]\s*(.*)", line):
        n_done, n_all, what = int(found[1]), int(found[2]), found[3]
    elif found := re.match(r"\s*\[\s*(\d+)%\]\s*(.*)", line):
        n_done, n_all, what = int(found[1]), 100, found[2]
    else:
        return pip_stage(line)
    source = re.findall(r"[\w.+-]+\.(?:cpp|cc|c|cu|m|S)\b", what)
    width = 24
    filled = width * n_done // max(n_all, 1)
    return f"[{'#' * filled}{'.' * (width - filled)}] {n_done}/{n_all} {source[-1] if source else ''}".rstrip()


def pip_stage(line: str) -> str | None:
    """Read what pip is doing."""
    line = line.strip()
    if line.startswith(
        ("Collecting ", "Downloading ", "Using cached ", "Building wheel", "Installing ", "Configuring")
    ):
        return line[:70].replace("Collecting", "resolving").replace("Installing collected packages", "installing")
    return None
