"""The highest level that watts and heat allow: pure, and before anything else that the governor wants.

Watts: never above what the calibrated worst case allows; a meter only takes away from that, at once, and gives it back
slowly and ever later each time it was wrong to. Without a calibration a meter alone has to do: then the way up goes one
level at a time, each only when the level above would hold at its worst. Without either only the lowest level is safe.

Heat: the temperature is foretold some seconds ahead by its slope, so that the kernel's own throttling is not met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edge_rt.power.levels import Model
from edge_rt.power.state import Limits, Observation, Work

STALE_S = 0.5  # a power reading older than this says nothing of now

_NEAR = 0.98  # of the cap: the meter's noise and delay
_FAR_ABOVE = 1.10
_ROOM = 0.92  # below this there may be room for a level more
_SETTLE_S = 0.25  # until the meter shows what the last change did
_BACK_S, _MAX_BACK_S = 5.0, 300.0
# How much more a level may take than what was seen while it decoded; prefill is the worst that this program does.
_SEEN_DECODING, _SEEN_COMPUTING = 1.9, 1.05

_AHEAD_S = 8.0
_HEAT_MARGIN_C, _HEAT_RETURN_C = 2.0, 6.0
_HEAT_SETTLE_S, _HOT_SETTLE_S = 2.0, 0.5
_SLOPE_S = 3.0  # over which the slope is smoothed
_MAX_SLOPE_C_S = 5.0  # what moves faster is a sensor that jumps
_BLIND_S = 2.0  # without a temperature after there was one


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """A level, and when it may rise again; back_s grows each time that rising was wrong."""

    level: int
    next_s: float = -math.inf  # no change before
    rise_s: float = -math.inf
    back_s: float = _BACK_S
    rose_s: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """The smoothed temperature and its slope."""

    at_s: float
    c: float
    slope_c_s: float = 0.0


def cap_w(observation: Observation, limits: Limits) -> float:
    """Give the watts that hold now; 0: none."""
    if observation.is_on_battery and limits.battery_w > 0:
        return min(limits.battery_w, limits.max_w) if limits.max_w > 0 else limits.battery_w
    return limits.max_w


def by_table(observation: Observation, cap: float, model: Model) -> int:
    """Find the highest level whose worst case is below the cap; the lowest if none is, or if nothing is known."""
    power = observation.power
    if not model.is_calibrated or (power is not None and power.boundary != model.boundary):
        return 0
    return max((i for i, level in enumerate(model.levels) if level.worst_w <= cap), default=0)


def measured_w(observation: Observation) -> float | None:
    """Give the power if it is one that can be acted on: fresh, finite, above 0 and not from a table of our own."""
    power = observation.power
    if power is None or power.power_w is None or power.quality == "modelled":
        return None
    if not (0 <= power.age_s <= STALE_S and 0 < power.power_w < math.inf):
        return None
    return power.power_w


def by_watts(
    observation: Observation, cap: float, model: Model, ceiling: Ceiling | None, *, level: int, work: Work | None
) -> Ceiling:
    """Move the ceiling of watts; level is what is in force and work what was done since it is."""
    now_s = observation.now_s
    table = by_table(observation, cap, model)
    has_table = model.is_calibrated and (observation.power is None or observation.power.boundary == model.boundary)
    if ceiling is None:
        ceiling = Ceiling(level=table, rise_s=now_s + _SETTLE_S)
    watts = measured_w(observation)
    if watts is None:
        # Blind: what was taken away stays so, and without a table nothing above the lowest is known to hold.
        return replace(ceiling, level=min(ceiling.level, table) if has_table else 0, rise_s=now_s + ceiling.back_s)
    if watts > cap * _NEAR:
        if now_s < ceiling.next_s:
            return ceiling
        back_s = min(ceiling.back_s * 2, _MAX_BACK_S) if now_s - ceiling.rose_s < 6 * ceiling.back_s else _BACK_S
        n_down = 1 if watts <= cap * _FAR_ABOVE else max(2, len(model.levels) // 4)
        lower = max(0, min(ceiling.level, level, table if has_table else ceiling.level) - n_down)
        return Ceiling(level=lower, next_s=now_s + _SETTLE_S, rise_s=now_s + back_s, back_s=back_s)
    highest = table if has_table else model.top
    if ceiling.level > highest:
        return replace(ceiling, level=highest)
    if ceiling.level == highest or now_s < max(ceiling.rise_s, ceiling.next_s):
        return ceiling
    if has_table:
        may_rise = watts < cap * _ROOM
    else:
        # Only what was seen at the ceiling itself, at work, foretells the level above it.
        may_rise = level == ceiling.level and work in {"prefill", "decode"}
        seen = _SEEN_COMPUTING if work == "prefill" else _SEEN_DECODING
        ratio = model.levels[ceiling.level + 1].hz / model.levels[ceiling.level].hz
        may_rise = may_rise and watts * seen * ratio**3 < cap * _ROOM
    if not may_rise:
        return ceiling
    wait_s = 2 * _SETTLE_S if not has_table else max(1.0, ceiling.back_s / 4)
    return replace(ceiling, level=ceiling.level + 1, next_s=now_s + _SETTLE_S, rise_s=now_s + wait_s, rose_s=now_s)


def warmed(observation: Observation, heat: Heat | None) -> Heat | None:
    """Smooth the temperature and its slope; an unknown one leaves what was known."""
    c, now_s = observation.temperature_c, observation.now_s
    if c is None or not math.isfinite(c):
        return heat
    if heat is None or now_s - heat.at_s > 4 * _SLOPE_S:
        return Heat(at_s=now_s, c=c)
    passed_s = now_s - heat.at_s
    if passed_s <= 0:
        return heat
    weight = 1 - math.exp(-passed_s / _SLOPE_S)
    # A second-order filter: the level follows with the slope, the slope follows what is left over.
    foretold = heat.c + heat.slope_c_s * passed_s
    error = c - foretold
    slope = heat.slope_c_s + weight * weight * error / passed_s
    slope = min(max(slope, -_MAX_SLOPE_C_S), _MAX_SLOPE_C_S)
    return Heat(at_s=now_s, c=foretold + min(1.0, 2 * weight) * error, slope_c_s=slope)


def by_heat(
    observation: Observation, limits: Limits, model: Model, ceiling: Ceiling | None, heat: Heat | None, *, level: int
) -> Ceiling:
    """Move the ceiling of heat; level is what is in force."""
    now_s = observation.now_s
    if ceiling is None:
        ceiling = Ceiling(level=model.top)
    if observation.throttled:
        is_hot = is_near = True
    elif heat is None:
        return ceiling  # never known: the kernel's own limit is all there is
    elif now_s - heat.at_s > _BLIND_S:
        # It was known and is lost: what half of the clock warms is safe wherever the whole was for some seconds.
        return replace(ceiling, level=min(ceiling.level, model.top // 2), rise_s=now_s + ceiling.back_s)
    else:
        is_hot = max(heat.c, observation.temperature_c or heat.c) >= limits.max_c - _HEAT_MARGIN_C / 2
        is_near = heat.c + max(heat.slope_c_s, 0.0) * _AHEAD_S > limits.max_c - _HEAT_MARGIN_C
    if is_near or is_hot:
        if now_s < ceiling.next_s:
            return ceiling
        back_s = min(ceiling.back_s * 2, _MAX_BACK_S) if now_s - ceiling.rose_s < 6 * ceiling.back_s else _BACK_S
        n_down = max(1, len(model.levels) // 6) if is_hot else 1
        return Ceiling(
            level=max(0, min(ceiling.level, level) - n_down),
            next_s=now_s + (_HOT_SETTLE_S if is_hot else _HEAT_SETTLE_S),
            rise_s=now_s + back_s,
            back_s=back_s,
        )
    assert heat is not None
    is_cool = heat.c + max(heat.slope_c_s, 0.0) * _AHEAD_S < limits.max_c - _HEAT_RETURN_C
    if ceiling.level < model.top and is_cool and now_s >= max(ceiling.rise_s, ceiling.next_s):
        rise_s = now_s + max(2.0, ceiling.back_s / 4)
        return replace(ceiling, level=ceiling.level + 1, next_s=now_s + _HEAT_SETTLE_S, rise_s=rise_s, rose_s=now_s)
    return ceiling
