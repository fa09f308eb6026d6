from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from edge_rt import config
from edge_rt.errors import BackendLoadError, EdgeRtError, ModelFormatError, ShuttingDownError, WorkerLostError
from edge_rt.tensor_types import NodePlacement, TensorAnswer, TensorModelInfo, TensorRequest, TensorTimings
from edge_rt.types import Chunk, EngineStats, ModelInfo, Usage
from edge_rt.worker import channel
from edge_rt.worker.channel import Load, ToWorker
from edge_rt.worker.process import Handle
from edge_rt.worker.supervisor import MAX_LOAD_DEATHS, STABLE_S, Worker, backoff_s
from tests import virtual_time
from tests.unit.worker.fake_child import (
    LOAD,
    FakeChild,
    FakeLaunch,
    answers,
    dies_loading,
    dies_on_request,
    loads,
    request,
    silent,
)

TIMINGS = TensorTimings(queue_s=0.0, compute_s=0.0, batch_size=1)


@dataclass
class Heard:
    restarts: list[str] = field(default_factory=list)
    downs: list[EdgeRtError] = field(default_factory=list)
    figures: list[EngineStats] = field(default_factory=list)
    infos: list[ModelInfo | TensorModelInfo] = field(default_factory=list)

    def stats(self, stats: EngineStats) -> None:
        self.figures.append(stats)

    def described(self, info: ModelInfo | TensorModelInfo) -> None:
        self.infos.append(info)

    def restarting(self, reason: str) -> None:
        self.restarts.append(reason)

    def down(self, error: EdgeRtError) -> None:
        self.downs.append(error)


def supervised(launch: FakeLaunch, heard: Heard | None = None) -> Worker:
    return Worker(LOAD, settings=config.Worker(), launch=launch, events=heard or Heard())


async def answer(worker: Worker, request_id: str = "r") -> str:
    return "".join([chunk.text async for chunk in worker.generate(request(request_id))])


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def gives_one_chunk(child: FakeChild, message: ToWorker) -> None:
    loads(child, message)
    if isinstance(message, channel.Generate):
        child.send(channel.ChunkOut(message.request.id, Chunk(text="a")))


def test_a_killed_worker_is_back_at_once() -> None:
    async def main() -> None:
        launch, heard = FakeLaunch(answers), Heard()
        worker = supervised(launch, heard)
        await worker.start()
        launch.children[0].exit(-9)
        assert await answer(worker) == "ab!"
        assert launch.launched_at_s[1] == launch.launched_at_s[0]
        assert heard.restarts == ["SIGKILL, perhaps out of memory"]
        assert worker.pid == launch.children[1].pid
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_a_worker_restarts_without_being_asked() -> None:
    async def main() -> None:
        launch = FakeLaunch(answers)
        worker = supervised(launch)
        await worker.start()
        launch.children[0].exit(-9)
        await asyncio.sleep(0.01)
        assert len(launch.children) == 2
        assert worker.pid == launch.children[1].pid
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_a_request_without_a_byte_yet_is_asked_once_more() -> None:
    async def main() -> None:
        launch = FakeLaunch(dies_on_request, answers)
        worker = supervised(launch)
        await worker.start()
        assert await answer(worker) == "ab!"
        assert [len(child.requests()) for child in launch.children] == [1, 1]
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def dies_of_poison(child: FakeChild, message: ToWorker) -> None:
    """Answer each request for tensors a moment later; one for poison kills all that are inside by then."""
    loads(child, message)
    if isinstance(message, channel.Infer):
        is_poison = message.outputs == ("poison",)

        def end() -> None:
            if is_poison:
                child.exit(-6)
            else:
                child.send(channel.Inferred(message.id, (), timings=TIMINGS))

        asyncio.get_running_loop().call_later(0.01 if is_poison else 0.02, end)


