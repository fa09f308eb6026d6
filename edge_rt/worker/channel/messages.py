"""The messages between the front process and a worker, each way."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from edge_rt.tensor_types import (
    Datatype,
    MediaAnswer,
    MediaRequest,
    Tensor,
    TensorAnswer,
    TensorModelInfo,
    TensorRegion,
    TensorRequest,
    TensorTimings,
)
from edge_rt.types import (
    Chunk,
    Energy,
    EngineStats,
    GenerateRequest,
    ModelInfo,
    PinAction,
    PinnedPrefix,
)
from edge_rt.worker.channel.loads import Load


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


class WithTensors(msgspec.Struct, array_like=True):
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


class Infer(WithTensors, array_like=True, tag="infer"):
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


class Inferred(WithTensors, kw_only=True, array_like=True, tag="inferred"):
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
