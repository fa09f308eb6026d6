"""The kernel's small text files, read and written by descriptor, so that every errno arrives where it can be told.

`open(path, "w").write(text)` loses EBUSY and EINVAL until the garbage collector closes the file. Imports os only: the
restorer of limits must run on a Python that lacks most of the standard library.
"""

from __future__ import annotations

import os

MAX_BYTES = 4096  # of a value: the kernel gives at most a page
_EIO = 5
# A directory that pretends to be /sys may hold a pipe; opening it must not wait.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
# sysfs does not care for truncation, plain files and FUSE need it: as a shell's > does.
_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_TRUNC


class KernelFiles:
    """Files below a root: / on a machine, a tree in a test. Belongs to one thread; every method raises OSError only.

    Paths are written without a leading slash. Values are at most MAX_BYTES, stripped of whitespace and NULs.
    """

    __slots__ = ("_kept", "_root")

    def __init__(self, root: str = "/") -> None:
        self._root = root.rstrip("/") + "/"
        self._kept: dict[str, tuple[int, bytes, str]] = {}  # descriptor, what it gave last, and that as text

    def read(self, path: str) -> str:
        fd = os.open(self._root + path, _READ)
        try:
            return _text(os.pread(fd, MAX_BYTES, 0))
        finally:
            os.close(fd)

    def watch(self, path: str) -> str:
        """Read a file that is read again and again: its descriptor is kept, which costs a tenth.

        A descriptor that fails is closed, and the path is tried once more: a device may have been replaced. What has
        not changed is the same object as before.
        """
        if (kept := self._kept.get(path)) is not None:
            fd, before, text = kept
            try:
                raw = os.pread(fd, MAX_BYTES, 0)
            except OSError:
                self.forget(path)
            else:
                if raw != before:
                    text = _text(raw)
                    self._kept[path] = fd, raw, text
                return text
        fd = os.open(self._root + path, _READ)
        try:
            raw = os.pread(fd, MAX_BYTES, 0)
        except OSError:
            os.close(fd)
            raise
        text = _text(raw)
        self._kept[path] = fd, raw, text
        return text

    def write(self, path: str, text: str) -> None:
        """Write one value in one call, as the kernel takes it. No error does not mean that it is in force."""
        raw = f"{text}\n".encode("ascii")
        fd = os.open(self._root + path, _WRITE)
        try:
            n_written = os.write(fd, raw)
        finally:
            os.close(fd)
        if n_written != len(raw):
            raise OSError(_EIO, f"took {n_written} of {len(raw)} bytes", self._root + path)

    def names(self, folder: str) -> list[str]:
        """List a directory, policy2 before policy10."""
        return sorted(os.listdir(self._root + folder), key=_natural)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._root + path)

    def forget(self, path: str) -> None:
        """Close a kept descriptor."""
        if (kept := self._kept.pop(path, None)) is not None:
            os.close(kept[0])

    def close(self) -> None:
        for path in list(self._kept):
            self.forget(path)


class DryFiles:
    """Files whose writes are remembered and not made; reads give what was "written". Otherwise as KernelFiles.

    written  path → (what the file really holds, what was to be written last)
    """

    __slots__ = ("_files", "written")

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        self.written: dict[str, tuple[str, str]] = {}

    def read(self, path: str) -> str:
        return self.written[path][1] if path in self.written else self._files.read(path)

    def watch(self, path: str) -> str:
        return self.written[path][1] if path in self.written else self._files.watch(path)

    def write(self, path: str, text: str) -> None:
        self.written[path] = (self._files.read(path), text)

    def names(self, folder: str) -> list[str]:
        return self._files.names(folder)

    def exists(self, path: str) -> bool:
        return self._files.exists(path)

    def forget(self, path: str) -> None:
        self._files.forget(path)

    def close(self) -> None:
        self._files.close()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").strip("\0 \t\r\n")


def _natural(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    number = name[len(head) :]
    return head, int(number) if number else -1, name
