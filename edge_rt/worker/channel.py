"""Framed messages between the front process and a worker: two little-endian lengths, msgpack, and what is attached.

A frame holds one message. Senders coalesce the frames of one moment into one write, and a reader decodes all the
frames of one read, so that a step of eight streams wakes the front process once. Tensors' bytes are attached to their
message rather than put in it: they leave from where they are, and are read to where they stay.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from edge_rt.catalog.pipelines import Pipeline, StateTensor
from edge_rt.tensor_types import (
    ChipNeeds,
    Data,
    Datatype,
    MediaAnswer,
    MediaRequest,
    Require,
    Tensor,
    TensorAnswer,
    TensorModelInfo,
    TensorRegion,
    TensorRequest,
    TensorTimings,
)
from edge_rt.types import (
    AdapterFile,
    Chunk,
    Energy,
    EngineStats,
    GenerateRequest,
    ModelInfo,
    PinAction,
    PinnedPrefix,
)

# The largest honest frame holds a tensor request's inputs; anything near the cap is a bug or a broken peer.
MAX_FRAME_BYTES = 256 * 2**20

_LENGTHS = struct.Struct("<II")  # of the message and of what is attached
_READ_BYTES = 64 * 1024  # what is longer is read to where it stays


class NpuLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How a model runs on an NPU; as backends.base.NpuOptions. max_artifact_bytes 0 keeps no compiled forms."""

    require: Require = "prefer"
    max_artifact_bytes: int = 2 * 2**30
    retry_s: float = 0.8
    soc: dict[str, str] = {}
    options: dict[str, dict[str, str]] = {}
    needs: ChipNeeds | None = None


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
    npu: NpuLoad = NpuLoad()


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="load"):
    """Load a model; the first message a worker gets.

    path           "" for back ends without a file
    backend        its name, or "auto" for the first that supports the model
    chat_template  overrides the file's own; None leaves it
    force          load although the memory looks too small
    adapters       that a language model's requests may name
    pins           system prompts that stay, by name
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
    max_prefix_bytes: int = -1
    isolate_prefixes: bool = False
    max_prefix_disk_bytes: int = 0
    pins: dict[str, str] = {}
    stream_interval_s: float = 0.05
    memory_margin_bytes: int = 0
    force: bool = False
    max_draft: int = 15
    tensor: TensorLoad | None = None
    adapters: tuple[AdapterFile, ...] = ()


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="gen"):
    """Start a request. Its id is unique on this channel."""

    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    id: str


class Advise(msgspec.Struct, frozen=True, array_like=True, tag="advise"):
    """Compute a language model on no more than so many threads from the next step on; None ends that."""

    n_prefill_threads: Annotated[int, msgspec.Meta(ge=1)] | None
    n_decode_threads: Annotated[int, msgspec.Meta(ge=1)] | None


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tok"):
    id: str
    text: str
    special: bool
    add_bos: bool


class ReadPrompt(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """Give the token ids of a request's prompt. The request's id is unique on this channel."""

    request: GenerateRequest


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag="detok"):
    id: str
    token_ids: list[int]


class Pins(msgspec.Struct, frozen=True, array_like=True, tag="pins"):
    """List the pinned prefixes that a tenant may see, after text was pinned by a name or a name unpinned."""

    id: str
    tenant: str
    action: PinAction = "list"
    name: str = ""
    text: str = ""


class SentTensor(msgspec.Struct, frozen=True, array_like=True):
    """A Tensor whose size_bytes of data are attached, behind those of the tensors before it."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    region: TensorRegion | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> SentTensor:
        return cls(tensor.name, tensor.datatype, tensor.shape, len(tensor.data), tensor.region)


