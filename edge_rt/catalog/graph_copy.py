"""A model's graph as its runtime has optimised it, in a file beside it, so that the next load need not do it again.

.FILE.graph is an ONNX file. Two entries of metadata end it: the facts that were found when the model was checked, so
that no load has to check it again, and the foot of FOOT_BYTES, which says of what model and runtime all this is and
what it hashes to. It appears by an atomic rename and is never changed. A file that is not what it says, or not written
by us, root or the model's owner, is not used, as packed.py does it; and since a runtime may crash on damaged bytes,
they are hashed at each load.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from edge_rt.catalog.packed import SPACE_MARGIN_BYTES, is_ours, open_plain
from edge_rt.catalog.part import sync_dir
from edge_rt.catalog.place import Place
from edge_rt.errors import ModelFormatError

FOOT_BYTES = 1024
# ModelProto.metadata_props (field 14) with the key "edge_rt" and a value that fills the rest.
_FOOT_HEAD = b"\x72\xfd\x07\x0a\x07edge_rt\x12\xf1\x07"
_FACTS_KEY = b"edge_rt_facts"
_FACTS_HEAD_BYTES = 14 + len(_FACTS_KEY)
MAX_FACTS_BYTES = 2**20  # what knows more of a model finds it out at each load
_Bytes = Annotated[int, Meta(ge=0)]
_MAX_GROWTH = 8  # folded constants make a graph larger; so many times the model's size must be free


class Foot(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy is: key of runtime, CPU and options; sha256 and model_… of the model file.

    n_bytes, digest               of the graph, which comes first; 0 bytes: is_hopeless
    n_facts_bytes, facts_digest   of the facts' entry, which comes next
    """

    key: str
    sha256: str
    model_bytes: int
    model_mtime_ns: int
    n_bytes: _Bytes = 0
    digest: str = ""
    n_facts_bytes: _Bytes = 0
    facts_digest: str = ""

    def fits(self, wanted: Foot) -> bool:
        return msgspec.structs.replace(self, n_bytes=0, digest="", n_facts_bytes=0, facts_digest="") == wanted


def is_hopeless(model: Path, copy: Path, key: str) -> bool:
    """Say whether an empty copy is there: the model is too large, or what its runtime writes it cannot read again."""
    if (wanted := _wanted(model, key)) is None or (file := open_plain(copy)) is None:
        return False
    with file:
        foot = _foot_of(file)
    return foot is not None and foot.fits(wanted) and not foot.n_bytes


def open_copy(model: Path, copy: Path, key: str) -> BinaryIO | None:
    """Open the copy of the store's model if it is whole, the wanted one, and by somebody who may write it."""
    if (found := _open_trusted(model, copy, key)) is None:
        return None
    file, foot = found
    if not foot.n_bytes or not _is_whole(file, foot):
        file.close()
        return None
    return file


def read_facts(model: Path, copy: Path, key: str) -> bytes:
    """Read what was found of the model when the copy was made, if open_copy would look at it; b"" if nothing is kept.

    The graph itself is not hashed: who believes the facts opens the copy, and nothing else.
    """
    if (found := _open_trusted(model, copy, key)) is None:
        return b""
    file, foot = found
    with file:
        if not foot.n_bytes or not _FACTS_HEAD_BYTES < foot.n_facts_bytes <= MAX_FACTS_BYTES:
            return b""
        file.seek(foot.n_bytes)
        entry = file.read(foot.n_facts_bytes)
    return entry[_FACTS_HEAD_BYTES:] if hashlib.sha256(entry).hexdigest() == foot.facts_digest else b""


