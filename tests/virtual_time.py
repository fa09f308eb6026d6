"""An event loop whose clock jumps to the next timer when nothing else is left to do: waiting takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.patience import PATIENCE_S

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if events := super().select(0):
            return events
        if timeout is None:
            # No timer is set, so only another thread or process can go on.
            events = super().select(PATIENCE_S)
            if not events:
                raise AssertionError(f"the test waits for something that did not come within {PATIENCE_S:g} s")
            return events
        self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine on a VirtualTimeLoop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
