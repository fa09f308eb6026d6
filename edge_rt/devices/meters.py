"""What measures power or energy: one interface for counters, rails, chips and USB meters.

Standard library only, because powerd reads meters too.

A meter says where it measures (boundary) and how far its numbers can be trusted (quality). Two meters are never added
or compared across boundaries: a board takes more than its chip, and a rail is a part of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from edge_rt.devices.base import Reading, known, unknown

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


# What no machine that edge_rt is for can take: above it a reading is a driver's mistake, and a jump of a counter is a
# reset and no energy.
MAX_W = 10_000.0
MAX_ZONE_W = 1_000.0

_SLACK_S = 0.1  # a counter steps at times of its own


class Counter:
    """Turns a counter that wraps and may be reset into a total that only grows.

    range_j  where it starts again at 0; None: not known, so what was used before a step down is not known either
    max_w    what it counts cannot take more

    total_j leaves out what is not known. changed_s is when the value last moved: one that stands still is stale.
    """

    def __init__(self, range_j: float | None, max_w: float = MAX_ZONE_W) -> None:
        self._range_j = range_j
        self._max_w = max_w
        self._last_j: float | None = None
        self._last_s = 0.0
        self.total_j = 0.0
        self.changed_s = 0.0

    def update(self, value_j: float, now_s: float) -> str:
        """Take a reading of now_s; give "", or why the energy since the last reading is not known."""
        last_j, span_s = self._last_j, now_s - self._last_s
        self._last_j, self._last_s = value_j, now_s
        if last_j is None:
            self.changed_s = now_s
            return ""
        if value_j == last_j:
            return ""
        self.changed_s = now_s
        limit_j = self._max_w * (max(0.0, span_s) + _SLACK_S)
        gained_j = value_j - last_j
        if gained_j < 0:
            if self._range_j is None:
                return "the counter went back, and where it wraps cannot be read"
            gained_j += self._range_j
        if self._range_j is not None and limit_j >= self._range_j + gained_j:
            return f"not read for {span_s:.0f} s, in which the counter may have wrapped more than once"
        if not 0 <= gained_j <= limit_j:
            return f"the counter jumped by {value_j - last_j:g} J in {span_s:.3g} s: it was reset, or is wrong"
        self.total_j += gained_j
        return ""


def watts(power_w: float, source: str) -> Reading[float]:
    """Pass a power on if it can be one. Some mW below 0 are a shunt amplifier's offset, and are 0."""
    if -0.05 <= power_w < 0:
        return known(0.0, source)
    if not 0 <= power_w <= MAX_W:
        return unknown(source, f"tells {power_w:g} W, which cannot be")
    return known(power_w, source)


def mean_w(before: Sample, after: Sample, span_s: float) -> float | None:
    """Give the mean power between two samples: by the counter where there is one; None where it is not known.

    A counter that stands still says nothing: no machine that runs takes 0 W. Its meter may tell a power beside it.

    span_s  from when the one was measured to when the other was, not from one reading to the next
    """
    if before.energy_j is not None and after.energy_j is not None:
        if span_s > 0 and after.energy_j > before.energy_j:
            return (after.energy_j - before.energy_j) / span_s
        return after.power_w
    if before.power_w is not None and after.power_w is not None:
        return (before.power_w + after.power_w) / 2
    return after.power_w
