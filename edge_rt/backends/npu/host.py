"""The process that a vendor's code runs in: `python host.py DRIVER SHARED_IN SHARED_OUT LIFE`, and frames.

It may run under another environment's Python (3.8 and up), so it imports the standard library and numpy only; the
driver, a file, imports the vendor's package. What the driver raises is answered as an error with a kind: the
exception's own `kind` if it has one, memory for MemoryError, absent for ImportError, else failed. What a library
prints goes to stderr.

A frame is a head, a JSON object and the bytes of small arrays. Large arrays lie in memory that both processes map; each
side writes to its own, which can grow and not shrink.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time

try:
    import numpy as np
except ImportError:  # told as an answer, not as a traceback
    np = None  # type: ignore[assignment]

from typing import Any, Mapping  # noqa: UP035 - Python 3.8 knows no others at run time

_HEAD = struct.Struct("<4sII")
_MAGIC = b"enp1"
MAX_MESSAGE_BYTES = 8 * 2**20
MAX_ARRAY_BYTES = 2**30  # of one message's arrays together
INLINE_BYTES = 16 * 1024  # a larger array is shared
_ALIGN = 64
_MAX_DIMS = 32
_DTYPES = frozenset(["|b1", "|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"])
_WATCH_S = 1.0


class EndedError(Exception):
    """The other side has closed its end."""


class LateError(Exception):
    """The other side was not there in time."""


class FrameError(Exception):
    """What came is no frame."""


class Frames:
    """Sends and receives messages with arrays. own and other are the memory that this side and the other one write."""

    def __init__(self, read_fd: int, write_fd: int, own: int, other: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._own, self._other = _Memory(own), _Memory(other)

    def send(self, message: Mapping[str, Any], arrays: Mapping[str, Any], *, until_s: float | None = None) -> None:
        """Send a message. Raises EndedError or LateError, ValueError for arrays that cannot be sent."""
        inline, told = [], []
        at = 0
        for name, array in arrays.items():
            array = np.asarray(array, order="C")  # noqa: PLW2901 - ascontiguousarray makes a scalar one-dimensional
            if array.dtype.newbyteorder("<") != array.dtype and array.dtype.itemsize > 1:
                array = array.astype(array.dtype.newbyteorder("<"))  # noqa: PLW2901
            if array.dtype.str not in _DTYPES:
                raise ValueError(f"{name} has type {array.dtype}, which cannot be sent")
            entry: dict[str, Any] = {"name": name, "dtype": array.dtype.str, "shape": array.shape}
            if array.nbytes > INLINE_BYTES:
                entry["at"] = at
                if at + array.nbytes > MAX_ARRAY_BYTES:
                    raise ValueError(f"the arrays have more than {MAX_ARRAY_BYTES} bytes")
                self._own.write(at, array)
                at = -(-(at + array.nbytes) // _ALIGN) * _ALIGN
            else:
                inline.append(array.tobytes())
            told.append(entry)
        text = json.dumps(dict(message, arrays=told)).encode()
        data = b"".join(inline)
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(text)} bytes, the limit is {MAX_MESSAGE_BYTES}")
        self._write(_HEAD.pack(_MAGIC, len(text), len(data)) + text + data, until_s)

    def receive(self, *, until_s: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Wait for a message; its arrays are the receiver's. Raises EndedError, LateError and FrameError."""
        magic, n_text, n_data = _HEAD.unpack(self._read(_HEAD.size, until_s))
        if magic != _MAGIC or n_text > MAX_MESSAGE_BYTES or n_data > MAX_ARRAY_BYTES:
            raise FrameError(f"no frame begins with {magic!r}, {n_text} and {n_data}")
        text = self._read(n_text, until_s)
        data = memoryview(self._read(n_data, until_s))
        try:
            message = json.loads(text)
            told = message.pop("arrays")
            return message, self._arrays(told, data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise FrameError(f"a message cannot be read: {type(exc).__name__}: {exc}") from exc

    def _arrays(self, told: Any, data: memoryview) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        all_bytes = 0
        for entry in told:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if len(shape) > _MAX_DIMS:  # to multiply them could take hours
                raise ValueError(f"an array of {len(shape)} dimensions")
            if dtype not in _DTYPES or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
                raise ValueError(f"an array of type {dtype!r} and shape {shape}")
            n_bytes = np.dtype(dtype).itemsize
            for n in shape:
                n_bytes *= n
            all_bytes += n_bytes
            if all_bytes > MAX_ARRAY_BYTES:  # together: several may lie at the same place
                raise ValueError(f"arrays of {all_bytes} bytes")
            if "at" in entry:
                raw = self._other.read(entry["at"], n_bytes)
            elif n_bytes <= len(data):
                raw, data = bytearray(data[:n_bytes]), data[n_bytes:]
            else:
                raise ValueError(f"{n_bytes} bytes of an array, {len(data)} are there")
            arrays[str(entry["name"])] = np.frombuffer(raw, dtype).reshape(shape)
        return arrays

    def _read(self, n_bytes: int, until_s: float | None) -> bytes:
        parts = []
        while n_bytes:
            _wait(self._read_fd, select.POLLIN, until_s)
            try:
                part = os.read(self._read_fd, min(n_bytes, 2**20))
            except BlockingIOError:
                continue
            except OSError as exc:
                raise EndedError from exc
            if not part:
                raise EndedError
            parts.append(part)
            n_bytes -= len(part)
        return b"".join(parts)

    def _write(self, data: bytes, until_s: float | None) -> None:
        rest = memoryview(data)
        while rest:
            _wait(self._write_fd, select.POLLOUT, until_s)
            try:
                rest = rest[os.write(self._write_fd, rest) :]
            except BlockingIOError:
                continue
            except OSError as exc:
                raise EndedError from exc


class _Memory:
    """A file in memory, mapped as far as it reaches."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def write(self, at: int, array: Any) -> None:
        view = np.frombuffer(self._mapped(at + array.nbytes, can_grow=True), np.uint8, array.nbytes, at)
        view[:] = array.reshape(-1).view(np.uint8)

    def read(self, at: int, n_bytes: int) -> bytearray:
        if type(at) is not int or not 0 <= at <= MAX_ARRAY_BYTES - n_bytes:
            raise ValueError(f"an array at {at!r}")
        mapped = self._mapped(at + n_bytes, can_grow=False)
        return bytearray(memoryview(mapped)[at : at + n_bytes])

    def _mapped(self, n_bytes: int, *, can_grow: bool) -> mmap.mmap:
        if self._map is None or len(self._map) < n_bytes:
            size = os.fstat(self._fd).st_size
            if size < n_bytes:
                if not can_grow:
                    raise ValueError(f"{n_bytes} bytes of shared memory, {size} are there")
                os.ftruncate(self._fd, n_bytes)
                size = n_bytes
            self._map = mmap.mmap(self._fd, size)  # views of the old one may be about: it goes with the last
        return self._map


def _wait(fd: int, event: int, until_s: float | None) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
    if not poll.poll(None if left_s is None else left_s * 1000):
        raise LateError


def load_driver(path: str) -> Any:
    """Import a driver from its file and make it. From its folder it gets modules relatively, `from .printed import …`,
    so none of them hides a vendor's package of the same name.
    """
    folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120
    spec = importlib.util.spec_from_file_location("npu_driver", path, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["npu_driver"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module.Driver()


class Host:
    """Answers calls: each names a method of the driver, which is imported by the first."""

    CALLS = frozenset({"probe", "capabilities", "compile", "load", "run", "telemetry"})

    def __init__(self, path: str) -> None:
        self._path = path
        self._driver: Any = None

    def preload(self) -> None:
        """Let the driver import what it will need, while the other side still does other things.

        What fails here fails again in the first call, which tells it.
        """
        with contextlib.suppress(BaseException):  # a vendor's code may raise anything
            getattr(self._made(), "preload", bool)()

    def _made(self) -> Any:
        if self._driver is None:
            self._driver = load_driver(self._path)
        return self._driver

    def answer(self, message: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give the answer to a call and its arrays; whatever goes wrong is an answer too."""
        begun_s = time.monotonic()
        try:
            if np is None:
                raise ImportError("numpy cannot be imported")
            name = message["call"]
            if name not in self.CALLS:
                raise ValueError(f"no such call: {name}")
            call = getattr(self._made(), name)
            given: dict[str, Any] = {}
            if name == "run":
                result, given = call(dict(arrays), **message["with"])
            else:
                result = call(**message["with"])
        except BaseException as exc:  # noqa: BLE001 - a vendor's code may raise anything, and exit
            return {"id": message.get("id"), "error": {"kind": _kind(exc), "said": _said(exc)}}, {}
        return {"id": message.get("id"), "result": result, "took_s": time.monotonic() - begun_s}, given


def _kind(exc: BaseException) -> str:
    kind = getattr(exc, "kind", None)
    if isinstance(kind, str):
        return kind
    return "memory" if isinstance(exc, MemoryError) else "absent" if isinstance(exc, ImportError) else "failed"


def _said(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return "{}: {}".format(type(exc).__name__, " ".join(lines)[:1000])


def _watch_parent(parent: int) -> None:
    """End with the process that has started this one, even where the driver hangs and reads nothing."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and with what the vendor's code has started
    os._exit(1)


def _die_with(life: int) -> None:
    """Let the kernel kill this process's group when the other end of a pipe closes, be it stopped or hanging."""
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


def main() -> int:
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != folder]  # noqa: PTH100
    driver, shared_in, shared_out, life = sys.argv[1:]
    _die_with(int(life))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    frames = Frames(0, answers, int(shared_out), int(shared_in))
    host = Host(driver)
    host.preload()
    while True:
        try:
            message, arrays = frames.receive()
        except EndedError:
            os._exit(0)  # vendors' destructors may hang
        answer, given = host.answer(message, arrays)
        try:
            frames.send(answer, given)
        except ValueError as exc:
            frames.send({"id": answer["id"], "error": {"kind": "failed", "said": str(exc)}}, {})


if __name__ == "__main__":
    sys.exit(main())
