"""A file on its way into the store: hashed as it is written, kept over a kill, bounded by its promised size."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

import msgspec

from edge_rt.errors import DiskFullError, PullError
from edge_rt.regular import open_regular

_CHUNK_BYTES = 1 << 20

Phase = Literal["wait", "check", "fetch", "retry", "unpack", "derive", "convert", "done"]
Report = Callable[[Phase, int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """Where a pull stands.

    phase        wait: another process pulls the same file · check: hashing what is there · fetch · retry: the
                 connection broke, another try begins · unpack: out of a wheel · derive: the quantiser runs ·
                 convert: another format becomes GGUF · done
    total_bytes  None where nobody knows
    """

    model: str
    variant: str
    file: str
    phase: Phase
    done_bytes: int = 0
    total_bytes: int | None = None


Progress = Callable[[PullProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """How a variant is made of another file.

    quant   what it becomes
    recipe  "" is the GGUF quantiser
    beside  materials that the recipe takes too
    """

    quant: str
    recipe: str = ""
    beside: tuple[Path, ...] = ()


Derive = Callable[[Path, Path, Derivation], None]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a partial file is a part of; it stands beside it. etag is the server's strong entity tag or ''."""

    source: str
    sha256: str
    etag: str = ""


class Part:
    """A partial file at path. Use it as a context manager; leaving it keeps the bytes for the next try.

    origin    bytes of another origin found at path are dropped
    resumed   whether bytes of an earlier process are in it
    n_bytes   written so far, all of them hashed
    """

    def __init__(self, path: Path, origin: Origin, *, size_bytes: int, free_bytes: Callable[[], int], report: Report):
        self.path = path
        self.size_bytes = size_bytes
        self.n_bytes = 0
        self.resumed = False
        self._origin = origin
        self._origin_path = path.with_name(path.name + ".json")
        self._free_bytes = free_bytes
        self._report = report
        self._hash = hashlib.sha256()
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        there = _read_origin(self._origin_path)
        size = os.fstat(self._fd).st_size
        if there is None or not self._is_mine(there) or size > self.size_bytes:
            self.restart()
            return self
        self._origin = there
        self.resumed = size > 0
        while chunk := os.pread(self._fd, _CHUNK_BYTES, self.n_bytes):
            self._take(chunk)
            self._report("check", self.n_bytes, size)
        os.lseek(self._fd, self.n_bytes, os.SEEK_SET)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    @property
    def etag(self) -> str:
        return self._origin.etag

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def is_complete(self) -> bool:
        return self.n_bytes == self.size_bytes

    def restart(self, etag: str = "") -> None:
        """Drop all bytes; what comes now is the file whose entity tag is etag."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.n_bytes = 0
        self.resumed = False
        self._hash = hashlib.sha256()
        self._origin = msgspec.structs.replace(self._origin, etag=etag)
        with self._writing():
            self._origin_path.write_bytes(msgspec.json.encode(self._origin))

    def write(self, chunk: bytes, phase: Phase = "fetch") -> None:
        """Append. Raises DiskFullError, and PullError when more comes than was promised."""
        if self.n_bytes + len(chunk) > self.size_bytes:
            raise PullError(source=self._origin.source, problem=f"it is longer than {self.size_bytes} bytes")
        view = memoryview(chunk)
        with self._writing():
            while view:
                written = os.write(self._fd, view)
                self._take(view[:written])
                view = view[written:]
        self._report(phase, self.n_bytes, self.size_bytes)

    def sync(self) -> None:
        with self._writing():
            os.fsync(self._fd)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._origin_path.unlink(missing_ok=True)

    def move_to(self, path: Path) -> None:
        """Put the finished file in its place; from now on readers see it."""
        self.path.rename(path)
        self._origin_path.unlink(missing_ok=True)
        sync_dir(path.parent)

    def _is_mine(self, there: Origin) -> bool:
        return (there.source, there.sha256) == (self._origin.source, self._origin.sha256)

    def _take(self, chunk: bytes | memoryview) -> None:
        self._hash.update(chunk)
        self.n_bytes += len(chunk)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with disk_full(self.path.parent, self.size_bytes - self.n_bytes, self._free_bytes):
                yield
        except DiskFullError:
            # A full disk harms everything else on the device; give the bytes back.
            self.remove()
            raise


@contextmanager
def disk_full(directory: Path, need_bytes: int, free_bytes: Callable[[], int]) -> Iterator[None]:
    """Turn "no space left" of the block's writes into DiskFullError."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(path=str(directory), need_bytes=need_bytes, have_bytes=free_bytes()) from exc


def sync_dir(directory: Path) -> None:
    """Make a rename in directory survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hash_file(path: Path, report: Callable[[int], None] | None = None) -> str:
    """Give a regular file's sha256, reporting the bytes read so far. Raises OSError."""
    with open_regular(path, buffering=0) as file:
        return hash_rest(file, report)


def hash_rest(file: BinaryIO, report: Callable[[int], None] | None = None, done_bytes: int = 0) -> str:
    """Give the sha256 of what is left of a file; report counts on from done_bytes."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        done_bytes += len(chunk)
        if report is not None:
            report(done_bytes)
    return digest.hexdigest()


def _read_origin(path: Path) -> Origin | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Origin)
    except (OSError, msgspec.DecodeError):
        return None
