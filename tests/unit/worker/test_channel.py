from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.errors import QueueFullError, from_wire
from edge_rt.tensor_types import Tensor, TensorRequest, TensorTimings
from edge_rt.types import Chunk, EngineStats, GenerateRequest, Message, Sampling, TokenLogprob
from edge_rt.worker import channel
from edge_rt.worker.channel import ChannelError, FrameReader, FromWorker, ToWorker, encode
from edge_rt.worker.own_end import WorkerChannel
from edge_rt.worker.parent_end import ParentChannel
from tests import virtual_time
from tests.unit.worker.fake_child import INFO, LAST, LOAD

TO_WORKER: list[ToWorker] = [
    LOAD,
    channel.Generate(
        GenerateRequest(
            id="r~1",
            model="m",
            messages=(Message(role="user", content="grüß 🎈"),),
            stop=("\n",),
            sampling=Sampling(temperature=0.5, seed=7, logit_bias={3: -1.5}),
            top_logprobs=2,
            deadline_s=1.5,
        )
    ),
    channel.Cancel("r~1"),
    channel.Advise(4, None),
    channel.Tokenize("1", "text", special=True, add_bos=False),
    channel.Detokenize("2", [1, 2, 3]),
    channel.Shutdown(1.5),
]
FROM_WORKER: list[FromWorker] = [
    channel.Ready(INFO),
    channel.ChunkOut(
        "r~1",
        Chunk(
            text="é",
            token_ids=(1, 2),
            logprobs=(TokenLogprob(token_id=1, raw=b"\xc3", logprob=-0.5, top=((1, b"\xc3", -0.5),)),),
        ),
    ),
    channel.ChunkOut("r~1", LAST),
    channel.Failed("r~1", *QueueFullError(waiting=1, limit=1, retry_after_s=2.0).to_wire()),
    channel.TokensOut("1", [4, 5]),
    channel.TextOut("2", "text"),
    channel.Stats(EngineStats(running=1, step_rows=(1, 2))),
]
TIMINGS = TensorTimings(queue_s=0.0, compute_s=0.5, batch_size=1)
ANSWER = channel.Inferred(
    "r",
    (channel.SentTensor("y", "UINT8", (2,), 2), channel.SentTensor("z", "INT8", (1,), 1)),
    timings=TIMINGS,
    place="null:null",
)


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_what_the_parent_sends_arrives_whole(message: ToWorker) -> None:
    assert FrameReader[ToWorker](ToWorker).feed(encode(message)) == [message]


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda m: type(m).__name__)
def test_what_the_worker_sends_arrives_whole(message: FromWorker) -> None:
    assert FrameReader[FromWorker](FromWorker).feed(encode(message)) == [message]


def test_an_error_keeps_its_fields_on_the_way() -> None:
    (message,) = FrameReader[FromWorker](FromWorker).feed(encode(FROM_WORKER[3]))
    assert isinstance(message, channel.Failed)
    error = from_wire(message.code, message.fields)
    assert isinstance(error, QueueFullError)
    assert (error.waiting, error.limit, error.retry_after_s) == (1, 1, 2.0)


@given(st.lists(st.sampled_from(FROM_WORKER), max_size=8), st.data())
def test_frames_survive_any_cut_of_the_stream(messages: list[FromWorker], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader[FromWorker](FromWorker)
    got: list[FromWorker] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert got == messages


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", channel.MAX_FRAME_BYTES + 1, 0),
        struct.pack("<II", 1, channel.MAX_FRAME_BYTES),
        struct.pack("<II", 3, 0) + b"\xc1\xc1\xc1",
        struct.pack("<II", 0, 0),
        encode(channel.Cancel("x")),  # the wrong direction
        b"".join((struct.pack("<II", 10, 0), msgspec.msgpack.encode(["chunk", "id"]))),
        encode(channel.TextOut("1", "x"), [b"y"]) + b"y",
        encode(ANSWER, [b"12"]) + b"12",
        encode(channel.Inferred("r", (channel.SentTensor("y", "UINT8", (1,), -1),), timings=TIMINGS)),
    ],
    ids=[
        "too long",
        "too much attached",
        "not msgpack",
        "empty",
        "wrong type",
        "too few fields",
        "attached to text",
        "less attached than said",
        "a negative size",
    ],
)
def test_a_broken_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ChannelError):
        FrameReader[FromWorker](FromWorker).feed(data)


