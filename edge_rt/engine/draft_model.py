"""What guesses tokens by computing them: the boundary between the engine and a model that drafts for another.

Two kinds fit. A model with a session of its own (session_drafts.py) holds each sequence in a KV of its own and computes
there what it lacks. A head on the session of the model itself reads the hidden state of the last row that was computed,
and is one call into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is wanted for one sequence.

    seq_id     of it in the session of the model that checks. Its KV there holds all of token_ids but the last: that one
               was just chosen from the logits of the row before it, and is computed together with what is guessed
    token_ids  prompt and answer, at least two; the sequence's own list, neither to be changed nor kept
    n_max      guesses wanted, at least 1; fewer may be given, none too
    min_chance an own probability below this ends the guessing: neither that guess nor any after it is wanted
    owner      whose tokens these are: what is held for another owner is not built on
    bias       what the request adds to the logits of some tokens
    n_allowed  counts how many of some tokens the answer's form lets come next, one after the other; None: all of them
    """

    seq_id: int
    token_ids: ListOf[int]
    n_max: int
    min_chance: float = 0.0
    owner: str = ""
    bias: Mapping[int, float] = field(default_factory=dict)
    n_allowed: Callable[[ListOf[int]], int] | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, one after the other, and the drafting model's own probability of each.

    The probability is of its softmax at temperature 1, over the part of the vocabulary that it knows. It need not be
    calibrated: how often guesses of which probability come true is measured.
    """

    token_ids: list[int]
    chances: list[float]


class DraftModel(Protocol):
    """Guesses how sequences go on. The engine's thread alone calls it, between two steps of the model that checks.

    No answer depends on what it gives: each guess is checked as one from the prompt's own words is. It may leave bias
    and n_allowed out of account, which costs right guesses only. Who calls it measures what its calls take, by
    sequences and tokens, and stops where that does not pay. It reaches the engine as TokenEngine's draft_model.

    A head on the model's own session implements it so. n_missing is 0 where the session has the hidden state of the
    sequence's last computed row, None where it has not: a prefix was restored or copied, and no step has computed a row
    since. compute is never called then. propose is the session's one call for all asks together. forget does nothing,
    because the session trims and copies the head's own KV with the sequence's. n_bytes is what the head adds.
    """

    name: str  # in logs, figures and errors
    max_draft: int  # guesses that it can make for one sequence at a time

    @property
    def n_bytes(self) -> int:
        """Count what it takes of the memory, weights and KV."""
        ...

    def n_missing(self, ask: Ask) -> int | None:
        """Count the rows to compute before it can guess, beyond the few that propose computes itself.

        None where it cannot guess for this sequence now.
        """
        ...

    def compute(self, ask: Ask, n_rows: int) -> int:
        """Compute so many of the missing rows, so that one call takes no longer than running streams may wait.

        returns how many it has computed. Raises BackendStepError.
        """
        ...

    def propose(self, asks: ListOf[Ask]) -> list[Draft]:
        """Guess for several sequences at once, none of which has missing rows: one Draft each, in order.

        Raises BackendStepError; then it is not asked again.
        """
        ...

    def forget(self, seq_id: int) -> None:
        """Hear that a sequence has left its slot, where another may come. What is still held may serve that one."""
        ...

    def set_threads(self, n_threads: int) -> None:
        """Compute on so many threads from the next call on, as the model that checks does."""
        ...

    def close(self) -> None:
        """Free everything; idempotent, and legal after any failure."""
        ...
