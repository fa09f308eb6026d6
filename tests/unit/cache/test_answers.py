"""The whole way of a request through the cache, with the answering in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt.answering import Answering
from edge_rt.cache.answers import Answers, store_path
from edge_rt.cache.exact import ExactTier
from edge_rt.cache.key import Identity
from edge_rt.cache.store import Store
from edge_rt.config import Cache
from edge_rt.types import Chunk, GenerateRequest, Message, Timings, Usage
from tests import virtual_time
from tests.fakes import FakeClock
from tests.unit.cache.test_exact import Events

TIMES = Timings(queue_s=0.0, prefill_s=1.0, prefill_tokens=3, decode_s=2.0, decode_tokens=1, ttft_s=1.0)
USAGE = Usage(prompt_tokens=3, completion_tokens=2)
ASKED = GenerateRequest(id="1", model="m", messages=(Message(role="user", content="Hello?"),))


class Device:
    """A model that answers after three seconds, and counts how often it was asked and left alone."""

    def __init__(self) -> None:
        self.n_asked = self.n_stopped = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.n_asked += 1
        is_done = False
        try:
            for text in ("Good ", f"day {self.n_asked}"):
                await asyncio.sleep(1.5)
                is_done = text != "Good "
                end = {"finish_reason": "stop", "usage": USAGE, "timings": TIMES} if is_done else {}
                yield Chunk(text=text, token_ids=(1,), **end)  # type: ignore[arg-type]
        finally:
            self.n_stopped += not is_done


class AnsweringEvents(Events):
    def routed(self, where: str, reason: str) -> None: ...

    def handed_over(self, reason: str) -> None: ...


class Bench:
    def __init__(self, path: Path) -> None:
        self.device, self.events, self.wall_clock = Device(), AnsweringEvents(), FakeClock(1e9)
        self.identity = Identity(model="m", file_sha256="1")
        self.store = Store.open(path, max_bytes=2**20, max_value_bytes=2**20)
        tier = ExactTier(Cache(), self.store, self.events)
        answers = Answers(tier, lambda _: (self.identity,), wall_clock=self.wall_clock)
        self.answering = Answering(self.device.generate, self.events, cache=answers)

    async def ask(self, request: GenerateRequest = ASKED) -> list[Chunk]:
        async with aclosing(self.answering.generate(request)) as chunks:
            return [chunk async for chunk in chunks]

    def text(self, request: GenerateRequest = ASKED) -> str:
        return "".join(chunk.text for chunk in virtual_time.run(self.ask(request)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "cache.sqlite")
    yield made
    made.store.close()


def test_that_the_second_one_gets_the_stored_answer(bench: Bench) -> None:
    first = virtual_time.run(bench.ask())
    bench.wall_clock.advance(10)
    second = virtual_time.run(bench.ask(replace(ASKED, id="2", stream=False)))
    assert bench.device.n_asked == 1
    assert "".join(c.text for c in first) == "".join(c.text for c in second) == "Good day 1"
    assert [c.origin.cache for c in (*first, *second) if c.origin] == ["miss", "hit-exact"]
    assert second[0].origin is not None
    assert second[0].origin.age_s == 10.0
    assert second[-1].usage == replace(USAGE, cached_tokens=3)
    assert bench.events.states == {"miss": 1, "hit-exact": 1}
    assert bench.events.saved_s == 3.0


def test_that_requests_in_flight_share_and_what_they_shared_is_stored(bench: Bench) -> None:
    async def main() -> None:
        answers = await asyncio.gather(*(bench.ask(replace(ASKED, id=str(n))) for n in range(5)))
        assert {"".join(c.text for c in chunks) for chunks in answers} == {"Good day 1"}

    virtual_time.run(main())
    assert bench.device.n_asked == 1
    assert bench.text() == "Good day 1"


def test_that_an_answer_outlives_one_of_its_clients_but_not_the_last(bench: Bench) -> None:
    async def main(*, stays: bool) -> None:
        first = asyncio.create_task(bench.ask())
        second = asyncio.create_task(bench.ask())
        await asyncio.sleep(2)
        first.cancel()
        if stays:
            assert len(await second) == 2
        else:
            second.cancel()
            await asyncio.wait((first, second))

    virtual_time.run(main(stays=False))
    assert (bench.device.n_stopped, len(bench.store)) == (1, 0), "a half answer is not stored"
    virtual_time.run(main(stays=True))
    assert (bench.device.n_stopped, len(bench.store)) == (1, 1)


def test_that_two_tenants_share_nothing(bench: Bench) -> None:
    assert bench.text(replace(ASKED, tenant="uid:1")) == "Good day 1"
    assert bench.text(replace(ASKED, tenant="uid:2")) == "Good day 2"

    async def main() -> None:
        await asyncio.gather(*(bench.ask(replace(ASKED, tenant=t, max_tokens=9)) for t in ("uid:1", "uid:2")))

    virtual_time.run(main())
    assert bench.device.n_asked == 4


def test_that_a_new_model_file_costs_the_old_answers(bench: Bench) -> None:
    bench.text()
    bench.identity = replace(bench.identity, file_sha256="2")
    assert bench.text() == "Good day 2"
    assert len(bench.store) == 1


def test_where_the_answers_are(tmp_path: Path) -> None:
    assert store_path(Cache(), tmp_path) == tmp_path / "cache.sqlite"
    assert store_path(Cache(store_file="/x/y"), tmp_path) == Path("/x/y")
