"""Answers that workers write to lent connections: the same bytes, once, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from edge_rt.api.client import Client
from edge_rt.api.loans import MAX_LOANS
from edge_rt.api.read_buffers import READ_BYTES
from edge_rt.api.server import PeerProtocol
from edge_rt.api.short_way import ShortWay
from edge_rt.errors import BackendStepError, WorkerLostError
from edge_rt.tensor_types import Tensor
from tests import patience
from tests.api.asgi import EYES, EYES_INFO, FakeStatus, FakeTensorRuntime, FakeWriter
from tests.api.daemon import Daemon
from tests.api.test_short_way import GOOD, LARGE, ONE, PLAIN, Served, answer, binary, request, serving


def writing(**fields: object) -> tuple[FakeTensorRuntime, FakeWriter]:
    worker = FakeWriter()
    return FakeTensorRuntime(is_direct=True, worker=worker, **fields), worker  # type: ignore[arg-type]


def masked(answers: list[bytes]) -> list[bytes]:
    return [re.sub(rb"x-request-id: \w+", b"x-request-id: id", answer) for answer in answers]


def n_descriptors() -> int:
    gc.collect()  # what an earlier test has left may go at any time
    return len(list(Path("/proc/self/fd").iterdir()))


async def ended(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), patience.PATIENCE_S)


def test_what_a_worker_writes_is_what_the_front_process_writes(socket_dir: Path) -> None:
    def asked(worker: FakeWriter | None) -> tuple[list[bytes], str]:
        answers: list[bytes] = []

        async def scenario(served: Served) -> None:
            reader, writer = await asyncio.open_unix_connection(served.path)
            for sent in (PLAIN, PLAIN, LARGE, PLAIN, GOOD, PLAIN[:-4] + b"5678", PLAIN):
                writer.write(sent)
                answers.append(await answer(reader))
            writer.close()
            assert served.n_long == 0

        served = serving(socket_dir, scenario, runtime=FakeTensorRuntime(is_direct=True, worker=worker))
        return masked(answers), served.metrics

    worker = FakeWriter()
    assert asked(worker) == asked(None)
    assert len(worker.lent) == 4  # neither the first of a kind nor one that names its request
    assert worker.n_written > 4 * 4


def test_an_answer_that_is_not_like_the_last_one_is_the_front_processs(socket_dir: Path) -> None:
    runtime, worker = writing()
    other = Tensor(name="other", datatype="UINT8", shape=(2,), data=b"ab")

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for outputs, end, n in (((), b"1234", 1), ([other], b"ab", 0), ([other], b"ab", 1), ((), b"1234", 0)):
            writer.write(PLAIN)
            if not worker.lent:
                await answer(reader)
                writer.write(PLAIN)
            runtime.outputs = outputs  # type: ignore[assignment]
            before = worker.n_written
            assert (await answer(reader)).endswith(end)
            assert (worker.n_written > before) == bool(n)
        runtime.outputs = BackendStepError(reason="no")
        for status in (b"500", b"500"):
            writer.write(PLAIN)
            assert (await answer(reader)).startswith(b"HTTP/1.1 " + status)
        runtime.outputs = ()
        writer.write(PLAIN)
        assert (await answer(reader)).endswith(b"1234")
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)


def test_a_client_that_reads_slowly_gets_the_rest_from_the_front_process(socket_dir: Path) -> None:
    runtime, worker = writing()
    data = os.urandom(60_000)
    runtime.outputs = [Tensor(name="image", datatype="UINT8", shape=(60_000,), data=data)]

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        expected = masked([await answer(reader)])
        (connection,) = served.server.server_state.connections
        sock = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(2):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(PLAIN)
            before = worker.n_written
            while worker.n_written == before:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)
            assert 0 < worker.n_written - before < 60_000
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            assert masked([await answer(reader)]) == expected
        writer.close()
        assert served.n_long == 0
        assert 'outcome="ok",route="/v2/models/{model}/infer",status="200"} 3.0' in served.metrics

    serving(socket_dir, scenario, runtime=runtime)


def test_a_worker_that_can_write_nothing_leaves_it_to_the_front_process(socket_dir: Path) -> None:
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        hold.set()
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        expected = masked([await answer(reader)])
        hold.clear()
        writer.write(PLAIN)
        while not worker.lent:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        assert worker.lent[0].reply is not None
        connection, _ = worker.lent[0].reply.loan.fds()
        n_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                n_bytes += os.write(connection, bytes(1000))
        hold.set()
        (protocol,) = served.server.server_state.connections
        while not protocol.transport.get_write_buffer_size():  # type: ignore[union-attr]  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert not worker.n_written
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.readexactly(n_bytes)
        assert masked([await answer(reader)]) == expected
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)


@pytest.mark.parametrize("n_bytes", [0, 20])
def test_a_worker_that_dies_in_mid_answer_ends_its_connection_only(socket_dir: Path, n_bytes: int) -> None:
    """It took the permit, so nobody knows what it has written: not even another worker may answer now."""
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        hold.set()
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        await answer(reader)
        hold.clear()
        writer.write(PLAIN)
        while not worker.lent:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        reply = worker.lent[0].reply
        assert reply is not None
        connection, permit = reply.loan.fds()
        os.eventfd_read(permit)
        os.write(connection, reply.head[:n_bytes])
        runtime.outputs = WorkerLostError(model="eyes", reason="x")
        hold.set()
        assert await ended(reader) == reply.head[:n_bytes]
        writer.close()
        assert len(runtime.inferences) == 2
        assert (await served.ask(PLAIN)).endswith(b"1234")
        assert 'outcome="worker_lost",route="/v2/models/{model}/infer",status="200"} 1.0' in served.metrics

    serving(socket_dir, scenario, runtime=runtime)


def test_a_worker_that_dies_between_an_answer_and_the_word_of_it_costs_nobody_anything(socket_dir: Path) -> None:
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        hold.set()
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        await answer(reader)
        for is_early in (False, True):
            hold.clear()
            n_lent, runtime.outputs = len(worker.lent), ()
            writer.write(PLAIN)
            while len(worker.lent) == n_lent:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)
            worker.write_before_it_is_told(worker.lent[-1])
            assert (await answer(reader)).endswith(b"1234")
            (connection,) = served.server.server_state.connections
            assert isinstance(connection, PeerProtocol)
            if is_early:
                writer.write(PLAIN[:-4] + b"5678")
                while connection._early is None:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0)
            runtime.outputs = WorkerLostError(model="eyes", reason="x")
            hold.set()
            if is_early:
                assert (await answer(reader)).endswith(b"5678")
            while not connection.is_between_requests():
                assert not connection.transport.is_closing()
                await asyncio.sleep(0)
        runtime.outputs = ()
        writer.write(PLAIN)
        assert (await answer(reader)).endswith(b"1234")
        writer.close()
        assert [asked.is_suspect for asked in runtime.inferences] == [False] * 5
        assert 'status="200"} 5.0' in served.metrics
        assert "worker_lost" not in served.metrics

    serving(socket_dir, scenario, runtime=runtime)


def test_a_worker_that_dies_before_it_writes_costs_nobody_an_answer(socket_dir: Path) -> None:
    runtime, worker = writing()

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        await answer(reader)
        runtime.outputs = WorkerLostError(model="eyes", reason="x")
        for _ in range(2):
            writer.write(PLAIN)
            assert (await answer(reader)).endswith(b"1234")
        writer.close()
        assert [asked.is_suspect for asked in runtime.inferences] == [False, False, True, False]
        assert len(worker.lent) == 2

    serving(socket_dir, scenario, runtime=runtime)


def test_requests_one_behind_the_other_are_answered_in_order(socket_dir: Path) -> None:
    runtime, worker = writing()

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        other = PLAIN[:-4] + b"5678"
        for _ in range(3):
            writer.write(PLAIN + other + b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" + PLAIN)
            for end in (b"1234", b"5678", b'{"status":"ok"}', b"1234"):
                assert (await answer(reader)).endswith(end)
        writer.close()
        assert worker.n_written

    serving(socket_dir, scenario, runtime=runtime)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_that_comes_before_the_word_of_an_answer_waits_for_it(socket_dir: Path, has_begun: bool) -> None:
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        hold.set()
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        await answer(reader)
        for i in range(2):
            hold.clear()
            writer.write(PLAIN)
            while len(worker.lent) == i:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)
            if has_begun:
                worker.write_before_it_is_told(worker.lent[-1])
                assert (await answer(reader)).endswith(b"1234")
            writer.write(PLAIN[:-4] + b"5678")
            (connection,) = served.server.server_state.connections
            assert isinstance(connection, PeerProtocol)
            while connection._early is None and not connection.flow.read_paused:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            assert (connection._early is not None) == has_begun
            hold.set()
            if not has_begun:
                assert (await answer(reader)).endswith(b"1234")
            assert (await answer(reader)).endswith(b"5678")
            if has_begun:
                worker.lent.pop()  # the early one was lent as well
                assert served.n_long == 0
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)


def test_much_that_comes_before_the_word_of_an_answer_waits_in_one_buffer(socket_dir: Path) -> None:
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        for is_cut_off in (False, True):
            hold.set()
            reader, writer = await asyncio.open_unix_connection(served.path)
            writer.write(PLAIN)
            await answer(reader)
            hold.clear()
            n_lent = len(worker.lent)
            writer.write(PLAIN)
            while len(worker.lent) == n_lent:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)
            worker.write_before_it_is_told(worker.lent[-1])
            assert (await answer(reader)).endswith(b"1234")
            writer.write(LARGE * 6)
            (connection,) = served.server.server_state.connections
            assert isinstance(connection, PeerProtocol)
            while not connection.flow.read_paused:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            assert connection._n_early == READ_BYTES
            if is_cut_off:
                writer.transport.abort()
                while served.server.server_state.connections:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0)
                continue
            hold.set()
            for _ in range(6):
                assert (await answer(reader)).endswith(bytes(60_000))
            writer.close()
            while served.server.server_state.connections:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)

    serving(socket_dir, scenario, runtime=runtime)


@pytest.mark.parametrize("waits_s", [60.0, 0.0])
def test_a_shutdown_takes_back_what_was_lent(socket_dir: Path, waits_s: float) -> None:
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        hold.set()
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        await answer(reader)
        hold.clear()
        writer.write(PLAIN)
        while not worker.lent:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        served.server.stop(waits_s)
        await asyncio.sleep(0)
        if waits_s:
            await asyncio.sleep(0)
            hold.set()
        last = await answer(reader)
        assert last.startswith(b"HTTP/1.1 200 " if waits_s else b"HTTP/1.1 503 ")
        assert b"\r\nconnection: close\r\n" in last
        assert await ended(reader) == b""
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)


def test_a_shutdown_that_cannot_wait_adds_nothing_to_what_a_worker_has_begun(socket_dir: Path) -> None:
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        hold.set()
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(PLAIN)
        await answer(reader)
        hold.clear()
        writer.write(PLAIN)
        while not worker.lent:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        worker.write_before_it_is_told(worker.lent[-1])
        served.server.stop(0.0)
        assert (await answer(reader)).endswith(b"1234")
        assert await ended(reader) == b""
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)


def test_a_connection_ends_although_a_worker_still_has_it(socket_dir: Path) -> None:
    runtime, worker = writing()
    worker.gives_back = False

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(2):
            writer.write(PLAIN)
            await answer(reader)
        served.server.stop(0.0)
        assert await ended(reader) == b""
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)
    worker.close()


def test_a_client_that_hangs_up_while_its_answer_is_lent_is_no_error(socket_dir: Path) -> None:
    runtime, worker = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None

    async def scenario(served: Served) -> None:
        served.server.server_state.lent_buffers.of("eyes")  # which stay for the next connection
        n_before = n_descriptors()
        for _ in range(3):
            hold.set()
            reader, writer = await asyncio.open_unix_connection(served.path)
            writer.write(PLAIN)
            await answer(reader)
            hold.clear()
            n_lent = len(worker.lent)
            writer.write(PLAIN)
            while len(worker.lent) == n_lent:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)
            writer.close()
            while served.server.server_state.connections:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert 'outcome="hung_up",route="/v2/models/{model}/infer",status="499"} 3.0' in served.metrics
        assert n_descriptors() == n_before

    serving(socket_dir, scenario, runtime=runtime)


def test_lent_connections_outlast_a_reload(socket_dir: Path) -> None:
    runtime, worker = writing()

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(2):
            for _ in range(2):
                writer.write(PLAIN)
                assert (await answer(reader)).endswith(b"1234")
            served.server.use(served.server.config.loaded_app, ShortWay(served.api, access_log=True))
        writer.close()
        assert len(worker.lent) == 2

    serving(socket_dir, scenario, runtime=runtime)


def test_no_more_than_so_many_connections_are_lent_at_a_time(socket_dir: Path) -> None:
    runtime, worker = writing()

    async def scenario(served: Served) -> None:
        async def asked(n: int) -> list[asyncio.StreamWriter]:
            writers = []
            for _ in range(n):
                reader, writer = await asyncio.open_unix_connection(served.path)
                writer.write(PLAIN)
                assert (await answer(reader)).endswith(b"1234")
                writers.append(writer)
            return writers

        await served.ask(PLAIN)  # now it is known what to expect
        writers = await asked(MAX_LOANS + 3)
        assert len(worker.lent) == MAX_LOANS
        writers.pop(0).close()
        while len(served.server.server_state.connections) > len(writers):  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        writers += await asked(2)
        assert len(worker.lent) == MAX_LOANS + 1
        for writer in writers:
            writer.close()

    serving(socket_dir, scenario, runtime=runtime)


class FullProtocol(PeerProtocol):
    """Has still something of the last answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport.get_write_buffer_size = lambda: 1  # type: ignore[method-assign]


