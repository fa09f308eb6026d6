"""One request inside the engine, from submission to its end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import SeqRows, TokenSession
from edge_rt.engine.draft_record import DraftRecord
from edge_rt.engine.drafts import PromptLookup
from edge_rt.engine.form import Form
from edge_rt.engine.prefix import Slot
from edge_rt.engine.sampling import Sampler
from edge_rt.engine.text import TextStream
from edge_rt.errors import EdgeRtError
from edge_rt.types import Capabilities, Chunk, FinishReason, GenerateRequest, Timings, TokenLogprob, TokenSignal, Usage

# Rows of a step whose logits are all wanted, 50,000 numbers each: of one sequence, and of all together, which is what
# LoadOptions.n_logits_max counts on for eight sequences that guess.
_MAX_SCORED, _MAX_SCORED_TOGETHER = 32, 128


class Sink(Protocol):
    """Takes one request's answer; called on the engine's thread, so it must not block.

    Nothing comes after a chunk with finish_reason or after failed; a cancelled request ends without either.
    """

    def chunk(self, chunk: Chunk) -> None: ...

    def failed(self, error: EdgeRtError) -> None: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, its place and what of its answer has not been sent.

    token_ids  prompt and answer; the KV of slot, while it has one, holds the first n_computed of them
    lookup     guesses how they go on; None where nothing is guessed
    record     what became of a drafting model's guesses; None before the first
    is_by_model  the last guess was such a model's
    form       what the answer must look like; None leaves it to the model
    """

    request: GenerateRequest
    sink: Sink
    token_ids: list[int]
    sampler: Sampler
    text: TextStream
    submitted_s: float
    lookup: PromptLookup | None = None
    record: DraftRecord | None = None
    is_by_model: bool = False
    form: Form | None = None
    n_prompt: int = 0
    slot: Slot | None = None
    started_s: float | None = None
    first_s: float | None = None
    sent_s: float | None = None
    n_cached: int = 0
    n_prefilled: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_scored: int = 0  # of the prompt's tokens, whose logprobs have been sent
    prefill_engine_s: float = 0.0
    decode_engine_s: float = 0.0
    _text: list[str] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _signals: list[TokenSignal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.token_ids)

    @property
    def n_computed(self) -> int:
        return len(self.slot.token_ids) if self.slot is not None else 0

    @property
    def n_answer(self) -> int:
        return len(self.token_ids) - self.n_prompt

    def is_past_deadline(self, now_s: float) -> bool:
        """Say whether the answer would come too late; a request that has begun to answer never is."""
        deadline_s = self.request.deadline_s
        return deadline_s is not None and self.first_s is None and now_s - self.submitted_s > deadline_s

    @property
    def n_places(self) -> int:
        """Slots that it takes, each of which is a row of a step once its prompt is computed."""
        return 1

    def n_cells(self, caps: Capabilities, n_growth: int) -> int:
        """Count the cells that it takes with so many more tokens."""
        return caps.n_cells(len(self.token_ids) + n_growth)

    def rows(self, n: int, draft: ListOf[int]) -> list[SeqRows]:
        """Give the rows of its next n tokens, and of what is guessed after them."""
        assert self.slot is not None
        start, end = len(self.slot.token_ids), len(self.slot.token_ids) + n
        token_ids = self.token_ids[start:end]
        if self.is_scored:
            return [SeqRows(self.slot.seq_id, start, token_ids, end == len(self.token_ids), want_all=True)]
        if draft:
            return [SeqRows(self.slot.seq_id, start, [*token_ids, *draft], want_logits=True, want_all=True)]
        return [SeqRows(self.slot.seq_id, start, token_ids, end == len(self.token_ids))]

    def took(self, rows: ListOf[SeqRows]) -> None:
        """Note that the rows it gave are in the KV."""
        assert self.slot is not None
        self.slot.token_ids += rows[0].token_ids

    def give_back(self) -> list[Slot]:
        """Let go of its slots but the first."""
        return []

    def is_due(self, now_s: float, interval_s: float) -> bool:
        """Say whether there is text to send by now: the first at once, then at most every interval_s."""
        if not self.request.stream or not (self.text.has_calls or any(self._text)):
            return False
        return self.sent_s is None or now_s - self.sent_s >= interval_s

    def is_scored_from(self, start: int) -> bool:
        """Tell whether the logits of rows from there on are all wanted: the prompt's own logprobs are asked for."""
        return self.request.prompt_logprobs is not None and start < self.n_prompt

    @property
    def is_scored(self) -> bool:
        return self.is_scored_from(self.n_computed)

    @property
    def known_ids(self) -> list[int]:
        """The tokens whose KV may be another's: all but where the prompt's logits are wanted, which a copy lacks."""
        return self.token_ids if self.request.prompt_logprobs is None else self.token_ids[:1]

    def score(self, start: int, logits: NDArray[np.float32], piece: Callable[..., bytes]) -> None:
        """Send the logprobs of the prompt's tokens that follow the rows from start on, those sent before left out."""
        n_top = self.request.prompt_logprobs
        assert n_top is not None
        scored: list[TokenLogprob] = []
        if not self.n_scored:
            first = self.token_ids[0]
            scored.append(TokenLogprob(token_id=first, raw=piece(first, special=True), logprob=0.0))
        for place, row in enumerate(logits, start + 1):
            if self.n_scored <= place < self.n_prompt:  # after a preemption they come again
                scored.append(self._scored(row, self.token_ids[place], n_top, piece))
        if scored:
            self.n_scored += len(scored)
            self.sink.chunk(Chunk(text="", prompt_logprobs=tuple(scored)))

    def begin(self) -> None:
        """Say how much of the prompt is kept already, to who asked for that."""
        if self.request.tells_start:
            self.sink.chunk(Chunk(text="", usage=self._prompt_usage))

    @property
    def _prompt_usage(self) -> Usage:
        return Usage(prompt_tokens=self.n_prompt, completion_tokens=0, cached_tokens=self.n_cached)

    def computed(self, n_rows: int, engine_s: float) -> None:
        """Count a step's rows of this request, and their share of its time."""
        if self.first_s is None:
            self.n_prefilled += n_rows
            self.prefill_engine_s += engine_s
        else:
            self.decode_engine_s += engine_s

    def choose(self, logits: NDArray[np.float32]) -> list[int]:
        """Choose the next token, and give with it those that the answer's form leaves no choice about.

        Raises BackendStepError for logits that are no numbers, InvalidRequestError for a form that takes too much.
        """
        if self.form is None:
            return [self.sampler.sample(logits)]
        # A token that was not chosen from logits has no probability to tell.
        forces = self.request.top_logprobs is None and self.n_answer + 1 >= self.request.max_signals
        return self.form.take(self.sampler.sample(logits, self.form.allowed), forces=forces)

    def guess(self, n: int) -> list[int]:
        """Guess up to n tokens that may come next."""
        if self.lookup is None:
            return []
        return self.fitting(self.lookup.draft(n))

    def fitting(self, draft: list[int]) -> list[int]:
        """Cut guesses where the answer's form forbids them."""
        return draft if self.form is None else draft[: self.form.n_allowed(draft)]

    def n_guessed(self, start: int, guess: ListOf[int]) -> int:
        """Count how many tokens from start on are the guessed ones, up to the first that is not."""
        n_same = 0
        while n_same < len(guess) and self.token_ids[start + n_same : start + n_same + 1] == [guess[n_same]]:
            n_same += 1
        return n_same

    def extend(self, token_ids: ListOf[int], logits: NDArray[np.float32], session: TokenSession) -> FinishReason | None:
        """Add what choose gave, as far as the answer goes; say how it ends if it does."""
        request = self.request
        n_after = len(self.token_ids) + len(token_ids)
        for token_id in token_ids:
            self.token_ids.append(token_id)
            if self.lookup is not None:
                self.lookup.push()
            if self.record is not None:
                self.record.push(token_id)
            if token_id in session.vocab.eog_ids and not request.ignore_eos:
                return self._end
            self._accept(token_id, logits, session.piece)
            if self.text.stopped:
                return "stop"
            is_cut = self.n_answer == request.max_tokens or len(self.token_ids) >= session.caps.n_ctx
            if is_cut and len(self.token_ids) < n_after:
                return "length"
        # Where its form leaves nothing to come but the end, that needs no step.
        if self.form is not None and self.form.is_whole:
            return self._end
        return "length" if is_cut else None

    @property
    def _end(self) -> FinishReason:
        """Say how the answer ends where the model ends it."""
        return "tool_calls" if self.text.n_calls else "stop"

    def _accept(self, token_id: int, logits: NDArray[np.float32], piece: Callable[..., bytes]) -> None:
        """Add a token to the answer that is sent, with what the request wants to know of the logits it came from."""
        if self.request.top_logprobs is not None:
            self._logprobs.append(self._scored(logits, token_id, self.request.top_logprobs, piece))
        if self.n_answer <= self.request.max_signals:
            self._signals.append(self.sampler.signal(logits, token_id))
        self.sampler.accept(token_id)
        self._ids.append(token_id)
        self._text.append(self.text.push(token_id))

    def _scored(
        self, logits: NDArray[np.float32], token_id: int, n_top: int, piece: Callable[..., bytes]
    ) -> TokenLogprob:
        logprob, top = self.sampler.logprobs(logits, token_id, n_top)
        best = tuple((i, piece(i, special=True), value) for i, value in top)
        return TokenLogprob(token_id=token_id, raw=piece(token_id, special=True), logprob=logprob, top=best)

    def send(self, now_s: float) -> None:
        """Send what there is."""
        is_first = len(self._ids) == self.n_answer
        self.sink.chunk(self._take(usage=self._prompt_usage if is_first else None))
        self.sent_s = now_s

    def finish(self, reason: FinishReason, now_s: float) -> None:
        """Send the last chunk with the account of the whole request."""
        self._text.append(self.text.flush())
        started_s = self.submitted_s if self.started_s is None else self.started_s
        first_s = now_s if self.first_s is None else self.first_s
        usage = Usage(prompt_tokens=self.n_prompt, completion_tokens=self.n_answer, cached_tokens=self.n_cached)
        timings = Timings(
            queue_s=started_s - self.submitted_s,
            prefill_s=first_s - started_s,
            prefill_tokens=self.n_prefilled,
            decode_s=now_s - first_s,
            decode_tokens=max(0, self.n_answer - 1),
            ttft_s=first_s - self.submitted_s,
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted,
            prefill_engine_s=self.prefill_engine_s,
            decode_engine_s=self.decode_engine_s,
        )
        self.sink.chunk(self._take(reason, usage, timings))

    def _take(
        self, reason: FinishReason | None = None, usage: Usage | None = None, timings: Timings | None = None
    ) -> Chunk:
        chunk = Chunk(
            text="".join(self._text),
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            signals=tuple(self._signals),
            finish_reason=reason,
            usage=usage,
            timings=timings,
            stopped_by="" if reason is None else self.text.stopped_by,
            tool_calls=self.text.take_calls(),
        )
        self._text, self._ids, self._logprobs, self._signals = [], [], [], []
        return chunk


def parts_of(running: ListOf[Sequence]) -> list[tuple[int, int]]:
    """Give of each sequence how many tokens its KV holds, and how many more the next step may compute."""
    n_scored = sum(sequence.is_scored for sequence in running)
    max_scored = min(_MAX_SCORED, _MAX_SCORED_TOGETHER // n_scored) if n_scored else 0
    parts = []
    for sequence in running:
        n_missing = len(sequence.token_ids) - sequence.n_computed
        parts.append((sequence.n_computed, min(n_missing, max(max_scored, 1)) if sequence.is_scored else n_missing))
    return parts
