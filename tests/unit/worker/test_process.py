from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from edge_rt.errors import (
    BackendLoadError,
    BackendStepError,
    EdgeRtError,
    ModelTooLargeError,
    ShuttingDownError,
    SlowReaderError,
    WorkerLostError,
)
from edge_rt.liveness import SUPERVISION_S
from edge_rt.tensor_types import Reply, Tensor, TensorRequest
from edge_rt.types import Chunk, EngineStats, TokenLogprob
from edge_rt.worker import channel
from edge_rt.worker.channel import Load, ToWorker
from edge_rt.worker.lending import MAX_LENT
from edge_rt.worker.process import MAX_UNREAD, Process, describe_exit
from tests import virtual_time
from tests.unit.worker.fake_child import (
    INFO,
    LAST,
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

STEP_TIMEOUT_S = 60.0


async def start(
    launch: FakeLaunch, *, load_timeout_s: float = 10.0, on_stats: Callable[[EngineStats], None] = lambda stats: None
) -> Process:
    return await Process.start(
        launch, LOAD, load_timeout_s=load_timeout_s, step_timeout_s=STEP_TIMEOUT_S, on_stats=on_stats
    )


async def answer(process: Process, request_id: str = "r") -> str:
    return "".join([chunk.text async for chunk in process.generate(request(request_id))])


async def settle() -> None:
    """Let everything that is ready run, without the clock going on."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_loaded_process_answers() -> None:
    async def main() -> None:
        launch = FakeLaunch(answers)
        process = await start(launch)
        assert process.info == INFO
        assert launch.children[0].seen[0] == LOAD
        assert await asyncio.gather(answer(process, "1"), answer(process, "2")) == ["ab!", "ab!"]
        assert await process.tokenize("ab", special=False, add_bos=False) == [97, 98]
        assert await process.detokenize([97, 98]) == "ab"
        await process.stop(0.0, ShuttingDownError)
        assert launch.children[0].is_dead

    virtual_time.run(main())


def test_two_requests_with_one_id_do_not_mix() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        first, second = (asyncio.create_task(answer(process, "same")) for _ in range(2))
        await settle()
        ids = launch.children[0].requests()
        assert len(set(ids)) == 2
        for wire_id, text in zip(ids, "xy", strict=True):
            launch.children[0].send(channel.ChunkOut(wire_id, Chunk(text=text)), channel.ChunkOut(wire_id, LAST))
        assert [await first, await second] == ["x!", "y!"]
        await process.kill("done")

    virtual_time.run(main())


def test_the_childs_own_load_error_is_raised_and_the_child_is_gone() -> None:
    def refuses(child: FakeChild, message: ToWorker) -> None:
        child.send(channel.Failed("", *ModelTooLargeError(model="m", need_bytes=2, have_bytes=1).to_wire()))

    async def main() -> None:
        launch = FakeLaunch(refuses)
        with pytest.raises(ModelTooLargeError) as caught:
            await start(launch)
        assert (caught.value.need_bytes, caught.value.have_bytes) == (2, 1)
        assert launch.children[0].is_dead

    virtual_time.run(main())


def test_a_child_that_dies_loading_is_lost_with_its_signal() -> None:
    async def main() -> None:
        with pytest.raises(WorkerLostError, match="SIGSEGV"):
            await start(FakeLaunch(dies_loading))

    virtual_time.run(main())


def test_a_child_that_does_not_load_in_time_is_killed() -> None:
    async def main() -> None:
        launch = FakeLaunch(silent)
        with pytest.raises(BackendLoadError, match=r"load_timeout_s = 10 s"):
            await start(launch, load_timeout_s=10.0)
        assert launch.children[0].is_dead

    virtual_time.run(main())


def test_giving_up_a_load_kills_the_child() -> None:
    async def main() -> None:
        launch = FakeLaunch(silent)
        loading = asyncio.create_task(start(launch))
        await settle()
        loading.cancel()
        await asyncio.wait([loading])
        assert loading.cancelled()
        assert launch.children[0].is_dead

    virtual_time.run(main())


def test_a_process_that_cannot_be_started_is_a_load_error() -> None:
    async def launch() -> tuple[object, object]:
        raise OSError(12, "Cannot allocate memory")

    async def main() -> None:
        with pytest.raises(BackendLoadError, match="Cannot allocate memory"):
            await start(launch)  # type: ignore[arg-type]

    virtual_time.run(main())


def test_a_lost_child_fails_its_requests_with_its_last_words() -> None:
    async def main() -> None:
        process = await start(FakeLaunch(dies_on_request))
        with pytest.raises(WorkerLostError, match=r"SIGABRT: GGML_ASSERT\(poison\) failed"):
            await answer(process)
        with pytest.raises(WorkerLostError):
            await process.tokenize("x", special=False, add_bos=False)

    virtual_time.run(main())


def test_a_failed_request_leaves_the_others_alone() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        bad, good = (asyncio.create_task(answer(process, name)) for name in ("bad", "good"))
        await settle()
        bad_id, good_id = launch.children[0].requests()
        launch.children[0].send(
            channel.Failed(bad_id, *BackendStepError(reason="no").to_wire()), channel.ChunkOut(good_id, LAST)
        )
        with pytest.raises(BackendStepError):
            await bad
        assert await good == "!"
        await process.kill("done")

    virtual_time.run(main())


@pytest.mark.parametrize("ends", ["lost", "failed"])
def test_one_that_cannot_take_its_reply_costs_the_others_nothing(ends: str) -> None:
    """Neither where the child is lost nor where its replies come in one read."""

    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        child, heard = launch.children[0], []

        def bad(reply: object) -> None:
            heard.append("bad")
            raise KeyError("no")

        inference = TensorRequest(id="r", model="m", inputs=())
        process.infer_now(inference, lambda reply: heard.append(type(reply).__name__))
        process.infer_now(inference, bad)
        process.infer_now(inference, lambda reply: heard.append(type(reply).__name__))
        await settle()
        if ends == "lost":
            child.exit(-9)
            await process.lost
            await settle()
        else:
            ids = [message.id for message in child.seen if isinstance(message, channel.Infer)]
            child.send(*(channel.Failed(wire_id, *BackendStepError(reason="x").to_wire()) for wire_id in ids))
            await settle()
        error = "WorkerLostError" if ends == "lost" else "BackendStepError"
        assert sorted(heard) == [error, error, "bad"]
        assert process.lost.done() == (ends == "lost")
        await process.kill("done")

    virtual_time.run(main())


class FakeLoan:
    """A connection whose descriptors are a socket's and a pipe's."""

    def __init__(self) -> None:
        self.sock, self.other = socket.socketpair()
        self.n_permits = 0
        self.borrowers: dict[object, Callable[[Any], None]] = {}

    def fds(self) -> tuple[int, int]:
        return self.sock.fileno(), self.other.fileno()

    def lent_to(self, borrower: object, ended: Callable[[Any], None]) -> None:
        self.borrowers[borrower] = ended

    def returned_by(self, borrower: object) -> None:
        self.borrowers.pop(borrower)

    def permit(self) -> None:
        self.n_permits += 1

    def end(self) -> None:
        (ended,) = self.borrowers.values()
        ended(self)

    def close(self) -> None:
        self.sock.close()
        self.other.close()


def test_connections_are_lent_once_and_taken_back_when_there_are_many() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        child = launch.children[0]
        loans = [FakeLoan() for _ in range(MAX_LENT + 1)]

        def lend(loan: FakeLoan) -> None:
            reply = Reply(loan=loan, head=b"h", outputs=(("y", "FP32", (1,), 4),), place="p", variant="v")
            process.infer_now(TensorRequest(id="r", model="m", inputs=(), reply=reply), lambda _: None)

        def seen(kind: type) -> list[Any]:
            return [message for message in child.seen if isinstance(message, kind)]

        for loan in (loans[0], loans[0], *loans[1:]):
            lend(loan)
            await settle()
        numbers = [message.loan for message in seen(channel.Lend)]
        assert len(set(numbers)) == len(loans)
        replies = [message.reply for message in seen(channel.Infer)]
        assert [reply.loan for reply in replies] == [numbers[0], *numbers]
        assert (replies[0].head, replies[0].outputs) == (b"h", (channel.SentTensor("y", "FP32", (1,), 4),))
        assert [loan.n_permits for loan in loans] == [2] + [1] * MAX_LENT
        assert [message.loan for message in seen(channel.GiveBack)] == numbers[:1]
        assert not loans[0].borrowers
        loans[1].end()  # its client has left
        await settle()
        assert [message.loan for message in seen(channel.GiveBack)] == numbers[:2]
        lend(loans[0])  # once more, under another number
        await settle()
        assert seen(channel.Lend)[-1].loan not in numbers
        child.exit(-9)
        await process.lost
        assert not any(loan.borrowers for loan in loans)
        for loan in loans:
            loan.close()

    virtual_time.run(main())


def test_inputs_in_lent_memory_are_not_sent() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        memory, lost = FakeLoan(), FakeLoan()
        lost.close()
        tensor = Tensor(name="x", datatype="UINT8", shape=(3,), data=b"abc")
        for lent in (memory, memory, lost):
            request = TensorRequest(id="r", model="m", inputs=(tensor,), memory=(lent, 70))
            process.infer_now(request, lambda _: None)
            await settle()
        seen = launch.children[0].seen
        (lend,) = [message for message in seen if isinstance(message, channel.LendMemory)]
        infers = [message for message in seen if isinstance(message, channel.Infer)]
        assert [infer.memory for infer in infers] == [(lend.loan, 70)] * 2 + [None]
        assert [bytes(infer.attached) for infer in infers] == [b"", b"", b"abc"]
        assert {infer.sent for infer in infers} == {(channel.SentTensor("x", "UINT8", (3,), 3),)}
        memory.end()  # it is used no more
        await settle()
        assert [message for message in seen if isinstance(message, channel.GiveBack)] == [channel.GiveBack(lend.loan)]
        memory.close()
        await process.kill("done")

    virtual_time.run(main())


def test_a_connection_that_cannot_be_lent_is_not_answered_by_the_child() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        loan = FakeLoan()
        loan.close()  # its descriptors are -1
        reply = Reply(loan=loan, head=b"h", outputs=(), place="p", variant="v")
        process.infer_now(TensorRequest(id="r", model="m", inputs=(), reply=reply), lambda _: None)
        await settle()
        (infer,) = [message for message in launch.children[0].seen if isinstance(message, channel.Infer)]
        assert infer.reply is None
        assert not loan.n_permits
        await process.kill("done")

    virtual_time.run(main())


def test_closing_the_iterator_cancels_the_request() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        child = launch.children[0]
        async with aclosing(process.generate(request())) as chunks:
            pending = asyncio.ensure_future(anext(chunks))
            await settle()
            (wire_id,) = child.requests()
            child.send(channel.ChunkOut(wire_id, Chunk(text="a")))
            assert (await pending).text == "a"
        await settle()
        assert child.cancelled() == [wire_id]
        child.send(channel.ChunkOut(wire_id, Chunk(text="late")), channel.Failed(wire_id, "x", {}))
        await settle()
        assert not process.lost.done()
        await process.kill("done")

    virtual_time.run(main())


def test_a_finished_request_is_not_cancelled() -> None:
    async def main() -> None:
        launch = FakeLaunch(answers)
        process = await start(launch)
        await answer(process)
        await settle()
        assert launch.children[0].cancelled() == []
        await process.kill("done")

    virtual_time.run(main())


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(text="x" * 9, token_ids=tuple(range(9))),
        Chunk(
            text="x",
            token_ids=(1,),
            logprobs=(TokenLogprob(token_id=1, raw=b"x", logprob=-1.0, top=((1, b"x", -1.0),) * 9),),
        ),
    ],
    ids=["tokens", "logprobs"],
)
def test_a_reader_that_does_not_read_is_cut_off_and_holds_bounded_memory(chunk: Chunk) -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        child = launch.children[0]
        async with aclosing(process.generate(request())) as chunks:
            pending = asyncio.ensure_future(anext(chunks))
            await settle()
            (wire_id,) = child.requests()
            child.send(channel.ChunkOut(wire_id, chunk))
            await pending
            for _ in range(MAX_UNREAD // 10 + 1):
                child.send(channel.ChunkOut(wire_id, chunk))
            await asyncio.sleep(1.0)
            assert child.cancelled() == [wire_id]
            with pytest.raises(SlowReaderError) as caught:
                await anext(chunks)
            assert MAX_UNREAD < caught.value.unread <= MAX_UNREAD + 10
        await process.kill("done")

    virtual_time.run(main())


def test_a_child_without_progress_is_killed() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        launch = FakeLaunch(loads)
        process = await start(launch)
        began_at_s = loop.time()
        with pytest.raises(WorkerLostError, match="no progress"):
            await answer(process)
        assert loop.time() - began_at_s == pytest.approx(STEP_TIMEOUT_S)
        assert launch.children[0].is_dead

    virtual_time.run(main())


def test_figures_without_new_steps_are_no_progress_and_new_steps_are() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        launch = FakeLaunch(loads)
        process = await start(launch)
        began_at_s = loop.time()
        waiting = asyncio.create_task(answer(process))
        for steps in (1, 2, 3, 3, 3):
            await asyncio.sleep(STEP_TIMEOUT_S / 2)
            launch.children[0].send(channel.Stats(EngineStats(running=1, steps_total=steps)))
        with pytest.raises(WorkerLostError, match="no progress"):
            await waiting
        assert loop.time() - began_at_s == pytest.approx(3 * STEP_TIMEOUT_S / 2 + STEP_TIMEOUT_S)

    virtual_time.run(main())


@pytest.mark.parametrize("what", ["device_products_total", "device_fallbacks_total"])
def test_products_of_an_accelerator_in_the_middle_of_a_long_step_are_progress(what: str) -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        waiting = asyncio.create_task(answer(process))
        for number in (1, 2, 3, 4, 5, 5):
            await asyncio.sleep(STEP_TIMEOUT_S * 0.75)
            assert not waiting.done()
            launch.children[0].send(channel.Stats(EngineStats(running=1, **{what: number})))
        with pytest.raises(WorkerLostError, match="no progress"):
            await waiting

    virtual_time.run(main())


def test_an_idle_child_is_left_alone_and_costs_no_timer() -> None:
    async def main() -> None:
        launch = FakeLaunch(answers)
        process = await start(launch)
        await answer(process)
        await asyncio.sleep(10 * STEP_TIMEOUT_S)
        assert not process.lost.done()
        assert await answer(process) == "ab!"
        await process.kill("done")

    virtual_time.run(main())


def test_the_time_between_requests_is_no_lack_of_progress() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        launch = FakeLaunch(loads)
        process = await start(launch)
        first = asyncio.create_task(answer(process))
        await settle()
        (wire_id,) = launch.children[0].requests()
        launch.children[0].send(channel.ChunkOut(wire_id, LAST))
        await first
        await asyncio.sleep(STEP_TIMEOUT_S - 1.0)
        began_at_s = loop.time()
        with pytest.raises(WorkerLostError, match="no progress"):
            await answer(process)
        assert loop.time() - began_at_s == pytest.approx(STEP_TIMEOUT_S)

    virtual_time.run(main())


@pytest.mark.parametrize("moment", ["spawned", "connected"])
def test_a_start_given_up_leaves_no_child(moment: str) -> None:
    async def main() -> None:
        launch = FakeLaunch(silent)
        starting = asyncio.create_task(start(launch))
        for _ in range(100):
            if launch.children:
                break
            await asyncio.sleep(0)
        if moment == "connected":
            await settle()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert launch.children[0].is_dead

    virtual_time.run(main())


def test_stop_fails_open_requests_with_the_callers_error() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        open_request = asyncio.create_task(answer(process))
        await settle()
        await process.stop(0.0, ShuttingDownError)
        with pytest.raises(ShuttingDownError):
            await open_request
        assert launch.children[0].seen[-1] == channel.Shutdown(0.0)

    virtual_time.run(main())


def test_a_child_that_ignores_shutdown_is_killed() -> None:
    def ignores(child: FakeChild, message: ToWorker) -> None:
        if isinstance(message, Load):
            child.send(channel.Ready(INFO))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        launch = FakeLaunch(ignores)
        process = await start(launch)
        began_at_s = loop.time()
        await process.stop(1.0, ShuttingDownError)
        assert launch.children[0].is_dead
        assert 1.0 <= loop.time() - began_at_s < 2.0

    virtual_time.run(main())


def test_a_child_that_cannot_be_killed_does_not_hold_up_its_requests_for_ever() -> None:
    def unkillable(child: FakeChild, message: ToWorker) -> None:
        loads(child, message)
        child.survives_kill = True

    async def main() -> None:
        launch = FakeLaunch(unkillable)
        process = await start(launch)
        open_request = asyncio.create_task(answer(process))
        await settle()
        await process.kill("wanted")
        with pytest.raises(WorkerLostError, match="wanted"):
            await open_request

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("status", "words", "expected"),
    [
        (-9, "", "SIGKILL, perhaps out of memory"),
        (-9, "a word of yesterday", "SIGKILL, perhaps out of memory"),
        (-6, "GGML_ASSERT failed", "SIGABRT: GGML_ASSERT failed"),
        (-64, "", "SIGRTMAX"),
        (-99, "", "signal 99"),
        (1, "KeyError: 3", "exit status 1: KeyError: 3"),
        (None, "", "it closed its channel, and it cannot be killed"),
    ],
)
def test_describe_exit(status: int | None, words: str, expected: str) -> None:
    assert describe_exit(status, "it closed its channel", words) == expected


def test_errors_of_lost_requests_are_separate_objects() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        both = [asyncio.create_task(answer(process, name)) for name in "ab"]
        await settle()
        launch.children[0].exit(-9)
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(first, EdgeRtError)
        assert isinstance(second, EdgeRtError)
        assert first is not second

    virtual_time.run(main())


def test_a_hanging_child_that_cannot_be_killed_is_late_and_then_lost() -> None:
    async def main() -> None:
        launch = FakeLaunch(loads)
        process = await start(launch)
        assert process.late_s() == 0.0
        launch.children[0].survives_kill = True
        asking = asyncio.create_task(answer(process))
        asked_at_s = asyncio.get_running_loop().time()
        await asyncio.sleep(STEP_TIMEOUT_S)
        assert process.late_s() == 0.0
        await asyncio.sleep(3.0)
        assert process.late_s() == 3.0
        with pytest.raises(WorkerLostError, match=r"worker\.step_timeout_s = 60 s, and it cannot be killed"):
            await asking
        assert asyncio.get_running_loop().time() < asked_at_s + STEP_TIMEOUT_S + SUPERVISION_S
        assert process.late_s() == 0.0

    virtual_time.run(main())