def make_copy(
    model: Path,
    copy: Path,
    key: str,
    write: Callable[[str], object],
    *,
    facts: bytes = b"",
    free_bytes: Callable[[Path], int] = lambda path: os.statvfs(path).f_bavail * os.statvfs(path).f_frsize,
) -> bool:
    """Let write(path) write the copy of the store's model; it takes the old one's place when it is whole.

    facts  UTF-8, for read_facts; left out where they are longer than MAX_FACTS_BYTES

    False for a file that is not the store's, or if another process is at it. Raises OSError, and what write raises.
    """
    if (wanted := _wanted(model, key)) is None:
        return False
    new = copy.with_name(f"{copy.name}.new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if not is_ours(fd, new):
            return False
        try:
            copy.unlink(missing_ok=True)  # what is of no use may not take up the room
            need = _MAX_GROWTH * wanted.model_bytes + SPACE_MARGIN_BYTES
            if (have := free_bytes(model.parent)) < need:
                raise OSError(errno.ENOSPC, f"{have >> 20} MiB are free, {need >> 20} MiB are needed")
            write(f"/proc/self/fd/{fd}")  # the file that is locked, not whatever stands at the path by now
            _seal(fd, wanted, facts)
            new.rename(copy)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    finally:
        os.close(fd)
    sync_dir(copy.parent)
    return True


def give_up(model: Path, copy: Path, key: str) -> None:
    """Write the empty copy that is_hopeless looks for. Raises OSError."""
    make_copy(model, copy, key, lambda _: None, free_bytes=lambda _: sys.maxsize)  # it takes FOOT_BYTES


def verify_copy(model: Path) -> None:
    """Hash the copy of the graph of the model at path, if there is one. Raises ModelFormatError."""
    copy = Place(model).graph
    if (file := open_plain(copy)) is None:
        return
    with file:
        foot = _foot_of(file)
        if foot is not None and not _is_whole(file, foot):
            problem = "it is not what was written; delete the file, a load makes it anew"
            raise ModelFormatError(path=str(copy), field="optimised graph", problem=problem)


def _wanted(model: Path, key: str) -> Foot | None:
    if (record := Place(model).read_record()) is None:
        return None
    found = model.stat()
    return Foot(key=key, sha256=record.sha256, model_bytes=found.st_size, model_mtime_ns=found.st_mtime_ns)


def _foot_of(file: BinaryIO) -> Foot | None:
    found = os.fstat(file.fileno())
    size = found.st_size
    if not S_ISREG(found.st_mode) or size < FOOT_BYTES:
        return None
    file.seek(size - FOOT_BYTES)
    raw = file.read(FOOT_BYTES)
    if not raw.startswith(_FOOT_HEAD):
        return None
    try:
        foot = msgspec.json.decode(raw[len(_FOOT_HEAD) :], type=Foot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return foot if size == foot.n_bytes + foot.n_facts_bytes + FOOT_BYTES else None


def _open_trusted(model: Path, copy: Path, key: str) -> tuple[BinaryIO, Foot] | None:
    """Open the copy if it is the wanted one, and by somebody who may write it; nothing of it has been hashed."""
    if (wanted := _wanted(model, key)) is None or (file := open_plain(copy)) is None:
        return None
    foot, owner = _foot_of(file), os.fstat(file.fileno()).st_uid
    if foot is None or not foot.fits(wanted) or owner not in (0, os.geteuid(), model.stat().st_uid):
        file.close()
        return None
    return file, foot


def _is_whole(file: BinaryIO, foot: Foot) -> bool:
    return (_digest(file, 0, foot.n_bytes), _digest(file, foot.n_bytes, foot.n_facts_bytes)) == (
        foot.digest,
        foot.facts_digest,
    )


def _seal(fd: int, wanted: Foot, facts: bytes) -> None:
    with open(fd, "rb+", closefd=False) as file:
        n_bytes = file.seek(0, os.SEEK_END)
        entry = _facts_entry(facts) if n_bytes and 0 < len(facts) <= MAX_FACTS_BYTES - _FACTS_HEAD_BYTES else b""
        file.write(entry)
        foot = msgspec.structs.replace(
            wanted,
            n_bytes=n_bytes,
            digest=_digest(file, 0, n_bytes),
            n_facts_bytes=len(entry),
            facts_digest=hashlib.sha256(entry).hexdigest(),
        )
        value = msgspec.json.encode(foot)
        file.seek(n_bytes + len(entry))
        file.write(_FOOT_HEAD + value.ljust(FOOT_BYTES - len(_FOOT_HEAD)))
        file.flush()
        os.fsync(fd)


def _facts_entry(facts: bytes) -> bytes:
    """Write an entry of the metadata, as the foot is one."""
    inner = b"\x0a" + bytes([len(_FACTS_KEY)]) + _FACTS_KEY + b"\x12" + _varint(len(facts)) + facts
    return b"\x72" + _varint(len(inner)) + inner


def _varint(number: int) -> bytes:
    """Write a number in as many bytes whatever it is, which protobuf reads like the shortest form."""
    return bytes([number >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21)] + [number >> 28])


def _digest(file: BinaryIO, begin: int, n_bytes: int) -> str:
    digest = hashlib.sha256()
    file.seek(begin)
    while n_bytes > 0 and (chunk := file.read(min(n_bytes, 1 << 20))):
        digest.update(chunk)
        n_bytes -= len(chunk)
    return digest.hexdigest()