def test_nothing_is_lent_before_the_last_answer_has_left(socket_dir: Path) -> None:
    runtime, worker = writing()

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(3):
            writer.write(PLAIN)
            assert (await answer(reader)).endswith(b"1234")
        writer.close()
        assert not worker.lent

    serving(socket_dir, scenario, runtime=runtime, protocol=FullProtocol)


def test_a_stream_is_never_answered_by_what_is_expected(socket_dir: Path) -> None:
    """How many calls of a stream an answer tells of differs from one to the next."""
    runtime, worker = writing()
    sequence = request({**ONE, "parameters": {**ONE["parameters"], "sequence_id": 7}}, b"1234")  # type: ignore[dict-item]
    sequence = sequence.replace(b"X-Request-Id: mine\r\n", b"")

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(3):
            writer.write(sequence)
            assert (await answer(reader)).endswith(b"1234")
        writer.close()
        assert not worker.lent

    serving(socket_dir, scenario, runtime=runtime)


def test_large_answers_are_not_lent(socket_dir: Path) -> None:
    runtime, worker = writing()
    large = request({"inputs": [binary("image", [90_000], 90_000)], "parameters": ONE["parameters"]}, bytes(90_000))
    large = large.replace(b"X-Request-Id: mine\r\n", b"")

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(3):
            writer.write(large)
            assert (await answer(reader)).endswith(bytes(90_000))
        writer.close()
        assert not worker.lent

    serving(socket_dir, scenario, runtime=runtime)


