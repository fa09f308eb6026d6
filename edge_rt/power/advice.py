"""How many threads compute, and how many answers are decoded together: advice to the inference daemon. Pure.

Decoding waits for memory, whose bandwidth a few threads fill; the others wait with them, and take power. So decoding
gets the number of threads that takes the fewest joules at its best clock, of those that keep the time per token. A
prompt gets fewer than all only where that hardly makes it slower. Below a cap that not even the lowest clock keeps with
all threads, as many compute as the calibration's worst case allows. Answers that are decoded together share the reading
of the weights, so as many as keep the time per token are the cheapest; under a cap up to the very end of that time.

Only what was measured is advised: without a sweep of threads in the calibration there is no advice at all. Advice never
loosens a cap, for it is taken up some time after it was given, or not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edge_rt.power import levels, phase_model
from edge_rt.power.levels import Level, Model
from edge_rt.power.phase_model import Phase
from edge_rt.power.state import NO_ADVICE, Advice, Hint, Limits, Observation
from edge_rt.power.thread_model import PhaseThreads, ThreadModel

SETTLE_S = 0.2  # from advice until all that is decoded is decoded by it

_TPOT_ROOM = 0.80  # of the objective: what a number of threads is chosen for, as a clock is
_NEAR = 1.03  # the most threads are taken whose joules are below this times the fewest
_SAME = 1.05  # and what is in force is kept while it is below this times the fewest
_DWELL_S = 2.0  # between two changes that only save joules
_LATE_DWELL_S = 0.5  # and two that are to keep the time per token
_PREFILL_ROOM = 1.10  # how much longer a prompt may take than on the best number of threads
_BATCH_ROOM, _CAPPED_BATCH_ROOM = 0.90, 0.97  # of the time per token: up to where more answers may join
_NOISE = 0.02  # of a step's time, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """What is remembered.

    base                 the calibration's levels, on all threads
    model                the same on those that compute now
    n_prefill, n_decode  those, and since_s when
    advice, changed_s    the last, and when its threads changed; batch_s: its number of answers
    asked                what it was given for
    """

    base: Model
    model: Model
    n_prefill: int
    n_decode: int
    since_s: float
    advice: Advice = NO_ADVICE
    changed_s: float = -math.inf
    batch_s: float = -math.inf
    asked: tuple[object, ...] = ()


def in_force(observation: Observation, model: Model, advised: Advised | None) -> Advised | None:
    """Find on how many threads the daemon computes, and what the levels take on them; None without a sweep."""
    table = model.threads
    if table is None:
        return None
    hint = observation.hint
    most = min(hint.max_threads, table.n_most) if hint is not None and hint.max_threads else table.n_most
    if hint is None and advised is not None and advised.base is model:
        return advised  # nothing is computed: nothing is known to have changed
    n_prefill = min(observation.advice.n_prefill_threads or most, most)
    n_decode = min(observation.advice.n_decode_threads or most, most)
    if advised is not None and advised.base is model:
        if (advised.n_prefill, advised.n_decode) == (n_prefill, n_decode):
            return advised
        on = levels.on_threads(model, n_prefill, n_decode)
        return replace(advised, model=on, n_prefill=n_prefill, n_decode=n_decode, since_s=observation.now_s)
    return Advised(
        base=model,
        model=levels.on_threads(model, n_prefill, n_decode),
        n_prefill=n_prefill,
        n_decode=n_decode,
        since_s=observation.now_s,
    )


def prior(advised: Advised | None) -> Phase | None:
    """Give the times of decoding where the ladder has one clock, which cannot tell waiting from computing."""
    if advised is None or advised.base.threads is None or len(advised.base.levels) > 1:
        return None
    table, n = advised.base.threads.decode, advised.n_decode
    scale = advised.model.levels[0].decode_s / table.seconds(1.0, n)
    return phase_model.begin(table.waiting_s(n) * scale, table.computing_s(n) * scale)


def moved(phase: Phase | None, table: PhaseThreads, n_from: int, n_to: int) -> Phase | None:
    """Give what was learned on n_from threads as it is on n_to."""
    if phase is None or n_from == n_to:
        return phase
    waiting = _ratio(table.waiting_s(n_to), table.waiting_s(n_from))
    computing = _ratio(table.computing_s(n_to), table.computing_s(n_from))
    return replace(
        phase,
        a_s=phase.a_s * waiting,
        b_s=phase.b_s * computing,
        c_aa=phase.c_aa * waiting**2,
        c_ab=phase.c_ab * waiting * computing,
        c_bb=phase.c_bb * computing**2,
    )


def advise(
    observation: Observation,
    limits: Limits,
    advised: Advised,
    decode: Phase | None,
    *,
    ceiling: int,
    cap_w: float,
    is_late: bool,
) -> Advised:
    """Choose anew if anything has changed.

    decode   the learned times of a step, on the threads that compute now
    ceiling  the highest level that the limits allow; cap_w 0: there is no cap
    is_late  tokens came later than they should
    """
    hint, table = observation.hint, advised.base.threads
    if hint is not None and not hint.max_threads:
        return replace(advised, advice=NO_ADVICE) if advised.advice != NO_ADVICE else advised
    if hint is None or hint.work == "idle" or table is None:
        return advised
    if decode is None:
        return advised
    # A choice takes a hundred times as long as a look: it is made anew where something has changed by more than noise,
    # and with each hint where it has to wait.
    n_rows = max(hint.n_running, 1)
    speed = round(math.log(decode.seconds(1.0, n_rows)) / _NOISE)
    asked = (n_rows, hint.max_threads, hint.max_batch, ceiling, cap_w, advised.n_decode, is_late, speed)
    if advised.asked in (asked, (*asked, hint.sent_s)):
        return advised
    choice = _Choice(
        hint=hint,
        advised=advised,
        table=table,
        decode=decode,
        levels=advised.base.levels[: ceiling + 1],
        counts=tuple(n for n in table.counts if n <= hint.max_threads),
    )
    advised, waits = _batch(choice, limits, observation.now_s, is_capped=ceiling < advised.base.top)
    if table.has_power and choice.counts:
        is_below = _is_of_the_cap(observation, advised.base) and cap_w < advised.base.levels[0].worst_w
        bound_w = cap_w if is_below else 0.0
        advised, also_waits = _threads(choice, limits, advised, observation.now_s, bound_w=bound_w, is_late=is_late)
        waits = waits or also_waits
    return replace(advised, asked=(*asked, hint.sent_s) if waits else asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """All that a choice is made of. counts: the numbers of threads to choose among, ascending."""

    hint: Hint
    advised: Advised
    table: ThreadModel
    decode: Phase
    levels: tuple[Level, ...]
    counts: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return max(self.hint.n_running, 1)

    def step_s(self, level: Level, n_threads: int, n_rows: int) -> float:
        """Foretell a step by what was learned of those that run now, and by what was calibrated of others."""
        x, table = self.advised.base.share(level.hz), self.table.decode
        known_s = table.seconds(x, self.advised.n_decode, self.n_rows)
        return self.decode.seconds(x, self.n_rows) * table.seconds(x, n_threads, n_rows) / known_s

    def power_w(self, level_w: float, table: PhaseThreads, hz: float, n_threads: int) -> float:
        """Give the power above idling on so many threads."""
        return (level_w - self.advised.base.idle_w) * table.power_share(hz, n_threads, self.table.n_most)


def _threads(
    choice: _Choice, limits: Limits, advised: Advised, now_s: float, *, bound_w: float, is_late: bool
) -> tuple[Advised, bool]:
    """Choose the threads; True: a change is wanted that comes too soon after the last."""
    decode, is_urgent = _decode_threads(choice, limits, bound_w, is_late=is_late)
    prefill = _prefill_threads(choice, bound_w)
    before = advised.advice
    told = (_told(choice, prefill), _told(choice, decode))
    if told == (before.n_prefill_threads, before.n_decode_threads):
        return advised, False
    wait_s = 0.0 if bound_w else _LATE_DWELL_S if is_urgent else _DWELL_S
    if now_s - advised.changed_s < wait_s:
        return advised, True
    advice = replace(before, n_prefill_threads=told[0], n_decode_threads=told[1])
    return replace(advised, advice=advice, changed_s=now_s), False


def _told(choice: _Choice, n_threads: int) -> int | None:
    """Leave it to the daemon where it may use more threads than were measured, and all of those are wanted."""
    return None if n_threads == choice.table.n_most < choice.hint.max_threads else n_threads


def _decode_threads(choice: _Choice, limits: Limits, bound_w: float, *, is_late: bool) -> tuple[int, bool]:
    """Choose for decoding; True: what is in force does not keep the time per token."""
    counts = _below(choice, choice.table.decode, bound_w, choice.advised.base.levels[0].decode_w)
    present = max((n for n in counts if n <= choice.advised.n_decode), default=counts[0])
    aim_s = limits.tpot_slo_s * _TPOT_ROOM
    costs: dict[int, float] = {}
    table, n_rows = choice.table.decode, choice.n_rows
    parts = [(n, table.waiting_s(n, n_rows), table.computing_s(n)) for n in counts if not is_late or n >= present]
    for level in choice.levels:
        x = choice.advised.base.share(level.hz)
        scale = choice.decode.seconds(x, n_rows) / table.seconds(x, choice.advised.n_decode, n_rows)
        for n, waiting_s, computing_s in parts:
            step_s = scale * (waiting_s + computing_s * n_rows / x)
            if step_s <= aim_s:
                cost = choice.power_w(level.decode_w, table, level.hz, n) * step_s
                costs[n] = min(costs.get(n, math.inf), cost)
    if not costs:
        top = choice.levels[-1]
        return min(counts, key=lambda n: choice.step_s(top, n, choice.n_rows)), True
    return _thriftiest(costs, present), present not in costs


def _prefill_threads(choice: _Choice, bound_w: float) -> int:
    base, table = choice.advised.base, choice.table.prefill
    counts = _below(choice, table, bound_w, base.levels[0].prefill_w)
    present = max((n for n in counts if n <= choice.advised.n_prefill), default=counts[0])
    fastest_s = min(table.seconds(1.0, n) for n in counts)
    costs = {}
    for n in counts:
        if table.seconds(1.0, n) > fastest_s * _PREFILL_ROOM:
            continue
        costs[n] = min(
            choice.power_w(level.prefill_w, table, level.hz, n)
            * level.prefill_s
            * table.seconds(base.share(level.hz), n)
            / table.seconds(base.share(level.hz), choice.table.n_most)
            for level in choice.levels
        )
    return _thriftiest(costs, present)


def _below(choice: _Choice, table: PhaseThreads, bound_w: float, lowest_w: float) -> tuple[int, ...]:
    """Give the numbers of threads whose worst case at the lowest clock keeps bound_w, or the least; 0: all."""
    if not bound_w:
        return choice.counts
    base = choice.advised.base
    lowest = base.levels[0]
    worst = lowest.worst_w / max(lowest.prefill_w, lowest.decode_w)
    fits = [
        n for n in choice.counts if (base.idle_w + choice.power_w(lowest_w, table, lowest.hz, n)) * worst <= bound_w
    ]
    return tuple(fits) or choice.counts[:1]


def _is_of_the_cap(observation: Observation, base: Model) -> bool:
    """Tell whether the calibration's watts are those that the cap is of."""
    return observation.power is None or observation.power.boundary == base.boundary


