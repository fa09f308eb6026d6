"""Kept prefixes in files, for the next start: written whole or not at all, and trusted in nothing.

A file holds one sequence from its first token on: a head that says of which model, back end and settings, whose, and
of each state its size and CRC-32; the tokens; the SHA-256 of these; and the back end's states. The head is read at the
start, bounded and checked for sense and by its hash, because a pin is computed again by its tokens where the states
are damaged. A state is read into memory and checked there each time: once, and never through a mapping, in which a
failing disk or a file cut short would end the process. A CRC finds what disks and crashes do, and takes a third of
SHA-256's time; who could change a file on purpose is its owner, who could write a right hash too. What is damaged, cut
short or of something else is removed. Files are the owner's alone (0600, in a folder of 0700) and name the user whose
prompt they hold where users are isolated.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_rt.catalog.packed import SPACE_MARGIN_BYTES, open_plain

_log = logging.getLogger(__name__)

_MAGIC: Final = b"ERTKV\0\0\4"
_MAX_HEAD_BYTES: Final = 2**20
_MAX_FILES: Final = 4096
_HASH_BYTES: Final = 32
_SUFFIX, _NEW = ".kv", ".kv-new"


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of itself. key names model, back end and all settings that a state depends on.

    owner  as PrefixTree has it; pin: the name of a pinned prefix, "" for one that was often used; pinned_by: by whom
    sizes  of the states, in bytes; sums: their CRC-32
    """

    key: str
    owner: str
    pin: str
    pinned_by: str
    n_tokens: int
    sizes: list[int]
    sums: list[int]


@dataclass(slots=True, eq=False)
class PrefixFile:
    """One file. is_gone: it was found damaged, or made room for others, and nothing more can be read from it."""

    path: Path
    head: Head
    token_ids: tuple[int, ...]
    n_bytes: int
    _starts: list[int] = field(default_factory=list)
    is_gone: bool = False

    def state(self, number: int) -> NDArray[np.uint8] | None:
        """Read a state; None where the file is not what it was, which is then removed."""
        if self.is_gone:
            return None
        state = _read_part(self.path, self.n_bytes, self._starts[number], self.head.sizes[number])
        if state is None or zlib.crc32(state.data) != self.head.sums[number]:
            self.is_gone = True
            _log.warning("%s is damaged and removed: its prefix is computed again", self.path.name)
            _unlink(self.path)
            return None
        return state


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A state in a file. It takes no memory."""

    file: PrefixFile
    number: int

    @property
    def n_bytes(self) -> int:
        return 0

    @property
    def size_bytes(self) -> int:
        """Count the bytes that it takes once it is read."""
        return self.file.head.sizes[self.number]

    @property
    def is_there(self) -> bool:
        return not self.file.is_gone

    def read(self) -> NDArray[np.uint8] | None:
        return self.file.state(self.number)


class PrefixDisk:
    """The files of one model's prefixes, at most max_bytes of them; what was saved or used longest ago goes first.

    key  as Head has it; a file of another one is removed
    """

    def __init__(self, folder: Path, key: str, max_bytes: int, *, free_bytes: Callable[[Path], int]) -> None:
        self._folder, self._key, self._max_bytes, self._free_bytes = folder, key, max_bytes, free_bytes
        self._lock: int | None = None
        self._has_warned = False
        self.files: list[PrefixFile] = []  # the oldest first
        self.problem = ""
        self.before_remove: Callable[[PrefixFile], None] = lambda _: None

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    def open(self) -> bool:
        """Find the files that can be used, and remove the others; False where the folder cannot be had."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            stat = self._folder.lstat()
            if not S_ISDIR(stat.st_mode) or stat.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it is not a folder of ours")
            self._folder.chmod(0o700)
            self._lock = _private(str(self._folder / ".lock"), os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            names = sorted(entry.name for entry in os.scandir(self._folder))[:_MAX_FILES]
        except BlockingIOError:
            told = "another worker of this model keeps its own there; end its daemon, or give this one a store_dir"
            _log.warning("prefixes are not kept in %s: %s", self._folder, told)
            self.close()
            return False
        except OSError as exc:
            _log.warning("prefixes are not kept in %s: %s", self._folder, exc.strerror or exc)
            self.close()
            return False
        found: list[tuple[float, PrefixFile]] = []
        for name in names:
            path = self._folder / name
            if name.endswith(_SUFFIX) and (entry := _read(path, self._key)) is not None:
                found.append(entry)
            elif name.endswith((_SUFFIX, _NEW)):
                _unlink(path)
        self.files = [file for _, file in sorted(found, key=lambda entry: entry[0])]
        self._make_room(0)
        return True

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def save(
        self,
        owner: str,
        token_ids: Sequence[int],
        states: Sequence[NDArray[np.uint8]],
        *,
        pin: str = "",
        pinned_by: str = "",
        go_on: Callable[[], bool] = lambda: True,
    ) -> PrefixFile | None:
        """Write a prefix; None where go_on ends it, or it cannot be written: problem says why, and once the log."""
        head = Head(
            key=self._key,
            owner=owner,
            pin=pin,
            pinned_by=pinned_by,
            n_tokens=len(token_ids),
            sizes=[state.nbytes for state in states],
            sums=[zlib.crc32(state.data) for state in states],
        )
        encoded = msgspec.json.encode(head)
        tokens = array("i", token_ids).tobytes()
        parts = [_MAGIC, len(encoded).to_bytes(4, "little"), encoded, tokens]
        parts.append(hashlib.sha256(b"".join(parts)).digest())
        start = sum(map(len, parts))
        n_bytes = start + sum(head.sizes)
        self.problem = ""
        if len(encoded) > _MAX_HEAD_BYTES or not self._make_room(n_bytes):
            self.problem = (
                f"its file takes {n_bytes / 2**20:.1f} MiB, and beside what is pinned on the disk only "
                f"{max(0, self._max_bytes - self.n_bytes) / 2**20:.1f} MiB are allowed; raise "
                "engine.max_prefix_disk_bytes, or unpin others"
            )
            return None
        path = self._folder / (secrets.token_hex(16) + _SUFFIX)
        new = path.with_suffix(_NEW)
        try:
            if (have := self._free_bytes(self._folder)) < n_bytes + SPACE_MARGIN_BYTES:
                raise OSError(errno.ENOSPC, f"{have >> 20} MiB are free, {(n_bytes + SPACE_MARGIN_BYTES) >> 20} needed")
            is_whole = _write(new, parts, states, go_on)
            if is_whole:
                new.rename(path)
        except OSError as exc:
            is_whole = False
            self.problem = f"its file cannot be written into {self._folder}: {exc.strerror or exc}"
            if not self._has_warned:
                _log.warning("prefixes cannot be kept in %s: %s", self._folder, exc.strerror or exc)
                self._has_warned = True
        if not is_whole:
            _unlink(new)
            return None
        file = PrefixFile(path, head, tuple(token_ids), n_bytes, _starts(start, head.sizes))
        self.files.append(file)
        return file

    def remove(self, file: PrefixFile) -> None:
        """Forget a file. Where it cannot be unlinked, the next start tries again."""
        self.before_remove(file)
        file.is_gone = True
        _unlink(file.path)
        if file in self.files:
            self.files.remove(file)

    def _make_room(self, n_bytes: int) -> bool:
        """Remove the oldest files until there is room; those of pinned prefixes stay."""
        for file in [f for f in self.files if not f.head.pin]:
            if self.n_bytes + n_bytes <= self._max_bytes:
                break
            self.remove(file)
        return self.n_bytes + n_bytes <= self._max_bytes


def state_key(parts: Iterable[object]) -> str:
    """Make a key of all that a state depends on."""
    return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()


def _unlink(path: Path) -> None:
    """Remove a file if that can be done: a disk that has become read-only must not end the engine."""
    with suppress(OSError):
        path.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _starts(first: int, sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=first))[:-1]


