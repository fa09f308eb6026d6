"""Runs prefill and decode at each clock and on fewer threads, and notes what they take.

`edge_rt power calibrate` makes its file of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from edge_rt.backends.base import SeqRows, TokenSession
from edge_rt.bench.metering import Metering
from edge_rt.bench.workload import token_ids
from edge_rt.devices.base import Reading
from edge_rt.devices.idle import cpu_ticks
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import PowerUnknownError
from edge_rt.power.calibration import CalibratedDomain, Phase, Point, ThreadPoint

_SEED: Final = 42
_SEQ: Final = 0
_SETTLE_S: Final = 1.0  # after a change of clock
_WARM_SHARE: Final = 1.1  # of a phase's time, with the run before it that warms up
_N_STREAMS: Final = 4  # decoded together, to see what each further one costs
_STREAM_TOKENS: Final = 64  # of each of their contexts


class Watts(Protocol):
    """Tells mean power over stretches of time: a meter, or a person who reads one."""

    def mark(self) -> float:
        """Begin a stretch."""
        ...

    def since(self, mark: float, what: str) -> Reading[float]:
        """Give the mean power since mark; what is "idle", "prefill" or "decode"."""
        ...


class Clock(Protocol):
    """Sets a domain's upper clock, for as long as the calibration runs."""

    def set(self, domain: str, max_hz: float) -> None:
        """Raises OSError where the kernel does not take it."""
        ...


