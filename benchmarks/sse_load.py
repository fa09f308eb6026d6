"""Streams of answers over a Unix socket, as a client sees them; the same for every server with OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LIMIT_BYTES = 4 * 2**20
_TIMEOUT_S = 600.0


@dataclass(slots=True, kw_only=True)
class Stream:
    """One answer: its text, when each part of it came, and what its server says of it.

    prompt_n  prompt tokens computed, n_cached those that were not; both as the server counts
    """

    sent_s: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # with the first part
    text: str = ""
    came_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    n_tokens: int = 0
    prompt_n: int = 0
    n_cached: int = 0
    finish_reason: str = ""

    @property
    def ttft_s(self) -> float:
        return self.came_s[0] - self.sent_s

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Give the waits between two parts that ended between begin_s and end_s."""
        pairs = zip(self.came_s, self.came_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs if begin_s <= later and earlier <= end_s]


async def ask(socket: Path, path: str, body: Mapping[str, Any], *, into: Stream | None = None) -> Stream:
    """Post a request for a stream, and read it to its end, into a Stream that the caller may look at meanwhile.

    Raises RuntimeError for an answer that is an error.
    """
    stream = Stream() if into is None else into
    asked = {"stream": True, "stream_options": {"include_usage": True}, **body}
    data = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: local\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    reader, writer = await asyncio.open_unix_connection(socket, limit=_LIMIT_BYTES)
    stream.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
            await _check(reader)
            async for line in _events(reader):
                _take(stream, line)
    finally:
        writer.close()
    stream.ended_s = time.perf_counter()
    if not stream.finish_reason:
        raise RuntimeError(f"an answer of {stream.n_tokens} tokens has no end")
    return stream


async def get(socket: Path, path: str) -> tuple[int, bytes]:
    """Get a page: its status and its body."""
    reader, writer = await asyncio.open_unix_connection(socket, limit=_LIMIT_BYTES)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: local\r\nConnection: close\r\n\r\n".encode())
        whole = await asyncio.wait_for(reader.read(_LIMIT_BYTES), _TIMEOUT_S)
    finally:
        writer.close()
    head, _, body = whole.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def _check(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if head.split()[1] != b"200":
        raise RuntimeError((head + await reader.read(2000)).decode(errors="replace"))


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Give the data of each event. The sizes of chunks between them are lines of their own, and passed over."""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            yield line[6:]
        elif line.startswith(b"data: [DONE]"):
            return


def _take(stream: Stream, line: bytes) -> None:
    now_s = time.perf_counter()
    event = json.loads(line)
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if piece := choice.get("text") or delta.get("content"):
            stream.text += piece
            stream.came_s.append(now_s)
            stream.begun.set()
        stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    if usage := event.get("usage"):
        stream.n_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        stream.n_cached = details.get("cached_tokens", 0)
        stream.prompt_n = usage["prompt_tokens"] - stream.n_cached
