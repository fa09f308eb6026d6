"""Whose the joules are: a meter's energy is split among the answers that were computed meanwhile. Pure; now_s is given.

The engine tells of each answer how many seconds of its steps were for it (engine-seconds): steps are shared by rows, so
one engine's answers together have as many as it computed. Several engines compute at the same time. An answer's share
of the energy of a window is its engine-seconds in it, times the threads of its engine, over those of all engines. An
engine counts as computing while it has an answer to give, so that nothing has to be waited for when an answer ends.
Of an answer that breaks off the engine tells nothing: it is taken to have had its turn like the others of its engine.

Idle power is learned from windows in which nobody asked for anything and no other program worked: of the last ones the
lower quartile.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from edge_rt.devices.energy import Curve, EnergyLog
from edge_rt.devices.meters import Boundary, Quality
from edge_rt.types import Energy

MIN_COVERAGE: Final = 0.5  # of an answer's time; with less nothing is said of it
_WHOLE: Final = 0.95  # with less, what is said is derived from a part

_SETTLE_S: Final = 1.0  # after the last answer, until the machine is idle again
_IDLE_WINDOW_S: Final = 2.0
_N_IDLE: Final = 64
_STEP_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Source:
    """What measures: as in devices.meters.Meter."""

    name: str
    boundary: Boundary
    quality: Quality


@dataclass(eq=False, slots=True)
class Open:
    """An answer that is being computed."""

    engine: str
    begun_s: float
    weight: float
    turn_s: float  # of its engine when it began


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of computing, ending ends_before_s before the answer's end: how long, and its engine-seconds."""

    span_s: float
    engine_s: float
    ends_before_s: float = 0.0


