from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest

from edge_rt import config
from edge_rt.devices.base import Reading, known
from edge_rt.devices.meters import Sample
from edge_rt.errors import WorkerLostError
from edge_rt.power.metered_worker import metered
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.tensor_types import MediaAnswer, MediaRequest, Reply, TensorAnswer, TensorRequest, TensorTimings
from edge_rt.types import Chunk, Energy, GenerateRequest, PinAction, PinnedPrefix
from edge_rt.worker.channel import Inferred
from tests import virtual_time
from tests.unit.worker.fake_child import INFO, LAST, LOAD

INFER = TensorRequest(id="i", model="m", inputs=())
TIMINGS = TensorTimings(queue_s=0.0, compute_s=1.0, batch_size=1, engine_s=1.0)
LOOK = MediaRequest(id="l", model="m", data=b"x")


class FakeWorker:
    """Takes a second for everything, all of it computing."""

    pid = 7
    is_lost = False

    def late_s(self) -> float:
        return 1.5

    n_threads = 1

    def __init__(self) -> None:
        self.asked: list[TensorRequest] = []

    async def start(self) -> Any:
        return replace(INFO, n_threads=self.n_threads)

    async def stop(self, error: Any) -> None: ...

    async def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        return [1, 2]

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        raise NotImplementedError

    async def pins(self, tenant: str, action: PinAction, name: str, text: str) -> list[PinnedPrefix]:
        raise NotImplementedError

    async def detokenize(self, token_ids: list[int]) -> str:
        return "text"

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(text="a")
        await asyncio.sleep(1.0)
        assert LAST.timings is not None
        timings = replace(LAST.timings, prefill_s=0.25, decode_s=0.75, prefill_engine_s=0.25, decode_engine_s=0.75)
        yield replace(LAST, timings=timings)

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        await asyncio.sleep(1.0)
        if self.is_lost:
            raise WorkerLostError(model="m", reason="gone")
        return TensorAnswer(outputs=(), timings=TensorTimings(queue_s=0.0, compute_s=1.0, batch_size=1, engine_s=1.0))

    def infer_now(self, request: TensorRequest, on_reply: Any) -> Any:
        self.asked.append(request)
        if self.is_lost:
            return None
        reply = Inferred(id="w", sent=(), timings=TIMINGS)
        return asyncio.get_running_loop().call_later(1.0, on_reply, reply).cancel

    async def look(self, request: MediaRequest) -> MediaAnswer:
        return MediaAnswer(task="classify", timings=(await self.infer(INFER)).timings)


class Watts:
    name, boundary, quality, interval_s = "watts", "board", "measured", 0.05

    def read(self, now_s: float) -> Reading[Sample]:
        return known(Sample(power_w=8.0), "watts")

    def close(self) -> None: ...


class Bench:
    """Metered workers of one model, and what was told of tensors."""

    def __init__(self) -> None:
        meter: Any = Watts()
        self.monitor = EnergyMonitor(meter, clock=asyncio.get_running_loop().time)
        self.told: list[tuple[str, Energy]] = []
        self.aborted: list[tuple[str, Energy]] = []
        self.made: list[FakeWorker] = []
        self.reading = asyncio.create_task(self.read())
        self.make = metered(
            self.make_plain,
            self.monitor,
            lambda model, energy: self.told.append((model, energy)),
            lambda model, energy: self.aborted.append((model, energy)),
        )

    def make_plain(self, *_: Any) -> Any:
        self.made.append(FakeWorker())
        return self.made[-1]

    def worker(self) -> Any:
        return self.make(LOAD, config.Worker(), None)  # type: ignore[arg-type]

    async def read(self) -> None:
        for _ in range(10_000):
            await asyncio.sleep(min(self.monitor.tick(), 0.05))


def test_every_kind_of_answer_says_what_it_took() -> None:
    async def main() -> None:
        bench = Bench()
        worker = bench.worker()
        await asyncio.sleep(1.0)
        chunks = [chunk async for chunk in worker.generate(GenerateRequest(id="g", model="m", prompt="x"))]
        assert chunks[0] == Chunk(text="a")
        energy = chunks[-1].usage.energy
        assert (energy.total_j, energy.prefill_j) == (pytest.approx(8.0), pytest.approx(2.0))
        assert bench.told == []  # whoever has the usage counts it
        inferred, found = await worker.infer(INFER), await worker.look(LOOK)
        assert inferred.energy.total_j == found.energy.total_j == pytest.approx(8.0)
        assert bench.told == [("m", inferred.energy), ("m", found.energy)]
        bench.reading.cancel()

    virtual_time.run(main())


