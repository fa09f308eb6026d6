"""How many guessed tokens the next step checks: decided by their chances and by what rows cost.

A step of more rows takes longer. How much longer depends on the model, the kernels, the threads and the neighbours, so
it is measured. With many sequences in a step each further row costs nearly as much as a step of its own would gain, and
the same reckoning leaves the guesses out.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any

from edge_rt.backends.base import SeqRows
from edge_rt.engine.draft_gate import BETTER, blend
from edge_rt.engine.draft_model import Draft, DraftModel
from edge_rt.engine.drafts import PromptLookup
from edge_rt.engine.model_guesses import ModelGuesses, PlainStep
from edge_rt.engine.prefix import Slot
from edge_rt.engine.sequence import Sequence
from edge_rt.engine.settings import EngineSettings
from edge_rt.types import Capabilities, GenerateRequest

_N_FRESH = 256  # what was measured longer ago than so many steps is not believed: it is tried again
_N_SWEEP = 64


@dataclass(slots=True)
class _Cost:
    seconds: float
    seen: int


class StepCosts:
    """The time a decode step takes, by its number of rows.

    row_s  what a row of a long prompt takes, 0 if unknown: the cost of rows beyond what was measured
    """

    def __init__(self) -> None:
        self.row_s = 0.0
        self._costs: dict[int, _Cost] = {}
        self._known: list[int] = []
        self._n_seen = 0

    def observe(self, n_rows: int, seconds: float) -> None:
        """Take the measured time of a step."""
        self._n_seen += 1
        cost = self._costs.get(n_rows)
        if cost is None:
            self._costs[n_rows] = _Cost(seconds, self._n_seen)
            self._known = sorted(self._costs)
        else:
            cost.seconds = blend(cost.seconds, seconds)
            cost.seen = self._n_seen
        if self._n_seen % _N_SWEEP == 0:
            self._costs = {n: cost for n, cost in self._costs.items() if self._n_seen - cost.seen < _N_FRESH}
            self._known = sorted(self._costs)

    def seconds(self, n_rows: int) -> float:
        """Estimate a step's time: as measured, between two measured ones on a straight line, 0 if nothing is known."""
        cost = self._costs.get(n_rows)
        if cost is not None:
            return cost.seconds
        at = bisect_left(self._known, n_rows)
        if not self._known:
            return 0.0
        if at == 0:
            return self._costs[self._known[0]].seconds
        low = self._known[at - 1]
        low_s = self._costs[low].seconds
        if at == len(self._known):
            return low_s + (n_rows - low) * self.row_s
        high = self._known[at]
        return low_s + (self._costs[high].seconds - low_s) * (n_rows - low) / (high - low)


def share(chances: ListOf[ListOf[float]], *, n_rows: int, n_max: int, seconds: Callable[[int], float]) -> list[int]:
    """Choose how many guessed tokens of each sequence the next step checks.

    chances  of each sequence's guesses, falling
    n_rows   rows of the step without guesses: one of each sequence, which gives one token
    n_max    guesses there is room for
    seconds  what a step of so many rows takes, 0 if unknown

    The likeliest guesses come first, and as many as make the most expected tokens per second.
    """
    n_chosen = [0] * len(chances)
    base_s = seconds(n_rows)
    if base_s <= 0.0:
        return n_chosen
    order = sorted(((chance, i) for i, each in enumerate(chances) for chance in each), reverse=True)[: max(n_max, 0)]
    best_rate, n_best = BETTER * n_rows / base_s, 0
    expected = float(n_rows)
    for n, (chance, _) in enumerate(order, 1):
        expected += chance
        step_s = seconds(n_rows + n)
        if step_s > 0.0 and expected / step_s > best_rate:
            best_rate, n_best = expected / step_s, n
    for _, i in order[:n_best]:
        n_chosen[i] += 1
    return n_chosen


