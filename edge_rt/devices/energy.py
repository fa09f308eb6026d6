"""From what a meter tells now and then to joules between any two moments.

Standard library only, because powerd keeps such an account too. Times are of the monotonic clock.

A meter with a counter is believed by its counter; of one that tells power only, neighbouring values make a trapezoid.
Where values are missing for longer than three of their periods there is a gap: its energy is not known, and it counts
neither as zero nor as what was before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from edge_rt.devices.base import Reading
from edge_rt.devices.meters import Sample

GAP_PERIODS: Final = 3.0

_MAX_KNOTS: Final = 8192  # 200 s at 20 Hz in the newer half …
_AGE_STEPS: Final = 256.0  # … and what is older to this share of its age
_MAX_COUNTER_S: Final = 30.0  # a counter knows what was used meanwhile, but not when
_SAME_S: Final = 1e-4  # closer values are one, read twice
_MAX_W: Final = 1e5


class Curve:
    """A total that only grows, over time: known at knots and straight in between, in bounded memory.

    With max_knots the newer half stays as it is, and of the older ones those that are closer to each other than a
    share of their age go. The total at those that stay is what it was.

    min_step_s  knots are no closer; of those that come closer the last one stays
    """

    __slots__ = ("_max_knots", "_min_step_s", "_times", "_totals")

    def __init__(self, *, max_knots: int = _MAX_KNOTS, min_step_s: float = 0.0) -> None:
        self._times: list[float] = []
        self._totals: list[float] = []
        self._max_knots, self._min_step_s = max_knots, min_step_s

    def __len__(self) -> int:
        return len(self._times)

    @property
    def end_s(self) -> float | None:
        return self._times[-1] if self._times else None

    @property
    def total(self) -> float:
        return self._totals[-1] if self._totals else 0.0

    def add(self, at_s: float, amount: float) -> None:
        """Let the total grow by an amount from the last knot to at_s, which must not be before it."""
        total = self.total + amount
        if len(self._times) > 1 and at_s - self._times[-2] < self._min_step_s:
            self._times[-1], self._totals[-1] = at_s, total
            return
        self._times.append(at_s)
        self._totals.append(total)
        if len(self._times) > self._max_knots:
            self._thin(at_s)

    def _thin(self, now_s: float) -> None:
        n_old = len(self._times) - self._max_knots // 2
        ratio, last_s, kept = _AGE_STEPS, self._times[n_old], list[int]()
        while True:
            for at in range(n_old - 1, 0, -1):
                if last_s - self._times[at] >= (now_s - self._times[at]) / ratio:
                    kept.append(at)
                    last_s = self._times[at]
            kept.append(0)  # from which on all is counted
            if len(kept) <= self._max_knots // 2 - 1:
                break
            ratio, last_s, kept = ratio / 2, self._times[n_old], []
        kept.reverse()
        self._times[:n_old] = [self._times[at] for at in kept]
        self._totals[:n_old] = [self._totals[at] for at in kept]

    def at(self, at_s: float) -> float:
        """Give the total at a moment; before the first knot and after the last one it stands still."""
        times, totals = self._times, self._totals
        if not times or at_s <= times[0]:
            return totals[0] if totals else 0.0
        if at_s >= times[-1]:
            return totals[-1]
        after = bisect_right(times, at_s)
        low, high = times[after - 1], times[after]
        share = (at_s - low) / (high - low)
        return totals[after - 1] + share * (totals[after] - totals[after - 1])

    def between(self, from_s: float, to_s: float) -> float:
        return max(0.0, self.at(to_s) - self.at(from_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is known of the energy between two moments.

    energy_j   over those covered_s of the span_s for which there are values
    """

    span_s: float
    covered_s: float
    energy_j: float

    @property
    def coverage(self) -> float:
        """The share of the window for which there are values, 0..1; an empty window has none."""
        return min(1.0, self.covered_s / self.span_s) if self.span_s > 0 else 0.0

    @property
    def mean_w(self) -> float | None:
        """Mean power while there were values; None without any."""
        return self.energy_j / self.covered_s if self.covered_s > 0 else None


