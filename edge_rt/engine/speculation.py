"""How many guessed tokens the next step checks: decided by their chances and by what rows cost.

A step of more rows takes longer. How much longer depends on the model, the kernels, the threads and the neighbours, so
it is measured. With many sequences in a step each further row costs nearly as much as a step of its own would gain, and
the same reckoning leaves the guesses out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from edge_rt.backends.base import SeqRows
from edge_rt.engine.drafts import PromptLookup
from edge_rt.engine.sequence import Sequence
from edge_rt.types import Capabilities, GenerateRequest

_BETTER = 1.03  # expected tokens per second must rise by this, or it is not worth the risk
_NEW_SHARE = 0.2
_MAX_JUMP = 2.0  # a step that was held up by something else counts as this many times the usual
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
            cost.seconds += _NEW_SHARE * (min(seconds, _MAX_JUMP * cost.seconds) - cost.seconds)
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
    best_rate, n_best = _BETTER * n_rows / base_s, 0
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
    """Guesses for the sequences of one engine. max_draft bounds what one sequence guesses in a step; 0 is off."""

    def __init__(self, caps: Capabilities, max_draft: int) -> None:
        self._caps = caps
        self._max_draft = max_draft if caps.can_trim else 0
        self._costs = StepCosts()

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

    def drafts(self, running: ListOf[Sequence], *, n_free: int, row_s: float) -> dict[int, list[int]]:
        """Choose the guesses that the next step checks, by the sequence's place in running.

        None while a prompt is computed: its part of the step is sized for how long it holds up the others.

        n_free  KV cells that nobody holds
        row_s   what a row of a long prompt takes, 0 if unknown
        """
        if not self._max_draft or any(len(s.token_ids) - s.n_computed != 1 for s in running):
            return {}
        chances = [self._chances(sequence) for sequence in running]
        if not any(chances):
            return {}
        n_rows = sum(sequence.n_places for sequence in running)
        self._costs.row_s = row_s
        n_max = min(n_free, self._caps.n_batch) - n_rows
        n_chosen = share(chances, n_rows=n_rows, n_max=n_max, seconds=self._costs.seconds)
        guesses = {i: s.guess(n) for i, (s, n) in enumerate(zip(running, n_chosen, strict=True)) if n}
        return {i: guess for i, guess in guesses.items() if guess}

    def observe(self, batch: ListOf[SeqRows], seconds: float) -> None:
        """Take the measured time of a step; one that computed a part of a prompt says nothing here."""
        if self._max_draft and all(rows.want_all or (rows.want_logits and len(rows.token_ids) == 1) for rows in batch):
            self._costs.observe(sum(len(rows.token_ids) for rows in batch), seconds)

    def _chances(self, sequence: Sequence) -> list[float]:
        if sequence.lookup is None:
            return []
        n_left = self._caps.n_ctx - len(sequence.token_ids)
        if sequence.request.max_tokens is not None:
            n_left = min(n_left, sequence.request.max_tokens - sequence.n_answer)
        # The step gives one token more than it checks.
        return sequence.lookup.chances(min(self.max_draft(sequence.request), n_left - 1))
