"""Show a pull's progress on stderr: a bar on a terminal that has tqdm, else a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from edge_rt.catalog.part import Phase, Progress, PullProgress

_LINE_EVERY_S = 5.0
_WORDS: dict[Phase, str] = {
    "wait": "waiting for another process that pulls it",
    "check": "checking",
    "fetch": "fetching",
    "retry": "the connection broke, trying again",
    "unpack": "unpacking",
    "derive": "deriving",
    "convert": "converting",
    "done": "ready",
}


@contextmanager
def pull_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Give the callback for Store.pull and Store.verify; stream defaults to stderr."""
    stream = sys.stderr if stream is None else stream
    bar = _bar(stream) if stream.isatty() else None
    logging.getLogger("stamina").setLevel(logging.ERROR)  # its retries are shown here
    display: Lines | Bar = Bar(bar) if bar is not None else Lines(stream)
    try:
        yield display.show
    finally:
        display.close()


def _bar(stream: TextIO) -> Any | None:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(file=stream, unit="B", unit_scale=True, leave=False, dynamic_ncols=True)


def size_text(n_bytes: int) -> str:
    """Write a size as people read it, in decimal units."""
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 100_000 else f"{n_bytes} B"


class Lines:
    """A line for each new phase and one every few seconds: for logs and pipes."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._clock = clock
        self._phase: tuple[str, Phase] | None = None
        self._next_s = 0.0

    def show(self, progress: PullProgress) -> None:
        phase = (progress.variant, progress.phase)
        now = self._clock()
        if phase == self._phase and now < self._next_s:
            return
        self._phase, self._next_s = phase, now + _LINE_EVERY_S
        self._stream.write(f"{_name(progress)}: {_WORDS[progress.phase]}{_amount(progress)}\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class Bar:
    """A tqdm bar; done phases leave a line above it."""

    def __init__(self, bar: Any):
        self._bar = bar
        self._phase: tuple[str, Phase] | None = None

    def show(self, progress: PullProgress) -> None:
        phase = (progress.variant, progress.phase)
        name = _name(progress)
        if progress.phase == "done":
            self._bar.clear()
            self._bar.write(f"{name}: {_WORDS['done']}{_amount(progress)}", file=self._bar.fp)
            return
        if phase != self._phase:
            self._phase = phase
            self._bar.reset(total=progress.total_bytes)
            self._bar.set_description_str(f"{name}: {_WORDS[progress.phase]}")
        self._bar.update(progress.done_bytes - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _name(progress: PullProgress) -> str:
    """Name what comes; an import knows the variant at its end only."""
    return f"{progress.model}:{progress.variant}" if progress.variant else progress.model


def _amount(progress: PullProgress) -> str:
    if progress.phase == "done":
        return f", {size_text(progress.done_bytes)}"
    if not progress.done_bytes:
        return ""
    total = f" of {size_text(progress.total_bytes)}" if progress.total_bytes else ""
    return f", {size_text(progress.done_bytes)}{total}"