def test_a_body_lies_in_lent_memory_once_its_connection_asks_again(socket_dir: Path) -> None:
    runtime, _ = writing(hold=asyncio.Event())
    hold = runtime.hold
    assert hold is not None
    dropped: list[object] = []

    async def scenario(served: Served) -> None:
        seen = []
        hold.set()
        connections = [await asyncio.open_unix_connection(served.path) for _ in range(2)]
        for value in (b"a", b"b", b"c"):
            for reader, writer in connections:
                body = LARGE[: -len(bytes(60_000))] + value * 60_000
                writer.write(body.replace(b"X-Request-Id: mine\r\n", b""))
                assert (await answer(reader)).endswith(value * 60_000)
        seen = [asked.memory for asked in runtime.inferences]
        assert [memory is not None for memory in seen] == [False] * 3 + [True] * 3  # the very first is not expected
        assert len({id(memory[0]) for memory in seen if memory}) == 2
        # What it says lies where it is said, and stays while it is computed.
        hold.clear()
        for i, (_, writer) in enumerate(connections):
            body = LARGE[: -len(bytes(60_000))] + b"%d" % i * 60_000
            writer.write(body.replace(b"X-Request-Id: mine\r\n", b""))
        while len(runtime.inferences) < 8:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        memories = [asked.memory for asked in runtime.inferences[-2:]]
        for i, memory in enumerate(memories):
            assert memory is not None
            buffer, start = memory
            assert os.pread(buffer.fds()[0], 60_000, start) == b"%d" % i * 60_000
            buffer.lent_to("test", dropped.append)
        connections[0][1].close()  # its worker may still read it, so it is not used again
        while not dropped:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        hold.set()
        await answer(connections[1][0])
        assert memories[0] is not None
        assert dropped == [memories[0][0]]
        # Neither is small, nor what the long way takes, nor what follows that.
        reader, writer = connections[1]
        for sent in (PLAIN, LARGE.replace(b"X-Request-Id: mine", b"Cache-Control: no-cache"), LARGE):
            writer.write(sent)
            await answer(reader)
        assert all(asked.memory is None for asked in runtime.inferences[-3:])
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)


