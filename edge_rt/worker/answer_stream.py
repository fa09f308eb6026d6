"""Chunks of one answer between the channel, which must never wait, and the reader, who may be slow."""

from __future__ import annotations

import asyncio
from collections import deque

from edge_rt.errors import EdgeRtError
from edge_rt.types import Chunk

# What one request may hold unread, in tokens and logprob rivals: minutes of decode, a few MiB.
MAX_UNREAD = 16 * 1024


class AnswerStream:
    """Chunks on their way from the channel to one reader."""

    __slots__ = ("chunks", "error", "n_unread", "waiter")

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.error: EdgeRtError | None = None
        self.n_unread = 0
        self.waiter: asyncio.Future[None] | None = None

    def push(self, chunk: Chunk) -> None:
        self.n_unread += _weight(chunk)
        self.chunks.append(chunk)
        self._wake()

    def fail(self, error: EdgeRtError) -> None:
        self.error = error
        self._wake()

    async def next(self) -> Chunk:
        while not self.chunks:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        chunk = self.chunks.popleft()
        self.n_unread -= _weight(chunk)
        return chunk

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def _weight(chunk: Chunk) -> int:
    if chunk.logprobs or chunk.prompt_logprobs:
        return sum(1 + len(entry.top) for entry in (*chunk.logprobs, *chunk.prompt_logprobs))
    return len(chunk.token_ids) + 1
