"""An OpenAI-compatible endpoint on loopback that answers as its script says, well or badly.

    async with RecordedCloud(says("Hello")) as cloud:
        cloud.then(status(429, headers={"retry-after": "1"}), says("Hello"))

Each request takes the next script; the last one stays. What was asked is kept in `requests`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from edge_rt.config import CloudEndpoint

Script = Callable[["Reply"], Awaitable[None]]

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int


@dataclass
class Reply:
    """One answer being written."""

    asked: Asked
    writer: asyncio.StreamWriter
    is_open: bool = True

    async def raw(self, data: str | bytes) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)
        await self.writer.drain()

    async def head(self) -> None:
        await self.raw(HEAD)

    async def piece(self, data: str | bytes) -> None:
        """Write one piece of a chunked body."""
        data = data.encode() if isinstance(data, str) else data
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, **fields: Any) -> None:
        await self.piece(f"data: {json.dumps(fields)}\n\n")

    async def text(self, text: str) -> None:
        is_chat = self.asked.path.endswith("/chat/completions")
        choice = {"delta": {"content": text}} if is_chat else {"text": text}
        await self.event(choices=[{"index": 0, **choice, "finish_reason": None}])

    async def finish(self, reason: str = "stop") -> None:
        await self.event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}])

    async def usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        await self.event(choices=[], usage=usage)

    async def done(self) -> None:
        await self.piece("data: [DONE]\n\n")
        await self.raw("0\r\n\r\n")

    def cut(self) -> None:
        self.is_open = False


class RecordedCloud:
    """A server of scripts; `async with` it."""

    def __init__(self, *scripts: Script, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.scripts, self.requests = list(scripts), list[Asked]()
        self.n_connections = self.n_hung_up = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def then(self, *scripts: Script) -> None:
        self.scripts = list(scripts)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def endpoint(self, **settings: Any) -> CloudEndpoint:
        """Give the configuration of this endpoint."""
        given = {"base_url": self.url, "model": "big", "allow_http": True, "allow_private": True, **settings}
        return CloudEndpoint(**given)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of its own: the streams' would report being cancelled as an error.
        self.n_connections += 1
        task = asyncio.ensure_future(self._serve(reader, writer, self.n_connections))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        begun = b""  # of the next request
        try:
            while (asked := await _read(reader, connection, begun)) is not None:
                self.requests.append(asked)
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                reply = Reply(asked, writer)
                work = asyncio.ensure_future(script(reply))
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                    begun = gone.result() if gone.done() and gone.exception() is None else b""
                    if begun:
                        await asyncio.wait({work})
                finally:
                    is_whole = work.done() and work.exception() is None
                    work.cancel()
                    gone.cancel()
                    await asyncio.gather(work, gone, return_exceptions=True)
                self.n_hung_up += not is_whole
                if not is_whole or not reply.is_open:
                    break
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, connection: int, begun: bytes) -> Asked | None:
    try:
        head = (begun + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(head[0].split()[1], headers, json.loads(body or b"{}"), connection)


def says(*texts: str, usage: tuple[int, int] | None = (7, 3), reason: str = "stop") -> Script:
    """Answer well."""

    async def script(reply: Reply) -> None:
        await reply.head()
        for text in texts:
            await reply.text(text)
        await reply.finish(reason)
        if usage is not None:
            await reply.usage(*usage)
        await reply.done()

    return script


def late(seconds: float, then: Script) -> Script:
    """Wait before the first byte."""

    async def script(reply: Reply) -> None:
        await asyncio.sleep(seconds)
        await then(reply)

    return script


def slowly(pause_s: float, *texts: str) -> Script:
    """Wait between tokens."""

    async def script(reply: Reply) -> None:
        await reply.head()
        for text in texts:
            await reply.text(text)
            await asyncio.sleep(pause_s)
        await reply.finish()
        await reply.done()

    return script


def status(code: int, body: str = '{"error": {"message": "no"}}', headers: dict[str, str] | None = None) -> Script:
    """Answer with an HTTP error."""

    async def script(reply: Reply) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        await reply.raw(f"HTTP/1.1 {code} X\r\n{lines}content-length: {len(body.encode())}\r\n\r\n{body}")

    return script


def cut_after(*texts: str) -> Script:
    """Close the connection in the middle."""

    async def script(reply: Reply) -> None:
        await reply.head()
        for text in texts:
            await reply.text(text)
        reply.cut()

    return script


def pieces(*data: str | bytes, end: bool = True) -> Script:
    """Answer with a stream of exactly these pieces."""

    async def script(reply: Reply) -> None:
        await reply.head()
        for one in data:
            await reply.piece(one)
        if end:
            await reply.raw("0\r\n\r\n")
        else:
            reply.cut()

    return script


def bytes_only(data: str | bytes) -> Script:
    """Answer with exactly these bytes and close."""

    async def script(reply: Reply) -> None:
        await reply.raw(data)
        reply.cut()

    return script


def never_ends(text: str = "x", pause_s: float = 0.0) -> Script:
    async def script(reply: Reply) -> None:
        await reply.head()
        while True:
            await reply.text(text)
            await asyncio.sleep(pause_s)

    return script


def bomb(n_bytes: int = 10**8) -> Script:
    """Answer with a small packed body that is large when unpacked."""
    packed = gzip.compress(bytes(n_bytes))
    head = f"content-type: text/event-stream\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
    return bytes_only(b"HTTP/1.1 200 OK\r\n" + head.encode() + packed)


async def hangs(reply: Reply) -> None:
    """Take the request and say nothing."""
    await asyncio.Event().wait()
