"""An event loop whose clock jumps to the next timer when nothing else is left to do: waiting takes no time.

What a thread was given to do is something left to do, and bytes on their way from one socket here to another are too.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.patience import PATIENCE_S

T = TypeVar("T")

_ON_THE_WAY_S = 0.002


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.n_in_threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if (events := super().select(0)) or timeout == 0:
            return events
        if timeout is None or self.n_in_threads:  # only another thread or process can go on
            events = super().select(PATIENCE_S)
            if not events:
                raise AssertionError(f"the test waits for something that did not come within {PATIENCE_S:g} s")
            return events
        # A busy kernel delivers late over TCP; the loop's own pipe is one of those it listens to.
        if len(self.get_map()) > 1 and (events := super().select(_ON_THE_WAY_S)):
            return events
        self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.selector.n_in_threads += 1
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: asyncio.Future[Any]) -> None:
        self.selector.n_in_threads -= 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine on a VirtualTimeLoop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
