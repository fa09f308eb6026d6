"""All stored entries: an index in memory, values in memory while they are hot, and everything in a SQLite file.

What the event loop does here takes memory only: the index knows every key, so a miss never waits for a disk; a put
goes to a writer thread; a value that is not hot is read in a reader thread (get), and kept hot. Values are signed with
a local key; one whose signature is wrong, because the file was edited, is removed and never given.

A disk that is full or fails leaves the cache readable: nothing more is stored until RETRY_S later, which is logged
once. A place that cannot be used at all leaves a cache in memory. A file that is damaged is moved aside.

Belongs to one thread, the event loop's; `edge_rt cache` without a daemon uses it from its only one.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from edge_rt.cache.disk import Disk, is_corrupt
from edge_rt.cache.entries import Found, Meta, NoEvents, StoreEvents, StoreStats
from edge_rt.cache.eviction import S3Fifo
from edge_rt.cache.signing import Signer
from edge_rt.cache.writer import Writer
from edge_rt.errors import CacheStoreError

_log = logging.getLogger("edge_rt.cache")

MAX_ENTRIES: Final = 20_000  # each takes about half a kilobyte of memory for its place in the index
HOT_BYTES: Final = 16 * 2**20  # of values held in memory
RETRY_S: Final = 60.0
_MAX_PENDING_BYTES: Final = 8 * 2**20  # of values that a slow disk has not taken yet
_ROW_BYTES: Final = 512  # what an entry takes beside its value, in memory and in the file
_COUNT_EVERY: Final = 64  # hits, that are written together


@dataclass(slots=True)
class _Indexed:
    meta: Meta
    size_bytes: int
    n_hits: int = 0


class Store:
    """Open one with Store.open, and close it.

    clock  monotonic, for the time until a failed disk is tried again
    """

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        max_bytes: int,
        max_value_bytes: int,
        events: StoreEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        must_persist: bool = False,
    ) -> Store:
        """Open or make the file in path, its key beside it. Where neither can be had the cache is one in memory.

        must_persist  raise CacheStoreError instead
        """
        disk: Disk | None = None
        try:
            disk = Disk(path, max_bytes=max_bytes)
            try:
                signer = Signer.load(path.with_name(f"{path.name}.key"))
            except OSError as exc:
                disk.close()
                raise CacheStoreError(path=str(path), problem=f"has no key: {exc}") from exc
        except CacheStoreError as exc:
            if must_persist:
                raise
            _log.warning("%s; answers are kept in memory only", exc)
            disk, signer = None, Signer(b"")
        return cls(path, disk, signer, max_bytes, max_value_bytes, events or NoEvents(), clock)

    def __init__(
        self,
        path: Path,
        disk: Disk | None,
        signer: Signer,
        max_bytes: int,
        max_value_bytes: int,
        events: StoreEvents,
        clock: Callable[[], float],
    ) -> None:
        self._path = path
        self._disk = disk
        self._signer = signer
        self._max_value_bytes = max_value_bytes
        self._events = events
        self._clock = clock
        self._hot_limit_bytes = HOT_BYTES if disk is not None else 2**62  # in memory nothing else holds them
        self._index: dict[bytes, _Indexed] = {}
        self._policy: S3Fifo[bytes] = S3Fifo(
            max_bytes if disk is not None else min(max_bytes, HOT_BYTES), max_entries=MAX_ENTRIES
        )
        self._hot: OrderedDict[bytes, bytes] = OrderedDict()
        self._hot_bytes = 0
        self._state = {"epoch": 0.0, "n_hits": 0.0, "saved_s": 0.0, "saved_j": 0.0}
        self._hits: dict[bytes, int] = {}
        self._n_uncounted = 0
        self._n_rejected = 0
        self._used_at_s = 0.0
        self._writer = Writer(disk, self._failed, self._written) if disk is not None else None
        self._reader = ThreadPoolExecutor(1, "cache-reader") if disk is not None else None
        self._problem = "" if disk is not None else "cannot be opened"
        self._retry_at_s: float | None = None
        self._was_reset = False
        self._load()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def epoch(self) -> int:
        """Count how often everything was forgotten; part of every key, so that what is under way is not kept."""
        return int(self._state["epoch"])

    # Reading.

    def meta(self, key: bytes) -> Meta | None:
        """Tell what is known of an entry; takes memory only."""
        indexed = self._index.get(key)
        return None if indexed is None else indexed.meta

    def items(self) -> Iterator[tuple[bytes, Meta, int, int]]:
        """Give each entry's key, meta, size in bytes and hits."""
        for key, indexed in list(self._index.items()):
            yield key, indexed.meta, indexed.size_bytes, indexed.n_hits

    def hot(self, key: bytes) -> Found | None:
        """Give an entry whose value is in memory."""
        indexed = self._index.get(key)
        if indexed is None:
            return None
        value = self._hot.get(key)
        if value is None:
            value = self._writer.pending(key) if self._writer is not None else None
            return None if value is None else Found(indexed.meta, value)
        self._hot.move_to_end(key)
        return Found(indexed.meta, value)

    async def get(self, key: bytes) -> Found | None:
        """Give an entry; one that is not in memory is read in another thread."""
        if (found := self.hot(key)) is not None or key not in self._index or self._reader is None:
            return found
        indexed = self._index[key]
        row = await asyncio.get_running_loop().run_in_executor(self._reader, self._read_row, key)
        # While it was read it may have been replaced or removed.
        return self._verified(key, row) if self._index.get(key) is indexed else self.hot(key)

    def get_now(self, key: bytes) -> Found | None:
        """Give an entry; waits for the disk."""
        if (found := self.hot(key)) is not None or key not in self._index or self._disk is None:
            return found
        return self._verified(key, self._read_row(key))

    def hit(self, key: bytes, now_s: float) -> None:
        """Count that an entry was given; now_s by the wall clock."""
        indexed = self._index.get(key)
        if indexed is None:
            return
        indexed.n_hits += 1
        self._policy.hit(key)
        self._hits[key] = self._hits.get(key, 0) + 1
        self._state["n_hits"] += 1
        self._state["saved_s"] += indexed.meta.saved_s
        self._state["saved_j"] += indexed.meta.saved_j
        self._used_at_s = now_s
        self._n_uncounted += 1
        if self._n_uncounted >= _COUNT_EVERY:
            self._write_counts()

    # Writing.

    def put(self, key: bytes, meta: Meta, value: bytes) -> bool:
        """Store an entry, in place of one of the same key; False if it could not be."""
        self._forget_if_reset()
        if len(value) > self._max_value_bytes or not self._takes(len(value)):
            return False
        self._drop(key)
        size_bytes = len(value) + _ROW_BYTES
        gone = self._policy.add(key, size_bytes, saved_s=meta.saved_s)
        self._events.cache_evicted(sum(k != key for k in gone))
        for old in gone:
            self._drop(old)
        if key in gone:
            self._delete(gone)
            return False
        self._index[key] = _Indexed(meta, size_bytes)
        self._keep_hot(key, value)
        if self._writer is not None:
            encoded = msgspec.json.encode(meta)
            mac = self._signer.sign(key, encoded, value)
            self._writer.put(key, encoded, value, mac, meta.created_at_s, gone)
        self._tell_size()
        return True

    def remove(self, keys: Iterable[bytes]) -> int:
        """Remove entries; give how many there were."""
        known = [key for key in keys if key in self._index]
        for key in known:
            self._drop(key)
            self._policy.remove(key)
        self._delete(known)
        self._tell_size()
        return len(known)

    def remove_if(self, is_meant: Callable[[Meta], bool]) -> int:
        return self.remove([key for key, indexed in self._index.items() if is_meant(indexed.meta)])

    def clear(self) -> int:
        """Forget everything, and what is under way as well: the epoch goes up. Give how many entries there were."""
        n_entries = len(self._index)
        self._forget()
        self._state["epoch"] += 1
        if self._writer is not None:
            self._writer.clear(dict(self._state))
        self._tell_size()
        return n_entries

    def flush(self) -> None:
        """Wait until all that was put has been written."""
        self._write_counts()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None and self._reader is not None and self._disk is not None:
            self._write_counts()
            self._writer.close()
            self._reader.shutdown()
            self._disk.close()

    def stats(self) -> StoreStats:
        return StoreStats(
            n_entries=len(self._index),
            size_bytes=self._policy.size_bytes,
            max_bytes=self._policy.max_bytes,
            hot_bytes=self._hot_bytes,
            n_hits=int(self._state["n_hits"]),
            n_evicted=self._policy.n_evicted,
            n_rejected=self._n_rejected,
            saved_s=self._state["saved_s"],
            saved_j=self._state["saved_j"],
            epoch=self.epoch,
            problem=self._problem,
            path=str(self._path) if self._disk is not None else "",
        )

    # The index.

    def _load(self) -> None:
        """Build the index from the file."""
        if self._disk is None:
            return
        n_bad = 0
        try:
            self._state |= {name: value for name, value in self._disk.state().items() if name in self._state}
            for row in self._disk.rows(MAX_ENTRIES, self._max_value_bytes):
                try:
                    meta = msgspec.json.decode(row.meta, type=Meta)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    n_bad += 1
                    continue
                size_bytes = row.value_bytes + _ROW_BYTES
                for gone in self._policy.add(row.key, size_bytes, saved_s=meta.saved_s, is_known=row.n_hits > 0):
                    self._index.pop(gone, None)
                if row.key in self._policy:
                    self._index[row.key] = _Indexed(meta, size_bytes, row.n_hits)
            strays = [key for key in self._disk.keys() if key not in self._index]  # noqa: SIM118  no mapping
        except sqlite3.Error as exc:
            self._failed(exc)
            return
        if n_bad:
            self._n_rejected += n_bad
            _log.warning("%s: %d entries cannot be read and are removed", self._path, n_bad)
        self._delete(strays)
        self._tell_size()

    def _read_row(self, key: bytes) -> tuple[bytes, bytes, bytes] | None:
        if self._disk is None:
            return None
        try:
            return self._disk.read(key, self._max_value_bytes)
        except sqlite3.Error as exc:
            self._failed(exc)
            return None

    def _verified(self, key: bytes, row: tuple[bytes, bytes, bytes] | None) -> Found | None:
        self._forget_if_reset()
        indexed = self._index.get(key)
        if indexed is None:
            return None
        if row is None:  # another process removed it, or the disk fails
            self._drop(key)
            self._policy.remove(key)
            return None
        encoded, value, mac = row
        if not self._signer.is_genuine(key, encoded, value, mac):
            self._n_rejected += 1
            self._events.cache_rejected()
            _log.warning("%s: an entry was not written by this cache, or was changed; it is removed", self._path)
            self.remove([key])
            return None
        indexed.meta = msgspec.json.decode(encoded, type=Meta)
        self._keep_hot(key, value)
        return Found(indexed.meta, value)

    def _keep_hot(self, key: bytes, value: bytes) -> None:
        self._hot_bytes -= len(self._hot.pop(key, b""))
        self._hot[key] = value
        self._hot_bytes += len(value)
        while self._hot_bytes > self._hot_limit_bytes:
            self._hot_bytes -= len(self._hot.popitem(last=False)[1])

    def _drop(self, key: bytes) -> None:
        self._index.pop(key, None)
        self._hits.pop(key, None)
        if (value := self._hot.pop(key, None)) is not None:
            self._hot_bytes -= len(value)

    def _forget(self) -> None:
        for key in self._index:
            self._policy.remove(key)
        self._index.clear()
        self._hits.clear()
        self._hot.clear()
        self._hot_bytes = 0

    def _forget_if_reset(self) -> None:
        """Follow a file that was moved aside."""
        if self._was_reset:
            self._was_reset = False
            self._forget()
            self._tell_size()

    def _tell_size(self) -> None:
        self._events.cache_size(n_entries=len(self._index), size_bytes=self._policy.size_bytes)

    # The disk.

    def _takes(self, n_bytes: int) -> bool:
        """Tell whether the disk takes more: it did not fail lately, and keeps up."""
        if self._writer is None:
            return True
        if self._retry_at_s is not None:
            if self._clock() < self._retry_at_s:
                return False
            self._retry_at_s = None
        return self._writer.pending_bytes + n_bytes <= _MAX_PENDING_BYTES

    def _delete(self, keys: Iterable[bytes]) -> None:
        if self._writer is not None and (gone := list(keys)):
            self._writer.delete(gone)

    def _write_counts(self) -> None:
        if self._n_uncounted and self._writer is not None:
            self._writer.count(dict(self._hits), self._used_at_s, dict(self._state))
        self._hits.clear()
        self._n_uncounted = 0

    def _failed(self, error: Exception) -> None:
        """Take note of a disk that failed; called from any thread."""
        self._retry_at_s = self._clock() + RETRY_S
        if isinstance(error, sqlite3.Error) and is_corrupt(error) and self._disk is not None and not self._was_reset:
            self._was_reset = True
            try:
                self._disk.begin_anew(str(error))
                self._retry_at_s = None
            except (OSError, sqlite3.Error) as exc:
                error = exc
        if self._retry_at_s is not None and str(error) != self._problem:
            self._problem = str(error)
            _log.warning(
                "%s: %s; answers go on, nothing more is stored until it is tried again every %.0f s",
                self._path,
                error,
                RETRY_S,
            )

    def _written(self) -> None:
        """Take note of a disk that works again; called from the writer's thread."""
        if self._problem:
            self._problem = ""
            _log.info("%s: can be written again", self._path)