def _write(new: Path, parts: Sequence[bytes], states: Iterable[NDArray[np.uint8]], go_on: Callable[[], bool]) -> bool:
    """Write a file. It need not be flushed: what a crash cuts short or leaves out is noticed by the sums."""
    with open(new, "xb", opener=_private) as out:
        out.writelines(parts)
        for state in states:
            if not go_on():
                return False
            out.write(state)  # type: ignore[arg-type]  # numpy's arrays are buffers
    return True


def _read(path: Path, key: str) -> tuple[float, PrefixFile] | None:
    """Read a file's head and tokens, and when it was written; None for one that is not ours, of something else, makes
    no sense, or cannot be read.
    """
    try:
        return _read_head(path, key)
    except OSError as exc:
        _log.warning("%s cannot be read: %s", path, exc.strerror or exc)
        return None


def _read_head(path: Path, key: str) -> tuple[float, PrefixFile] | None:
    if (opened := open_plain(path)) is None:
        return None
    with opened as file:
        stat = os.fstat(file.fileno())
        if not S_ISREG(stat.st_mode) or stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
            return None
        begin = file.read(len(_MAGIC) + 4)
        n_head = int.from_bytes(begin[len(_MAGIC) :], "little")
        if begin[: len(_MAGIC)] != _MAGIC or not 0 < n_head <= _MAX_HEAD_BYTES:
            return None
        encoded = file.read(n_head)
        try:
            head = msgspec.json.decode(encoded, type=Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        start = len(begin) + n_head + 4 * head.n_tokens + _HASH_BYTES
        if head.key != key or head.n_tokens <= 0 or not head.sizes or min(head.sizes) < 0:
            return None
        if start + sum(head.sizes) != stat.st_size or len(head.sums) != len(head.sizes):
            return None
        tokens = file.read(4 * head.n_tokens)
        if hashlib.sha256(begin + encoded + tokens).digest() != file.read(_HASH_BYTES):
            _log.warning("%s is damaged and removed", path.name)
            return None
    token_ids = array("i", tokens)
    if len(token_ids) != head.n_tokens or min(token_ids) < 0:
        return None
    starts = _starts(start, head.sizes)
    return stat.st_mtime, PrefixFile(path, head, tuple(token_ids), stat.st_size, starts)


def _read_part(path: Path, n_bytes: int, start: int, size: int) -> NDArray[np.uint8] | None:
    """Read a part of a file of n_bytes; None for one of another size, that is not ours, or cannot be read."""
    if (opened := open_plain(path)) is None:
        return None
    part = np.empty(size, np.uint8)
    try:
        with opened as file:
            stat = os.fstat(file.fileno())
            if not S_ISREG(stat.st_mode) or stat.st_size != n_bytes or stat.st_uid != os.geteuid():
                return None
            n_read = 0
            while n_read < size and (n := os.preadv(file.fileno(), [part[n_read:].data], start + n_read)):
                n_read += n
    except OSError as exc:
        _log.warning("%s cannot be read: %s", path, exc.strerror or exc)
        return None
    return part if n_read == size else None
