"""Quieten a calibration's watts: neighbouring clocks say what a reading's noise hides. Standard library only. Pure.

Near the clock of fewest joules the curve is flat, so readings that are 2 % off lead to a clock some steps away from it.
Power hardly bends over a small part of the clocks' range: a line through the logarithms of what lies there, the near
ones counting most, has half of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_REACH = 0.16  # of the highest clock: three steps of most drivers; ladders with fewer steps are left as they are


def smoothed(hz: Sequence[float], watts: Sequence[float]) -> list[float]:
    """Fit each of the watts, all above 0, to those at clocks near its own; ascending clocks in Hz."""
    top_hz = hz[-1]
    points = [(clock / top_hz, math.log(value)) for clock, value in zip(hz, watts, strict=True)]
    return [math.exp(_at(x, points)) for x, _ in points]


def _at(x: float, points: Sequence[tuple[float, float]]) -> float:
    """Give the height at x of a line through points, weighed by their distance (tricube)."""
    weighed = [(at - x, y, (1 - (abs(at - x) / _REACH) ** 3) ** 3) for at, y in points if abs(at - x) < _REACH]
    s_0 = sum(w for _, _, w in weighed)
    s_1 = sum(w * d for d, _, w in weighed)
    s_2 = sum(w * d * d for d, _, w in weighed)
    t_0 = sum(w * y for _, y, w in weighed)
    t_1 = sum(w * d * y for d, y, w in weighed)
    spread = s_0 * s_2 - s_1 * s_1
    if spread <= 1e-12:  # no neighbour is near
        return t_0 / s_0
    return (s_2 * t_0 - s_1 * t_1) / spread
