"""Frozen value types that cross module and process borders.

Standard library only. Every quantity is SI and carries its unit in its name. The worker channel
encodes these types as msgpack, so a field is a plain scalar, a tuple, a mapping or another type here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]
Phase = Literal["prefill", "decode"]
Route = Literal["auto", "local", "cloud"]
# What a device's answers show: a real one's, or those of a stand-in, which says nothing of speed, power or drivers.
Evidence = Literal["device", "simulator", "emulated", "stub"]
CacheState = Literal["hit-exact", "hit-semantic", "miss", "shadow", "bypass"]
PinAction = Literal["list", "pin", "unpin"]
# Who waits for an answer: a person who watches it come, a program, or nobody.
Priority = Literal["interactive", "normal", "background"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool that the model asks its client to run. arguments is a JSON object's text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat turn; content parts have been joined to plain text by then.

    tool_calls    an assistant's
    tool_call_id  a tool's result names the call that it answers; name is the tool's, where its client says it
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters is a JSON Schema's text."""

    name: str
    description: str = ""
    parameters: str = '{"type":"object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """What an answer must look like, whatever the model would rather say.

    json_object  any JSON object; text is ""
    json_schema  the schema's JSON text
    grammar      GBNF, llama.cpp's notation, from its rule root
    regex        a regular expression that matches the whole answer
    choice       a JSON array of the texts that it may be
    """

    kind: Literal["json_object", "json_schema", "grammar", "regex", "choice"]
    text: str = ""


# Those that OpenAI-compatible endpoints know.
CLOUD_FORMATS = frozenset({"json_object", "json_schema"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that is added to the model's weights, times scale. name is what the configuration calls it."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A LoRA adapter in a GGUF file. base_sha256 is that of the model's file that it belongs to, "" if nobody says."""

    name: str
    path: str
    base_sha256: str = ""


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
class CacheWishes:
    """What a request's Cache-Control asks of the answer cache (RFC 9111).

    no_cache        compute anew; the answer is stored
    no_store        leave nothing of request and answer behind
    only_if_cached  fail with NotCachedError rather than compute
    max_age_s       no answer older than this
    sampled         an answer that was drawn without a seed may be stored and given again
    tags            names under which the answer can be removed
    """

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age_s: float | None = None
    sampled: bool = False
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """Beam search: the likeliest answers as wholes are looked for, and nothing is drawn.

    n_beams         beginnings that are gone on with at each step
    n_best          answers that are given, at most n_beams
    length_penalty  an answer's score is its log probability over its number of tokens to this power; 0 compares sums
    early_stopping  when n_beams answers have ended, the search is over at once (first), when no beam would be better if
                    it ended now (likely), or when none can get better (never)
    """

    n_beams: int
    n_best: int = 1
    length_penalty: float = 1.0
    early_stopping: Literal["first", "likely", "never"] = "likely"


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
    route        where it is answered: on the device, by a cloud model, or as the router decides
    cache        what it asks of the answer cache
    max_signals  how many tokens of the answer, from its first on, come with a TokenSignal
    priority     who is computed first, and who makes room where it gets scarce
    response_format  what the answer must look like; None leaves it to the model
    tools        that the model may call; messages only
    tool_choice  none: it answers in text; required: it calls at least one; auto leaves it to the model
    tool_name    the only tool that it may call, and must; "" leaves it to tool_choice
    parallel_tool_calls  one answer may hold several calls
    adapters     that the answer is computed with
    prompt_logprobs  None: none; n >= 0: the prompt's tokens come with their logprobs and the n most likely ones at each
                     place. All of the prompt is computed then, kept or not, and max_tokens may be 0
    beams        answers come from a beam search, all on the last chunk; sampling stays greedy
    tells_start  an engine says how many of the prompt's tokens it computes when it begins: a chunk of usage alone
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
    route: Route = "auto"
    cache: CacheWishes = field(default_factory=CacheWishes)
    max_signals: int = 0
    tells_start: bool = False
    priority: Priority = "normal"
    response_format: ResponseFormat | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    adapters: tuple[Adapter, ...] = ()
    prompt_logprobs: int | None = None
    beams: Beams | None = None


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
class Hypothesis:
    """An answer that a beam search has found.

    token_ids  without the token that ended it, which n_tokens counts
    logprob    of all its n_tokens, natural log; score  is what answers are ordered by
    logprobs   of token_ids, where the request wants them
    """

    text: str
    token_ids: tuple[int, ...]
    n_tokens: int
    logprob: float
    score: float
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSignal:
    """How sure the model was of a token of its answer, by the softmax of the logits as they are.

    logprob  of the token, natural log
    margin   probability of the most likely token less that of the second, 0..1
    entropy  of the distribution, in nats
    """

    logprob: float
    margin: float
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What computing one answer took, by a meter. Where nothing was measured there is no Energy: it is never 0.

    total_j         the answer's share of all that was drawn while it was computed, idle power included
    above_idle_j    its share of what was drawn beyond idle power; None until that is known
    prefill_*, decode_*  of the phases; None for a model without tokens
    boundary        what was measured: the chip (soc), all that the plug gives (board), or one supply (rail)
    quality         measured by a sensor, derived from what was, or modelled without one
    source          the meter
    coverage        share of the time for which the meter had values, 0..1
    """

    total_j: float
    above_idle_j: float | None = None
    prefill_j: float | None = None
    prefill_above_idle_j: float | None = None
    decode_j: float | None = None
    decode_above_idle_j: float | None = None
    boundary: Literal["soc", "board", "rail"] = "board"
    quality: Literal["measured", "derived", "modelled"] = "measured"
    source: str = ""
    coverage: float = 1.0

    def phases(self) -> tuple[tuple[str, float, float | None], ...]:
        """Give (phase, total_j, above_idle_j) of each; a phase in which the meter was silent has what is left."""
        if self.prefill_j is None and self.decode_j is None:
            return (("compute", self.total_j, self.above_idle_j),)
        prefill_j = self.prefill_j if self.prefill_j is not None else max(0.0, self.total_j - (self.decode_j or 0.0))
        prefill_above_j = decode_above_j = None
        if (above_j := self.above_idle_j) is not None:
            prefill_above_j = self.prefill_above_idle_j
            if prefill_above_j is None:
                prefill_above_j = max(0.0, above_j - (self.decode_above_idle_j or 0.0))
            decode_above_j = max(0.0, above_j - prefill_above_j)
        return ("prefill", prefill_j, prefill_above_j), ("decode", max(0.0, self.total_j - prefill_j), decode_above_j)

    def plus(self, other: Energy) -> Energy:
        """Add what another model's part of the same answer took."""
        known = self.above_idle_j is not None and other.above_idle_j is not None
        return Energy(
            total_j=self.total_j + other.total_j,
            above_idle_j=(self.above_idle_j or 0.0) + (other.above_idle_j or 0.0) if known else None,
            boundary=self.boundary,
            quality=other.quality if other.quality != "measured" else self.quality,
            source=self.source,
            coverage=min(self.coverage, other.coverage),
        )

    @property
    def saved_j(self) -> float:
        """What it saves not to compute the answer: idle power is drawn all the same, where that is known."""
        return self.total_j if self.above_idle_j is None else self.above_idle_j


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. cached_tokens is the part of prompt_tokens not computed again.

    is_estimate  a cloud endpoint counted nothing: the prompt by its bytes, the answer by its events
    energy       that computing it took; None where nothing was computed here, or nothing measured
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    is_estimate: bool = False
    energy: Energy | None = None

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
    prefill_engine_s, decode_engine_s  its share, by rows, of the steps in that time
    """

    queue_s: float
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int
    ttft_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_engine_s: float = 0.0
    decode_engine_s: float = 0.0

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
class Origin:
    """Where an answer comes from, and why.

    endpoint      name of the cloud endpoint; "" if the device answered
    reason        why it was answered there, a fixed word or two (docs/router.md)
    cache         what the answer cache did; None where there is none
    age_s         of a stored answer
    similarity    of the stored question to this one, 0..1, for a semantic hit
    cost          what the cloud charges for it, in the currency of the endpoint's prices
    """

    endpoint: str = ""
    reason: str = ""
    cache: CacheState | None = None
    age_s: float | None = None
    similarity: float | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a request is answered.

    reason        a word or two, for x-edge-route-reason and the counters
    on_probation  the device begins, and the cloud may take over before the first text leaves
    may_go        the cloud may be asked beside the device
    """

    where: Literal["local", "cloud"]
    reason: str
    on_probation: bool = False
    may_go: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of a tool call. The first of a call, and only it, has id and name; joined arguments are JSON.

    index  counts an answer's calls
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last one of an answer, and only it, has finish_reason, usage and timings.

    An engine that was asked to tell its start sends usage alone before all others: is_start. Nobody else sees it.
    Before the answer come, in chunks of their own, the prompt's logprobs; the first token's is 0, nothing is before it.

    text is always whole characters: joined chunks equal the unary answer.
    hypotheses are a beam search's answers, the best of which is the chunk's own text too.
    origin is set on the first chunk of an answer that came through cache and router; its cost may follow on the last.
    stopped_by is on the last one: the stop string that ended the answer, "" if none did.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    signals: tuple[TokenSignal, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    origin: Origin | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stopped_by: str = ""
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def is_start(self) -> bool:
        return self.usage is not None and self.finish_reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one loaded model on one device can do.

    can_save_ranges     a part of a sequence can be saved and restored, cut where blocks of n_cell_block cells end
    n_cell_block        cells that a sequence takes at once: its last block may be partly empty
    reads_own_cells     a row's attention reads the cells of its own sequence only: others cost it no time
    is_batch_invariant  a row's logits are the same, bit for bit, whatever else is in its batch
    copies_share        a copy of a sequence takes cells from where it differs on
    adapters            that rows may be computed with, by name; all rows of a step with the same
    """

    n_ctx: int
    n_seq_max: int
    n_vocab: int
    n_batch: int
    can_trim: bool
    can_copy: bool
    can_save: bool
    can_save_ranges: bool = False
    n_cell_block: int = 1
    reads_own_cells: bool = False
    is_batch_invariant: bool = False
    copies_share: bool = False
    adapters: tuple[str, ...] = ()

    def n_cells(self, n_tokens: int) -> int:
        """Count the cells of the blocks that so many tokens of one sequence take."""
        return -(-n_tokens // self.n_cell_block) * self.n_cell_block


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a worker reports of the model it has loaded.

    backend_reason  why a back end that comes before this one did not take the model; "" if none came before, or if
                    the configuration names this one
    evidence        what computes it: a real device or a stand-in
    build           of the back end: another one's saved sequences are not used
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
    evidence: Evidence = "device"
    build: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """A prefix that stays. is_kept: it is computed, and in memory or on disk; is_on_disk: it outlasts the process."""

    name: str
    n_tokens: int
    is_kept: bool = False
    is_on_disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since load and momentary gauges of one engine; sent to the front process as metrics.

    cells_used   of running requests; idle prefixes are not counted, they leave when cells are wanted
    drafted_tokens_total, accepted_tokens_total  guessed by speculation, and those of them that were right
    prefix_hits_total  requests that began with kept or shared rows; prefixes_lost_total kept ones that were of no use
    prefix_disk_bytes  prefixes kept on disk; restored_tokens_total taken from there; pinned_prefixes that stay
    refused_total  requests whose deadline was out of reach when they came
    device_products_total  what the accelerator that a model runs on has computed, device_fallbacks_total what the CPU
                           did in its place, device_faults_total its failures, device_fault the last in words
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
    prefix_hits_total: int = 0
    prefixes_lost_total: int = 0
    prefix_disk_bytes: int = 0
    pinned_prefixes: int = 0
    restored_tokens_total: int = 0
    preempted_total: int = 0
    refused_total: int = 0
    cancelled_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    rss_bytes: int = 0
    device_products_total: int = 0
    device_faults_total: int = 0
    device_fallbacks_total: int = 0
    device_fault: str = ""
    step_rows: tuple[int, ...] = ()
