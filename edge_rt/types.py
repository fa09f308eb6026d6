"""Frozen value types that cross module and process borders.

Standard library only. Every quantity is SI and carries its unit in its name. The worker channel
encodes these types as msgpack, so a field is a plain scalar, a tuple, a mapping or another type here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]  # as the Open Inference Protocol spells them
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat turn; content parts have been joined to plain text by then."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen; the defaults mean greedy.

    temperature        >= 0; 0 is greedy (argmax, lowest id wins a tie)
    top_k              0 is off, else keep the k most likely
    top_p, min_p       1.0 and 0.0 are off
    repeat_penalty     > 0; 1.0 is off; over the last repeat_last_n tokens of prompt and answer
    presence_penalty,
    frequency_penalty  -2..2; over the answer's tokens only, as OpenAI defines them
    seed               None draws one; the same seed on the same machine gives the same answer
    logit_bias         token id -> -100..100, added to the raw logit
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


# What a request without sampling fields gets from the API, the library and the command line: llama-server's defaults.
# A small INT4 model at temperature 1 over its whole vocabulary, which is OpenAI's default, writes nonsense.
CHAT_SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation. Exactly one of prompt, prompt_token_ids and messages is set.

    max_tokens   None: until the model stops or the context is full
    stop         strings that end the answer; they are not part of it
    ignore_eos   keep going past the end-of-generation token (benchmarks)
    stream       False lets the engine send the whole answer as one chunk
    top_logprobs None: no logprobs; n >= 0: the chosen token's and the n most likely ones'
    max_draft    tokens that may be guessed and checked in one step, at most the engine's own limit, which is also what
                 None means; 0 guesses none
    tenant       who asks, a quota key; the peer's uid on a Unix socket
    deadline_s   seconds from submission after which the request may be dropped unanswered
    """

    id: str
    model: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    stream: bool = True
    top_logprobs: int | None = None
    max_draft: int | None = None
    tenant: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log probability (natural log, of the unmodified softmax) and its best rivals.

    raw is the token's exact bytes, which may be a part of a UTF-8 character.
    """

    token_id: int
    raw: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. cached_tokens is the part of prompt_tokens not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where one request's time went, by the engine's monotonic clock.

    queue_s    submission to the first prefill step
    prefill_s  first prefill step to the first token; prefill_tokens were computed in it
    decode_s   first token to the last; decode_tokens = completion_tokens - 1 were computed in it
    ttft_s     submission to the first token
    drafted_tokens were guessed and computed beside the answer's own; accepted_tokens of them were right
    """

    queue_s: float
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int
    ttft_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tps(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else None

    @property
    def decode_tps(self) -> float | None:
        """None for an answer of one token, which took no decode step."""
        return self.decode_tokens / self.decode_s if self.decode_tokens > 0 and self.decode_s > 0 else None

    @property
    def tpot_s(self) -> float | None:
        return self.decode_s / self.decode_tokens if self.decode_tokens > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last one of an answer, and only it, has finish_reason, usage and timings.

    text is always whole characters: joined chunks equal the unary answer.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one loaded model on one device can do.

    n_cell_block        cells that a sequence takes at once: its last block may be partly empty
    is_batch_invariant  a row's logits are the same, bit for bit, whatever else is in its batch
    """

    n_ctx: int
    n_seq_max: int
    n_vocab: int
    n_batch: int
    can_trim: bool
    can_copy: bool
    can_save: bool
    n_cell_block: int = 1
    is_batch_invariant: bool = False

    def n_cells(self, n_tokens: int) -> int:
        """Count the cells of the blocks that so many tokens of one sequence take."""
        return -(-n_tokens // self.n_cell_block) * self.n_cell_block


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a worker reports of the model it has loaded.

    backend_reason  why a back end that comes before this one did not take the model; "" if none came before, or if
                    the configuration names this one
    """

    model: str
    variant: str
    backend: str
    device: str
    arch: str
    quant: str
    n_params: int
    size_bytes: int
    n_ctx_train: int
    caps: Capabilities
    n_threads: int
    has_chat_template: bool
    backend_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since load and momentary gauges of one engine; sent to the front process as metrics.

    cells_used   of running requests; idle prefixes are not counted, they leave when cells are wanted
    drafted_tokens_total, accepted_tokens_total  guessed by speculation, and those of them that were right
    step_rows    steps by their number of rows: <= 1, 2, 4, … 512, and above (11 counts; their sum is steps_total)
    """

    waiting: int = 0
    running: int = 0
    cells_used: int = 0
    cells_total: int = 0
    prefix_bytes: int = 0
    n_threads: int = 0
    steps_total: int = 0
    rows_total: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    cached_tokens_total: int = 0
    preempted_total: int = 0
    cancelled_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    rss_bytes: int = 0
    step_rows: tuple[int, ...] = ()


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
    data: bytes
    region: TensorRegion | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data) if self.region is None else self.region.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """One inference of a tensor model.

    outputs    names of those wanted; () is all
    regions    where outputs shall be put, by name; one that comes back without its region has not been put there yet
    stream     names the stream whose state a stateful model goes on from; "" starts fresh and keeps nothing
    is_first   forget the state that the stream has, and start fresh
    is_last    forget the stream's state after this
    tenant, deadline_s  as in GenerateRequest
    """

    id: str
    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    regions: Mapping[str, TensorRegion] = field(default_factory=dict)
    stream: str = ""
    is_first: bool = False
    is_last: bool = False
    tenant: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTimings:
    """Where one inference's time went, by the worker's monotonic clock.

    queue_s     submission to the start of its batch
    compute_s   of the whole batch, whose rows were batch_size requests' together
    """

    queue_s: float
    compute_s: float
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAnswer:
    """The outputs, and what they took.

    place           the back end and device that computed them, from the model's form variant
    n_stream_calls  of the request's stream since its state was zeros, with this one; 1 in the middle of a stream means
                    that its state was lost, to a worker's restart or to other streams. 0 without a stream
    """

    outputs: tuple[Tensor, ...]
    timings: TensorTimings
    place: str = ""
    variant: str = ""
    n_stream_calls: int = 0


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
    """

    id: str
    model: str
    data: bytes
    reference: bytes = b""
    regions: tuple[Box, ...] = ()
    top_k: int | None = None
    min_score: float | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """How many nodes of a model's graph a provider runs, and their kinds with the counts."""

    provider: str
    n_nodes: int
    kinds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorModelInfo:
    """What a worker reports of the tensor model it has loaded.

    max_batch       rows that requests are joined to; 1: never joined
    max_runs        that may be under way at once, each on a thread of its own
    is_stateful     has a state for each stream
    task            of its pipeline; "" has none and takes tensors only
    placement       which provider runs how much of the graph, as the back end itself tells
    backend_reason  why a back end that comes before this one did not take the model
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A back end's device as a probe found it; the front process, which imports no back end, knows devices by this.

    kind        cpu, npu, fpga, null
    reference   right but slow: not chosen unless the back end is named
    features    instruction sets of a CPU
    free_bytes  that a model may still take; temp_c; None where nobody says
    fault       why it cannot be used, "" if it can
    """

    backend: str
    id: str
    kind: str
    detail: str = ""
    simulated: bool = False
    reference: bool = False
    features: frozenset[str] = frozenset()
    free_bytes: int | None = None
    temp_c: float | None = None
    fault: str = ""

    @property
    def place(self) -> str:
        return f"{self.backend}:{self.id}"
