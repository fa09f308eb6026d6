"""Requests over a Unix socket with as little between as HTTP allows: for inferences, which may take less than a client.

A request leaves in one write, and its answer is parsed by httptools, which the daemon parses requests with. httpx2,
which the client uses for everything else, takes several times as long.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import httptools

from edge_rt.tensor_types import Data

_READ_BYTES: Final = 256 * 1024
_SEND_BYTES: Final = 1024 * 1024  # a picture's tensor goes in one write; net.core.wmem_max may allow less
_OK: Final = b"HTTP/1.1 200 "
_MAX_KEPT: Final = 16  # connections that wait for the next request


class Reply:
    """An answer. head is its header lines, each behind a line break and the last one before one."""

    __slots__ = ("_head", "body", "status")

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self._head, self.body = status, head, body

    def header(self, name: str) -> str | None:
        """Give a header's value; its name is in lower case."""
        key = b"\r\n%b: " % name.encode()
        start = self._head.lower().find(key)
        if start < 0:
            return None
        start += len(key)
        return self._head[start : self._head.index(b"\r\n", start)].decode("latin-1")


class _Connection:
    """One connection, for one request at a time."""

    def __init__(self, path: Path, *, connect_timeout_s: float, timeout_s: float) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            self._sock.settimeout(connect_timeout_s)
            self._sock.connect(str(path))
            # The kernel's own timeouts: with the socket object's each read would be two calls.
            self._sock.setblocking(True)
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        except BaseException:
            self._sock.close()
            raise
        self._readable = select.poll()
        self._readable.register(self._sock, select.POLLIN)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._parser: Any = None
        self._status = 0
        self._lines: list[bytes] = []
        self._parts: list[bytes] = []
        self._is_whole = self._can_keep = False

    def is_stale(self) -> bool:
        """Say whether the daemon has closed it, or sent what nobody has asked for."""
        return bool(self._readable.poll(0))

    def close(self) -> None:
        self._sock.close()

    def ask(self, head: bytes, body: Sequence[Data]) -> tuple[Reply, bool]:
        """Give the answer, and whether the connection can be used again."""
        parts = [head, *body]
        n_sent = self._sock.sendmsg(parts)
        for part in parts:
            if n_sent < len(part):
                self._sock.sendall(memoryview(part)[n_sent:])
            n_sent = max(0, n_sent - len(part))
        n_bytes = self._received()
        if (reply := _whole(bytes(self._buffer[:n_bytes]))) is not None:
            return reply, True
        self._parser = httptools.HttpResponseParser(self)
        self._lines, self._parts, self._is_whole = [], [], False
        while True:
            self._parser.feed_data(self._buffer[:n_bytes])
            if self._is_whole:
                break
            n_bytes = self._received()
        head = b"".join((*self._lines, b"\r\n"))
        return Reply(self._status, head, b"".join(self._parts)), self._can_keep

    def _received(self) -> int:
        if n_bytes := self._sock.recv_into(self._buffer):
            return n_bytes
        raise ConnectionResetError("the connection was closed")

    # The parser's callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines.append(b"\r\n%b: %b" % (name, value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._can_keep = self._parser.should_keep_alive()  # behind the answer it would always be no

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True


@lru_cache(maxsize=64)
def _head(target: str, headers: tuple[tuple[str, str], ...], n_bytes: int) -> bytes:
    """Write a request's head; most are like the one before."""
    lines = [f"POST {target} HTTP/1.1", "Host: edge_rt", f"Content-Length: {n_bytes}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _whole(data: bytes) -> Reply | None:
    """Read a plain answer that is here whole, which most are; None: it is the parser's.

    Plain is what begins with this version and 200, tells its length in one header, and is neither the last of its
    connection nor encoded.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0 or not data.startswith(_OK):
        return None
    body = data[end + 4 :]
    head = data[: end + 2]
    names = head.lower()
    if b"\r\ncontent-length: %d\r\n" % len(body) not in names or names.count(b"\r\ncontent-length:") > 1:
        return None
    if b"\r\nconnection:" in names or b"\r\ntransfer-encoding:" in names:
        return None
    return Reply(200, head, body)


class PlainHttp:
    """Asks a server on a Unix socket; any thread may, and each request that is under way has its own connection.

    timeout_s is the longest silence. Raises OSError; for a silence it is BlockingIOError or TimeoutError.
    """

    def __init__(self, path: Path, *, connect_timeout_s: float, timeout_s: float) -> None:
        self._path = path
        self._connect_timeout_s, self._timeout_s = connect_timeout_s, timeout_s
        self._kept: list[_Connection] = []  # whose append and pop need no lock
        self._is_closed = False

    def post(self, target: str, headers: Mapping[str, str], body: Sequence[Data]) -> Reply:
        """Send a request with its body's parts, and wait for its whole answer.

        Raises ConnectingError where nobody can be asked.
        """
        head = _head(target, tuple(headers.items()), sum(map(len, body)))
        connection = self._connection()
        try:
            reply, can_keep = connection.ask(head, body)
        except httptools.HttpParserError as exc:
            connection.close()
            raise ConnectionAbortedError(f"its answer is no HTTP: {exc}") from exc
        except BaseException:
            connection.close()
            raise
        self._keep(connection, can_keep=can_keep)
        return reply

    def close(self) -> None:
        self._is_closed = True
        while self._kept:
            self._kept.pop().close()

    def _connection(self) -> _Connection:
        while True:
            try:
                connection = self._kept.pop()
            except IndexError:
                try:
                    return _Connection(self._path, connect_timeout_s=self._connect_timeout_s, timeout_s=self._timeout_s)
                except OSError as exc:
                    raise ConnectingError from exc
            if not connection.is_stale():
                return connection
            connection.close()

    def _keep(self, connection: _Connection, *, can_keep: bool) -> None:
        if can_keep and not self._is_closed and len(self._kept) < _MAX_KEPT:
            self._kept.append(connection)
        else:
            connection.close()


class ConnectingError(Exception):
    """No connection could be made; the cause says why."""
