"""Guesses of a head on the session of the model that checks them: it reads the last row's hidden state there."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING

from edge_rt.backends.drafting import Drafting, HeadAsk
from edge_rt.engine.draft_model import Ask, Draft

if TYPE_CHECKING:
    from edge_rt.catalog.draft_head import DraftHead

_MAX_DRAFT = 6  # further on a head that sees one state only is right too seldom


class HeadDrafts:
    """A DraftModel. It computes with its session's threads, holds nothing of sequences and ends with its session.

    Raises ModelFormatError where the head does not fit the session's model.
    """

    def __init__(self, session: Drafting, head: DraftHead) -> None:
        self.name = head.path.name
        self.max_draft = _MAX_DRAFT
        self._session = session
        session.load_head(head)

    @property
    def n_bytes(self) -> int:
        return self._session.head_bytes()

    def n_missing(self, ask: Ask) -> int | None:
        return 0 if self._session.can_draft(ask.seq_id) else None

    def compute(self, ask: Ask, n_rows: int) -> int:  # noqa: ARG002
        """Compute nothing: what a head reads is there or not."""
        return 0

    def propose(self, asks: ListOf[Ask]) -> list[Draft]:
        """Guess in one call of the session. Bias and form are left to the check. Raises BackendStepError."""
        wanted = [
            HeadAsk(ask.seq_id, ask.token_ids[-1], min(ask.n_max, self.max_draft), ask.min_chance) for ask in asks
        ]
        return [Draft(token_ids, chances) for token_ids, chances in self._session.draft(wanted)]

    def forget(self, seq_id: int) -> None:
        """Do nothing: the session forgets a sequence's states with the sequence."""

    def set_threads(self, n_threads: int) -> None:
        """Do nothing: the session's threads compute."""

    def close(self) -> None:
        """Do nothing: the session frees the head."""
