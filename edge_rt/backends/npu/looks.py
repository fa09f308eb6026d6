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
    the first to be through. So neither one that is slow is given up for ever, nor is one that hangs waited for. Any
    number of threads may ask.
    """

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._pending: list[Future[T]] = []  # in the order they were begun in

    def ask(self, wait_s: float) -> T:
        """Give what the first look to end well has found. Raises what the new one raises, and TimeoutError."""
        until_s = time.monotonic() + wait_s
        newest: Future[T] = Future()
        with self._lock:
            self._pending.append(newest)
            pending = list(self._pending)
        threading.Thread(target=self._run, args=(newest,), name="npu-look", daemon=True).start()
        while True:
            done, _ = wait(pending, max(0.0, until_s - time.monotonic()), FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            for ended in [each for each in pending if each in done]:
                pending.remove(ended)
                error = ended.exception()
                self._has_ended(ended, is_good=error is None)
                if error is None:
                    return ended.result()
                if ended is newest:
                    raise error

    def _has_ended(self, ended: Future[T], *, is_good: bool) -> None:
        """Keep what has ended from those who ask later, and with a good one all others: they are older by then."""
        with self._lock:
            if is_good:
                self._pending.clear()
            elif ended in self._pending:
                self._pending.remove(ended)

    def _run(self, told: Future[T]) -> None:
        try:
            told.set_result(self._look())
        except Exception as exc:  # noqa: BLE001 - whoever asks is to have it
            told.set_exception(exc)
