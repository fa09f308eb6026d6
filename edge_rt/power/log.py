"""Lines for the journal: a priority, and each matter once a minute at most. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, TextIO

_AGAIN_S: Final = 60.0
_MAX_MATTERS: Final = 256


class Log:
    """Writes "<4>text" lines, as systemd reads them off stderr. Belongs to one thread; never raises."""

    def __init__(self, clock: Callable[[], float], stream: TextIO | None = None) -> None:
        self._clock = clock
        self._stream = stream if stream is not None else sys.stderr
        self._told: dict[str, tuple[float, int]] = {}  # matter → when it was told, how often it was not told since

    def say(self, priority: int, matter: str, text: str) -> None:
        """Write a line, unless one of the same matter was written within the last minute."""
        now_s = self._clock()
        at_s, n_silent = self._told.get(matter, (now_s - _AGAIN_S, 0))
        if now_s - at_s < _AGAIN_S:
            self._told[matter] = (at_s, n_silent + 1)
            return
        if len(self._told) >= _MAX_MATTERS:
            del self._told[min(self._told, key=lambda known: self._told[known][0])]
        self._told[matter] = (now_s, 0)
        more = f" ({n_silent} times more since the last line)" if n_silent else ""
        plain = "".join(char if char.isprintable() else "?" for char in f"{text}{more}")
        try:
            self._stream.write(f"<{priority}>{plain}\n")
            self._stream.flush()
        except (OSError, ValueError):
            return  # nobody reads
