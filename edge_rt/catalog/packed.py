"""A model's packed weights in a file beside it, written once and mapped read-only by every process that runs the model.

.FILE.packed holds a page that says what the weights were packed from and how, and after it the weights. It appears by
an atomic rename and is never changed. Its content is data for kernels that take any bits, so a damaged file would give
wrong answers, never a crash; it is hashed at each load, and made anew where it has changed. Whoever cuts it short while
it is mapped ends the worker by SIGBUS, as with the model file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

import msgspec

from edge_rt.catalog.part import hash_rest, sync_dir
from edge_rt.catalog.place import Place
from edge_rt.errors import ModelFormatError

# Left free on the disk, so that the rest of the device can go on writing.
SPACE_MARGIN_BYTES = 64 * 2**20
HEAD_BYTES = 4096  # a page: what follows is aligned
_log = logging.getLogger(__name__)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What the weights are. layout is the packer's version of their order; sha256 and model_… are the model file's."""

    layout: str
    sha256: str
    model_bytes: int
    model_mtime_ns: int
    n_bytes: int
    packed_sha256: str = ""

    def fits(self, wanted: Head) -> bool:
        return msgspec.structs.replace(self, packed_sha256="") == wanted


@dataclass(frozen=True, slots=True)
class Packing:
    """n_bytes of weights in a layout; pack writes them into a map, from HEAD_BYTES on."""

    layout: str
    n_bytes: int
    pack: Callable[[mmap.mmap], object]


def open_packed(path: Path, packing: Packing, *, free_bytes: Callable[[Path], int]) -> mmap.mmap | None:
    """Map the packed weights of the store's model at path, packing them first if need be; they begin at HEAD_BYTES.

    None for a file that is not the store's, and, with a line in the log that says why, where no copy can be written.
    """
    record = Place(path).read_record()
    if record is None:
        return None
    model = path.stat()
    wanted = Head(
        layout=packing.layout,
        sha256=record.sha256,
        model_bytes=model.st_size,
        model_mtime_ns=model.st_mtime_ns,
        n_bytes=packing.n_bytes,
    )
    try:
        return _map(path, wanted) or _pack(path, wanted, packing, free_bytes)
    except OSError as exc:
        _log.warning("%s: its packed weights are not kept on disk: %s", path.name, exc.strerror or exc)
        return None


def verify_packed(path: Path, report: Callable[[int], None], done_bytes: int = 0) -> None:
    """Hash the packed weights of the model at path, if there are any; report counts on from done_bytes.

    Raises ModelFormatError.
    """
    packed = Place(path).packed
    if (file := open_plain(packed)) is None:
        return
    with file:
        if (head := _head_of(file)) is None:
            return
        file.seek(HEAD_BYTES)
        found = hash_rest(file, report, done_bytes)
    if found != head.packed_sha256:
        problem = f"sha256 is {found}, {head.packed_sha256} was written; the next load makes it anew"
        raise ModelFormatError(path=str(packed), field="packed weights", problem=problem)


def packed_size_bytes(path: Path) -> int:
    """Give the size of the packed weights of the model at path, 0 if there are none."""
    head = read_head(Place(path).packed)
    return head.n_bytes if head else 0


def read_head(packed: Path) -> Head | None:
    """Read what a file of packed weights says of itself; None if it is not whole or not such a file."""
    if (file := open_plain(packed)) is None:
        return None
    with file:
        return _head_of(file)


def open_plain(packed: Path) -> BinaryIO | None:
    """Open for reading whatever stands there, but no link, which may lead to anything, nor wait for a pipe's writer."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    try:
        return open(packed, "rb", opener=opener)
    except OSError:
        return None


def _head_of(file: BinaryIO) -> Head | None:
    stat = os.fstat(file.fileno())
    if not S_ISREG(stat.st_mode):
        return None
    try:
        head = msgspec.json.decode(file.read(HEAD_BYTES).rstrip(b"\0"), type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return head if stat.st_size == HEAD_BYTES + head.n_bytes else None


def _map(path: Path, wanted: Head) -> mmap.mmap | None:
    """Map the copy of the model at path if it is the wanted one and whole, written by us, root or the model's owner.

    What was looked at is what is mapped: another process may put a new copy in its place meanwhile.
    """
    if (file := open_plain(Place(path).packed)) is None:
        return None
    with file:
        head, owner = _head_of(file), os.fstat(file.fileno()).st_uid
        if head is None or not head.fits(wanted) or owner not in (0, os.geteuid(), path.stat().st_uid):
            return None
        mapped = mmap.mmap(file.fileno(), HEAD_BYTES + wanted.n_bytes, access=mmap.ACCESS_READ)
    with memoryview(mapped)[HEAD_BYTES:] as weights:
        is_sound = hashlib.sha256(weights).hexdigest() == head.packed_sha256
    if not is_sound:
        mapped.close()
        _log.warning("%s: its packed weights on disk are damaged and are made anew", path.name)
        return None
    return mapped


def _pack(path: Path, wanted: Head, packing: Packing, free_bytes: Callable[[Path], int]) -> mmap.mmap | None:
    """Pack into a file that takes the old one's place when it is whole; None if another process is at it."""
    place = Place(path)
    n_bytes = HEAD_BYTES + packing.n_bytes
    fd = os.open(place.packing, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if not is_ours(fd, place.packing):
            return None
        try:
            os.ftruncate(fd, 0)  # and what stands there for an old copy is of no use: neither may take up the room
            place.packed.unlink(missing_ok=True)
            if (have := free_bytes(path.parent)) < n_bytes + SPACE_MARGIN_BYTES:
                need = (n_bytes + SPACE_MARGIN_BYTES) >> 20
                raise OSError(errno.ENOSPC, f"{have >> 20} MiB are free, {need} MiB are needed")
            os.posix_fallocate(fd, 0, n_bytes)  # a full disk must be an error here, not a signal in the mapping
            _fill(fd, n_bytes, wanted, packing)
            place.packing.rename(place.packed)
        except BaseException:
            place.packing.unlink(missing_ok=True)
            raise
    finally:
        os.close(fd)
    sync_dir(path.parent)
    return _map(path, wanted)


def is_ours(fd: int, packing: Path) -> bool:
    """Lock the file, unless somebody has it or has already renamed it to where readers map it."""
    stat = os.fstat(fd)
    if stat.st_uid != os.geteuid() or stat.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"{packing} is not a file of ours alone")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.st_ino == packing.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def _fill(fd: int, n_bytes: int, wanted: Head, packing: Packing) -> None:
    out = mmap.mmap(fd, n_bytes)  # not closed by hand: a packer that is interrupted may still hold on to it
    packing.pack(out)
    with memoryview(out)[HEAD_BYTES:] as weights:
        digest = hashlib.sha256(weights).hexdigest()
    head = msgspec.json.encode(msgspec.structs.replace(wanted, packed_sha256=digest))
    out[: len(head)] = head
    out.flush()
    os.fsync(fd)
