"""What one engine has done since its model was loaded, for EngineStats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Totals:
    """Counts; step_rows are steps by their number of rows, as EngineStats has them."""

    steps: int = 0
    rows: int = 0
    step_rows: list[int] = field(default_factory=lambda: [0] * 11)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    forced: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    refused: int = 0
    cancelled: int = 0
    drafted: int = 0
    accepted: int = 0
    model_drafted: int = 0
    model_accepted: int = 0

    def count_step(self, n_rows: int) -> None:
        self.steps += 1
        self.rows += n_rows
        self.step_rows[min((n_rows - 1).bit_length(), len(self.step_rows) - 1)] += 1

    def count_guesses(self, n_drafted: int, n_accepted: int, *, by_model: bool) -> None:
        """Count guesses that were checked, or those of them that were right."""
        self.drafted += n_drafted
        self.accepted += n_accepted
        if by_model:
            self.model_drafted += n_drafted
            self.model_accepted += n_accepted

    def stats(self) -> dict[str, Any]:
        """Give the fields of EngineStats that count since the load."""
        return {
            "steps_total": self.steps,
            "rows_total": self.rows,
            "step_rows": tuple(self.step_rows),
            "prompt_tokens_total": self.prompt_tokens,
            "completion_tokens_total": self.completion_tokens,
            "forced_tokens_total": self.forced,
            "cached_tokens_total": self.cached_tokens,
            "preempted_total": self.preempted,
            "refused_total": self.refused,
            "cancelled_total": self.cancelled,
            "drafted_tokens_total": self.drafted,
            "accepted_tokens_total": self.accepted,
            "model_drafted_tokens_total": self.model_drafted,
            "model_accepted_tokens_total": self.model_accepted,
        }
