"""Asking a second source when the first is late, for a few requests: whoever has text first answers.

The policy is pure; the loop knows nothing of what it joins, so that it works in both directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from edge_rt.types import Chunk

Source = Callable[[], AsyncGenerator[Chunk, None]]
_Begun = tuple[AsyncGenerator[Chunk, None], list[Chunk]]

MAX_SHARE: Final = 0.05  # of requests that are asked twice
_RESERVE: Final = 2.0
_MIN_SAMPLES: Final = 8


class HedgePolicy:
    """After which time a request is asked a second time: later than most first texts come, and for few."""

    __slots__ = ("_left", "_share")

    def __init__(self, share: float = MAX_SHARE) -> None:
        self._share, self._left = share, 1.0

    def after_s(self, p95_s: float | None, n_samples: int) -> float | None:
        """Give the wait before a second source is asked; None: it is not known when the first is late.

        Counts the request, which earns a share of a second question.
        """
        self._left = min(_RESERVE, self._left + self._share)
        return p95_s if n_samples >= _MIN_SAMPLES else None

    def take(self) -> bool:
        """Spend one second question if there is one."""
        if self._left < 1.0 - 1e-9:
            return False
        self._left -= 1.0
        return True


async def hedged(
    first: Source, second: Source, *, after_s: float, may: Callable[[], bool]
) -> AsyncGenerator[Chunk, None]:
    """Stream the answer of whichever source has text first; the other is closed before that text is passed on.

    after_s  second is begun this long after first, unless may() says no; at once if first fails before

    If both fail before any text, first's error is raised. What fails after its first text fails.
    """
    race = _Race()
    try:
        race.begin(first)
        found = await race.winner(after_s)
        if found is None and may():
            race.begin(second)
        answer, begun = found or await race.last_winner()
        await race.close(but=answer)
        for chunk in begun:
            yield chunk
        async for chunk in answer:
            yield chunk
    finally:
        await race.close()


class _Race:
    """Answers that have begun, and who has text."""

    def __init__(self) -> None:
        self._runners: list[tuple[AsyncGenerator[Chunk, None], asyncio.Task[list[Chunk]]]] = []
        self._first: AsyncGenerator[Chunk, None] | None = None
        self._error: BaseException | None = None  # the first source's, if it has failed

    def begin(self, source: Source) -> None:
        answer = source()
        self._first = self._first or answer
        self._runners.append((answer, asyncio.get_running_loop().create_task(_until_text(answer))))

    async def last_winner(self) -> _Begun:
        """Wait for text of those that have begun. Raises the first error once nobody is left."""
        if (found := await self.winner(None)) is not None:
            return found
        raise self._error or RuntimeError("a race that nobody has begun")

    async def winner(self, within_s: float | None) -> _Begun | None:
        """Wait for text; None if there is none within_s, or nobody is left."""
        loop = asyncio.get_running_loop()
        due_at_s = None if within_s is None else loop.time() + within_s
        while self._runners:
            left_s = None if due_at_s is None else max(due_at_s - loop.time(), 0.0)
            tasks = [task for _, task in self._runners]
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return None
            for answer, task in tuple(self._runners):
                if not task.done():
                    continue
                error = task.exception()
                if error is None:
                    return answer, task.result()
                self._runners.remove((answer, task))
                self._error = error if answer is self._first else self._error or error
        return None

    async def close(self, but: AsyncGenerator[Chunk, None] | None = None) -> None:
        """Stop all, or all but one, and wait until they have stopped."""
        for answer, task in self._runners:
            if answer is not but:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await answer.aclose()
        self._runners = [(answer, task) for answer, task in self._runners if answer is but]


async def _until_text(answer: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    """Read an answer to its first text or its end."""
    begun: list[Chunk] = []
    async for chunk in answer:
        begun.append(chunk)
        if chunk.text or chunk.tool_calls or chunk.finish_reason is not None:
            break
    return begun
