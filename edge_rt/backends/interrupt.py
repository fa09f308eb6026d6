"""Ctrl-C while native code runs that calls back into Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_held() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back until the block ends; yield what tells whether it has come.

    Python raises KeyboardInterrupt in the next Python function that is entered. If that is a callback from C, ctypes
    prints it and goes on: the interrupt would be lost. Where signals are not turned into exceptions, on other threads
    and in a worker, nothing is held.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, None)
