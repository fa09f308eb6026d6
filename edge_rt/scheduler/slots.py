"""A model's place in memory: what is known of it, and which model makes room for another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from edge_rt.errors import EdgeRtError
from edge_rt.tensor_types import TensorModelInfo
from edge_rt.types import EngineStats, ModelInfo
from edge_rt.worker.supervisor import ModelWorker, WorkerEvents

_ALIKE = 1.25  # a difference between two models' worth that is not one

State = Literal["unloaded", "waiting", "loading", "ready", "draining", "unloading"]


Make = Callable[[WorkerEvents, bool], ModelWorker]  # (events, force): a worker that is not started yet


class ResidencyEvents(Protocol):
    """What the owner hears of; edge_rt.telemetry.Telemetry is one."""

    def engine_stats(self, model: str, stats: EngineStats) -> None: ...

    def engine_gone(self, model: str) -> None: ...

    def stand_in_loaded(self, model: str, place: str, evidence: str) -> None: ...

    def worker_restarted(self, model: str) -> None: ...


@dataclass(slots=True)
class Uses:
    """How often a model is used, as far as loads are concerned: what comes together would share one.

    rate_hz  by its last gaps, the newest counting half; unknown, and infinite, until there is one
    """

    rate_hz: float = math.inf
    at_s: float = -math.inf

    def expected_hz(self, now_s: float) -> float:
        """Expect as many as of late, and no more often than once in the time that none has come."""
        return min(self.rate_hz, 1 / max(now_s - self.at_s, 1e-3))

    def is_overdue(self, now_s: float) -> bool:
        """Say whether more time has gone by than usually does."""
        return (now_s - self.at_s) * self.rate_hz > _ALIKE

    def add(self, now_s: float, *, load_s: float) -> None:
        gap_s = now_s - self.at_s
        if self.at_s > -math.inf and gap_s >= max(load_s, 1e-3):
            self.rate_hz = 1 / gap_s if self.rate_hz == math.inf else (self.rate_hz + 1 / gap_s) / 2
        self.at_s = now_s


@dataclass(slots=True, eq=False)
class Slot:
    """One model's place in memory, and who waits for it.

    asked_keep_alive_s  counts instead of keep_alive_s while the model is in memory; None: nobody asked
    """

    model: str
    make: Make
    keep_alive_s: float
    asked_keep_alive_s: float | None = None
    state: State = "unloaded"
    loaded: Loaded | None = None
    used_at_s: float | None = None
    load_s: float = 0.0
    uses: Uses = field(default_factory=Uses)
    force: bool = False
    failure: EdgeRtError | None = None
    failed_at_s: float = 0.0
    waiters: list[asyncio.Future[Loaded]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None
    idle_since_s: float = 0.0

    @property
    def idle_limit_s(self) -> float:
        """Give how long the model stays in memory without a lease; negative: for ever."""
        return self.keep_alive_s if self.asked_keep_alive_s is None else self.asked_keep_alive_s

    @property
    def n_leases(self) -> int:
        return self.loaded.n_leases if self.loaded is not None else 0


class Loaded:
    """One load of a model: its worker from start to stop, and the leases on it. Hears the worker's events.

    gave_up  is called when the worker died and could not be started again
    """

    def __init__(self, slot: Slot, events: ResidencyEvents, gave_up: Callable[[Slot, EdgeRtError], None]) -> None:
        self.n_leases = 0
        self.loaded_at_s = 0.0
        self.info: ModelInfo | TensorModelInfo | None = None
        self.engine = EngineStats()
        self._slot = slot
        self._events, self._gave_up = events, gave_up
        self.worker = slot.make(self, slot.force)

    def stats(self, stats: EngineStats) -> None:
        self.engine = stats
        self._events.engine_stats(self._slot.model, stats)

    def described(self, info: ModelInfo | TensorModelInfo) -> None:
        """Keep what the model is, and tell where it is computed in a device's place."""
        self.info = info
        if info.evidence != "device":
            place = f"{info.variant} on {info.backend}:{info.device}"  # as a place of the dispatcher is named
            self._events.stand_in_loaded(self._slot.model, place, info.evidence)

    def restarting(self, reason: str) -> None:  # noqa: ARG002 - the worker has logged it
        self._events.worker_restarted(self._slot.model)

    def down(self, error: EdgeRtError) -> None:
        if self._slot.loaded is self:
            self._gave_up(self._slot, error)


def pick_victim(slots: Iterable[Slot], now_s: float) -> Slot | None:
    """Pick the model that makes room: an idle one; else one that drains; else the longest loaded.

    Of idle ones that which is worth least: how often it is wanted × what a load takes. Of those about alike, none of
    them overdue, the most recently used: where one model more than there is room for is asked for in turn, its turn
    comes last, and the others stay. None while all are being loaded or unloaded. Pure.
    """
    resident = [(slot, slot.loaded) for slot in slots if slot.state in {"ready", "draining"} and slot.loaded]
    worths = {slot: slot.uses.expected_hz(now_s) * slot.load_s for slot, loaded in resident if loaded.n_leases == 0}
    if worths:
        least = min(worths, key=lambda slot: (worths[slot], slot.uses.at_s))
        alike = [slot for slot, worth in worths.items() if worth <= worths[least] * _ALIKE]
        if any(slot.uses.is_overdue(now_s) for slot in alike):
            return least
        return max(alike, key=lambda slot: slot.uses.at_s)
    busy = ((slot.state == "ready", loaded.loaded_at_s, slot) for slot, loaded in resident)
    victim = min(busy, key=lambda row: row[:2], default=None)
    return victim[2] if victim is not None else None
