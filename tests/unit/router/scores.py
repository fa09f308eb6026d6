from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """What a scorer says, as a test wants it."""

    p_local: float
    p_cloud: float
    reasons: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        return self.p_cloud - self.p_local