class _WithTensors(msgspec.Struct, array_like=True):
    """attached is not sent with the message: it is given to encode's caller, and set by the reader."""

    id: str
    sent: tuple[SentTensor, ...]
    attached: Any = b""

    def tensors(self) -> tuple[Tensor, ...]:
        """Give the tensors, which share the memory of what is attached."""
        tensors, start = [], 0
        for sent in self.sent:
            data = self.attached[start : start + sent.size_bytes]
            start += sent.size_bytes
            tensors.append(
                Tensor(name=sent.name, datatype=sent.datatype, shape=sent.shape, data=data, region=sent.region)
            )
        return tuple(tensors)


class SentReply(msgspec.Struct, frozen=True, array_like=True):
    """A Reply; loan is the number that the connection was lent by."""

    loan: int
    head: bytes
    outputs: tuple[SentTensor, ...]


class Lend(msgspec.Struct, frozen=True, array_like=True, tag="lend"):
    """Lend a client's connection: its descriptor and that of its permit come with this message."""

    loan: int


class LendMemory(msgspec.Struct, frozen=True, array_like=True, tag="lendmem"):
    """Lend memory that inputs are read from: its descriptor comes with this message."""

    loan: int


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag="back"):
    """Close a connection, or leave memory, that was lent."""

    loan: int


class Infer(_WithTensors, array_like=True, tag="infer"):
    """Run a tensor model. Its id is unique on this channel; the rest is as in TensorRequest.

    memory  which of the lent memories, and where in it, has what else would be attached
    """

    outputs: tuple[str, ...] = ()
    regions: dict[str, TensorRegion] = {}
    stream: str = ""
    is_first: bool = False
    is_last: bool = False
    tenant: str = ""
    deadline_s: float | None = None
    reply: SentReply | None = None
    memory: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        request: TensorRequest,
        wire_id: str,
        reply: SentReply | None = None,
        memory: tuple[int, int] | None = None,
    ) -> Infer:
        return cls(
            wire_id,
            tuple(map(SentTensor.of, request.inputs)),
            b"",
            request.outputs,
            dict(request.regions),
            request.stream,
            request.is_first,
            request.is_last,
            request.tenant,
            request.deadline_s,
            reply,
            memory,
        )


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


class Described(msgspec.Struct, frozen=True, array_like=True, tag="described"):
    """A tensor model is not any more what TensorReady said: its device was lost, or is back."""

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


class PinsOut(msgspec.Struct, frozen=True, array_like=True, tag="pinsout"):
    id: str
    pins: list[PinnedPrefix]


class Inferred(_WithTensors, kw_only=True, array_like=True, tag="inferred"):
    """A TensorAnswer but for its form, which the front process knows.

    energy     is not the worker's to tell: the front process sets it where there is a meter
    n_written  bytes of the reply that the client has got; if that is all, no tensors are sent
    substitute the place that computed it instead of the model's, whose device failed
    """

    timings: TensorTimings
    place: str = ""
    n_stream_calls: int = 0
    energy: Energy | None = None
    n_written: int = 0
    substitute: str = ""

    def answer(self, *, place: str = "", variant: str = "") -> TensorAnswer:
        return TensorAnswer(
            outputs=self.tensors(),
            timings=self.timings,
            place=self.substitute or place or self.place,  # who asks may know of the place what the worker does not
            variant=variant,
            n_stream_calls=self.n_stream_calls,
            energy=self.energy,
            n_written=self.n_written,
        )


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    id: str
    answer: MediaAnswer


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    stats: EngineStats


ToWorker = (
    Load
    | Generate
    | Cancel
    | Advise
    | Tokenize
    | ReadPrompt
    | Detokenize
    | Pins
    | Infer
    | Look
    | Lend
    | LendMemory
    | GiveBack
    | Shutdown
)
FromWorker = (
    Ready | TensorReady | Described | ChunkOut | Failed | TokensOut | TextOut | PinsOut | Inferred | Found | Stats
)

M = TypeVar("M")


class ChannelError(Exception):
    """The peer broke the framing or the message types; the connection cannot go on."""


