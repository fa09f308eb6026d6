"""What a step's logits bring: the tokens that answers go on with, and which of them have ended."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import SeqRows, TokenSession
from edge_rt.engine.beam_sequence import BeamSequence
from edge_rt.engine.sequence import Sequence
from edge_rt.engine.slots import Slots
from edge_rt.engine.totals import Totals
from edge_rt.types import FinishReason

_F32 = NDArray[np.float32]


class Choices:
    """Chooses the next tokens of sequences whose rows were computed, and counts them."""

    def __init__(self, session: TokenSession, slots: Slots, totals: Totals) -> None:
        self._session, self._slots, self._totals = session, slots, totals

    def take(
        self, sequence: Sequence, own: ListOf[SeqRows], logits: Iterator[_F32], now_s: float
    ) -> FinishReason | None:
        """Take the logits of a sequence's rows, if it wanted any; say how its answer has ended with them, if it has.

        Raises BackendStepError for broken ones, and what a form raises.
        """
        rows = own[0]
        if rows.want_all and sequence.is_scored_from(rows.start):
            scored = next(logits)
            sequence.score(rows.start, scored, self._session.piece)
            return self._choose(sequence, scored[-1], now_s) if rows.want_logits else None
        if not rows.want_logits:
            return None
        if isinstance(sequence, BeamSequence):
            return self._search(sequence, [next(logits) for _ in own], now_s)
        if rows.want_all:
            return self._check_draft(sequence, rows.token_ids[1:], next(logits), now_s)
        return self._choose(sequence, next(logits), now_s)

    def _check_draft(self, sequence: Sequence, draft: ListOf[int], logits: _F32, now_s: float) -> FinishReason | None:
        """Choose tokens as long as they are the guessed ones, then forget the rows of the other guesses.

        Each token is chosen once, by the request's own rule and from the logits after the tokens before it, as without
        guesses; so the answer is the same, and with a seed the same in every token.
        """
        slot = sequence.slot
        assert slot is not None
        n_before, n_known, n_right = len(slot.token_ids) - len(draft), len(sequence.token_ids), 0
        sequence.n_drafted += len(draft)
        self._totals.count_guesses(len(draft), 0, by_model=sequence.is_by_model)
        while (finish := self._choose(sequence, logits[n_right], now_s)) is None:
            n_chosen = len(sequence.token_ids) - n_known - n_right  # a form may have forced some after the first
            n_same = sequence.n_guessed(n_known + n_right, draft[n_right:])
            n_right += n_same
            sequence.n_accepted += n_same
            self._totals.count_guesses(0, n_same, by_model=sequence.is_by_model)
            if n_same < n_chosen:
                break
        n_right += n_before
        if n_right < len(slot.token_ids):
            self._session.seq_trim(slot.seq_id, n_right)
            del slot.token_ids[n_right:]
        return finish

    def _search(self, sequence: BeamSequence, logits: ListOf[_F32], now_s: float) -> FinishReason | None:
        """Choose the next beams, and copy those that go on in several ways."""
        copies = sequence.advance(logits)
        if sequence.first_s is None:
            sequence.first_s = now_s
        if copies is None:
            self._totals.completion_tokens += sequence.n_answer
            return sequence.found[0].finish_reason
        for source, slot in copies:
            self._slots.copy(source, slot)
        return None

    def _choose(self, sequence: Sequence, logits: _F32, now_s: float) -> FinishReason | None:
        if sequence.request.max_tokens == 0:
            return "length"
        token_ids = sequence.choose(logits)
        if sequence.first_s is None:
            sequence.first_s = now_s
        n_before = sequence.n_answer
        finish = sequence.extend(token_ids, logits, self._session)
        n_added = sequence.n_answer - n_before
        self._totals.completion_tokens += n_added
        self._totals.forced += max(0, n_added - 1)
        return finish
