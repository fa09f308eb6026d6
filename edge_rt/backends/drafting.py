"""The boundary for draft heads: what a token session gives that can guess from its own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from edge_rt.catalog.draft_head import DraftHead


@dataclass(frozen=True, slots=True)
class HeadAsk:
    """What a draft head is to guess: up to n_max tokens behind token_id, which follows what the sequence holds.

    A guess whose chance among the head's tokens is below min_chance ends them.
    """

    seq_id: int
    token_id: int
    n_max: int
    min_chance: float = 0.0


@runtime_checkable
class Drafting(Protocol):
    """A token session on whose hidden states a head can guess."""

    def load_head(self, head: DraftHead) -> None:
        """Load a head, which stays until the session closes. Raises ModelFormatError, BackendUnavailableError."""
        ...

    def head_bytes(self) -> int:
        """Count what the head adds to the memory, 0 without one."""
        ...

    def can_draft(self, seq_id: int) -> bool:
        """Say whether the hidden state of the sequence's last row is there: it is after a step that gave its logits."""
        ...

    def draft(self, asks: Sequence[HeadAsk]) -> list[tuple[list[int], list[float]]]:
        """Guess for several sequences at once: token ids and their chances for each, in order.

        Nothing where the hidden state is not there. Raises BackendStepError.
        """
        ...