def test_a_request_without_a_task_says_it_too_and_leaves_nothing_open() -> None:
    async def main() -> None:
        bench = Bench()
        worker = bench.worker()
        await asyncio.sleep(1.0)
        replies: list[Any] = []
        reply = Reply(loan=cast("Any", None), head=b"", outputs=(), place="", variant="")
        assert worker.infer_now(replace(INFER, reply=reply), replies.append) is not None
        assert bench.made[0].asked[-1].reply is None  # the worker does not know what it took
        await asyncio.sleep(1.5)
        (reply,) = replies
        assert reply.answer().energy.total_j == pytest.approx(8.0)
        assert bench.told == [("m", reply.energy)]
        drop = worker.infer_now(INFER, replies.append)
        await asyncio.sleep(0.5)
        assert bench.monitor._account.is_busy
        drop()
        assert not bench.monitor._account.is_busy
        bench.made[0].is_lost = True
        assert worker.infer_now(INFER, replies.append) is None
        assert not bench.monitor._account.is_busy
        bench.reading.cancel()

    virtual_time.run(main())


def test_workers_of_one_model_share_what_is_drawn() -> None:
    async def main() -> None:
        bench = Bench()
        cpu, npu = bench.worker(), bench.worker()
        await asyncio.sleep(1.0)
        answers = await asyncio.gather(cpu.infer(INFER), npu.infer(INFER))
        assert [answer.energy.total_j for answer in answers] == pytest.approx([4.0, 4.0])
        bench.reading.cancel()

    virtual_time.run(main())


def test_a_worker_with_more_threads_takes_more() -> None:
    async def main() -> None:
        bench = Bench()
        wide, narrow = bench.worker(), bench.worker()
        bench.made[0].n_threads = 3
        await asyncio.gather(wide.start(), narrow.start(), asyncio.sleep(1.0))
        answers = await asyncio.gather(wide.infer(INFER), narrow.infer(INFER))
        assert [answer.energy.total_j for answer in answers] == pytest.approx([6.0, 2.0])
        bench.reading.cancel()

    virtual_time.run(main())


def test_what_fails_leaves_nothing_open() -> None:
    async def main() -> None:
        bench = Bench()
        worker = bench.worker()
        bench.made[0].is_lost = True
        with pytest.raises(WorkerLostError):
            await worker.infer(INFER)
        answer = worker.generate(GenerateRequest(id="g", model="m", prompt="x"))
        await anext(answer)
        await answer.aclose()
        assert not bench.monitor._account.is_busy
        assert bench.told == []
        bench.reading.cancel()

    virtual_time.run(main())


def test_what_is_cancelled_counts_as_aborted() -> None:
    async def main() -> None:
        bench = Bench()
        worker = bench.worker()
        await asyncio.sleep(1.0)

        async def text() -> None:
            async with aclosing(worker.generate(GenerateRequest(id="g", model="m", prompt="x"))) as answer:
                async for _ in answer:
                    pass

        cancelled = [asyncio.create_task(one) for one in (text(), worker.infer(INFER))]
        drop = worker.infer_now(INFER, lambda _: None)
        await asyncio.sleep(0.75)
        for task in cancelled:
            task.cancel()
        drop()
        await asyncio.gather(*cancelled, return_exceptions=True)
        joules = [energy.total_j for _, energy in bench.aborted]
        assert joules == pytest.approx([2.0] * 3, rel=0.05)  # three took turns for 0.75 s at 8 W
        assert {energy.quality for _, energy in bench.aborted} == {"derived"}
        assert bench.told == []
        assert not bench.monitor._account.is_busy
        await text()
        assert len(bench.aborted) == 3, "an answer with an end is none of them"
        bench.reading.cancel()

    virtual_time.run(main())


def test_what_fails_on_its_way_counts_as_aborted_too() -> None:
    async def main() -> None:
        bench = Bench()
        worker = bench.worker()
        bench.made[0].is_lost = True
        await asyncio.sleep(1.0)
        with pytest.raises(WorkerLostError):
            await worker.infer(INFER)
        ((model, energy),) = bench.aborted
        assert (model, energy.total_j) == ("m", pytest.approx(8.0, rel=0.05))
        bench.reading.cancel()

    virtual_time.run(main())


def test_the_rest_is_the_workers_own() -> None:
    async def main() -> None:
        bench = Bench()
        worker = bench.worker()
        assert (worker.pid, worker.late_s()) == (7, 1.5)
        assert await worker.tokenize("x", special=False, add_bos=False) == [1, 2]
        assert await worker.detokenize([1]) == "text"
        bench.reading.cancel()

    virtual_time.run(main())
