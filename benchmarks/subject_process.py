"""A subject of a benchmark in a process of its own, which sleeps while it is not measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Self

import psutil


class SubjectProcess:
    """A program of this directory, asked over pipes: it reads [what, *values] as JSON lines, and answers each in JSON.

    kind, arguments  its command line
    environ          beside this process' own
    """

    def __init__(self, program: str, kind: str, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, program, kind, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (environ or {}),
        )
        self._kind = kind

    def resident_mib(self) -> float:
        """Read how much of the process is in memory now, pages of mapped files included."""
        return psutil.Process(self._process.pid).memory_info().rss / 2**20

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _ask(self, what: str, *values: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *values]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._kind} subject ended with exit code {self._process.wait()}")
        return json.loads(line)
