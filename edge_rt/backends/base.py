"""The boundary between edge_rt and whatever computes: back ends, their sessions and the values between.

A back end runs language models (Backend, TokenSession), tensor models (TensorBackend, TensorSession) or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edge_rt.tensor_types import ChipNeeds, Datatype, Evidence, Require, TensorModelInfo, TensorSpec
from edge_rt.types import Adapter, AdapterFile, Capabilities, ModelInfo

if TYPE_CHECKING:
    from edge_rt.backends.onnx_facts import OnnxModel
    from edge_rt.catalog.gguf import GgufHeader

# How a tensor session's arrays hold each datatype; the elements of BYTES are Python's bytes, UTF-8 for most models.
DTYPES: Mapping[Datatype, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Something a back end can run on.

    kind       cpu, fpga, npu, null
    detail     one line for people; stand-ins say so in it
    evidence   what answers show that come from here: a real device, or a stand-in
    reference  right but slow: not chosen unless the back end is named
    free_bytes that a model may still take, temp_c: None where the device does not say; fault: why it cannot be used
    skew       which parts of its stack are of versions that do not belong together, and the mend; detail says so too
    """

    id: str
    kind: str
    detail: str
    evidence: Evidence = "device"
    reference: bool = False
    free_bytes: int | None = None
    temp_c: float | None = None
    fault: str = ""
    skew: str = ""

    @property
    def simulated(self) -> bool:
        return self.evidence != "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Why a back end has no device here, and the pip extra that would bring it ('' if none)."""

    reason: str
    extra: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model.

    n_ctx       tokens one sequence may hold, and the KV cells all sequences share
    n_seq_max   sequences decoded together
    n_batch     rows one decode call may hold
    n_ubatch    rows computed at once inside it, at most n_batch; bounds the scratch memory
    n_threads   0 lets the engine choose and change it
    kv_type     f16 or q8_0
    max_draft   rows of one sequence beyond its first whose logits a step asks for; for the estimate only
    adapters    that requests may be computed with
    packed_copy whether a back end that packs weights may keep them on disk, beside a model of the store
    """

    n_ctx: int
    n_seq_max: int = 8
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int = 0
    kv_type: str = "f16"
    device: str = "cpu"
    packed_copy: bool = True
    max_draft: int = 0
    adapters: tuple[AdapterFile, ...] = ()

    @property
    def n_logits_max(self) -> int:
        """Rows of logits that a step may give."""
        return min(self.n_seq_max * (1 + self.max_draft), max(self.n_batch, self.n_seq_max))


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model file that has been pulled and verified."""

    model: str
    variant: str
    path: Path
    quant: str

    @cached_property
    def header(self) -> GgufHeader:
        """The header, checked and read once: a large vocabulary takes tenths of a second. Raises ModelFormatError."""
        from edge_rt.catalog.gguf import read_header  # the worker of a tensor model reads none

        return read_header(self.path)

    @cached_property
    def onnx(self) -> OnnxModel:
        """The facts of an ONNX file, checked and read once. Raises ModelFormatError; needs the extra `onnx`."""
        from edge_rt.backends.onnx_model import read_model  # who has no such file need not have the package

        return read_model(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes a load will take; weights may be mapped and shared between processes."""

    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes


@dataclass(frozen=True, slots=True)
class SeqRows:
    """Rows of one sequence in a batch: token_ids go to positions start, start + 1, …

    want_logits asks for the logits after the last of them; want_all for those after each (scoring). shares says that
    the sequence is copied over and over: copies must share its cells where they can (Capabilities.copies_share).
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    want_logits: bool
    want_all: bool = False
    shares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocab:
    """Facts of a model's tokenizer. bos_id and eos_id are -1 where there is none.

    control_texts  how the control tokens are written: text that tokenize parses only with special
    """

    n_vocab: int
    bos_id: int
    eos_id: int
    eog_ids: frozenset[int]
    add_bos: bool
    chat_template: str | None
    bos_text: str = ""
    eos_text: str = ""
    control_texts: frozenset[str] = frozenset()


def model_info(file: ModelFile, options: LoadOptions, caps: Capabilities, *, backend: str, n_threads: int) -> ModelInfo:
    """Describe a model loaded from a GGUF file."""
    header = file.header
    return ModelInfo(
        model=file.model,
        variant=file.variant,
        backend=backend,
        device=options.device,
        arch=header.arch,
        quant=file.quant or header.quant,
        n_params=header.n_params,
        size_bytes=header.file_bytes,
        n_ctx_train=header.n_ctx_train,
        caps=caps,
        n_threads=n_threads,
        has_chat_template=header.chat_template is not None,
    )


class TokenSession(Protocol):
    """One language model on one device.

    One thread calls it, except tokenize and piece, which any thread may call. close is idempotent and legal after any
    failure; no other call may be under way, and those that come after it raise BackendStepError.
    """

    caps: Capabilities
    info: ModelInfo
    vocab: Vocab

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        """Split text into token ids; special parses control tokens such as <|im_start|> written in the text."""
        ...

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """Give a token's bytes, b"" for control tokens unless special.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        ...

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        """Compute rows of many sequences at once.

        returns one array per SeqRows with want_logits or want_all, in batch order: (n_vocab,), or (n_rows, n_vocab)
        for want_all. The arrays are views that the next decode overwrites. Raises BackendStepError; then the KV of the
        sequences in the batch is undefined and the caller drops them. KV cells that run out raise NoCellsError
        before anything is written.
        """
        ...

    def seq_copy(self, src: int, dst: int, n_tokens: int) -> None:
        """Let dst begin with src's first n_tokens positions; dst must be empty."""
        ...

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        """Forget all of a sequence but its first n_tokens positions; 0 empties it."""
        ...

    def seq_length(self, seq_id: int) -> int:
        """Count the positions that a sequence holds."""
        ...

    def seq_bytes(self, seq_id: int) -> int:
        """Give the size that seq_save's answer would have for all of a sequence."""
        ...

    def seq_save(self, seq_id: int, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        """Copy a sequence's KV out, as bytes that only the same model and back end understand.

        start, end  positions, all of them by default; a part only with can_save_ranges, and then start and, but for the
                    sequence's end, end are multiples of n_cell_block. Raises BackendStepError for other positions.
        """
        ...

    def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
        """Restore what seq_save gave: all of a sequence into an empty one, a part behind the positions before it.

        Raises BackendStepError for bytes of another model or context size, for a part that does not follow, and where
        the cells do not suffice; the sequence is as it was then.
        """
        ...

    def set_threads(self, n_threads: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Adaptable(Protocol):
    """A TokenSession with caps.adapters."""

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Compute the rows of all further steps with these; none at first. Raises BackendStepError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCounts:
    """What an accelerator has done since a model was loaded on it.

    n_products   products or runs that it computed; n_fallbacks those that the CPU computed in its place
    n_faults     how often it failed; last_fault  in words, "" if it has not
    """

    n_products: int = 0
    n_faults: int = 0
    n_fallbacks: int = 0
    last_fault: str = ""


@runtime_checkable
class Accelerated(Protocol):
    """A session of a back end that has the CPU compute what its device fails to."""

    def device_counts(self) -> DeviceCounts:
        """Count; any thread may ask."""
        ...


def device_stats(session: object) -> dict[str, Any]:
    """Give the fields of EngineStats that tell of a session's accelerator; none where it has none."""
    if not isinstance(session, Accelerated):
        return {}
    counts = session.device_counts()
    return {
        "device_products_total": counts.n_products,
        "device_faults_total": counts.n_faults,
        "device_fallbacks_total": counts.n_fallbacks,
        "device_fault": counts.last_fault,
    }


class NoCellsError(Exception):
    """The KV pool has no room for this batch; the engine preempts or waits. Never leaves the engine."""


class Backend(Protocol):
    """A cheap factory that holds no device."""

    name: ClassVar[str]

    def probe(self) -> tuple[Device, ...] | Absent:
        """Look for devices; missing hardware or software is Absent with the reason, never an exception."""
        ...

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:
        """Say why this back end, present, cannot run the model so; None if it can. Reads no weights.

        Raises ModelFormatError for a file that is no sound model.
        """
        ...

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed: ...

    def load(self, file: ModelFile, options: LoadOptions) -> TokenSession:
        """Load a model. Raises ModelFormatError, BackendLoadError or BackendUnavailableError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuOptions:
    """How a model runs on an NPU.

    require    see tensor_types.Require
    artifacts  folder that its compiled forms may be kept in; None keeps none
    max_artifact_bytes  of these
    retry_s    until a chip that failed is tried again; doubles with each failure, up to 5 times
    soc        the chip by back end, where it cannot be found out or is simulated; as its vendor names it
    options    of the vendor's compiler and runtime, by back end
    needs      what the model's form wants of the chip; None: nobody says
    """

    require: Require = "prefer"
    artifacts: Path | None = None
    max_artifact_bytes: int = 2 * 2**30
    retry_s: float = 0.8
    soc: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs: ChipNeeds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOptions:
    """How to load a tensor model.

    n_threads     0 takes the usable big cores
    max_batch     rows a run may have in its first dimension
    max_shapes    shapes of dynamic inputs that may be prepared for at a time
    graph_cache   where the optimised graph may be kept; None keeps none
    custom_op_libraries  that the model may use
    is_alone      this process is there for the model, and its allocators may be set up for it
    npu           where it runs on an NPU
    """

    n_threads: int = 0
    max_batch: int = 1
    max_shapes: int = 8
    device: str = "cpu"
    graph_cache: Path | None = None
    custom_op_libraries: tuple[Path, ...] = ()
    is_alone: bool = False
    npu: NpuOptions = field(default_factory=NpuOptions)


class TensorSession(Protocol):
    """One tensor model on one device.

    info.max_runs threads at a time may call run. close is idempotent and legal after any failure.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    info: TensorModelInfo

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """Compute once; outputs () gives all. The arrays are the caller's; DTYPES says how they hold each datatype.

        Raises InvalidRequestError for feeds that do not fit the inputs, BackendStepError for everything else.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Substituted(Protocol):
    """A TensorSession whose runs the CPU may compute; one thread at a time runs it."""

    @property
    def computed_on(self) -> str:
        """The place that has computed the last run, as "back end:device"; info has the one that was meant."""
        ...


@runtime_checkable
class TensorBackend(Protocol):
    """A cheap factory that holds no device, for tensor models."""

    name: ClassVar[str]

    def probe(self) -> tuple[Device, ...] | Absent: ...

    def supports_tensor(self, file: ModelFile, options: TensorOptions) -> str | None:
        """Say why this back end, present, cannot run the model so; None if it can.

        Raises ModelFormatError for a file that is no sound model.
        """
        ...

    def estimate_tensor(self, file: ModelFile, options: TensorOptions) -> MemoryNeed: ...

    def load_tensor(self, file: ModelFile, options: TensorOptions) -> TensorSession:
        """Load a model. Raises ModelFormatError, BackendLoadError or BackendUnavailableError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendProbe:
    """What probing one back end found."""

    name: str
    devices: tuple[Device, ...] = ()
    absent: Absent | None = field(default=None)
