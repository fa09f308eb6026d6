"""What computing an answer took, by a meter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What computing one answer took, by a meter. Where nothing was measured there is no Energy: it is never 0.

    total_j         the answer's share of all that was drawn while it was computed, idle power included
    above_idle_j    its share of what was drawn beyond idle power; None until that is known
    prefill_*, decode_*  of the phases; None for a model without tokens
    boundary        what was measured: the chip (soc), all that the plug gives (board), or one supply (rail)
    quality         measured by a sensor, derived from what was, or modelled without one
    source          the meter
    coverage        share of the time for which the meter had values, 0..1
    """

    total_j: float
    above_idle_j: float | None = None
    prefill_j: float | None = None
    prefill_above_idle_j: float | None = None
    decode_j: float | None = None
    decode_above_idle_j: float | None = None
    boundary: Literal["soc", "board", "rail"] = "board"
    quality: Literal["measured", "derived", "modelled"] = "measured"
    source: str = ""
    coverage: float = 1.0

    def phases(self) -> tuple[tuple[str, float, float | None], ...]:
        """Give (phase, total_j, above_idle_j) of each; a phase in which the meter was silent has what is left."""
        if self.prefill_j is None and self.decode_j is None:
            return (("compute", self.total_j, self.above_idle_j),)
        prefill_j = self.prefill_j if self.prefill_j is not None else max(0.0, self.total_j - (self.decode_j or 0.0))
        prefill_above_j = decode_above_j = None
        if (above_j := self.above_idle_j) is not None:
            prefill_above_j = self.prefill_above_idle_j
            if prefill_above_j is None:
                prefill_above_j = max(0.0, above_j - (self.decode_above_idle_j or 0.0))
            decode_above_j = max(0.0, above_j - prefill_above_j)
        return ("prefill", prefill_j, prefill_above_j), ("decode", max(0.0, self.total_j - prefill_j), decode_above_j)

    def plus(self, other: Energy) -> Energy:
        """Add what another model's part of the same answer took."""
        known = self.above_idle_j is not None and other.above_idle_j is not None
        return Energy(
            total_j=self.total_j + other.total_j,
            above_idle_j=(self.above_idle_j or 0.0) + (other.above_idle_j or 0.0) if known else None,
            boundary=self.boundary,
            quality=other.quality if other.quality != "measured" else self.quality,
            source=self.source,
            coverage=min(self.coverage, other.coverage),
        )

    @property
    def saved_j(self) -> float:
        """What it saves not to compute the answer: idle power is drawn all the same, where that is known."""
        return self.total_j if self.above_idle_j is None else self.above_idle_j
