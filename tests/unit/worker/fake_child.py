"""A worker process that is none: it answers on the other end of a socket pair, as its test tells it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from itertools import count

from edge_rt.types import Capabilities, Chunk, GenerateRequest, ModelInfo, Timings, Usage
from edge_rt.worker import channel
from edge_rt.worker.channel import FrameReader, FromWorker, Load, ToWorker
from edge_rt.worker.process import Handle

LOAD = Load(model="m", variant="q4_0", path="", quant="Q4_0", backend="fake", n_ctx=64)

INFO = ModelInfo(
    model="m",
    variant="q4_0",
    backend="fake",
    device="cpu",
    arch="fake",
    quant="Q4_0",
    n_params=1,
    size_bytes=1,
    n_ctx_train=64,
    caps=Capabilities(n_ctx=64, n_seq_max=2, n_vocab=8, n_batch=8, can_trim=True, can_copy=True, can_save=True),
    n_threads=1,
    has_chat_template=False,
)

LAST = Chunk(
    text="!",
    token_ids=(9,),
    finish_reason="stop",
    usage=Usage(prompt_tokens=1, completion_tokens=3),
    timings=Timings(queue_s=0.0, prefill_s=0.1, prefill_tokens=1, decode_s=0.2, decode_tokens=2, ttft_s=0.1),
)


def request(request_id: str = "r", **fields: object) -> GenerateRequest:
    return GenerateRequest(id=request_id, model="m", prompt="x", **fields)  # type: ignore[arg-type]


class FakeChild(asyncio.Protocol):
    """One process: its Handle, and the worker's end of its channel."""

    _pids = count(100_001)

    def __init__(self, behave: Callable[[FakeChild, ToWorker], None]) -> None:
        self.pid = next(self._pids)
        self.seen: list[ToWorker] = []
        self.words = ""
        self.survives_kill = False
        self._behave = behave
        self._reader: FrameReader[ToWorker] = FrameReader(ToWorker)
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport

    # Handle

    def kill(self) -> None:
        if not self.survives_kill:
            self.exit(-9)

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def last_words(self) -> str:
        return self.words

    # for tests

    def exit(self, status: int, words: str = "") -> None:
        if not self._status.done():
            self.words = words
            self._status.set_result(status)
            self._transport.close()

    @property
    def is_dead(self) -> bool:
        return self._status.done()

    def send(self, *messages: FromWorker) -> None:
        self._transport.write(b"".join(channel.encode(message) for message in messages))

    def send_raw(self, data: bytes) -> None:
        self._transport.write(data)

    def requests(self) -> list[str]:
        return [message.request.id for message in self.seen if isinstance(message, channel.Generate)]

    def cancelled(self) -> list[str]:
        return [message.id for message in self.seen if isinstance(message, channel.Cancel)]

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self.seen.append(message)
            self._behave(self, message)


class FakeLaunch:
    """Launches children that behave, in turn, as told; the last behaviour goes on for ever."""

    def __init__(self, *behaviours: Callable[[FakeChild, ToWorker], None]) -> None:
        self.children: list[FakeChild] = []
        self.launched_at_s: list[float] = []
        self._behaviours = list(behaviours)

    async def __call__(self) -> tuple[socket.socket, Handle]:
        ours, theirs = socket.socketpair()
        behave = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
        child = FakeChild(behave)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=theirs)
        self.children.append(child)
        self.launched_at_s.append(asyncio.get_running_loop().time())
        return ours, child


def loads(child: FakeChild, message: ToWorker) -> None:
    """Load, and leave the rest to the test; exit when told to."""
    if isinstance(message, Load):
        child.send(channel.Ready(INFO))
    elif isinstance(message, channel.Shutdown):
        child.exit(0)


def answers(child: FakeChild, message: ToWorker) -> None:
    """Load, and answer every request at once with "a", "b", "!"."""
    loads(child, message)
    if isinstance(message, channel.Generate):
        chunks = (Chunk(text="a", token_ids=(1,)), Chunk(text="b", token_ids=(2,)), LAST)
        child.send(*(channel.ChunkOut(message.request.id, chunk) for chunk in chunks))
    elif isinstance(message, channel.Tokenize):
        child.send(channel.TokensOut(message.id, list(message.text.encode())))
    elif isinstance(message, channel.Detokenize):
        child.send(channel.TextOut(message.id, bytes(message.token_ids).decode()))


def dies_on_request(child: FakeChild, message: ToWorker) -> None:
    loads(child, message)
    if isinstance(message, channel.Generate):
        child.exit(-6, "GGML_ASSERT(poison) failed")


def dies_loading(child: FakeChild, message: ToWorker) -> None:
    if isinstance(message, Load):
        child.exit(-11)


def silent(child: FakeChild, message: ToWorker) -> None:
    """Never say anything."""