@pytest.mark.parametrize("n_bytes", [2, 200_000], ids=["short", "longer than what is read at once"])
@given(data=st.data())
def test_tensors_are_attached_to_their_message(n_bytes: int, data: st.DataObject) -> None:
    inputs = tuple(
        Tensor(name=name, datatype="UINT8", shape=(len(value),), data=value)
        for name, value in (("a", bytes(range(250)) * (n_bytes // 250) + b"ab"), ("b", b""), ("c", b"c"))
    )
    request = TensorRequest(id="r", model="m", inputs=inputs, outputs=("y",), stream="s", is_last=True, deadline_s=0.5)
    attached = [tensor.data for tensor in inputs]
    stream = b"".join([encode(channel.Infer.of(request, "7"), attached), *attached, encode(channel.Cancel("7"))])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    reader = FrameReader[ToWorker](ToWorker)
    got: list[ToWorker] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    first, second = got
    assert isinstance(first, channel.Infer)
    assert first.tensors() == inputs
    assert (first.id, first.outputs, first.stream, first.is_last, first.deadline_s) == ("7", ("y",), "s", True, 0.5)
    assert second == channel.Cancel("7")
    assert reader.is_empty


def test_what_is_attached_is_sent_however_little_the_socket_takes() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        got: asyncio.Queue[FromWorker | str] = asyncio.Queue()
        parent = ParentChannel(got.put_nowait, got.put_nowait)
        await parent.connect(ours)
        worker = WorkerChannel(theirs)
        large = Tensor(name="x", datatype="UINT8", shape=(300_000,), data=bytes(range(250)) * 1200)
        for i in range(2):
            request = TensorRequest(id="r", model="m", inputs=(large, large))
            parent.send(channel.Infer.of(request, str(i)), [large.data, large.data])
        for i in range(2):
            (message,) = await asyncio.to_thread(worker.receive) or ()
            assert isinstance(message, channel.Infer)
            assert (message.id, message.tensors()) == (str(i), (large, large))
            answer = channel.Inferred(str(i), (channel.SentTensor.of(large),), timings=TIMINGS)
            worker.send(answer, [large.data], at_once=True)
        for i in range(2):
            back = await got.get()
            assert isinstance(back, channel.Inferred)
            assert (back.id, back.tensors()) == (str(i), (large,))
        parent.close()
        await got.get()
        worker.flush()
        theirs.close()

    virtual_time.run(main())


def test_descriptors_cross_with_their_messages_between_long_frames() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        got: asyncio.Queue[FromWorker | str] = asyncio.Queue()
        parent = ParentChannel(got.put_nowait, got.put_nowait)
        await parent.connect(ours)
        worker = WorkerChannel(theirs)
        large = Tensor(name="x", datatype="UINT8", shape=(100_000,), data=bytes(100_000))
        infer = channel.Infer.of(TensorRequest(id="r", model="m", inputs=(large,)), "1")
        pipes = [os.pipe() for _ in range(3)]
        messages: list[ToWorker] = []
        for i, ends in enumerate(pipes):
            parent.send(infer, [large.data])
            parent.send(channel.Cancel("c"))
            assert parent.send_fds(channel.Lend(i), ends)
            while len(messages) < 3 * (i + 1):
                messages += await asyncio.to_thread(worker.receive) or ()
        assert [m for m in messages if isinstance(m, channel.Lend)] == [channel.Lend(i) for i in range(3)]
        for i, (read, write) in enumerate(pipes):
            copies = worker.take_fd(), worker.take_fd()
            os.write(copies[1], b"%d" % i)
            assert os.read(read, 9) == b"%d" % i
            assert not any(map(os.get_inheritable, copies))
            for fd in (*copies, read, write):
                os.close(fd)
        while not parent._transport.get_write_buffer_size():  # type: ignore[union-attr]
            parent.send(infer, [large.data])
        assert not parent.send_fds(channel.Lend(9), (0, 1))  # it would come before what waits
        parent.close()
        assert not parent.send_fds(channel.Lend(9), (0, 1))
        await got.get()
        worker.flush()
        theirs.close()

    virtual_time.run(main())


def test_a_message_over_the_limit_is_refused_by_its_sender() -> None:
    with pytest.raises(ChannelError, match="over the limit"):
        encode(ANSWER, [bytes(2), bytes(channel.MAX_FRAME_BYTES)])
    with pytest.raises(ChannelError, match="over the limit"):
        encode(channel.TextOut("1", "x" * channel.MAX_FRAME_BYTES))


def test_the_two_ends_talk_and_see_each_other_leave() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        got: asyncio.Queue[FromWorker | str] = asyncio.Queue()
        parent = ParentChannel(got.put_nowait, got.put_nowait)
        await parent.connect(ours)
        worker = WorkerChannel(theirs)
        parent.send(TO_WORKER[1])
        assert await asyncio.to_thread(worker.receive) == [TO_WORKER[1]]
        assert worker.receive(0.0) == []
        for message in FROM_WORKER:
            worker.send(message)
        assert [await got.get() for _ in FROM_WORKER] == FROM_WORKER
        parent.close()
        assert await asyncio.to_thread(worker.receive) is None
        assert await got.get() == "it closed its channel"
        worker.flush()
        theirs.close()

    virtual_time.run(main())


def test_a_channel_is_quiet_unless_something_is_on_its_way() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = WorkerChannel(theirs)
        frame = encode(channel.Cancel("x"))
        assert worker.is_quiet()
        ours.send(frame + frame[:10])
        assert not worker.is_quiet()
        assert worker.receive() == [channel.Cancel("x")]
        assert not worker.is_quiet()  # the beginning of the next
        ours.send(frame[10:])
        assert worker.receive() == [channel.Cancel("x")]
        assert worker.is_quiet()
        worker.flush()


def test_what_is_queued_is_written_before_flush_returns() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = WorkerChannel(theirs)
        big = channel.TextOut("1", "x" * 2_000_000)  # more than the socket's buffer
        received: list[FromWorker] = []

        def read() -> None:
            reader = FrameReader[FromWorker](FromWorker)
            while len(received) < 2:
                received.extend(reader.feed(ours.recv(65536)))

        thread = threading.Thread(target=read)
        thread.start()
        worker.send(big)
        worker.send(channel.TextOut("2", "end"))
        worker.flush()
        thread.join()
        assert received == [big, channel.TextOut("2", "end")]


def test_a_worker_that_talks_nonsense_is_cut_off() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        parent = ParentChannel(lambda message: None, lost.set_result)
        await parent.connect(ours)
        with theirs:
            theirs.sendall(b"\xff" * 8)
            assert "over the limit" in await lost

    virtual_time.run(main())