def test_a_poison_request_for_tensors_takes_nobody_with_it() -> None:
    async def main() -> None:
        launch = FakeLaunch(dies_of_poison)
        worker = supervised(launch)
        await worker.start()
        wanted = ["y", "poison", "y", "y"]
        requests = [TensorRequest(id=f"{i}", model="m", inputs=(), outputs=(y,)) for i, y in enumerate(wanted)]
        results = await asyncio.gather(*(worker.infer(request) for request in requests), return_exceptions=True)
        assert [type(result) for result in results] == [TensorAnswer, WorkerLostError, TensorAnswer, TensorAnswer]
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_a_streams_request_is_not_asked_again() -> None:
    async def main() -> None:
        launch = FakeLaunch(dies_of_poison)
        worker = supervised(launch)
        await worker.start()
        with pytest.raises(WorkerLostError):
            await worker.infer(TensorRequest(id="p", model="m", inputs=(), outputs=("poison",), stream="s"))
        await settle()
        assert [sum(isinstance(seen, channel.Infer) for seen in child.seen) for child in launch.children] == [1, 0]
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_a_request_that_kills_the_worker_twice_is_not_asked_again() -> None:
    async def main() -> None:
        launch = FakeLaunch(dies_on_request, dies_on_request, answers)
        worker = supervised(launch)
        await worker.start()
        with pytest.raises(WorkerLostError, match="poison"):
            await answer(worker)
        assert await answer(worker, "innocent") == "ab!"
        assert len(launch.children[2].requests()) == 1
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_a_request_with_a_byte_out_is_not_asked_again() -> None:
    async def main() -> None:
        launch = FakeLaunch(gives_one_chunk, answers)
        worker = supervised(launch)
        await worker.start()
        async with aclosing(worker.generate(request())) as chunks:
            assert (await anext(chunks)).text == "a"
            launch.children[0].exit(-11)
            with pytest.raises(WorkerLostError, match="SIGSEGV"):
                await anext(chunks)
        await settle()
        assert launch.children[1].requests() == []
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_tokenize_is_asked_once_more() -> None:
    def dies_on_tokenize(child: FakeChild, message: ToWorker) -> None:
        loads(child, message)
        if isinstance(message, channel.Tokenize):
            child.exit(-9)

    async def main() -> None:
        worker = supervised(FakeLaunch(dies_on_tokenize, answers))
        await worker.start()
        assert await worker.tokenize("a", special=True, add_bos=True) == [97]
        assert await worker.detokenize([98]) == "b"
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_repeated_deaths_are_answered_with_growing_pauses_until_a_stable_life() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        launch = FakeLaunch(answers)
        worker = supervised(launch)
        await worker.start()
        pauses = []
        for _ in range(4):
            died_at_s = loop.time()
            launch.children[-1].exit(-9)
            await answer(worker)
            pauses.append(loop.time() - died_at_s)
        assert pauses == pytest.approx([0.0, 0.5, 1.0, 2.0])
        await asyncio.sleep(STABLE_S)
        died_at_s = loop.time()
        launch.children[-1].exit(-9)
        await answer(worker)
        assert loop.time() == died_at_s
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_pauses_are_bounded() -> None:
    assert [backoff_s(n) for n in (0, 1, 2, 3)] == [0.0, 0.0, 0.5, 1.0]
    assert backoff_s(1000) == 15.0


def test_a_worker_that_dies_loading_is_tried_a_few_times_and_then_given_up() -> None:
    async def main() -> None:
        launch, heard = FakeLaunch(dies_loading), Heard()
        worker = supervised(launch, heard)
        with pytest.raises(BackendLoadError, match="died 3 times while loading, at last by SIGSEGV"):
            await worker.start()
        assert len(launch.children) == MAX_LOAD_DEATHS
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_a_worker_that_dies_loading_once_still_loads() -> None:
    async def main() -> None:
        worker = supervised(FakeLaunch(dies_loading, answers))
        await worker.start()
        assert await answer(worker) == "ab!"
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_an_error_of_the_model_is_not_tried_again() -> None:
    def bad_file(child: FakeChild, message: ToWorker) -> None:
        child.send(channel.Failed("", *ModelFormatError(path="f", field="magic", problem="bad").to_wire()))

    async def main() -> None:
        launch = FakeLaunch(bad_file)
        with pytest.raises(ModelFormatError, match="magic"):
            await supervised(launch).start()
        assert len(launch.children) == 1

    virtual_time.run(main())


def test_a_worker_that_cannot_be_restarted_tells_its_owner_and_its_requests() -> None:
    async def main() -> None:
        heard = Heard()
        worker = supervised(FakeLaunch(dies_on_request, dies_loading), heard)
        await worker.start()
        with pytest.raises(BackendLoadError, match="while loading"):
            await answer(worker)
        await settle()
        assert [type(error) for error in heard.downs] == [BackendLoadError]
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_an_unforeseen_failure_of_a_restart_is_told_too() -> None:
    async def main() -> None:
        launch, heard = FakeLaunch(answers), Heard()
        broken = False

        async def launch_or_break() -> tuple[socket.socket, Handle]:
            if broken:
                raise KeyError("odd")
            return await launch()

        worker = Worker(LOAD, settings=config.Worker(), launch=launch_or_break, events=heard)
        await worker.start()
        broken = True
        launch.children[0].exit(-9)
        with pytest.raises(BackendLoadError, match="KeyError: 'odd'"):
            await answer(worker)
        assert [type(error) for error in heard.downs] == [BackendLoadError]

    virtual_time.run(main())


def test_stop_during_a_load_kills_the_child_and_tells_those_who_wait() -> None:
    async def main() -> None:
        launch = FakeLaunch(silent)
        worker = supervised(launch)
        loading = asyncio.create_task(worker.start())
        await settle()
        await worker.stop(ShuttingDownError)
        with pytest.raises(ShuttingDownError):
            await loading
        assert launch.children[0].is_dead

    virtual_time.run(main())


