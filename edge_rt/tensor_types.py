"""Frozen value types of tensor models and of the files they look at; as edge_rt/types.py, which has those of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, Self

from edge_rt.types import Energy
from edge_rt.types import Evidence as Evidence

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]  # as the Open Inference Protocol spells them


Data = bytes | memoryview

# Where a model must run, of which an NPU was asked: npu: all of it there, and what fails there fails; prefer: the CPU
# steps in, which is told as a warning; any: it steps in without a word.
Require = Literal["npu", "prefer", "any"]

# For how many weights there is a scale: all of them, an output channel's, a block's within one. "": it does not matter.
Granularity = Literal["", "tensor", "channel", "block"]

# Bytes of one element; 0 where each has its own length.
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a tensor model; -1 in its shape takes any size."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRegion:
    """A part of memory that a client shares: size_bytes from offset on in the file that path names to other processes.

    device, inode  the file's identity: descriptors' numbers are used again, and path holds one
    """

    name: str
    path: str
    device: int
    inode: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor's elements as bytes: row after row, little-endian; BYTES elements each behind its length as uint32.

    region  where the bytes are instead of in data, None: they are in data
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: Data
    region: TensorRegion | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data) if self.region is None else self.region.size_bytes


# What the eventfd beside a lent connection counts: a permit to write one answer, and that all of the last was written.
PERMIT: Final = 1
WRITTEN: Final = 2


class Lent(Protocol):
    """What workers may have descriptors of."""

    def fds(self) -> tuple[int, ...]: ...

    def lent_to(self, borrower: object, ended: Callable[[Self], None]) -> None: ...

    def returned_by(self, borrower: object) -> None: ...


class Loan(Lent, Protocol):
    """A client's connection that an answer may be written to by the worker that computes it; see api/loans.py."""

    def permit(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as its client shall get it: head, and then the bytes of the outputs, if these are as head says.

    outputs         name, datatype, shape and bytes of each
    place, variant  that head tells of
    """

    loan: Loan
    head: bytes
    outputs: tuple[tuple[str, Datatype, tuple[int, ...], int], ...]
    place: str
    variant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """One inference of a tensor model.

    outputs    names of those wanted; () is all
    regions    where outputs shall be put, by name; one that comes back without its region has not been put there yet
    stream     names the stream whose state a stateful model goes on from; "" starts fresh and keeps nothing
    is_first   forget the state that the stream has, and start fresh
    is_last    forget the stream's state after this
    variant    the form that must answer, with streams of its own; "" leaves it to the placement
    tenant, deadline_s  as in GenerateRequest
    no_cache, no_store, only_if_cached  as in CacheWishes
    is_suspect  a worker has died with it: it is asked once more, with no other such request
    reply       what the worker may write itself, where it is asked without a task
    memory      that the worker may map, and where in it the inputs' bytes begin, one behind the other; likewise
    """

    id: str
    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    regions: Mapping[str, TensorRegion] = field(default_factory=dict)
    stream: str = ""
    is_first: bool = False
    is_last: bool = False
    variant: str = ""
    tenant: str = ""
    deadline_s: float | None = None
    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    is_suspect: bool = False
    reply: Reply | None = field(default=None, compare=False)
    memory: tuple[Lent, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTimings:
    """Where one inference's time went, by the worker's monotonic clock.

    queue_s     submission to the start of its batch
    compute_s   of the whole batch, whose rows were batch_size requests' together
    engine_s    the request's share of that: by its rows, and by the runs that were under way at the same time
    """

    queue_s: float
    compute_s: float
    batch_size: int
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAnswer:
    """The outputs, and what they took.

    place           the back end and device that computed them, from the model's form variant
    n_stream_calls  of the request's stream since its state was zeros, with this one; 1 in the middle of a stream means
                    that its state was lost, to a worker's restart or to other streams. 0 without a stream
    age_s           of stored outputs; None: they were computed for this request
    similarity      of the stored picture to this one, 0..1, where it is not the same
    energy          that computing them took; None where nothing was computed or measured
    n_written       bytes of the request's reply that its client has got from the worker; outputs is () if that is all
    """

    outputs: tuple[Tensor, ...]
    timings: TensorTimings
    place: str = ""
    variant: str = ""
    n_stream_calls: int = 0
    age_s: float | None = None
    similarity: float | None = None
    energy: Energy | None = None
    n_written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle in a picture, in its pixels from the top left corner, and what was found in it.

    turn_deg  it is turned clockwise about its own middle by so much; x and y are its corner's before that
    """

    x: float
    y: float
    width: float
    height: float
    label: str = ""
    score: float = 1.0
    text: str = ""
    turn_deg: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    index: int
    label: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in a recording."""

    start_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRequest:
    """A file for a model with a pipeline: a picture, a recording or a text.

    data       the file's bytes, as they came
    reference  a second file where the pipeline compares with one, as a golden board
    regions    parts of the picture to work on, each by itself; () is all of it
    top_k, min_score  None takes the pipeline's own
    token_ids  of a text, by the model's own tokenizer and with its special tokens, in place of data
    dimensions of its embedding; None: all. Only a model that was trained for it gives fewer
    truncate   a text that is too long is cut; False refuses it
    """

    id: str
    model: str
    data: bytes
    reference: bytes = b""
    regions: tuple[Box, ...] = ()
    top_k: int | None = None
    min_score: float | None = None
    token_ids: tuple[int, ...] = ()
    dimensions: int | None = None
    truncate: bool = False
    tenant: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaAnswer:
    """What a pipeline found; the fields that its task does not have are empty.

    labels     classification, best first; with regions those of the first
    boxes      detection, best first; lines of text in reading order
    spans      speech
    texts      lines read, one for each region
    embedding  of a text, which had n_tokens
    width, height  of the picture; duration_s of the recording
    stage      which model of a cascade answered; early or full of a model with an early exit; "" of others
    variant    the model's form that answered
    energy     that it took; None where nothing was measured
    """

    task: str
    labels: tuple[Label, ...] = ()
    boxes: tuple[Box, ...] = ()
    spans: tuple[Span, ...] = ()
    texts: tuple[Label, ...] = ()
    embedding: tuple[float, ...] = ()
    n_tokens: int = 0
    width: int = 0
    height: int = 0
    duration_s: float = 0.0
    stage: str = ""
    timings: TensorTimings | None = None
    place: str = ""
    variant: str = ""
    energy: Energy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """How many nodes of a model's graph a provider runs, and their kinds with the counts.

    reason  why they are not on the device that was meant; "" for those that are
    """

    provider: str
    n_nodes: int
    kinds: tuple[tuple[str, int], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorModelInfo:
    """What a worker reports of the tensor model it has loaded.

    max_batch       rows that requests are joined to; 1: never joined
    max_runs        that may be under way at once, each on a thread of its own
    is_stateful     has a state for each stream
    task            of its pipeline; "" has none and takes tensors only
    placement       which provider runs how much of the graph, as the back end itself tells
    backend_reason  why a back end that comes before this one did not take the model
    evidence        what computes it: a real device or a stand-in
    """

    model: str
    variant: str
    backend: str
    device: str
    quant: str
    size_bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    n_threads: int
    max_batch: int = 1
    max_runs: int = 1
    is_stateful: bool = False
    task: str = ""
    placement: tuple[NodePlacement, ...] = ()
    backend_reason: str = ""
    evidence: Evidence = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipNeeds:
    """What a form of a model wants of an NPU; as catalog.manifest.Requires."""

    weight_bits: int
    activation_bits: int
    granularity: Granularity = ""
    socs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A back end's device as a probe found it; the front process, which imports no back end, knows devices by this.

    kind        cpu, npu, fpga, null
    evidence    a real device or a stand-in
    reference   right but slow: not chosen unless the back end is named
    features    instruction sets of a CPU
    free_bytes  that a model may still take; temp_c; None where nobody says
    is_hot      it was too hot and has not cooled enough; who keeps the readings knows, not the probe
    fault       why it cannot be used, "" if it can
    """

    backend: str
    id: str
    kind: str
    detail: str = ""
    evidence: Evidence = "device"
    reference: bool = False
    features: frozenset[str] = frozenset()
    free_bytes: int | None = None
    temp_c: float | None = None
    is_hot: bool = False
    fault: str = ""

    @property
    def place(self) -> str:
        return f"{self.backend}:{self.id}"

    @property
    def simulated(self) -> bool:
        return self.evidence != "device"
