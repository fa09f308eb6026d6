"""Requests in flight: those with one key share one generation.

The generation runs in a task of its own and fills a list of chunks that each of its clients reads from the beginning,
at its own pace. A client that leaves takes nothing from the others; the last one to leave stops the generation. An
error reaches all. The list holds what its slowest client has not read, and everything while somebody new may still
join; an answer longer than MAX_JOINABLE takes no newcomers, so that what all have read can be forgotten, and a client
that falls more than MAX_UNREAD behind gets a SlowReaderError, as it does without company.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from edge_rt.errors import DeadlineError, EdgeRtError, SlowReaderError
from edge_rt.types import Chunk

# In tokens and logprob rivals, as worker/answer_stream.py counts what one client has not read.
MAX_UNREAD: Final = 16_384
MAX_JOINABLE: Final = 16_384

Start = Callable[[], AsyncGenerator[Chunk, None]]


class Flights:
    """All generations that may be shared. Belongs to one event loop."""

    def __init__(self, *, max_unread: int = MAX_UNREAD, max_joinable: int = MAX_JOINABLE) -> None:
        self._max_unread = max_unread
        self._max_joinable = min(max_joinable, max_unread)
        self._flights: dict[bytes, _Flight] = {}
        self.n_joined = 0  # clients that were given another's generation, in all

    def __len__(self) -> int:
        """Count the generations that somebody may still join."""
        return len(self._flights)

    async def stream(self, key: bytes, start: Start, *, deadline_s: float | None = None) -> AsyncGenerator[Chunk, None]:
        """Give the answer of the generation under way for key, or of the one that start begins.

        deadline_s  until the first chunk of a generation that another request began; that request's own deadline is
                    not this one's, so one that dies of it is begun anew
        Closing the iterator leaves; start's generator has been closed when the last one has left. Raises what the
        generation raises, and SlowReaderError.
        """
        loop = asyncio.get_running_loop()
        due_at_s = None if deadline_s is None else loop.time() + deadline_s
        while (joined := self._flights.get(key)) is not None:
            self.n_joined += 1
            n_given = 0
            try:
                async with aclosing(self._joined(joined, due_at_s, deadline_s)) as chunks:
                    async for chunk in chunks:
                        n_given += 1
                        yield chunk
                return
            except DeadlineError:
                if n_given or (due_at_s is not None and loop.time() >= due_at_s):
                    raise
        flight = _Flight(self._max_unread, self._max_joinable, lambda: self._landed(key, flight))
        self._flights[key] = flight
        reader = flight.enter()
        flight.take_off(start)
        try:
            async with aclosing(flight.read(reader)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            await flight.leave(reader)

    async def _joined(
        self, flight: _Flight, due_at_s: float | None, deadline_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        joined_at_s = asyncio.get_running_loop().time()
        waited_s = joined_at_s - flight.began_at_s
        reader = flight.enter()
        try:
            async with aclosing(flight.read(reader, due_at_s, deadline_s)) as chunks:
                async for chunk in chunks:
                    yield _as_joined(chunk, waited_s)
        finally:
            await flight.leave(reader)

    def _landed(self, key: bytes, flight: _Flight) -> None:
        """Let nobody join any more."""
        if self._flights.get(key) is flight:
            del self._flights[key]


def _as_joined(chunk: Chunk, waited_s: float) -> Chunk:
    """Give the times as one who came waited_s after the first sees them, and the joules to the first alone."""
    if chunk.usage is not None and chunk.usage.energy is not None:
        # Told to each, the answers' joules would add up to more than the meter has counted.
        chunk = replace(chunk, usage=replace(chunk.usage, energy=None))
    if (times := chunk.timings) is None:
        return chunk
    times = replace(times, queue_s=max(0.0, times.queue_s - waited_s), ttft_s=max(0.0, times.ttft_s - waited_s))
    return replace(chunk, timings=times)


class _Reader:
    """How far one client has read: chunks, and what they weigh."""

    __slots__ = ("n_read", "weight_read")

    def __init__(self) -> None:
        self.n_read = 0
        self.weight_read = 0


class _Flight:
    def __init__(self, max_unread: int, max_joinable: int, landed: Callable[[], None]) -> None:
        self._max_unread = max_unread
        self._max_joinable = max_joinable
        self._landed = landed
        self._chunks: list[Chunk] = []
        self._n_forgotten = 0  # chunks that all have read
        self._weight = 0  # of all chunks that came
        self._readers: set[_Reader] = set()
        self._slow: dict[_Reader, int] = {}
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self.began_at_s = asyncio.get_running_loop().time()

    def enter(self) -> _Reader:
        reader = _Reader()
        self._readers.add(reader)
        return reader

    def take_off(self, start: Start) -> None:
        self._task = asyncio.get_running_loop().create_task(self._fly(start))

    async def read(
        self, reader: _Reader, due_at_s: float | None = None, deadline_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Give chunks from the first on; due_at_s is when the first must have come."""
        while True:
            while (place := reader.n_read - self._n_forgotten) < len(self._chunks):
                self._raise_if_slow(reader)
                chunk = self._chunks[place]
                reader.n_read += 1
                reader.weight_read += _weight(chunk)
                yield chunk
                if chunk.finish_reason is not None:
                    return
            self._raise_if_slow(reader)
            if self._is_over:
                if self._error is not None:
                    raise own_copy(self._error)
                return
            try:
                async with asyncio.timeout_at(due_at_s if reader.n_read == 0 else None):
                    await self._news.wait()
            except TimeoutError:
                raise DeadlineError(deadline_s=deadline_s or 0.0) from None

    async def leave(self, reader: _Reader) -> None:
        """Go; the last one to go ends the generation, and returns when it has ended."""
        self._readers.discard(reader)
        self._slow.pop(reader, None)
        if self._readers or self._task is None:
            return
        self._landed()
        if not self._task.done():
            if not self._is_over:
                self._task.cancel()
            await asyncio.wait((self._task,))

    def _raise_if_slow(self, reader: _Reader) -> None:
        if (unread := self._slow.get(reader)) is not None:
            raise SlowReaderError(unread=unread, limit=self._max_unread)

    async def _fly(self, start: Start) -> None:
        try:
            async with aclosing(start()) as chunks:
                async for chunk in chunks:
                    self._add(chunk)
                    if not self._readers:  # all were too slow
                        break
        except asyncio.CancelledError as exc:
            self._error = exc
            raise
        except Exception as exc:  # noqa: BLE001  it is each client's to raise
            self._error = exc
        finally:
            self._is_over = True
            self._landed()
            self._wake()

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._weight += _weight(chunk)
        if self._weight > self._max_joinable:
            self._landed()
            for reader in [r for r in self._readers if self._weight - r.weight_read > self._max_unread]:
                self._slow[reader] = self._weight - reader.weight_read
                self._readers.discard(reader)
            n_read = min((reader.n_read for reader in self._readers), default=0)
            if (n_old := n_read - self._n_forgotten) > len(self._chunks) // 2:  # so that each chunk is moved once
                del self._chunks[:n_old]
                self._n_forgotten = n_read
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        if self._is_over:
            self._news.set()


def _weight(chunk: Chunk) -> int:
    """Count tokens and logprob rivals; text that came without ids, as a cloud's does, by its length."""
    n_rivals = sum(len(logprob.top) for logprob in (*chunk.logprobs, *chunk.prompt_logprobs))
    n_chars = len(chunk.text) + sum(len(delta.arguments) for delta in chunk.tool_calls)
    return max(1, len(chunk.token_ids), len(chunk.prompt_logprobs), n_chars // 4) + n_rivals


def own_copy(error: BaseException) -> BaseException:
    """Give each client an error of its own: one that is raised in several tasks collects all their tracebacks."""
    if isinstance(error, EdgeRtError):
        return replace(error).with_traceback(error.__traceback__)
    return error
