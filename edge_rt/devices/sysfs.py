"""The kernel's text files below an injectable root, read so that a missing one is a reason and not an exception."""

from __future__ import annotations

import errno
import glob
import os
from pathlib import Path

from edge_rt.devices.base import Reading, known, unknown

# Larger than any file read here, /proc/cpuinfo of a 512-thread server included; a cap, because a root may be hostile.
_MAX_BYTES = 4 * 2**20
_CHUNK_BYTES = 2**16
# A directory that pretends to be /sys may hold a pipe; opening it must not wait.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_MAX_DIGITS = 40  # of a number: the kernel's largest has 20
_MAX_NAME = 80  # characters of a name
_MAX_CPUS = 2**16


class SysfsRoot:
    """The directory that holds proc/, sys/ and etc/: / on a machine, a captured tree in a test."""

    __slots__ = ("_root", "_top")

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._top = f"{root}/" if root != Path("/") else "/"  # joined as text: meters are read 20 times a second

    def read_bytes(self, path: str) -> bytes:
        """Read a file from its start, at most 4 MiB of it. Raises OSError."""
        parts: list[bytes] = []
        n_left = _MAX_BYTES
        file = os.open(self._top + path, _READ)
        try:
            while n_left > 0 and (part := os.read(file, min(_CHUNK_BYTES, n_left))):
                parts.append(part)
                n_left -= len(part)
        finally:
            os.close(file)
        return b"".join(parts)

    def text(self, path: str) -> Reading[str]:
        """Read a file, stripped of surrounding whitespace and NULs. path is written without a leading slash."""
        try:
            raw = self.read_bytes(path)
        except OSError as exc:
            # Sensors answer EAGAIN or ENODATA while they sleep, ENODEV when they are gone: all of it is "unknown".
            return unknown("/" + path, _reason(exc))
        return known(raw.decode("utf-8", "replace").strip("\0 \t\r\n"), "/" + path)

    def name(self, path: str) -> Reading[str]:
        """Read a short name that may be shown on a terminal: one line of printable characters, none of them missing."""
        text = self.text(path)
        if text.value is None:
            return text
        if not 0 < len(text.value) <= _MAX_NAME or not text.value.isprintable():
            return unknown(text.source, f"holds {text.value[:40]!r}, not a name")
        return text

    def integer(self, path: str) -> Reading[int]:
        text = self.text(path)
        if text.value is None:
            return unknown(text.source, text.reason)
        try:
            # int() would take "1_0" and other scripts' digits too, which no kernel writes.
            if len(text.value) > _MAX_DIGITS or not text.value.isascii() or "_" in text.value:
                raise ValueError
            return known(int(text.value, 0), text.source)
        except ValueError:
            return unknown(text.source, f"holds {text.value[:40]!r}, not a number")

    def scaled(self, path: str, factor: float) -> Reading[float]:
        """Read an integer and convert it from the kernel's unit: value * factor."""
        number = self.integer(path)
        if number.value is None:
            return unknown(number.source, number.reason)
        return known(number.value * factor, number.source)

    def paths(self, pattern: str) -> tuple[str, ...]:
        """List what matches a glob, in natural order (cpu2 before cpu10); nothing where the place cannot be read."""
        try:
            found = glob.glob(pattern, root_dir=self._root)  # noqa: PTH207  a third faster than Path's
        except OSError:  # a device or a file system that went away while it was being listed
            return ()
        return tuple(sorted(found, key=_natural))

    def path(self, path: str) -> Path:
        """Give where a file below the root is."""
        return self._root / path

    def exists(self, path: str) -> bool:
        try:
            return (self._root / path).exists()
        except OSError:
            return False

    def link_name(self, path: str) -> str:
        """Name what a link leads to ("1-0040" for an I2C chip's device); "" where it is no link or no name."""
        try:
            found = (self._root / path).readlink().name
        except OSError:
            return ""
        return found if found.isprintable() and len(found) <= _MAX_NAME else ""


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Expand the kernel's list form, "0-3,8" to (0, 1, 2, 3, 8). Raises ValueError."""
    ids: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if len(ids) + len(span) > _MAX_CPUS:
            raise ValueError(f"more than {_MAX_CPUS} CPUs")
        ids.extend(span)
    return tuple(ids)


def _reason(exc: OSError) -> str:
    if exc.errno in {errno.ENOENT, errno.ENOTDIR}:
        return "this kernel or container has no such file"
    if exc.errno in {errno.EACCES, errno.EPERM}:
        return "only root may read it"
    return exc.strerror or type(exc).__name__


def _natural(path: str) -> tuple[tuple[int, str], ...]:
    parts: list[tuple[int, str]] = []
    digits = ""
    for char in path + "/":
        if char.isdigit():
            digits += char
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, char))
    return tuple(parts)