class EnergyLog:
    """Takes a meter's readings in order and tells the energy of windows. Belongs to one thread, or behind a lock.

    interval_s  the meter's; it may change
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._energy, self._covered = Curve(), Curve()
        self._last: Sample | None = None
        self._last_s = -math.inf
        self._power_w: float | None = None
        self._gap_s = GAP_PERIODS * interval_s
        self._is_broken = False
        self.reason = "nothing has been read yet"

    def take(self, reading: Reading[Sample], now_s: float, *, period_s: float = 0.0) -> None:
        """Take what was read at now_s.

        period_s  how often the meter is read now, where that is more seldom than it has new values

        A value that is not newer than the last one, by a clock that was set back or because the meter has no new one,
        changes nothing. One that cannot be is as good as none.
        """
        sample = reading.value
        problem = reading.reason if sample is None else _problem(sample)
        if sample is None or problem is not None:
            self.reason = f"{reading.source}: {problem}"
            self._is_broken = True  # a counter that was reset meanwhile goes on as if nothing had been
            return
        at_s = now_s - sample.age_s
        if at_s - self._last_s < _SAME_S:
            return
        self._gap_s = GAP_PERIODS * max(self.interval_s, period_s)
        dt_s = at_s - self._last_s
        energy_j = self._energy_j(sample, dt_s)
        if len(self._energy):
            self._energy.add(at_s, energy_j or 0.0)
            self._covered.add(at_s, dt_s if energy_j is not None else 0.0)
        else:
            self._energy.add(at_s, 0.0)
            self._covered.add(at_s, 0.0)
        self._power_w = sample.power_w
        if self._power_w is None and energy_j is not None:
            self._power_w = energy_j / dt_s
        self._last, self._last_s, self.reason, self._is_broken = sample, at_s, "", False

    def window(self, from_s: float, to_s: float) -> Window:
        """Give what is known between two moments. After the last value power stays as it was, for a gap's length."""
        energy_j, covered_s = self._energy.between(from_s, to_s), self._covered.between(from_s, to_s)
        if self._power_w is not None and to_s > self._last_s:
            held_s = max(0.0, min(to_s, self._last_s + self._gap_s) - max(from_s, self._last_s))
            energy_j += self._power_w * held_s
            covered_s += held_s
        return Window(span_s=max(0.0, to_s - from_s), covered_s=covered_s, energy_j=energy_j)

    @property
    def last_w(self) -> float | None:
        """The power by the last value; None where it told none."""
        return self._power_w

    @property
    def last_s(self) -> float | None:
        """When the last value was measured; None before the first one."""
        return self._last_s if math.isfinite(self._last_s) else None

    @property
    def total_j(self) -> float:
        """All energy that is known, over covered_s."""
        return self._energy.total

    @property
    def covered_s(self) -> float:
        return self._covered.total

    def power_w(self, now_s: float) -> float | None:
        """Give the power now; None after a gap's time without a value."""
        return self._power_w if now_s - self._last_s <= self._gap_s else None

    def _energy_j(self, sample: Sample, dt_s: float) -> float | None:
        """Give the energy since the last value; None: not known."""
        last = self._last
        if last is None:
            return None
        if sample.energy_j is not None and last.energy_j is not None and not self._is_broken:
            used_j = sample.energy_j - last.energy_j
            is_possible = 0 <= used_j <= _MAX_W * dt_s and dt_s <= max(self._gap_s, _MAX_COUNTER_S)
            return used_j if is_possible else None
        if sample.power_w is not None and last.power_w is not None and dt_s <= self._gap_s:
            return (sample.power_w + last.power_w) / 2 * dt_s
        return None


def _problem(sample: Sample) -> str | None:
    if sample.power_w is None and sample.energy_j is None:
        return "neither power nor energy"
    if sample.power_w is not None and not 0 <= sample.power_w <= _MAX_W:
        return f"{sample.power_w:g} W cannot be"
    if sample.energy_j is not None and not math.isfinite(sample.energy_j):
        return "its counter is no number"
    if not 0 <= sample.age_s < math.inf:
        return "its age is no number"
    return None
