"""What measures power or energy: one interface for counters, rails, chips and USB meters.

Standard library only, because powerd reads meters too.

A meter says where it measures (boundary) and how far its numbers can be trusted (quality). Two meters are never added
or compared across boundaries: a board takes more than its chip, and a rail is a part of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from edge_rt.devices.base import Reading

# soc: the chip, with its memory where it counts that. board: all that the plug or battery gives. rail: one supply.
Boundary = Literal["soc", "board", "rail"]
# measured: by a shunt or the chip's own counter. derived: a sum or fit of what was measured. modelled: from the clock
# and load by a table; no sensor took part.
Quality = Literal["measured", "derived", "modelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a meter told at one moment; one of power_w and energy_j is set at least.

    energy_j  a running total with wraps and resets already taken out: it only grows; its zero means nothing
    age_s     how old the value was when it was read
    """

    power_w: float | None = None
    energy_j: float | None = None
    age_s: float = 0.0


class Meter(Protocol):
    """One source of power or energy. Belongs to one thread.

    name        for people: "rapl package-0 + dram", "ina3221 VDD_IN"
    interval_s  how often there is a new value; reading more often gives the same one again
    """

    name: str
    boundary: Boundary
    quality: Quality
    interval_s: float

    def read(self, now_s: float) -> Reading[Sample]:
        """Read now, at now_s of the monotonic clock; never waits for longer than some ms. Unknown is never 0."""
        ...

    def close(self) -> None: ...