class TwoModels(FakeTensorRuntime):
    def models(self) -> list[FakeStatus]:
        return [
            *super().models(),
            FakeStatus("ears", manifest=EYES, variant="int8", tensor=EYES_INFO, versions=("int8",)),
        ]


def test_no_model_is_lent_memory_that_another_has_been_lent(socket_dir: Path) -> None:
    """Its worker keeps what it was lent, and would see what is read there later, of whatever client."""
    runtime = TwoModels(is_direct=True, worker=FakeWriter(), direct=("eyes", "ears"))

    async def scenario(served: Served) -> None:
        connections = [await asyncio.open_unix_connection(served.path) for _ in range(2)]
        plain = LARGE.replace(b"X-Request-Id: mine\r\n", b"")
        for model in (b"eyes", b"ears", b"eyes", b"ears") * 3 + (b"ears", b"eyes", b"eyes", b"ears") * 3:
            for reader, writer in connections:
                writer.write(plain.replace(b"/models/eyes/", b"/models/" + model + b"/"))
                assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        for _, writer in connections:
            writer.close()

    serving(socket_dir, scenario, runtime=runtime)
    of = {
        model: {asked.memory[0] for asked in runtime.inferences if asked.memory and asked.model == model}
        for model in ("eyes", "ears")
    }
    assert all(of.values())
    assert not of["eyes"] & of["ears"]


