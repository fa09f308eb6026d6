"""Inferences in flight: those with one key share one run.

The run is a task of its own. A client that leaves takes nothing from the others, the last one to leave stops the run,
and an error reaches all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from edge_rt.cache.flights import own_copy
from edge_rt.errors import DeadlineError
from edge_rt.tensor_types import TensorAnswer

Compute = Callable[[], Awaitable[TensorAnswer]]


class TensorFlights:
    """All runs that may be shared. Belongs to one event loop."""

    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}

    def __len__(self) -> int:
        """Count the runs that somebody may still join."""
        return len(self._runs)

    async def share(self, key: bytes, compute: Compute, *, deadline_s: float | None = None) -> TensorAnswer:
        """Give the answer of the run under way for key, or of the one that compute begins.

        deadline_s  until the answer of a run that another request began; that request's own deadline is not this one's,
                    so one that dies of it is begun anew

        Raises what compute raises, and DeadlineError.
        """
        clock = asyncio.get_running_loop().time
        due_at_s = None if deadline_s is None else clock() + deadline_s
        while (joined := self._runs.get(key)) is not None:
            came_at_s = clock()
            try:
                async with asyncio.timeout_at(due_at_s):
                    answer = await self._wait(key, joined)
            except TimeoutError:
                raise DeadlineError(deadline_s=deadline_s or 0.0) from None
            except DeadlineError:
                if due_at_s is not None and clock() >= due_at_s:
                    raise
            else:
                return _as_joined(answer, came_at_s - joined.began_at_s)
        run = self._runs[key] = _Run(clock())
        run.task = asyncio.get_running_loop().create_task(_run(compute))
        run.task.add_done_callback(lambda _: self._landed(key, run))
        return await self._wait(key, run)

    async def _wait(self, key: bytes, run: _Run) -> TensorAnswer:
        assert run.task is not None
        run.n_waiting += 1
        try:
            await asyncio.wait((run.task,))
        finally:
            run.n_waiting -= 1
            if not run.n_waiting and not run.task.done():
                self._landed(key, run)
                run.task.cancel()
                await asyncio.wait((run.task,))
        if run.task.cancelled() or (error := run.task.exception()) is None:
            return run.task.result()
        raise own_copy(error) from error.__cause__

    def _landed(self, key: bytes, run: _Run) -> None:
        """Let nobody join any more."""
        if self._runs.get(key) is run:
            del self._runs[key]


class _Run:
    """One run, and how many wait for it."""

    __slots__ = ("began_at_s", "n_waiting", "task")

    def __init__(self, began_at_s: float) -> None:
        self.began_at_s = began_at_s
        self.n_waiting = 0
        self.task: asyncio.Task[TensorAnswer] | None = None


async def _run(compute: Compute) -> TensorAnswer:
    return await compute()


def _as_joined(answer: TensorAnswer, waited_s: float) -> TensorAnswer:
    """Give the times as one who came waited_s after the first sees them, and the joules to the first alone."""
    times = replace(answer.timings, queue_s=max(0.0, answer.timings.queue_s - waited_s))
    return replace(answer, timings=times, energy=None)
