"""What comes of a request, piece by piece: text and tokens, what they took, and who answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_rt.types.energy import Energy

FinishReason = Literal["stop", "length", "tool_calls"]
CacheState = Literal["hit-exact", "hit-semantic", "miss", "shadow", "bypass"]


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
    """A piece of an answer. The last one of an answer, and only it, has finish_reason and timings; it has usage.

    An engine's first one has usage too, of the prompt alone: by then it is known. A cloud's has none. An engine that
    was asked to tell its start sends it in a chunk of its own before all others: is_start. Nobody else sees that.
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
        return self.usage is not None and self.finish_reason is None and not self.token_ids
