"""Equal inferences in flight: one run, an answer for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edge_rt.cache.tensor_flights import TensorFlights
from edge_rt.errors import DeadlineError, WorkerLostError
from edge_rt.tensor_types import Tensor, TensorAnswer, TensorTimings
from edge_rt.types import Energy
from tests import virtual_time

KEY = b"k"
ENERGY = Energy(total_j=1.0)


class Model:
    """Answers after took_s, or when it is told to."""

    def __init__(self, took_s: float = 1.0, error: Exception | None = None) -> None:
        self.took_s, self.error = took_s, error
        self.n_begun = self.n_stopped = 0

    async def __call__(self) -> TensorAnswer:
        self.n_begun += 1
        try:
            await asyncio.sleep(self.took_s)
        except asyncio.CancelledError:
            self.n_stopped += 1
            raise
        if self.error is not None:
            raise self.error
        out = Tensor(name="y", datatype="INT32", shape=(1,), data=b"\0\0\0\0")
        times = TensorTimings(queue_s=0.75, compute_s=0.25, batch_size=1)
        return TensorAnswer(outputs=(out,), timings=times, energy=ENERGY)


def flown(test: Callable[[TensorFlights], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        flights = TensorFlights()
        found = await test(flights)
        assert len(flights) == 0
        return found

    return virtual_time.run(main())


def after(delay_s: float, answer: Awaitable[TensorAnswer]) -> asyncio.Task[TensorAnswer]:
    async def wait() -> TensorAnswer:
        await asyncio.sleep(delay_s)
        return await answer

    return asyncio.get_running_loop().create_task(wait())


def test_that_equal_ones_share_a_run_and_the_joules_are_told_once() -> None:
    async def test(flights: TensorFlights) -> list[TensorAnswer]:
        model = Model()
        found = await asyncio.gather(
            after(0.0, flights.share(KEY, model)), after(0.5, flights.share(KEY, model)), flights.share(b"other", model)
        )
        assert model.n_begun == 2
        return found

    first, joined, _ = flown(test)
    assert joined.outputs == first.outputs
    assert (first.energy, joined.energy) == (ENERGY, None)
    assert (first.timings.queue_s, joined.timings.queue_s) == (0.75, 0.25)


def test_that_one_who_leaves_takes_nothing_from_the_others() -> None:
    async def test(flights: TensorFlights) -> None:
        model = Model()
        first, second = after(0.0, flights.share(KEY, model)), after(0.1, flights.share(KEY, model))
        await asyncio.sleep(0.5)
        first.cancel()
        assert (await second).outputs
        assert first.cancelled()
        assert (model.n_begun, model.n_stopped) == (1, 0)

    flown(test)


def test_that_the_last_one_to_leave_stops_the_run_and_the_next_begins_anew() -> None:
    async def test(flights: TensorFlights) -> None:
        model = Model()
        tasks = [after(0.0, flights.share(KEY, model)) for _ in range(2)]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert (model.n_begun, model.n_stopped, len(flights)) == (1, 1, 0)
        await flights.share(KEY, model)
        assert model.n_begun == 2

    flown(test)


def test_that_an_error_reaches_each_as_its_own() -> None:
    async def test(flights: TensorFlights) -> list[Any]:
        model = Model(error=WorkerLostError(model="m", reason="signal 9"))
        asked = [after(0.0, flights.share(KEY, model)) for _ in range(3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert model.n_begun == 1
        return found

    found = flown(test)
    assert {str(error) for error in found} == {str(WorkerLostError(model="m", reason="signal 9"))}
    assert len({id(error) for error in found}) == 3


def test_that_each_has_its_own_deadline() -> None:
    async def test(flights: TensorFlights) -> None:
        model = Model(took_s=10.0)
        clock = asyncio.get_running_loop().time
        began_s, slow = clock(), after(0.0, flights.share(KEY, model))
        with pytest.raises(DeadlineError, match="2"):
            await after(0.1, flights.share(KEY, model, deadline_s=2.0))
        assert clock() - began_s == pytest.approx(2.1)
        assert (await slow).energy == ENERGY
        assert model.n_begun == 1

    flown(test)


def test_that_a_run_which_dies_of_another_s_deadline_is_begun_anew() -> None:
    async def test(flights: TensorFlights) -> None:
        hasty, model = Model(error=DeadlineError(deadline_s=1.0)), Model()
        first = after(0.0, flights.share(KEY, hasty, deadline_s=1.0))
        second = after(0.1, flights.share(KEY, model))
        with pytest.raises(DeadlineError):
            await first
        assert (await second).energy == ENERGY
        assert (hasty.n_begun, model.n_begun) == (1, 1)

    flown(test)
