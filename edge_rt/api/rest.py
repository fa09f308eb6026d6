"""Give memory back when nobody asks any more."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from edge_rt.devices import memory

QUIET_S = 1.0


class Rest:
    """Waits until no answer has ended for QUIET_S, then lets go of what the requests before have left behind.

    Bodies of many requests at a time leave holes in the heap that the C library would keep for good. An idle process
    sets no timer, a busy one a timer each QUIET_S.
    """

    def __init__(self, let_go: Callable[[], object] | None = None) -> None:
        self._let_go = let_go or _collect
        self._n_answers = 0
        self._is_watching = False

    def answered(self) -> None:
        """Take note that a request has been answered; on the event loop."""
        self._n_answers += 1
        if not self._is_watching:
            self._is_watching = True
            self._look_later(self._n_answers)

    def _look_later(self, n_answers: int) -> None:
        asyncio.get_running_loop().call_later(QUIET_S, self._look, n_answers)

    def _look(self, n_before: int) -> None:
        if self._n_answers != n_before:
            self._look_later(self._n_answers)
            return
        self._is_watching = False
        self._let_go()


def _collect() -> None:
    gc.collect()
    memory.give_back()
