"""A file behind HTTP on loopback whose answers can be scripted: `from tests.file_server import FileServer`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

Step = Callable[["_Handler"], None]


@dataclass(frozen=True)
class Seen:
    """A request as it came; header names are lower case."""

    path: str
    headers: dict[str, str]


class FileServer:
    """Serves content at every path, with ranges and an entity tag; each request first takes a step off script."""

    def __init__(self, content: bytes, *steps: Step, etag: str = '"v1"') -> None:
        self.content = content
        self.etag = etag
        self.script = deque(steps)
        self.seen: list[Seen] = []
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def ranges(self) -> list[str]:
        """The Range headers of all requests, "" where there was none."""
        return [seen.headers.get("range", "") for seen in self.seen]


class _Server(ThreadingHTTPServer):
    owner: FileServer
    daemon_threads = False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        owner = self.server.owner
        owner.seen.append(Seen(self.path, {k.lower(): v for k, v in self.headers.items()}))
        self.close_connection = True
        if owner.script:
            owner.script.popleft()(self)
        else:
            serve(self)

    def log_message(self, *args: object) -> None:
        pass

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def start(self) -> int:
        """Where the body starts: 0, or what a Range with the right If-Range asks for."""
        wanted = self.headers.get("Range", "")
        if not wanted or self.headers.get("If-Range", self.server.owner.etag) != self.server.owner.etag:
            return 0
        return int(wanted.removeprefix("bytes=").rstrip("-"))


def serve(handler: _Handler, *, cut_after: int | None = None, ranges: bool = True) -> None:
    owner = handler.server.owner
    total = len(owner.content)
    start = handler.start() if ranges else 0
    headers = {"Content-Length": str(total - start)} | ({"ETag": owner.etag} if owner.etag else {})
    if start >= total:
        handler.head(416, {"Content-Range": f"bytes */{total}", "Content-Length": "0"})
        return
    if start:
        headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
    handler.head(206 if start else 200, headers)
    body = owner.content[start:]
    handler.wfile.write(body if cut_after is None else body[:cut_after])


def cut(after: int) -> Step:
    """Close the connection after some bytes of the body."""
    return lambda handler: serve(handler, cut_after=after)


def ignore_range(handler: _Handler) -> None:
    serve(handler, ranges=False)


def status(code: int, **headers: str) -> Step:
    """Answer with a status and no body; header names with _ for -."""
    return lambda handler: handler.head(
        code, {"Content-Length": "0", **{name.replace("_", "-"): value for name, value in headers.items()}}
    )


def answer(code: int, body: bytes, **headers: str) -> Step:
    """Answer with exactly this, whatever was asked."""

    def step(handler: _Handler) -> None:
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.head(code, {"Content-Length": str(len(body)), **own})
        handler.wfile.write(body)

    return step


def stall(after: int, until: threading.Event) -> Step:
    """Send some bytes, then nothing until the event."""

    def step(handler: _Handler) -> None:
        owner = handler.server.owner
        handler.head(200, {"Content-Length": str(len(owner.content)), "ETag": owner.etag})
        handler.wfile.write(owner.content[:after])
        handler.wfile.flush()
        until.wait(30)

    return step


def without_length(body: bytes) -> Step:
    """Send a body that ends with the connection."""

    def step(handler: _Handler) -> None:
        handler.head(200, {})
        handler.wfile.write(body)

    return step