class Speculation:
    """Guesses for the sequences of one engine: from their own words, and from a drafting model if there is one.

    settings  whose max_draft bounds what one sequence guesses in a step; 0 is off
    model     that drafts; closed with this
    """

    def __init__(
        self,
        caps: Capabilities,
        settings: EngineSettings,
        *,
        model: DraftModel | None = None,
        eog_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caps = caps
        self._settings = settings
        self._max_draft = settings.max_draft if caps.can_trim else 0
        self._costs = StepCosts()
        self._model: ModelGuesses | None = None
        if model is not None:
            self._model = ModelGuesses(model, eog_ids, clock=clock, min_chance=settings.min_draft_chance)
        self._step: tuple[int, int, float] | None = None  # rows without guesses, guesses, seconds
        self._n_accepted = 0

    def max_draft(self, request: GenerateRequest) -> int:
        """Give how many tokens may be guessed in a step of this request.

        Where a row's logits depend on the batch, guesses may turn a near tie. So a request that asks for a repeatable
        answer, by a seed or by being greedy, gets them there only if it asks for them too.
        """
        if request.beams is not None:
            return 0
        if request.max_draft is not None:
            return min(request.max_draft, self._max_draft)
        sampling = request.sampling
        is_repeatable = sampling.temperature <= 0.0 or sampling.seed is not None
        return 0 if is_repeatable and not self._caps.is_batch_invariant else self._max_draft

    def lookup(self, request: GenerateRequest, token_ids: list[int]) -> PromptLookup | None:
        """Index a request's prompt, if anything is to be guessed for it; any thread may call this."""
        if not self.max_draft(request) or request.max_tokens == 1:
            return None
        n_ctx = self._caps.n_ctx
        n_max = n_ctx if request.max_tokens is None else min(len(token_ids) + request.max_tokens, n_ctx)
        return PromptLookup(token_ids, n_max)

    def warm_up(self) -> None:
        """Let the drafting model compute a little, so that its times are known."""
        if self._model is not None and self._max_draft:
            self._model.warm_up()

    def drafts(self, running: ListOf[Sequence], *, n_free: int, row_s: float) -> dict[int, list[int]]:
        """Choose the guesses that the next step checks, by the sequence's place in running.

        None while a prompt is computed: its part of the step is sized for how long it holds up the others.

        n_free  KV cells that nobody holds
        row_s   what a row of a long prompt takes, 0 if unknown
        """
        if not self._max_draft or any(len(s.token_ids) - s.n_computed != 1 for s in running):
            return {}
        wanted = [self._n_wanted(sequence) for sequence in running]
        chances = [
            [] if sequence.lookup is None else sequence.lookup.chances(n)
            for sequence, n in zip(running, wanted, strict=True)
        ]
        if self._model is None and not any(chances):
            return {}
        n_rows = sum(sequence.n_places for sequence in running)
        n_max = min(n_free, self._caps.n_batch) - n_rows
        self._costs.row_s = row_s
        chosen = self._share(chances, n_rows, n_max)
        drafts: dict[int, Draft] = {}
        if self._model is not None:
            drafts = self._ask_model(self._model, running, wanted, chances, chosen, n_rows, n_max)
            if drafts:
                chosen = self._share(chances, n_rows, n_max)
        guesses = {}
        for i, (sequence, n) in enumerate(zip(running, chosen, strict=True)):
            draft = drafts.get(i)
            guess = (sequence.guess(n) if draft is None else sequence.fitting(draft.token_ids[:n])) if n else []
            if guess and (draft is None or len(guess) >= self._settings.min_draft):
                sequence.is_by_model = draft is not None
                guesses[i] = guess
        return guesses

    def observe(self, batch: ListOf[SeqRows], seconds: float) -> None:
        """Take the measured time of a step; one that computed a part of a prompt says nothing here."""
        self._step = None
        if self._max_draft and all(rows.want_all or (rows.want_logits and len(rows.token_ids) == 1) for rows in batch):
            n_rows = sum(len(rows.token_ids) for rows in batch)
            self._costs.observe(n_rows, seconds)
            self._step = len(batch), n_rows - len(batch), seconds

    def settle(self, n_accepted_total: int) -> None:
        """Hear how many guesses were right until now, the last step's among them."""
        n_accepted, self._n_accepted = n_accepted_total - self._n_accepted, n_accepted_total
        if self._model is not None and self._step is not None:
            n_rows, n_guesses, seconds = self._step
            usual_s = self._costs.seconds(n_rows + n_guesses)
            self._model.settle(n_rows, n_guesses, n_accepted, seconds, usual_s=usual_s)
        self._step = None

    def forget(self, slot: Slot) -> None:
        """Hear that a sequence has left its slot."""
        if self._model is not None:
            self._model.forget(slot.seq_id)

    def set_threads(self, n_threads: int) -> None:
        if self._model is not None:
            self._model.set_threads(n_threads)

    def stats(self) -> dict[str, Any]:
        """Give the fields of EngineStats that tell of the drafting model."""
        model = self._model
        if model is None:
            return {}
        return {"draft_model": model.name, "draft_bytes": model.n_bytes, "drafting_s_total": model.total_s}

    def close(self) -> None:
        if self._model is not None:
            self._model.close()

    def _share(self, chances: ListOf[ListOf[float]], n_rows: int, n_max: int) -> list[int]:
        if not any(chances):
            return [0] * len(chances)
        return share(chances, n_rows=n_rows, n_max=n_max, seconds=self._costs.seconds)

    def _ask_model(
        self,
        model: ModelGuesses,
        running: ListOf[Sequence],
        wanted: ListOf[int],
        chances: list[list[float]],
        chosen: ListOf[int],
        n_rows: int,
        n_max: int,
    ) -> dict[int, Draft]:
        """Have the model draft where that beats the sequences' own words; its chances take the place of theirs."""
        plain = PlainStep(
            n_rows=n_rows,
            n_max_rows=n_rows + n_max,
            others=[(sum(each[:n]), n) for each, n in zip(chances, chosen, strict=True)],
            step_s=self._costs.seconds,
            n_left=[self._n_left(sequence) for sequence in running],
            max_hold_s=self._settings.max_stall_s / 2,
        )
        drafts = {}
        for i, draft in model.guess(running, wanted, plain).items():
            record = running[i].record
            own = record.chances(draft) if record is not None else []
            if sum(own) > plain.others[i][0]:
                chances[i], drafts[i] = own, draft
        return drafts

    def _n_wanted(self, sequence: Sequence) -> int:
        """Count the tokens that may be guessed for a sequence: the step gives one more than it checks."""
        return max(0, min(self.max_draft(sequence.request), self._n_left(sequence) - 1))

    def _n_left(self, sequence: Sequence) -> int:
        n_left = self._caps.n_ctx - len(sequence.token_ids)
        if sequence.request.max_tokens is not None:
            n_left = min(n_left, sequence.request.max_tokens - sequence.n_answer)
        return n_left
