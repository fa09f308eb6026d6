"""Run a converter in a process of its own: what it says on stdout is an error of ours as one JSON line. Both ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import msgspec

from edge_rt.errors import BackendLoadError, EdgeRtError, from_wire
from edge_rt.same_package import command

_TELLING = ("failed", "error", "ASSERT")


def run_child(module: str, *arguments: str, model: str, what: str) -> None:
    """Run `python -m module arguments` to its end.

    Raises the error that the child tells, or BackendLoadError naming what ended and its last words on stderr.
    """
    child = subprocess.run(
        command(module, *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if child.returncode == 0:
        return
    if child.stdout.strip():
        code, values = msgspec.json.decode(child.stdout.splitlines()[-1], type=tuple[str, dict[str, object]])
        raise from_wire(code, values)
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
    raise BackendLoadError(model=model, reason=f"{what} ended with {how}: {_last_words(child.stderr)}")


def answer_parent(work: Callable[[], int | None], write: Callable[[bytes], object] | None = None) -> int:
    """Work as the child; give its exit code, which is work's own where that gives one. Errors of ours are written."""
    try:
        return work() or 0
    except EdgeRtError as exc:
        (write or sys.stdout.buffer.write)(msgspec.json.encode(exc.to_wire()))
        return 1


def _last_words(log: bytes) -> str:
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in _TELLING)]
    return (telling or lines or ["it said nothing"])[-1]
