"""Framed messages between the front process and a worker: a 4-byte little-endian length, then msgpack.

A frame holds one message. Senders coalesce the frames of one moment into one write, and a reader decodes all the
frames of one read, so that a step of eight streams wakes the front process once.
"""

from __future__ import annotations

import asyncio
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from edge_rt.catalog.manifest import StateTensor
from edge_rt.catalog.pipelines import Pipeline
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorModelInfo, TensorRequest
from edge_rt.types import Chunk, EngineStats, GenerateRequest, ModelInfo

# The largest honest frame holds a tensor request's inputs; anything near the cap is a bug or a broken peer.
MAX_FRAME_BYTES = 256 * 2**20

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024


class TensorLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a tensor model takes beyond a language model's settings.

    assets       paths by id
    max_shapes   shapes of dynamic inputs that may be prepared for at a time
    max_tensor_bytes, max_pixels  of one request; checked before anything of that size is allocated
    custom_op_libraries  that the model may use; () none
    backends     that can run the file, in order of preference; () leaves it to the worker
    """

    pipeline: Pipeline | None = None
    state: tuple[StateTensor, ...] = ()
    assets: dict[str, str] = {}
    max_batch: int = 1
    max_delay_s: float = 0.0
    max_shapes: int = 8
    max_streams: int = 256
    max_tensor_bytes: int = 64 * 2**20
    max_pixels: int = 50_000_000
    max_audio_s: float = 3600.0
    graph_cache: bool = True
    custom_op_libraries: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="load"):
    """Load a model; the first message a worker gets.

    path           "" for back ends without a file
    backend        its name, or "auto" for the first that supports the model
    chat_template  overrides the file's own; None leaves it
    force          load although the memory looks too small
    tensor         set for a tensor model, None for a language model
    """

    model: str
    variant: str
    path: str
    quant: str
    backend: str
    n_ctx: int
    n_seq_max: int = 8
    n_batch: int = 512
    n_threads: int = 0
    kv_type: str = "f16"
    packed_copy: bool = True
    device: str = "cpu"
    chat_template: str | None = None
    max_stall_s: float = 0.15
    max_prefix_bytes: int = 128 * 2**20
    stream_interval_s: float = 0.05
    memory_margin_bytes: int = 0
    force: bool = False
    max_draft: int = 15
    tensor: TensorLoad | None = None


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="gen"):
    """Start a request. Its id is unique on this channel."""

    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    id: str


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tok"):
    id: str
    text: str
    special: bool
    add_bos: bool


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag="detok"):
    id: str
    token_ids: list[int]


class Infer(msgspec.Struct, frozen=True, array_like=True, tag="infer"):
    """Run a tensor model. Its id is unique on this channel."""

    request: TensorRequest


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Run a tensor model's pipeline on a file. Its id is unique on this channel."""

    request: MediaRequest


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Finish what runs within drain_s, then exit."""

    drain_s: float


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: ModelInfo


class TensorReady(msgspec.Struct, frozen=True, array_like=True, tag="tready"):
    info: TensorModelInfo


class ChunkOut(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    id: str
    chunk: Chunk


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """An error in to_wire form. id "" means the load."""

    id: str
    code: str
    fields: dict[str, Any]


class TokensOut(msgspec.Struct, frozen=True, array_like=True, tag="ids"):
    id: str
    token_ids: list[int]


class TextOut(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    id: str
    text: str


class Inferred(msgspec.Struct, frozen=True, array_like=True, tag="inferred"):
    id: str
    answer: TensorAnswer


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    id: str
    answer: MediaAnswer


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    stats: EngineStats


ToWorker = Load | Generate | Cancel | Tokenize | Detokenize | Infer | Look | Shutdown
FromWorker = Ready | TensorReady | ChunkOut | Failed | TokensOut | TextOut | Inferred | Found | Stats

M = TypeVar("M")


class ChannelError(Exception):
    """The peer broke the framing or the message types; the connection cannot go on."""


def encode(message: ToWorker | FromWorker) -> bytearray:
    """Make one frame, copying a large tensor once. Raises ChannelError for a message over MAX_FRAME_BYTES."""
    frame = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, frame, _LENGTH.size)
    size = len(frame) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(frame, 0, size)
    return frame


_ENCODER = msgspec.msgpack.Encoder()


class FrameReader(Generic[M]):
    """Cut a byte stream into messages of one type."""

    __slots__ = ("_buffer", "_decoder")

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """Say whether no part of a message is here that is not whole yet."""
        return not self._buffer

    def feed(self, data: bytes | memoryview) -> list[M]:
        """Take bytes as they come and give the messages that are whole. Raises ChannelError."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - start >= 4:
                (size,) = _LENGTH.unpack_from(view, start)
                if size > MAX_FRAME_BYTES:
                    raise ChannelError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
                if end - start - 4 < size:
                    break
                start += 4
                try:
                    messages.append(self._decoder.decode(view[start : start + size]))
                except msgspec.DecodeError as exc:
                    raise ChannelError(f"a message cannot be decoded: {exc}") from exc
                start += size
        del buffer[:start]
        return messages


