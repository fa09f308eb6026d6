"""Which clocks the machine gets: one pure decision from what is seen, in this order: limits, latency, energy.

A prompt is computing, so its time follows the clock: it gets the level that takes the fewest joules of those that bring
the first token in time. Decoding mostly waits for memory: it gets the level that takes the fewest joules of those that
keep the time per token. Joules are counted above idling, because a machine that has finished goes on idling. Whenever
a request waits behind another or is late, and for a prompt beside running answers, the machine races. A hint comes with
the request, before its work begins, so the clock rises first; a kernel governor sees the work only when it runs, and
takes waiting for memory for computing.

Everything that is remembered is in Memory, a value: the same calls give the same decisions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from edge_rt.power import advice, clamp
from edge_rt.power.learning import SHARED, TPOT_ROOM, Memory, learned, prior_prefill
from edge_rt.power.levels import Model
from edge_rt.power.state import HINT_S, Decision, Hint, Limits, Observation

DWELL_S = 0.1
MAX_SWITCHES_HZ = 5

_N_FOR_LIMITS, _N_FOR_UP = 1, 1  # of these switches a second, kept for limits and for going up
_TTFT_ROOM = 0.75
_LAG_S = 0.02  # from a hint to the clock
_SAME = 1.02  # a level is kept while its joules are below this times the fewest: no reason to switch
_WAIT_S = 0.15  # a request that waits longer waits for others, not for the next step
_BUSY, _CALM = 0.7, 0.4  # utilisation by other programs, at which they get the clock and lose it again
_CALM_S = 1.0
_BATTERY_EXTRA = 1.25  # joules per token that racing may cost on battery, relative to the best level


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    level: int
    reason: str
    memory: Memory = field(default_factory=Memory)


def decide(observation: Observation, limits: Limits, model: Model, memory: Memory) -> tuple[Decision, Memory]:
    """Choose the clocks for now.

    observation  at 20 Hz while there is work, at 1 Hz without, and at each hint; its time must not go back
    returns      a level of the model as clocks, and what to remember for the next call
    """
    memory = _on_threads(observation, model, memory)
    model = model if memory.advised is None else memory.advised.model
    memory = learned(observation, limits, model, memory)
    wish = _wish(observation, limits, model, memory)
    memory = wish.memory
    level, reason = wish.level, wish.reason
    in_force = memory.level if memory.level >= 0 else level
    work = memory.hint.work if memory.hint is not None else None

    cap_w = clamp.cap_w(observation, limits)
    cap = clamp.by_watts(observation, cap_w, model, memory.cap, level=in_force, work=work) if cap_w > 0 else None
    heat = clamp.warmed(observation, memory.heat)
    hot = clamp.by_heat(observation, limits, model, memory.hot, heat, level=in_force)
    ceiling = hot.level
    if cap is not None and cap.level <= ceiling:
        ceiling = cap.level
        reason = "cap" if level > ceiling else reason
    elif level > ceiling:
        reason = "heat"
    memory = replace(memory, cap=cap, hot=hot, heat=heat, looked_s=observation.now_s)
    moved = _move(observation.now_s, min(level, ceiling), ceiling, memory)
    max_hz = model.levels[moved.level].max_hz
    if moved.advised is None:
        return Decision(max_hz=max_hz, reason=reason), moved
    advised = advice.advise(
        observation,
        limits,
        moved.advised,
        moved.decode,
        ceiling=ceiling,
        cap_w=cap_w,
        is_late=moved.boost > 0,
    )
    if advised is not moved.advised:
        moved = replace(moved, advised=advised)
    return Decision(max_hz=max_hz, reason=reason, advice=advised.advice), moved


def _on_threads(observation: Observation, model: Model, memory: Memory) -> Memory:
    """Take note of on how many threads the daemon computes, and take what was learned over to them."""
    before = memory.advised
    now = advice.in_force(observation, model, before)
    if now is before:
        return memory
    memory = replace(memory, advised=now)
    if now is None or before is None or now.base is not before.base or model.threads is None:
        return memory
    return replace(
        memory,
        prefill=advice.moved(memory.prefill, model.threads.prefill, before.n_prefill, now.n_prefill),
        decode=advice.moved(memory.decode, model.threads.decode, before.n_decode, now.n_decode),
    )


def _move(now_s: float, wanted: int, ceiling: int, memory: Memory) -> Memory:
    """Go up at once and down after a while, seldom enough; the ceiling holds in any case."""
    level = memory.level
    if level < 0:
        return replace(memory, level=wanted, since_s=now_s, switched_s=(now_s,))
    if wanted == level:
        return memory
    recent = tuple(at_s for at_s in memory.switched_s if now_s - at_s < 1.0)
    n_left = MAX_SWITCHES_HZ - len(recent)
    if level > ceiling:
        # The last change of this second has to be enough, whatever a meter tells next.
        wanted = wanted if n_left > 1 else 0
    elif wanted > level:
        if n_left <= _N_FOR_LIMITS:
            return memory
    elif n_left <= _N_FOR_LIMITS + _N_FOR_UP or now_s - memory.since_s < DWELL_S:
        return memory
    return replace(memory, level=wanted, since_s=now_s, switched_s=(*recent, now_s)[-MAX_SWITCHES_HZ:])


# -- what is wanted --------------------------------------------------------------------------------------------------


def _wish(observation: Observation, limits: Limits, model: Model, memory: Memory) -> _Wish:
    hint = memory.hint
    if hint is None or observation.now_s - hint.sent_s > HINT_S:
        return _without_hint(observation, model, replace(memory, hint=None), "static")
    if hint.work == "idle" and not hint.n_waiting:
        return _without_hint(observation, model, memory, "idle")
    if memory.is_busy or memory.calm_since_s is not None:
        memory = replace(memory, is_busy=False, calm_since_s=None)
    if _must_race(observation.now_s, hint, memory):
        return _Wish(level=_race(observation, limits, model), reason="race", memory=memory)
    if hint.work == "prefill" or hint.n_waiting:
        return _prefill(observation, limits, model, memory, hint)
    return _decode(limits, model, memory, hint)


def _without_hint(observation: Observation, model: Model, memory: Memory, reason: str) -> _Wish:
    """Other programs get all clocks as long as they need them, and those of decoding, the thrifty ones, otherwise."""
    rest = _thriftiest_decode(model, memory, 1)
    used = observation.utilisation
    if memory.hint is not None and memory.looked_s < memory.hint.sent_s:
        used = 0.0  # since the last look the machine was busy with our own work
    now_s = observation.now_s
    is_busy, calm_since_s = memory.is_busy, memory.calm_since_s
    if used is None:
        is_busy = reason == "static"  # nothing is known at all: the kernel's governor decides alone
    elif used >= _BUSY:
        is_busy, calm_since_s = True, None
    elif is_busy and used <= _CALM:
        calm_since_s = now_s if calm_since_s is None else calm_since_s
        is_busy = now_s - calm_since_s < _CALM_S
    else:
        calm_since_s = None
    calm_since_s = calm_since_s if is_busy else None
    if (is_busy, calm_since_s) != (memory.is_busy, memory.calm_since_s):
        memory = replace(memory, is_busy=is_busy, calm_since_s=calm_since_s)
    if is_busy:
        return _Wish(level=model.top, reason="static" if reason == "static" else "others", memory=memory)
    return _Wish(level=rest, reason=reason, memory=memory)


def _must_race(now_s: float, hint: Hint, memory: Memory) -> bool:
    waits = memory.waiting_since_s is not None and now_s - memory.waiting_since_s >= _WAIT_S
    left_s = hint.ttft_left_s
    is_late = left_s is not None and left_s - (now_s - hint.sent_s) <= 0
    # Beside answers a prompt gets a part of each step only, and how large a part is the engine's affair.
    is_beside = left_s is not None and hint.n_prompt_tokens > 0 and hint.n_running > (0 if hint.n_waiting else 1)
    return waits or is_late or hint.n_waiting > 1 or memory.pressing or is_beside


def _race(observation: Observation, limits: Limits, model: Model) -> int:
    """Give the highest level; on battery the highest whose prompt tokens cost little more than the cheapest ones."""
    if not observation.is_on_battery or limits.battery_w <= 0:
        return model.top
    costs = [(level.prefill_w - model.idle_w) * level.prefill_s for level in model.levels]
    best = min(costs)
    return max(i for i, cost in enumerate(costs) if cost <= best * _BATTERY_EXTRA)


def _prefill(observation: Observation, limits: Limits, model: Model, memory: Memory, hint: Hint) -> _Wish:
    """Take the cheapest level that brings the first token in time, and race if none does."""
    n_units, phase = (hint.n_prompt_tokens, memory.prefill) if hint.n_prompt_tokens else (1, memory.job)
    if hint.ttft_left_s is None:
        phase = phase or prior_prefill(model)
    if phase is None:
        return _Wish(level=_race(observation, limits, model), reason="race", memory=replace(memory, promised=False))
    costs = []
    in_time = []
    left_s = math.inf
    if hint.ttft_left_s is not None:
        left_s = (hint.ttft_left_s - (observation.now_s - hint.sent_s)) * _TTFT_ROOM - _LAG_S
    # A prompt's tokens are told by its length, kept prefixes included: twice the usual error has to fit too. But what
    # comes after the told ones is raced for, so only they have to be in time at this level.
    told = max(n_units - memory.done, 0.0) * memory.caution
    beyond_s = 2 * memory.spread * n_units * memory.caution * phase.seconds(1.0)
    if not hint.n_prompt_tokens and hint.n_running:
        told, beyond_s = told * SHARED, beyond_s * SHARED
    for level in model.levels:
        unit_s = phase.seconds(model.share(level.hz))
        costs.append((level.prefill_w - model.idle_w) * unit_s)
        in_time.append(told * unit_s + beyond_s <= left_s)
    # A prompt that should have been done by now is larger than was told.
    if not any(in_time) or (memory.done > n_units and left_s < math.inf):
        return _Wish(level=_race(observation, limits, model), reason="race", memory=replace(memory, promised=False))
    best = _steady(costs, [i for i, ok in enumerate(in_time) if ok], memory.level)
    if memory.done > 0 and not memory.is_counted:
        best = max(best, memory.level)  # what is left is only known by what was told: no slower than it began
    return _Wish(level=best, reason="prefill", memory=replace(memory, promised=True))


def _decode(limits: Limits, model: Model, memory: Memory, hint: Hint) -> _Wish:
    steps_s = _decode_times(model, memory, max(hint.n_running, 1))
    costs = _decode_costs(model, steps_s)
    in_time = list(range(len(model.levels)))
    if memory.decode is not None:
        aim_s = limits.tpot_slo_s * TPOT_ROOM
        in_time = [i for i, step_s in enumerate(steps_s) if step_s <= aim_s]
    best = _steady(costs, in_time, memory.level) if in_time else model.top
    return _Wish(level=min(best + memory.boost, model.top), reason="decode", memory=memory)


def _decode_times(model: Model, memory: Memory, n: int) -> list[float]:
    """Give the time of a step at each level."""
    if memory.decode is None:
        return [level.decode_s for level in model.levels]
    return [memory.decode.seconds(model.share(level.hz), n) for level in model.levels]


def _decode_costs(model: Model, steps_s: list[float]) -> list[float]:
    """Give the joules above idling of a step at each level."""
    return [(level.decode_w - model.idle_w) * step_s for level, step_s in zip(model.levels, steps_s, strict=True)]


def _thriftiest_decode(model: Model, memory: Memory, n: int) -> int:
    return _steady(_decode_costs(model, _decode_times(model, memory, n)), list(range(len(model.levels))), -1)


def _steady(costs: list[float], allowed: list[int], present: int) -> int:
    """Find the cheapest of the allowed levels; stay where a neighbour of it is as good."""
    best = min(allowed, key=lambda i: (costs[i], -i))
    is_as_good = present in allowed and abs(best - present) <= 1 and costs[present] <= costs[best] * _SAME
    return present if is_as_good else best
