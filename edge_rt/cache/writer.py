"""The thread that writes to the cache's file, one step after the other, so that nobody waits for the disk."""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from edge_rt.cache.disk import Disk

_Step = Callable[[Disk], None]

_CLOSE_S: Final = 10.0


class Writer:
    """failed is told each error of the disk, written that an entry was; both are called in the thread."""

    def __init__(self, disk: Disk, failed: Callable[[Exception], None], written: Callable[[], None]) -> None:
        self._disk = disk
        self._failed = failed
        self._written = written
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = 0
        self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Count the bytes of values that have not been written yet."""
        return self._pending_bytes

    def pending(self, key: bytes) -> bytes | None:
        """Give a value that has not been written yet."""
        return self._pending.get(key)

    def put(
        self, key: bytes, meta: bytes, value: bytes, mac: bytes, used_at_s: float, gone: Iterable[bytes] = ()
    ) -> None:
        with self._lock:
            self._pending[key] = value
            self._pending_bytes += len(value)

        def write(disk: Disk) -> None:
            try:
                disk.put(key, meta, value, mac, used_at_s, gone)
                self._written()
            finally:
                with self._lock:
                    self._pending_bytes -= len(value)
                    if self._pending.get(key) is value:
                        del self._pending[key]

        self._steps.put(write)

    def delete(self, keys: list[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._pending.pop(key, None)
        self._steps.put(lambda disk: disk.delete(keys))

    def count(self, hits: Mapping[bytes, int], used_at_s: float, state: Mapping[str, float]) -> None:
        self._steps.put(lambda disk: disk.count(hits, used_at_s, state))

    def clear(self, state: Mapping[str, float]) -> None:
        with self._lock:
            self._pending.clear()
        self._steps.put(lambda disk: disk.clear(state))

    def flush(self) -> None:
        """Wait until everything so far has been written, or has failed."""
        done = threading.Event()
        self._steps.put(lambda _: done.set())
        done.wait()

    def close(self) -> None:
        """Write what is left; a disk that hangs is waited for _CLOSE_S."""
        self._steps.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step(self._disk)
            except (sqlite3.Error, OSError) as exc:
                self._failed(exc)