class ParentChannel(asyncio.Protocol):
    """The front process' end. Callbacks run on the event loop and must not block."""

    def __init__(self, on_message: Callable[[FromWorker], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader: FrameReader[FromWorker] = FrameReader(FromWorker)
        self._transport: asyncio.WriteTransport | None = None
        self._problem = ""

    async def connect(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def send(self, message: ToWorker) -> None:
        """Queue a message; one to a lost worker is dropped, on_lost tells of it. Raises ChannelError if too large."""
        frame = encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except ChannelError as exc:
            self._problem = str(exc)
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._problem or (str(exc) if exc is not None else "it closed its channel"))


class WorkerChannel:
    """The worker's blocking end. One thread receives; any thread may send, and none of them blocks in it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        # A timeout of the socket object would bind the writer thread too, hence poll.
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._reader: FrameReader[ToWorker] = FrameReader(ToWorker)
        self._read_buffer = memoryview(bytearray(_READ_BYTES))  # a new one for each read would be mapped each time
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._n_queued = 0  # frames that the writer has or shall have; those sent at once come after them
        self._order = threading.Lock()
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)
        self._writer.start()

    def receive(self, timeout_s: float | None = None) -> list[ToWorker] | None:
        """Wait for messages; [] after timeout_s without one, None when the front process is gone."""
        while True:
            if not self._readable.poll(None if timeout_s is None else timeout_s * 1000):
                return []
            try:
                n_bytes = self._sock.recv_into(self._read_buffer)
            except OSError:
                return None
            if not n_bytes:
                return None
            if messages := self._reader.feed(self._read_buffer[:n_bytes]):
                return messages

    def is_quiet(self) -> bool:
        """Say whether nothing has come that receive has not given; for the thread that receives."""
        return self._reader.is_empty and not self._readable.poll(0)

    def send(self, message: FromWorker, *, at_once: bool = False) -> None:
        """Queue a message for the writer thread. Raises ChannelError if it is too large.

        at_once  write it here as far as the socket takes it, if nothing is queued: one thread less has to wake up, but
                 messages of one moment are not joined
        """
        frame: bytearray | memoryview = encode(message)
        with self._order:
            if at_once and not self._n_queued:
                frame = self._write_at_once(memoryview(frame))
            if frame:
                self._n_queued += 1
                self._outbox.put(bytes(frame))

    def flush(self) -> None:
        """Write out what is queued and end the writer; nothing can be sent after it."""
        self._outbox.put(None)
        self._writer.join()

    def _write_at_once(self, frame: memoryview) -> memoryview:
        """Give what the socket did not take; the writer meets an error again."""
        try:
            return frame[self._sock.send(frame, socket.MSG_DONTWAIT) :]
        except OSError:
            return frame

    def _write(self) -> None:
        closing = False
        while not closing:
            frames = [self._outbox.get()]
            while not self._outbox.empty():
                frames.append(self._outbox.get())
            closing = None in frames
            try:
                self._sock.sendall(b"".join(frame for frame in frames if frame is not None))
            except OSError:
                return  # the front process is gone; receive sees it too and ends this one
            with self._order:
                self._n_queued -= sum(frame is not None for frame in frames)
