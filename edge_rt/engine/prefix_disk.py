"""Kept prefixes in files, for the next start: written whole or not at all, and trusted in nothing.

A file holds one sequence from its first token on: a head that says of which model, back end and settings, whose, and
where its parts begin; the tokens; the SHA-256 of these; the back end's states; and at the end the SHA-256 of all of
that. The head is read at the start, bounded and checked for sense and by its hash, because a pin is computed again by
its tokens where the states are damaged; the last hash is checked before the first state is used. What is damaged, cut
short or of something else is removed. Files are the owner's alone (0600, in a folder of 0700) and name the user whose
prompt they hold where users are isolated.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
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

_MAGIC: Final = b"ERTKV\0\0\2"
_MAX_HEAD_BYTES: Final = 2**20
_MAX_FILES: Final = 4096
_HASH_BYTES: Final = 32
_SUFFIX, _NEW = ".kv", ".kv-new"


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of itself. key names model, back end and all settings that a state depends on.

    owner  as PrefixTree has it; pin: the name of a pinned prefix, "" for one that was often used
    sizes  of the states, in bytes
    """

    key: str
    owner: str
    pin: str
    n_tokens: int
    sizes: list[int]


@dataclass(slots=True, eq=False)
class PrefixFile:
    """One file. Its content is mapped and checked when the first state is read; is_bad: it was found damaged."""

    path: Path
    head: Head
    token_ids: tuple[int, ...]
    n_bytes: int
    _starts: list[int] = field(default_factory=list)
    _mapped: mmap.mmap | None = None
    is_bad: bool = False

    def state(self, number: int) -> NDArray[np.uint8] | None:
        """Give a state; None where the file is not what it was, which is then removed."""
        if self._mapped is None and not self.is_bad:
            self._mapped = _checked_map(self.path, self.n_bytes)
            if self._mapped is None:
                self.is_bad = True
                _log.warning("%s is damaged and removed: its prefix is computed again", self.path.name)
                _unlink(self.path)
        if self._mapped is None:
            return None
        return np.frombuffer(self._mapped, np.uint8, self.head.sizes[number], self._starts[number])


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A state in a file. It takes no memory that the kernel could not have back."""

    file: PrefixFile
    number: int

    @property
    def n_bytes(self) -> int:
        return 0

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
        self.n_refused = 0

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
                self.n_refused += name.endswith(_SUFFIX)
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
        go_on: Callable[[], bool] = lambda: True,
    ) -> PrefixFile | None:
        """Write a prefix; None where go_on ends it, or it cannot be written, which is told in the log once."""
        head = Head(key=self._key, owner=owner, pin=pin, n_tokens=len(token_ids), sizes=[s.nbytes for s in states])
        encoded = msgspec.json.encode(head)
        tokens = array("i", token_ids).tobytes()
        parts = [_MAGIC, len(encoded).to_bytes(4, "little"), encoded, tokens]
        parts.append(hashlib.sha256(b"".join(parts)).digest())
        start = sum(map(len, parts))
        n_bytes = start + sum(head.sizes) + _HASH_BYTES
        if len(encoded) > _MAX_HEAD_BYTES or not self._make_room(n_bytes):
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
    """Write a file that the last 32 bytes vouch for; so it need not be flushed: what a crash cuts short is noticed."""
    digest = hashlib.sha256()
    with open(new, "xb", opener=_private) as out:
        for part in parts:
            digest.update(part)
            out.write(part)
        for state in states:
            if not go_on():
                return False
            digest.update(state)  # type: ignore[arg-type]  # numpy's arrays are buffers
            out.write(state)  # type: ignore[arg-type]
        out.write(digest.digest())
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
        if start + sum(head.sizes) + _HASH_BYTES != stat.st_size:
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


def _checked_map(path: Path, n_bytes: int) -> mmap.mmap | None:
    """Map a file that is as it was written; None for another, or one that cannot be read."""
    if (opened := open_plain(path)) is None:
        return None
    try:
        with opened as file:
            stat = os.fstat(file.fileno())
            if not S_ISREG(stat.st_mode) or stat.st_size != n_bytes or stat.st_uid != os.geteuid():
                return None
            # It is read for its hash, and mapped then: where a disk fails, looking into a mapping ends the process.
            digest, n_left = hashlib.sha256(), n_bytes - _HASH_BYTES
            while n_left and (part := file.read(min(n_left, 2**20))):
                digest.update(part)
                n_left -= len(part)
            if n_left or file.read(_HASH_BYTES + 1) != digest.digest():
                return None
            return mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ)
    except OSError as exc:
        _log.warning("%s cannot be read: %s", path, exc.strerror or exc)
        return None