def encode(message: ToWorker | FromWorker, attached: Sequence[Data] = ()) -> bytearray:
    """Make one frame but for what is attached, which must follow it.

    Raises ChannelError for more than MAX_FRAME_BYTES.
    """
    frame = bytearray(_LENGTHS.size)
    _ENCODER.encode_into(message, frame, _LENGTHS.size)
    size, n_attached = len(frame) - _LENGTHS.size, sum(map(len, attached))
    if size + n_attached > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {size + n_attached} bytes is over the limit of {MAX_FRAME_BYTES}")
    _LENGTHS.pack_into(frame, 0, size, n_attached)
    return frame


_ENCODER = msgspec.msgpack.Encoder()


class FrameReader(Generic[M]):
    """Cut a byte stream into messages of one type. Bytes are read into room, then received is told how many.

    A frame that is longer than what is read at once gets memory of its own, which its tensors go on using.
    """

    __slots__ = ("_decoder", "_frame", "_n_bytes", "_n_message", "_read")

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._read = memoryview(bytearray(_READ_BYTES))
        self._frame: memoryview | None = None  # of a long frame, behind its lengths
        self._n_message = 0  # bytes of a long frame that are its message
        self._n_bytes = 0  # in _frame, or in _read if there is none

    @property
    def is_empty(self) -> bool:
        """Say whether no part of a message is here that is not whole yet."""
        return self._frame is None and not self._n_bytes

    @property
    def is_in_long_frame(self) -> bool:
        """Say whether room ends where a message does."""
        return self._frame is not None

    def room(self) -> memoryview:
        """Give where the next bytes go; never empty."""
        return (self._read if self._frame is None else self._frame)[self._n_bytes :]

    def received(self, n_bytes: int) -> list[M]:
        """Give the messages that are whole, with so many more bytes in room. Raises ChannelError."""
        self._n_bytes += n_bytes
        if (frame := self._frame) is not None:
            if self._n_bytes < len(frame):
                return []
            self._frame, self._n_bytes = None, 0
            return [self._message(frame[: self._n_message], frame[self._n_message :].toreadonly())]
        messages: list[M] = []
        start, end, view = 0, self._n_bytes, self._read
        while end - start >= _LENGTHS.size:
            n_message, n_attached = _LENGTHS.unpack_from(view, start)
            size = n_message + n_attached
            if size > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            begin = start + _LENGTHS.size
            if end - begin < size:
                if begin + size > len(view):
                    self._frame, self._n_message = memoryview(bytearray(size)), n_message
                    self._n_bytes = end - begin
                    self._frame[: self._n_bytes] = view[begin:end]
                    return messages
                break
            start = begin + size
            messages.append(self._message(view[begin : begin + n_message], bytes(view[begin + n_message : start])))
        if start:
            self._n_bytes = end - start
            view[: self._n_bytes] = bytes(view[start:end])
        return messages

    def feed(self, data: Data) -> list[M]:
        """Take bytes as they come and give the messages that are whole. Raises ChannelError."""
        messages: list[M] = []
        while data:
            room = self.room()
            n_bytes = min(len(room), len(data))
            room[:n_bytes] = data[:n_bytes]
            messages += self.received(n_bytes)
            data = data[n_bytes:]
        return messages

    def _message(self, view: memoryview, attached: Data) -> M:
        try:
            message = self._decoder.decode(view)
        except msgspec.DecodeError as exc:
            raise ChannelError(f"a message cannot be decoded: {exc}") from exc
        if isinstance(message, _WithTensors):
            message.attached = attached
            is_elsewhere = isinstance(message, Infer) and message.memory is not None
            n_bytes = 0 if is_elsewhere else sum([sent.size_bytes for sent in message.sent])
        else:
            n_bytes = 0
        if n_bytes != len(attached):
            raise ChannelError(f"{len(attached)} bytes are attached to a message that has {n_bytes}")
        return message