class EnergyAccount:
    """Belongs to one thread, or behind a lock.

    idle_w  what is known of the machine's idle power from before; None: nothing
    """

    def __init__(self, source: Source, interval_s: float, *, idle_w: float | None = None) -> None:
        self.source = source
        self.log = EnergyLog(interval_s)
        self._prior_idle_w = idle_w
        self._idle: deque[float] = deque(maxlen=_N_IDLE)
        self._idle_since_s = -math.inf
        self._n_open: dict[str, int] = {}
        self._weights: dict[str, float] = {}  # of the engines that compute
        self._turn_s: dict[str, float] = {}  # of each, the time that each of its answers has had if all took turns
        self._busy = Curve(min_step_s=_STEP_S)  # weighted engine-seconds of all of them
        self._busy_s = -math.inf

    @property
    def is_busy(self) -> bool:
        return bool(self._n_open)

    @property
    def idle_w(self) -> float | None:
        """Power without work, once it is known."""
        if not self._idle:
            return self._prior_idle_w
        return sorted(self._idle)[(len(self._idle) - 1) // 4]

    def begin(self, engine: str, now_s: float, *, weight: float = 1.0) -> Open:
        """Note that an engine, which has one name, computes for one more answer.

        weight  of its seconds beside those of others: the threads it computes with
        """
        self._advance(now_s)
        self._n_open[engine] = self._n_open.get(engine, 0) + 1
        self._weights[engine] = weight
        return Open(engine, now_s, weight, self._turn_s.setdefault(engine, 0.0))

    def abandon(self, answer: Open, now_s: float) -> None:
        """Note that it does no more, with or without an answer."""
        self._advance(now_s)
        n_left = self._n_open.get(answer.engine, 0) - 1
        if n_left > 0:
            self._n_open[answer.engine] = n_left
        else:
            self._n_open.pop(answer.engine, None)
            self._weights.pop(answer.engine, None)
            self._turn_s.pop(answer.engine, None)
            if not self._n_open:
                self._idle_since_s = now_s

    def end(self, answer: Open, now_s: float, *, prefill: Part, decode: Part | None = None) -> Energy | None:
        """Give what an answer took; None where the meter told too little meanwhile. To be followed by abandon.

        prefill  all of it, for a model without tokens
        """
        self._advance(now_s)
        if prefill.engine_s + (decode.engine_s if decode is not None else 0.0) <= 0:
            return None
        found = self._part(answer, now_s, prefill)
        ends = (found,) if decode is None else (found, self._part(answer, now_s, decode))
        span_s, covered_s = sum(part.span_s for part in ends), sum(part.covered_s for part in ends)
        if span_s <= 0 or covered_s < MIN_COVERAGE * span_s:
            return None
        # A phase in which the meter was silent took as much power as the rest, for the total; by itself it is unknown.
        mean_w = sum(part.energy_j for part in ends) / covered_s
        idle_w, coverage = self.idle_w, min(1.0, covered_s / span_s)
        totals = [part.share * part.span_s * (part.mean_w if part.is_known else mean_w) for part in ends]
        above = [
            part.share * part.span_s * max(0.0, (part.mean_w if part.is_known else mean_w) - (idle_w or 0.0))
            for part in ends
        ]
        shown = [part.is_known and decode is not None for part in ends]
        quality = self.source.quality
        return Energy(
            total_j=sum(totals),
            above_idle_j=None if idle_w is None else sum(above),
            prefill_j=totals[0] if shown[0] else None,
            prefill_above_idle_j=above[0] if shown[0] and idle_w is not None else None,
            decode_j=totals[-1] if shown[-1] else None,
            decode_above_idle_j=above[-1] if shown[-1] and idle_w is not None else None,
            boundary=self.source.boundary,
            quality="derived" if quality == "measured" and coverage < _WHOLE else quality,
            source=self.source.name,
            coverage=coverage,
        )

    def break_off(self, answer: Open, now_s: float) -> Energy | None:
        """Give what an answer without an end has taken, derived from how long it was computed beside how many others.

        To be followed by abandon.
        """
        self._advance(now_s)
        turn_s = self._turn_s.get(answer.engine, 0.0) - answer.turn_s
        found = self.end(answer, now_s, prefill=Part(now_s - answer.begun_s, turn_s))
        if found is None or found.quality != "measured":
            return found
        return replace(found, quality="derived")

    def disturbed(self, now_s: float) -> None:
        """Note that other programs work: what is drawn now is not idle power."""
        if not self._n_open:
            self._idle_since_s = now_s

    def learn_idle(self, now_s: float) -> None:
        """Take in the last seconds' power if nothing was computed in them; to be called now and then."""
        from_s = self._idle_since_s + _SETTLE_S
        if self._n_open or now_s - from_s < _IDLE_WINDOW_S:
            return
        window = self.log.window(max(from_s, now_s - _IDLE_WINDOW_S), now_s)
        if window.mean_w is not None and window.coverage >= _WHOLE:
            self._idle.append(window.mean_w)
        self._idle_since_s = now_s - _SETTLE_S  # the next window begins here

    def _advance(self, now_s: float) -> None:
        dt_s = now_s - self._busy_s
        if dt_s > 0:
            self._busy.add(now_s, sum(self._weights.values()) * dt_s if self._weights else 0.0)
            self._busy_s = now_s
            for engine, n_open in self._n_open.items():
                self._turn_s[engine] += dt_s / n_open

    def _part(self, answer: Open, now_s: float, part: Part) -> _Share:
        to_s = max(answer.begun_s, now_s - max(0.0, part.ends_before_s))
        from_s = max(answer.begun_s, to_s - max(0.0, part.span_s))
        window = self.log.window(from_s, to_s)
        # Nobody has computed for longer than all together, whatever the clocks of two processes make of it.
        own = part.engine_s * answer.weight
        share = own / max(self._busy.between(from_s, to_s), own) if own > 0 else 0.0
        return _Share(window.span_s, window.covered_s, window.energy_j, share)


@dataclass(frozen=True, slots=True)
class _Share:
    """A stretch of time, what all took in it, and one answer's share of that."""

    span_s: float
    covered_s: float
    energy_j: float
    share: float

    @property
    def mean_w(self) -> float:
        return self.energy_j / self.covered_s if self.covered_s > 0 else 0.0

    @property
    def is_known(self) -> bool:
        return self.covered_s >= MIN_COVERAGE * self.span_s
