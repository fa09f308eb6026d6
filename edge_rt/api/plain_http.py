"""Requests over a Unix socket with as little between as HTTP allows: for inferences, which may take less than a client.

A request leaves in one write, and its answer is parsed by httptools, which the daemon parses requests with. httpx2,
which the client uses for everything else, takes several times as long.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httptools

from edge_rt.tensor_types import Data

_READ_BYTES: Final = 256 * 1024
_SEND_BYTES: Final = 1024 * 1024  # a picture's tensor goes in one write; net.core.wmem_max may allow less
_MAX_KEPT: Final = 16  # connections that wait for the next request


@dataclass(slots=True)
class Reply:
    """An answer. Header names are in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


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
        self._reply = Reply()
        self._parts: list[bytes] = []
        self._is_whole = self._can_keep = False

    def is_stale(self) -> bool:
        """Say whether the daemon has closed it, or sent what nobody has asked for."""
        return bool(self._readable.poll(0))

    def close(self) -> None:
        self._sock.close()

    def ask(self, head: bytes, body: Sequence[Data]) -> tuple[Reply, bool]:
        """Give the answer, and whether the connection can be used again."""
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._parts, self._is_whole = Reply(), [], False
        parts = [head, *body]
        n_sent = self._sock.sendmsg(parts)
        for part in parts:
            if n_sent < len(part):
                self._sock.sendall(memoryview(part)[n_sent:])
            n_sent = max(0, n_sent - len(part))
        while not self._is_whole:
            n_bytes = self._sock.recv_into(self._buffer)
            if not n_bytes:
                raise ConnectionResetError("the connection was closed")
            self._parser.feed_data(self._buffer[:n_bytes])
        self._reply.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        return self._reply, self._can_keep

    # The parser's callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._can_keep = self._parser.should_keep_alive()  # behind the answer it would always be no

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True


class PlainHttp:
    """Asks a server on a Unix socket; any thread may, and each request that is under way has its own connection.

    timeout_s is the longest silence. Raises OSError; for a silence it is BlockingIOError or TimeoutError.
    """

    def __init__(self, path: Path, *, connect_timeout_s: float, timeout_s: float) -> None:
        self._path = path
        self._connect_timeout_s, self._timeout_s = connect_timeout_s, timeout_s
        self._lock = threading.Lock()
        self._kept: list[_Connection] = []

    def post(self, target: str, headers: Mapping[str, str], body: Sequence[Data]) -> Reply:
        """Send a request with its body's parts, and wait for its whole answer.

        Raises ConnectingError where nobody can be asked.
        """
        lines = [f"POST {target} HTTP/1.1", "Host: edge_rt", f"Content-Length: {sum(map(len, body))}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
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
        with self._lock:
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()

    def _connection(self) -> _Connection:
        while True:
            with self._lock:
                connection = self._kept.pop() if self._kept else None
            if connection is None:
                try:
                    return _Connection(self._path, connect_timeout_s=self._connect_timeout_s, timeout_s=self._timeout_s)
                except OSError as exc:
                    raise ConnectingError from exc
            if not connection.is_stale():
                return connection
            connection.close()

    def _keep(self, connection: _Connection, *, can_keep: bool) -> None:
        with self._lock:
            if can_keep and len(self._kept) < _MAX_KEPT:
                self._kept.append(connection)
                return
        connection.close()


class ConnectingError(Exception):
    """No connection could be made; the cause says why."""