def n_permits(pid: int) -> int:
    """Count the eventfds that a process has: one for each connection that it was lent."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(fd.readlink()))
    return sum("[eventfd]" in link for link in links)


def workers_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_real_worker_writes_its_answers_and_one_that_is_killed_costs_none(socket_dir: Path) -> None:
    model = (
        '[models.tensors]\nbackend = "null"\nvariant = "inputs=x:UINT8:-1x50000,outputs=y:FP32:-1x100,row_s=0.0001"\n'
    )
    line = 'edge_rt_requests_total{outcome="ok",route="/v2/models/{model}/infer",status="200"}'
    pixels = np.arange(50_000, dtype=np.uint8).reshape(1, -1)
    with Daemon(socket_dir, extra=model) as daemon, Client(daemon.socket) as client:
        first = client.infer("tensors", {"x": pixels})
        for round_ in range(2):
            for _ in range(20):
                assert client.infer("tensors", {"x": pixels}).outputs == first.outputs
            other = client.infer("tensors", {"x": pixels[:, ::-1].copy()})
            assert other.outputs != first.outputs
            (worker,) = workers_of(daemon.process.pid)
            assert n_permits(worker) == 1
            patience.until(lambda n=22 + 21 * round_: daemon.metric(line) == n)  # type: ignore[misc]
            if not round_:
                os.kill(worker, signal.SIGKILL)
        client.close()
        patience.until(lambda: not n_permits(worker))
