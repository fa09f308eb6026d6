"""Drafting models over the null back end: they know its answers, and are right as often as a test says."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from edge_rt.backends.null import _next
from edge_rt.engine.draft_model import Ask, Draft
from edge_rt.errors import BackendStepError
from tests.fakes import FakeClock

WRONG = ord("#")  # no answer of the null model has it


class NullDraft:
    """Right with `acceptance`, by a seed; a guess takes token_s, and each further sequence a tenth of it more.

    Every prompt is missing at first, unless row_s is 0.
    """

    name = "null-draft"
    max_draft = 16
    n_bytes = 77

    def __init__(
        self,
        clock: FakeClock,
        acceptance: Callable[[], float] = lambda: 0.8,
        *,
        token_s: float = 0.001,
        row_s: float = 0.0,
        sureness: float | None = None,
        seed: int = 1,
    ) -> None:
        self._clock = clock
        self._acceptance = acceptance
        self._token_s, self._row_s = token_s, row_s
        self._sureness = sureness
        self._chance = random.Random(seed)
        self._held: dict[int, int] = {}
        self.fails = self.is_closed = False
        self.asked: list[list[tuple[int, int]]] = []  # tokens there were, and guesses wanted, of each call's sequences
        self.n_computed = 0

    def n_missing(self, ask: Ask) -> int | None:
        if self._row_s == 0.0:
            return 0
        return max(0, len(ask.token_ids) - 16 - self._held.get(ask.seq_id, 0))

    def compute(self, ask: Ask, n_rows: int) -> int:
        self._check()
        self._held[ask.seq_id] = self._held.get(ask.seq_id, 0) + n_rows
        self._clock.advance(n_rows * self._row_s)
        self.n_computed += n_rows
        return n_rows

    def propose(self, asks: ListOf[Ask]) -> list[Draft]:
        self._check()
        self.asked.append([(len(ask.token_ids), ask.n_max) for ask in asks])
        drafts = []
        for ask in asks:
            self._held[ask.seq_id] = len(ask.token_ids)
            draft = Draft([], [])
            while len(draft.token_ids) < ask.n_max:
                is_right = self._chance.random() < self._acceptance()
                chance = self._sureness if self._sureness is not None else (0.95 if is_right else 0.3)
                if chance < ask.min_chance:
                    break
                token_id = _next([*ask.token_ids, *draft.token_ids]) if is_right else WRONG
                draft.token_ids.append(token_id)
                draft.chances.append(chance)
            drafts.append(draft)
        n_rounds = max(
            len(draft.token_ids) + (len(draft.token_ids) < ask.n_max) for draft, ask in zip(drafts, asks, strict=True)
        )
        self._clock.advance(n_rounds * self._token_s * (0.9 + 0.1 * len(asks)))
        return drafts

    def forget(self, seq_id: int) -> None:
        self._held.pop(seq_id, None)

    def set_threads(self, n_threads: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def _check(self) -> None:
        assert not self.is_closed
        if self.fails:
            raise BackendStepError(reason="the draft was told to fail")
