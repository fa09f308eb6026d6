"""The cache's SQLite file: rows in and out, and what is done with a file that is not sound.

One connection writes and one reads, each for one thread at a time. A row is written in a transaction of its own in WAL
mode, so that a process that is killed leaves whole rows only; with synchronous=NORMAL the disk is waited for at
checkpoints alone, and a power cut may cost the last rows, never the file.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_rt.errors import CacheStoreError

_log = logging.getLogger("edge_rt.cache")

_APPLICATION_ID: Final = 0x45525443  # "ERTC"
_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE entries (key BLOB PRIMARY KEY, meta BLOB NOT NULL, value BLOB NOT NULL, mac BLOB NOT NULL, "
    "n_hits INTEGER NOT NULL, used_at_s REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE state (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
)
_BUSY_TIMEOUT_S: Final = 5.0
_MAX_META_BYTES: Final = 8192
_PAGE_BYTES: Final = 4096
_SPARE_PAGES: Final = 256
_PAGE_CACHE_KIB: Final = 512  # of each connection; values that are hot are held by the store
_WAL_BYTES: Final = 4 * 2**20
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stored entry; its value is read when it is asked for."""

    key: bytes
    meta: bytes
    value_bytes: int
    n_hits: int


def is_corrupt(error: sqlite3.Error) -> bool:
    """Tell damage from what passes, as a full disk or a lock."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _CORRUPT


class Disk:
    """An open file. Methods raise sqlite3.Error, the constructor CacheStoreError for a place that cannot be used.

    max_bytes  of all rows; the file itself is held below one and a half times that
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self._max_pages = max_bytes * 3 // 2 // _PAGE_BYTES + _SPARE_PAGES
        self._writing, self._reading = threading.Lock(), threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_private(path)
            try:
                self._open()
            except sqlite3.DatabaseError as exc:
                if not is_corrupt(exc) and not isinstance(exc, _ForeignFileError):
                    raise
                self._move_aside(str(exc))
                self._open()
        except (OSError, sqlite3.Error) as exc:
            raise CacheStoreError(path=str(path), problem=str(exc)) from exc

    def _open(self) -> None:
        self._writer = self._connect()
        try:
            _check_schema(self._writer)
        except sqlite3.Error:
            self._writer.close()
            raise
        self._reader = self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=16
        )
        try:
            for pragma in (
                "trusted_schema = OFF",
                "cell_size_check = ON",
                "mmap_size = 0",
                f"cache_size = -{_PAGE_CACHE_KIB}",
                "journal_mode = WAL",
                "synchronous = NORMAL",
                "secure_delete = FAST",
                f"journal_size_limit = {_WAL_BYTES}",
                f"max_page_count = {self._max_pages}",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    def begin_anew(self, problem: str) -> None:
        """Move the damaged file aside and open an empty one. Raises OSError, sqlite3.Error."""
        self.close()
        with self._writing, self._reading:
            self._move_aside(problem)
            _make_private(self.path)
            self._open()

    def _move_aside(self, problem: str) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        _log.warning("%s: %s; moved to %s, the cache begins anew", self.path, problem, aside.name)

    # Reading.

    def rows(self, max_rows: int, max_value_bytes: int) -> Iterator[Row]:
        """List the rows used last, the one used longest ago first; those that are larger than they may be are not."""
        query = (
            "SELECT * FROM (SELECT key, meta, length(value), n_hits, used_at_s FROM entries WHERE length(meta) <= ? "
            "AND length(value) <= ? AND length(key) <= 64 ORDER BY used_at_s DESC LIMIT ?) ORDER BY used_at_s"
        )
        with self._reading:
            for key, meta, value_bytes, n_hits, _ in self._reader.execute(
                query, (_MAX_META_BYTES, max_value_bytes, max_rows)
            ):
                yield Row(key=bytes(key), meta=_bytes(meta), value_bytes=value_bytes, n_hits=int(n_hits))

    def keys(self) -> list[bytes]:
        with self._reading:
            return [_bytes(key) for (key,) in self._reader.execute("SELECT key FROM entries")]

    def read(self, key: bytes, max_value_bytes: int) -> tuple[bytes, bytes, bytes] | None:
        """Give an entry's meta, value and MAC, unverified."""
        with self._reading:
            row = self._reader.execute(
                "SELECT meta, value, mac FROM entries WHERE key = ? AND length(meta) <= ? AND length(value) <= ?",
                (key, _MAX_META_BYTES, max_value_bytes),
            ).fetchone()
        return None if row is None else (_bytes(row[0]), _bytes(row[1]), _bytes(row[2]))

    def state(self) -> dict[str, float]:
        with self._reading:
            return {str(name): float(value) for name, value in self._reader.execute("SELECT name, value FROM state")}

    # Writing.

    def put(self, key: bytes, meta: bytes, value: bytes, mac: bytes, used_at_s: float, gone: Iterable[bytes]) -> None:
        """Write one row, and delete those that made room for it, all or nothing."""
        with self._writing, self._transaction():
            self._writer.executemany("DELETE FROM entries WHERE key = ?", [(k,) for k in gone])
            self._writer.execute(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, 0, ?)", (key, meta, value, mac, used_at_s)
            )

    def delete(self, keys: Iterable[bytes]) -> None:
        with self._writing, self._transaction():
            self._writer.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])

    def count(self, hits: Mapping[bytes, int], used_at_s: float, state: Mapping[str, float]) -> None:
        """Add hits to rows, and set figures of the whole."""
        with self._writing, self._transaction():
            self._writer.executemany(
                "UPDATE entries SET n_hits = n_hits + ?, used_at_s = ? WHERE key = ?",
                [(n, used_at_s, key) for key, n in hits.items()],
            )
            self._writer.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", list(state.items()))

    def clear(self, state: Mapping[str, float]) -> None:
        """Delete all rows and give their space back, so that nothing of them is left in the file."""
        with self._writing:
            with self._transaction():
                self._writer.execute("DELETE FROM entries")
                self._writer.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", list(state.items()))
            self._writer.execute("VACUUM")
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _transaction(self) -> _Transaction:
        return _Transaction(self._writer)


class _Transaction:
    """A transaction that takes the write lock at its begin: where it cannot be had, nothing has been done."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            try:
                self._connection.execute("COMMIT")
                return
            except sqlite3.Error:
                self._roll_back()
                raise
        self._roll_back()

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # a full disk may have rolled back by itself
            self._connection.execute("ROLLBACK")


class _ForeignFileError(sqlite3.DatabaseError):
    """A sound SQLite file, but not one of ours: its triggers and views would run."""


def _check_schema(connection: sqlite3.Connection) -> None:
    found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    if not found and version == 0:
        with _Transaction(connection):
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            for statement in _SCHEMA:
                connection.execute(statement)
    elif found != set(_SCHEMA) or version != _VERSION or application_id != _APPLICATION_ID:
        raise _ForeignFileError("is no cache of this version")


def _make_private(path: Path) -> None:
    """Make the file with mode 0600, which SQLite gives to the files beside it as well; refuse what is no file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
    finally:
        os.close(descriptor)


def _bytes(value: object) -> bytes:
    """Take a column for what it should be: SQLite lets any type stand in it."""
    return value if isinstance(value, bytes) else str(value).encode()