def _thriftiest(costs: dict[int, float], present: int) -> int:
    least = min(costs.values())
    if costs.get(present, math.inf) <= least * _SAME:
        return present
    return max(n for n, cost in costs.items() if cost <= least * _NEAR)


def _batch(choice: _Choice, limits: Limits, now_s: float, *, is_capped: bool) -> tuple[Advised, bool]:
    """Let as many answers be decoded together as keep the time per token at the highest level that is allowed.

    True: a change is wanted that comes too soon after the last.
    """
    advised, most = choice.advised, choice.hint.max_batch
    before = advised.advice.max_batch
    top, counts = choice.levels[-1], choice.counts or (advised.n_decode,)

    def step_s(n_rows: int) -> float:
        return min(choice.step_s(top, n, n_rows) for n in counts)

    aim_s = limits.tpot_slo_s * (_CAPPED_BATCH_ROOM if is_capped else _BATCH_ROOM)
    low, high = 1, max(most, 1)
    while low < high:  # more rows never take less time
        middle = (low + high + 1) // 2
        low, high = (middle, high) if step_s(middle) <= aim_s else (low, middle - 1)
    wanted = low
    if before is not None and before <= most:
        is_kept = wanted < before and step_s(before) <= limits.tpot_slo_s
        wait_s = _LATE_DWELL_S if wanted < before else _DWELL_S
        if wanted == before or is_kept:
            return advised, False
        if now_s - advised.batch_s < wait_s:
            return advised, True
    return replace(advised, advice=replace(advised.advice, max_batch=wanted), batch_s=now_s), False


def _ratio(value: float, other: float) -> float:
    return value / other if other > 0 and value > 0 else 1.0
