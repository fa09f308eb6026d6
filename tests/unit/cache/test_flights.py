"""Requests in flight that are alike share one generation, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from edge_rt.cache.flights import Flights
from edge_rt.errors import BackendStepError, DeadlineError, SlowReaderError, WorkerLostError
from edge_rt.types import Chunk, Energy, Timings, Usage
from tests import virtual_time

TIMES = Timings(queue_s=1.0, prefill_s=0.5, prefill_tokens=3, decode_s=4.0, decode_tokens=4, ttft_s=1.5)
Source = Callable[[], AsyncGenerator[Chunk, None]]


class Generation:
    """A generation that writes one letter a second, counts how often it was begun, and tells how it ended."""

    def __init__(
        self,
        n_tokens: int = 5,
        *,
        error: Exception | None = None,
        interval_s: float = 1.0,
        energy: Energy | None = None,
    ) -> None:
        self.n_tokens, self.error, self.interval_s, self.energy = n_tokens, error, interval_s, energy
        self.n_begun = self.n_closed = self.n_made = 0

    def __call__(self) -> AsyncGenerator[Chunk, None]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        self.n_begun += 1
        try:
            for i in range(self.n_tokens):
                await asyncio.sleep(self.interval_s)
                self.n_made += 1
                last = i == self.n_tokens - 1
                if last and self.error is not None:
                    raise self.error
                yield Chunk(
                    text=chr(97 + i % 26),
                    token_ids=(i,),
                    finish_reason="stop" if last else None,
                    usage=Usage(prompt_tokens=3, completion_tokens=self.n_tokens, energy=self.energy) if last else None,
                    timings=TIMES if last else None,
                )
        finally:
            self.n_closed += 1


async def read(flights: Flights, source: Source, *, key: bytes = b"k", deadline_s: float | None = None) -> str:
    async with aclosing(flights.stream(key, source, deadline_s=deadline_s)) as chunks:
        return "".join([chunk.text async for chunk in chunks])


async def later(delay_s: float, flights: Flights, source: Source, *, deadline_s: float | None = None) -> str:
    await asyncio.sleep(delay_s)
    return await read(flights, source, deadline_s=deadline_s)


def test_that_like_requests_share_one_generation_from_its_beginning() -> None:
    async def main() -> None:
        flights, source = Flights(), Generation()
        texts = await asyncio.gather(*(later(delay_s, flights, source) for delay_s in (0, 0, 2.5, 4.5)))
        assert texts == ["abcde"] * 4
        assert (source.n_begun, source.n_closed, flights.n_joined, len(flights)) == (1, 1, 3, 0)
        assert await read(flights, source) == "abcde"
        assert source.n_begun == 2, "one that has ended is joined no more"

    virtual_time.run(main())


def test_that_other_requests_do_not() -> None:
    async def main() -> None:
        flights, source = Flights(), Generation()
        await asyncio.gather(read(flights, source, key=b"a"), read(flights, source, key=b"b"))
        assert source.n_begun == 2

    virtual_time.run(main())


def test_that_each_client_reads_at_its_own_pace() -> None:
    async def slowly(flights: Flights, source: Source) -> str:
        text = ""
        async with aclosing(flights.stream(b"k", source)) as chunks:
            async for chunk in chunks:
                await asyncio.sleep(100)
                text += chunk.text
        return text

    async def main() -> None:
        flights, source = Flights(), Generation()
        loop = asyncio.get_running_loop()
        began_at_s = loop.time()
        slow = loop.create_task(slowly(flights, source))
        await asyncio.sleep(0)
        assert await read(flights, source) == "abcde"
        assert loop.time() - began_at_s < 6
        assert await slow == "abcde"
        assert source.n_begun == 1

    virtual_time.run(main())


@pytest.mark.parametrize("leaver", [0, 1])
def test_that_one_hanging_up_does_not_stop_the_others(leaver: int) -> None:
    async def main() -> None:
        flights, source = Flights(), Generation()
        clients = [asyncio.create_task(read(flights, source)) for _ in range(2)]
        await asyncio.sleep(2.5)
        clients[leaver].cancel()
        assert await clients[1 - leaver] == "abcde"
        assert clients[leaver].cancelled()
        assert (source.n_begun, source.n_closed) == (1, 1)

    virtual_time.run(main())


def test_that_the_last_one_hanging_up_stops_the_generation_before_it_returns() -> None:
    async def main() -> None:
        flights, source = Flights(), Generation()
        first, second = flights.stream(b"k", source), flights.stream(b"k", source)
        assert (await anext(first)).text == (await anext(second)).text == "a"
        await first.aclose()
        assert source.n_closed == 0
        await second.aclose()
        assert (source.n_closed, source.n_made, len(flights)) == (1, 1, 0)
        assert await read(flights, source) == "abcde"

    virtual_time.run(main())


def test_that_an_error_reaches_all_each_with_its_own() -> None:
    async def failed(flights: Flights, source: Source, delay_s: float) -> BaseException:
        with pytest.raises(WorkerLostError) as caught:
            await later(delay_s, flights, source)
        return caught.value

    async def main() -> None:
        flights, source = Flights(), Generation(error=WorkerLostError(model="m", reason="killed"))
        errors = await asyncio.gather(*(failed(flights, source, delay_s) for delay_s in (0, 0, 3)))
        assert {str(error) for error in errors} == {str(source.error)}
        assert len({id(error) for error in errors}) == 3
        assert (source.n_begun, len(flights)) == (1, 0)

    virtual_time.run(main())


def test_that_what_came_before_an_error_is_read_first() -> None:
    async def main() -> None:
        flights = Flights()
        chunks = flights.stream(b"k", Generation(3, error=BackendStepError(reason="x")))
        for text in "ab":
            await asyncio.sleep(10)
            assert (await anext(chunks)).text == text
        with pytest.raises(BackendStepError):
            await anext(chunks)

    virtual_time.run(main())


def test_that_an_answer_which_breaks_off_ends_for_all() -> None:
    async def broken() -> AsyncGenerator[Chunk, None]:
        yield Chunk(text="a")

    async def main() -> None:
        flights = Flights()
        assert await asyncio.gather(read(flights, broken), read(flights, broken)) == ["a", "a"]

    virtual_time.run(main())


def test_that_a_slow_reader_is_bounded_and_the_others_go_on() -> None:
    async def main() -> None:
        flights, source = Flights(max_unread=20, max_joinable=10), Generation(100)
        slow = flights.stream(b"k", source)
        await anext(slow)
        quick = asyncio.create_task(read(flights, source))
        await asyncio.sleep(0)
        assert len(await quick) == 100
        with pytest.raises(SlowReaderError) as caught:
            await anext(slow)
        assert (caught.value.unread, caught.value.limit) == (21, 20)

    virtual_time.run(main())


def test_that_a_generation_with_none_but_slow_readers_is_stopped() -> None:
    async def main() -> None:
        flights, source = Flights(max_unread=20, max_joinable=10), Generation(100)
        slow = flights.stream(b"k", source)
        await anext(slow)
        await asyncio.sleep(1000)
        assert (source.n_made, source.n_closed) == (22, 1)
        with pytest.raises(SlowReaderError):
            await anext(slow)

    virtual_time.run(main())


def test_that_a_long_answer_takes_no_newcomers_and_forgets_what_all_have_read() -> None:
    async def main() -> None:
        flights, source = Flights(max_unread=20, max_joinable=10), Generation(50)
        first = asyncio.create_task(read(flights, source))
        await asyncio.sleep(9.5)
        assert len(flights) == 1
        await asyncio.sleep(2)
        assert len(flights) == 0
        assert len(await read(flights, source)) == 50
        assert len(await first) == 50
        assert source.n_begun == 2

    virtual_time.run(main())


def test_that_times_are_those_that_each_client_sees() -> None:
    async def timings(flights: Flights, source: Source, delay_s: float) -> Timings:
        await asyncio.sleep(delay_s)
        found = [chunk.timings async for chunk in flights.stream(b"k", source)][-1]
        assert found is not None
        return found

    async def main() -> None:
        flights, source = Flights(), Generation()
        first, second, third = await asyncio.gather(*(timings(flights, source, s) for s in (0.0, 1.25, 3.0)))
        assert first == TIMES
        assert (second.queue_s, second.ttft_s, second.decode_s) == (0.0, 0.25, 4.0)
        assert (third.queue_s, third.ttft_s) == (0.0, 0.0)

    virtual_time.run(main())


def test_that_the_joules_are_told_once() -> None:
    joules = Energy(total_j=3.0, prefill_j=1.0, decode_j=2.0, source="meter")

    async def energy(flights: Flights) -> Energy | None:
        found = [chunk.usage async for chunk in flights.stream(b"k", Generation(energy=joules))][-1]
        assert found is not None
        return found.energy

    async def main() -> None:
        flights = Flights()
        assert await asyncio.gather(*(energy(flights) for _ in range(3))) == [joules, None, None]

    virtual_time.run(main())


def test_that_a_joining_requests_own_deadline_counts() -> None:
    async def main() -> None:
        flights, source = Flights(), Generation(interval_s=10.0)
        first = asyncio.create_task(read(flights, source))
        with pytest.raises(DeadlineError) as caught:
            await later(1.0, flights, source, deadline_s=2.0)
        assert caught.value.deadline_s == 2.0
        assert await later(0.0, flights, source, deadline_s=8.0) == "abcde", "in time for the first token"
        assert await first == "abcde"
        assert source.n_begun == 1

    virtual_time.run(main())


def test_that_the_deadline_of_the_first_does_not_count_for_who_joined() -> None:
    async def main() -> None:
        flights, source = Flights(), Generation()
        late = Generation(1, error=DeadlineError(deadline_s=1.0))
        results = await asyncio.gather(
            read(flights, late), read(flights, source), read(flights, source), return_exceptions=True
        )
        assert isinstance(results[0], DeadlineError)
        assert results[1:] == ["abcde", "abcde"]
        assert source.n_begun == 1

    virtual_time.run(main())