@dataclass(frozen=True, slots=True)
class Domain:
    """One clock and the values to try, ascending; one value alone is the present one, which is not set."""

    name: str
    points_hz: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long each run lasts; the prompt is n_prompt tokens, over and over.

    phase_s         of each phase at each point
    thread_phase_s  of each phase on each number of threads
    """

    phase_s: float = 10.0
    idle_s: float = 10.0
    thread_phase_s: float = 5.0
    n_prompt: int = 256


def planned_s(plan: Plan, domains: Sequence[Domain], sweep: Domain | None, counts: Sequence[int]) -> float:
    """Foretell how long a calibration takes; sweep is the domain at whose clocks the counts of threads are tried."""
    n_points = sum(len(domain.points_hz) for domain in domains)
    seconds = plan.idle_s + _SETTLE_S + n_points * (2 * plan.phase_s * _WARM_SHARE + _SETTLE_S)
    if sweep is not None:
        n_runs = len(sweep.points_hz) * len(_runs(counts))
        seconds += len(sweep.points_hz) * _SETTLE_S + n_runs * plan.thread_phase_s * _WARM_SHARE
    return seconds


def _runs(counts: Sequence[int]) -> list[tuple[Phase, int, int]]:
    """List phase, threads and streams; several streams on the fewest and on the most threads only."""
    runs: list[tuple[Phase, int, int]] = []
    for n in reversed(counts):
        runs += [("prefill", n, 1), ("decode", n, 1)]
        if n in (counts[0], counts[-1]):
            runs.append(("decode", n, _N_STREAMS))
    return runs


class Calibrator:
    """Measures on one loaded model, with nothing else on the machine.

    announce  gets a line a step, for people
    """

    def __init__(
        self,
        session: TokenSession,
        watts: Watts,
        plan: Plan,
        *,
        clock: Clock | None = None,
        root: SysfsRoot | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._session, self._watts, self._plan, self._clock = session, watts, plan, clock
        self._root, self._now, self._sleep, self._announce = root or SysfsRoot(), now, sleep, announce
        n_prompt = min(plan.n_prompt, session.caps.n_ctx - 1)
        vocab = session.vocab
        self._prompt = token_ids(n_prompt, vocab.n_vocab, _SEED, is_plain=lambda i: session.piece(i) != b"", first=None)
        self._busy_ticks = self._all_ticks = 0

    def idle_w(self) -> float:
        """Measure the machine at rest. Raises PowerUnknownError."""
        self._announce(f"idle, for {self._plan.idle_s:g} s")
        self._sleep(_SETTLE_S)
        mark = self._watts.mark()
        self._sleep(self._plan.idle_s)
        return _known(self._watts.since(mark, "idle"))

    def domain(self, domain: Domain) -> CalibratedDomain:
        """Measure a domain at each of its points, the highest first. Raises PowerUnknownError and OSError."""
        points: list[Point] = []
        for number, hz in enumerate(reversed(domain.points_hz), 1):
            title = f"{domain.name} at {hz / 1e6:.0f} MHz ({number}/{len(domain.points_hz)})"
            if self._clock is not None and len(domain.points_hz) > 1:
                self._clock.set(domain.name, hz)
                self._sleep(_SETTLE_S)
            self._announce(f"{title}: prefill")
            prefill_s, prefill_w = self._phase("prefill", self._prefill, self._plan.phase_s)
            self._announce(f"{title}: decode")
            decode_s, decode_w = self._phase("decode", self._decode, self._plan.phase_s)
            points.append(
                Point(
                    max_hz=hz,
                    prefill_s_per_token=prefill_s,
                    decode_s_per_token=decode_s,
                    prefill_w=prefill_w,
                    decode_w=decode_w,
                )
            )
        return CalibratedDomain(name=domain.name, points=tuple(reversed(points)))

    def threads(
        self, domain: Domain, counts: Sequence[int], *, idle_w: float, has_watts: bool
    ) -> tuple[ThreadPoint, ...]:
        """Measure both phases on each number of threads, at each of the domain's points, the highest first.

        counts     ascending; the last is what is left in force
        has_watts  False: what tells watts knows those of all threads only, so none are noted
        Raises PowerUnknownError and OSError.
        """
        busy, every = self._busy_ticks, self._all_ticks  # what the clocks' points were measured with stays what is told
        points: list[ThreadPoint] = []
        runs = _runs(counts)
        try:
            for number, hz in enumerate(reversed(domain.points_hz)):
                if self._clock is not None and len(domain.points_hz) > 1:
                    self._clock.set(domain.name, hz)
                    self._sleep(_SETTLE_S)
                for at, (phase, n, n_streams) in enumerate(runs, 1):
                    if n_streams > self._session.caps.n_seq_max:
                        continue
                    done = f"{number * len(runs) + at}/{len(domain.points_hz) * len(runs)}"
                    beside = f", {n_streams} streams" if n_streams > 1 else ""
                    self._announce(f"{n} threads at {hz / 1e6:.0f} MHz ({done}): {phase}{beside}")
                    self._session.set_threads(n)
                    points.append(self._thread_point(phase, hz, n, n_streams, idle_w if has_watts else None))
        finally:
            self._session.set_threads(counts[-1])
            self._busy_ticks, self._all_ticks = busy, every
        return tuple(points)

    def _thread_point(self, phase: Phase, hz: float, n: int, n_streams: int, idle_w: float | None) -> ThreadPoint:
        run = self._prefill if phase == "prefill" else self._decode
        if n_streams > 1:
            run = partial(self._decode_streams, self._fill_streams())
        seconds, watts = self._phase(phase, run, self._plan.thread_phase_s)
        return ThreadPoint(
            phase=phase,
            max_hz=hz,
            n_threads=n,
            n_streams=n_streams,
            s_per_token=seconds,
            power_w=None if idle_w is None else max(watts, idle_w),  # what is below it is the meter's noise
        )

    @property
    def utilisation(self) -> float:
        """The share of all CPUs' time that the runs have taken; 1 where the kernel does not tell."""
        return max(0.01, self._busy_ticks / self._all_ticks) if self._all_ticks > 0 else 1.0

    def _phase(self, what: str, run: Callable[[], int], seconds: float) -> tuple[float, float]:
        """Run for so long; give seconds a token, of each stream, and watts."""
        run()  # caches and clocks warm up
        before, mark, begun_s = cpu_ticks(self._root), self._watts.mark(), self._now()
        n_tokens = 0
        while n_tokens == 0 or self._now() - begun_s < seconds:
            n_tokens += run()
        spent_s = self._now() - begun_s
        watts = _known(self._watts.since(mark, what))
        after = cpu_ticks(self._root)
        if before is not None and after is not None:
            self._busy_ticks += after[0] - before[0]
            self._all_ticks += after[1] - before[1]
        return spent_s / n_tokens, watts

    def _prefill(self) -> int:
        for seq in range(min(_N_STREAMS, self._session.caps.n_seq_max)):  # attention reads every cell in use
            self._session.seq_trim(seq, 0)
        n_batch = self._session.caps.n_batch
        for at in range(0, len(self._prompt), n_batch):
            self._session.decode([SeqRows(_SEQ, at, self._prompt[at : at + n_batch], want_logits=True)])
        return len(self._prompt)

    def _decode(self) -> int:
        """Decode one token behind the prompt, which is there: the context is as long each time."""
        at = len(self._prompt) - 1
        self._session.seq_trim(_SEQ, at)
        self._session.decode([SeqRows(_SEQ, at, self._prompt[-1:], want_logits=True)])
        return 1

    def _fill_streams(self) -> int:
        """Give each stream a short context; give its tokens."""
        n_tokens = min(_STREAM_TOKENS, len(self._prompt), self._session.caps.n_ctx // _N_STREAMS) - 1
        for seq in range(_N_STREAMS):
            self._session.seq_trim(seq, 0)
        for seq in range(_N_STREAMS):
            self._session.decode([SeqRows(seq, 0, self._prompt[:n_tokens], want_logits=True)])
        return n_tokens

    def _decode_streams(self, at: int) -> int:
        """Decode one token of each stream, all contexts as long each time; one step is told as one token."""
        for seq in range(_N_STREAMS):
            self._session.seq_trim(seq, at)
        self._session.decode([SeqRows(seq, at, self._prompt[-1:], want_logits=True) for seq in range(_N_STREAMS)])
        return 1


class MeterWatts:
    """Mean power by a meter."""

    def __init__(self, metering: Metering) -> None:
        self._metering = metering

    def mark(self) -> float:
        return self._metering.mark()

    def since(self, mark: float, what: str) -> Reading[float]:
        del what
        return self._metering.watts_since(mark)


class TypedWatts:
    """Watts that a person reads off an instrument and types in."""

    def __init__(self, *, idle_w: float, active_w: float) -> None:
        self._idle_w, self._active_w = idle_w, active_w

    def mark(self) -> float:
        return 0.0

    def since(self, mark: float, what: str) -> Reading[float]:
        del mark
        return Reading(value=self._idle_w if what == "idle" else self._active_w, source="typed in")


def thinned(points_hz: Sequence[float], most: int) -> tuple[float, ...]:
    """Leave out points evenly, but neither the lowest nor the highest, until there are no more than most."""
    if len(points_hz) <= most or most < 2:
        return tuple(points_hz[-1:]) if most < 2 else tuple(points_hz)
    step = (len(points_hz) - 1) / (most - 1)
    return tuple(points_hz[round(at * step)] for at in range(most))


def _known(reading: Reading[float]) -> float:
    if reading.value is None:
        raise PowerUnknownError(source=reading.source, reason=reading.reason)
    return reading.value
