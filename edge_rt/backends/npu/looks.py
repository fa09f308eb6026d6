"""Looks for devices that may take long: a vendor's library may be slow to import, and may hang, and nobody can tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Looks(Generic[T]):
    """Looks once more each time that it is asked, and waits only so long for it.

    A look that took longer goes on beside those that come after it, until it ends by itself: of a slow library it is
    the first to be through. So neither one that is slow is given up for ever, nor is one that hangs waited for.
    """

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._pending: list[Future[T]] = []

    def ask(self, wait_s: float) -> T:
        """Give what the first look to end well has found. Raises what the new one raises, and TimeoutError."""
        until_s = time.monotonic() + wait_s
        newest: Future[T] = Future()
        self._pending.append(newest)
        threading.Thread(target=self._run, args=(newest,), name="npu-look", daemon=True).start()
        while True:
            done, _ = wait(self._pending, max(0.0, until_s - time.monotonic()), FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            for ended in [each for each in self._pending if each in done]:
                self._pending.remove(ended)
                if (error := ended.exception()) is None:
                    self._pending.clear()  # what the others find later is older by then
                    return ended.result()
                if ended is newest:
                    raise error

    def _run(self, told: Future[T]) -> None:
        try:
            told.set_result(self._look())
        except Exception as exc:  # noqa: BLE001 - whoever asks is to have it
            told.set_exception(exc)
