"""HTTP/1.1 over a Unix socket whose connection stays open, by the standard library's client."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """Waits for ever: a timeout would cost a poll at each read, which would be measured."""

    def __init__(self, path: Path) -> None:
        super().__init__("edge_rt")
        self._socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._socket_path))
