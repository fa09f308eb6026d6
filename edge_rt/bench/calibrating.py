"""Runs prefill and decode at each clock and notes what they take: `edge_rt power calibrate` makes its file of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from edge_rt.backends.base import SeqRows, TokenSession
from edge_rt.bench.metering import Metering
from edge_rt.bench.workload import token_ids
from edge_rt.devices.base import Reading
from edge_rt.devices.idle import cpu_ticks
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import PowerUnknownError
from edge_rt.power.calibration import CalibratedDomain, Point

_SEED: Final = 42
_SEQ: Final = 0
_SETTLE_S: Final = 1.0  # after a change of clock


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
    """seconds of each phase at each point; the prompt is n_prompt tokens, over and over."""

    seconds: float = 10.0
    idle_seconds: float = 10.0
    n_prompt: int = 256


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
        self._announce(f"idle, for {self._plan.idle_seconds:g} s")
        self._sleep(_SETTLE_S)
        mark = self._watts.mark()
        self._sleep(self._plan.idle_seconds)
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
            prefill_s, prefill_w = self._phase("prefill", self._prefill)
            self._announce(f"{title}: decode")
            decode_s, decode_w = self._phase("decode", self._decode)
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

    @property
    def utilisation(self) -> float:
        """The share of all CPUs' time that the runs have taken; 1 where the kernel does not tell."""
        return max(0.01, self._busy_ticks / self._all_ticks) if self._all_ticks > 0 else 1.0

    def _phase(self, what: str, run: Callable[[], int]) -> tuple[float, float]:
        """Run for the plan's time; give seconds a token and watts."""
        run()  # caches and clocks warm up
        before, mark, begun_s = cpu_ticks(self._root), self._watts.mark(), self._now()
        n_tokens = 0
        while n_tokens == 0 or self._now() - begun_s < self._plan.seconds:
            n_tokens += run()
        spent_s = self._now() - begun_s
        watts = _known(self._watts.since(mark, what))
        after = cpu_ticks(self._root)
        if before is not None and after is not None:
            self._busy_ticks += after[0] - before[0]
            self._all_ticks += after[1] - before[1]
        return spent_s / n_tokens, watts

    def _prefill(self) -> int:
        self._session.seq_trim(_SEQ, 0)
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