def test_stop_during_the_pause_before_a_restart_ends_it() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        worker = supervised(launch)
        await worker.start()
        for _ in range(2):
            launch.children[-1].exit(-9)
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(answer(worker))
        await settle()
        await worker.stop(ShuttingDownError)
        with pytest.raises(ShuttingDownError):
            await waiting
        await asyncio.sleep(60)
        assert len(launch.children) == 2

    virtual_time.run(main())


def test_a_stopped_worker_is_not_restarted() -> None:
    async def main() -> None:
        launch, heard = FakeLaunch(answers), Heard()
        worker = supervised(launch, heard)
        await worker.start()
        await worker.stop(ShuttingDownError)
        await asyncio.sleep(60)
        assert len(launch.children) == 1
        assert heard.restarts == []
        with pytest.raises(ShuttingDownError):
            await answer(worker)

    virtual_time.run(main())


def test_a_client_that_leaves_while_the_worker_restarts_is_not_asked_for() -> None:
    def loads_late(child: FakeChild, message: ToWorker) -> None:
        if isinstance(message, Load):
            asyncio.get_running_loop().call_later(5.0, loads, child, message)
        else:
            loads(child, message)

    async def main() -> None:
        launch = FakeLaunch(dies_on_request, loads_late)
        worker = supervised(launch)
        await worker.start()
        leaving = asyncio.create_task(answer(worker))
        await asyncio.sleep(1.0)
        leaving.cancel()
        await asyncio.sleep(10.0)
        assert leaving.cancelled()
        assert launch.children[1].requests() == []
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_figures_reach_the_owner() -> None:
    async def main() -> None:
        launch, heard = FakeLaunch(loads), Heard()
        worker = supervised(launch, heard)
        await worker.start()
        launch.children[0].send(channel.Stats(EngineStats(running=1)))
        await settle()
        assert heard.figures == [EngineStats(running=1)]
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_what_a_model_has_become_reaches_the_owner() -> None:
    lost = TensorModelInfo(
        model="m", variant="v", backend="npu", device="d", quant="", size_bytes=1, inputs=(), outputs=(), n_threads=1
    )
    back = replace(lost, placement=(NodePlacement(provider="NPU", n_nodes=1, kinds=(("Conv", 1),)),))

    def behave(child: FakeChild, message: ToWorker) -> None:
        if isinstance(message, channel.Load):
            child.send(channel.TensorReady(lost))

    async def main() -> None:
        launch, heard = FakeLaunch(behave), Heard()
        worker = supervised(launch, heard)
        assert await worker.start() == lost
        launch.children[0].send(channel.Described(back))
        await settle()
        assert (worker.info, heard.infos) == (back, [back])
        launch.children[0].exit(-9)
        await asyncio.sleep(1.0)
        assert heard.infos == [back, lost], "a worker that was started again has found the device or not"
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def test_a_restarted_worker_is_advised_as_the_one_before() -> None:
    async def main() -> None:
        launch = FakeLaunch(answers)
        worker = supervised(launch)
        worker.advise(4, 2)  # before there is a process
        await worker.start()
        worker.advise(4, 1)
        await settle()
        launch.children[0].exit(-9)
        assert await answer(worker) == "ab!"
        told = [[message for message in child.seen if isinstance(message, channel.Advise)] for child in launch.children]
        assert told == [[channel.Advise(4, 2), channel.Advise(4, 1)], [channel.Advise(4, 1)]]
        await worker.stop(ShuttingDownError)
        worker.advise(1, 1)  # which nobody hears any more

    virtual_time.run(main())


def test_a_worker_without_advice_hears_none() -> None:
    async def main() -> None:
        launch = FakeLaunch(answers)
        worker = supervised(launch)
        await worker.start()
        assert await answer(worker) == "ab!"
        assert not any(isinstance(message, channel.Advise) for message in launch.children[0].seen)
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())


def begins(child: FakeChild, message: ToWorker) -> None:
    loads(child, message)
    if isinstance(message, channel.Generate):
        usage = Usage(prompt_tokens=3, completion_tokens=0)
        child.send(channel.ChunkOut(message.request.id, Chunk(text="", usage=usage)))


def test_a_worker_that_dies_after_it_only_said_that_it_begins_is_asked_again() -> None:
    async def main() -> None:
        launch = FakeLaunch(begins, answers)
        worker = supervised(launch)
        await worker.start()
        asked = asyncio.create_task(answer(worker))
        await settle()
        launch.children[0].exit(-9)
        assert await asked == "ab!"
        await worker.stop(ShuttingDownError)

    virtual_time.run(main())
