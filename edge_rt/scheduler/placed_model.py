"""One tensor model's places: ranked now and then, told what happened there, and picked from for each request."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol

from edge_rt import config
from edge_rt.breaker import Breaker, Ticket
from edge_rt.errors import (
    AcceleratorLostError,
    AcceleratorMemoryError,
    BackendLoadError,
    BackendUnavailableError,
    EdgeRtError,
    ModelFormatError,
    ModelTooLargeError,
    NotOnAcceleratorError,
    VersionSkewError,
    WorkerLostError,
)
from edge_rt.scheduler.placement import Candidate, PolicyName, Ranked, Ranking, Refused, reference
from edge_rt.scheduler.places import Place, PlaceStatus, n_to_move, pick, to_try
from edge_rt.scheduler.residency import Residency
from edge_rt.worker.channel import Load
from edge_rt.worker.supervisor import ModelWorker, WorkerEvents

_log = logging.getLogger(__name__)

REPLAN_S = 5.0  # how old a ranking may be: heat and memory change, models are pulled and profiled

_LOAD_ERRORS = (
    AcceleratorMemoryError,
    BackendLoadError,
    BackendUnavailableError,
    ModelFormatError,
    ModelTooLargeError,
    NotOnAcceleratorError,
    VersionSkewError,
)
_ELSEWHERE = (*_LOAD_ERRORS, AcceleratorLostError, WorkerLostError)  # where the same device may do with another form


class Subject(Protocol):
    """A tensor model, as the dispatcher needs it."""

    async def ready(self) -> None:
        """Wait until rank can tell all that there is."""
        ...

    def rank(self, shown_s: Callable[[Candidate], float | None]) -> Ranking:
        """Order the candidates now; shown_s is what those that have run really take."""
        ...

    def load(self, candidate: Candidate, *, force: bool) -> Load: ...

    def placed_by(self, settings: config.Placement) -> Subject:
        """Give the same model, ranked by other settings."""
        ...

    def pinned(self, variant: str) -> Subject:
        """Give the same model in one form only, whatever the settings say."""
        ...


class DispatchEvents(Protocol):
    """What the owner hears of; edge_rt.telemetry.Telemetry is one."""

    def place_answered(self, model: str, place: str, *, spilled: bool, took_s: float, n_joined: int) -> None: ...

    def place_failed(self, model: str, place: str) -> None: ...

    def place_wrong(self, model: str, place: str) -> None: ...

    def place_state(self, model: str, place: str, state: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchStatus:
    policy: PolicyName
    places: tuple[PlaceStatus, ...]
    refused: tuple[Refused, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed at a place. lost_s went by until that showed."""

    place: Place
    ticket: Ticket
    error: EdgeRtError
    lost_s: float


class PlacedModel:
    """A tensor model on this machine's devices. Belongs to one event loop, whose time() is the clock.

    order  places as they were last ranked, best first; known: those that left the ranking too, by candidate
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        settings: config.Placement,
        residency: Residency,
        events: DispatchEvents,
        make_worker: Callable[[Load, WorkerEvents], ModelWorker],
        *,
        keep_alive_s: float,
        slot: str,
    ) -> None:
        self.name = name
        self.order: list[Place] = []
        self.known: dict[str, Place] = {}
        self._subject, self._settings = subject, settings
        self._residency, self._events, self._make_worker = residency, events, make_worker
        self.keep_alive_s, self._slot = keep_alive_s, slot
        self._ranking: Ranking | None = None
        self._ranked_at_s = 0.0
        self._loading: dict[Place, asyncio.Task[None]] = {}
        self._versions: dict[str, PlacedModel] = {}

    def version(self, variant: str) -> PlacedModel:
        """Give the model in one form, ranked for itself in the places that both share; "" is the model as it is."""
        if not variant:
            return self
        if (found := self._versions.get(variant)) is None:
            found = PlacedModel(
                self.name,
                self._subject.pinned(variant),
                self._settings,
                self._residency,
                self._events,
                self._make_worker,
                keep_alive_s=self.keep_alive_s,
                slot=self._slot,
            )
            found.known, found._loading = self.known, self._loading
            self._versions[variant] = found
        return found

    async def status(self) -> DispatchStatus:
        """Describe the places, best first."""
        await self.ranked(fresh=True)
        assert self._ranking is not None
        now_s = asyncio.get_running_loop().time()
        return DispatchStatus(
            policy=self._ranking.policy,
            places=tuple(p.status(now_s, load=self._residency.slot(p.key).state) for p in self.order),
            refused=self._ranking.refused,
        )

    def reference(self, place: Place) -> Place | None:
        """Give the place whose answers count as right, if it can be asked."""
        if self._ranking is None or (candidate := reference(self._ranking, place.row.candidate)) is None:
            return None
        found = self.known.get(str(candidate))
        now_s = asyncio.get_running_loop().time()
        return found if found is not None and found.state(now_s) == "closed" else None

    def only_place(self) -> Place | None:
        """Give the only place if it works, and a request would not wait there behind others.

        None too where the ranking is old, or answers are still to be compared.
        """
        now_s = asyncio.get_running_loop().time()
        if self._ranking is None or now_s - self._ranked_at_s >= REPLAN_S or len(self.order) != 1:
            return None
        place = self.order[0]
        if place.wrong or place.n_to_check or place.breaker.retry_at_s is not None:
            return None
        # So many are computed at a time, and are never moved to another place.
        return place if place.n_open < max(1, place.n_joined) else None

    def pick(self, failures: Sequence[Failure], *, can_copy: bool) -> tuple[Place, bool] | None:
        """Pick the place for a request that has failed at some; None when there is none left. See places.pick."""
        assert self._ranking is not None
        return pick(
            self.order,
            tried=self._tried(failures),
            now_s=asyncio.get_running_loop().time(),
            policy=self._ranking.policy,
            load_s=self._load_s,
            can_copy=can_copy,
        )

    def to_try(self, chosen: Place, failures: Sequence[Failure]) -> Place | None:
        """Name the place that a copy of the request shall try. See places.to_try."""
        if all(place.breaker.retry_at_s is None for place in self.order):
            return None
        now_s = asyncio.get_running_loop().time()
        return to_try(self.order, chosen, tried=self._tried(failures), now_s=now_s, load_s=self._load_s)

    def works_again(self, place: Place) -> None:
        """Let requests that wait elsewhere go to a place that can be used from now on, where that is better."""
        assert self._ranking is not None
        if place in self.order:
            unit = self.order[0].option()
            for other in self.order:
                if other is not place and other.movable and other.row.tier >= place.row.tier:
                    other.move(n_to_move(other, place, self._ranking.policy, unit))

    def _tried(self, failures: Sequence[Failure]) -> list[Place]:
        # Another form on the device whose computing failed would fail too, and would be loaded for that.
        computed = {f.place.row.candidate.place for f in failures if not isinstance(f.error, _ELSEWHERE)}
        tried = {failure.place for failure in failures}
        return [p for p in self.order if p in tried or p.row.candidate.place in computed]

    def _load_s(self, place: Place) -> float | None:
        states = {other: self._residency.slot(other.key).state for other in self.order}
        if states[place] == "ready":
            return 0.0
        if states[place] != "unloaded":
            return place.load_s
        if not self._residency.has_room():
            return None
        # Models load one after the other: what is on its way comes first.
        return place.load_s + sum(other.load_s for other, state in states.items() if state in {"waiting", "loading"})

    def prepare(self, chosen: Place) -> None:
        """Load the place that is best when idle beside the request that cannot wait for it, if there is room."""
        now_s = asyncio.get_running_loop().time()
        best = next((p for p in self.order if not p.wrong and p.breaker.allows(now_s)), chosen)
        if best is not chosen and best.row.tier <= chosen.row.tier and best not in self._loading:
            slot = self._residency.slot(best.key)
            if slot.state == "unloaded" and slot.failure is None and self._residency.has_room():
                task = asyncio.get_running_loop().create_task(self._residency.load(best.key), context=Context())
                self._loading[best] = task
                task.add_done_callback(lambda done: self._loaded(best, done))

    def _loaded(self, place: Place, done: asyncio.Task[None]) -> None:
        del self._loading[place]
        if not done.cancelled() and done.exception() is not None:
            now_s = asyncio.get_running_loop().time()
            place.breaker.failed(place.breaker.begin(now_s), now_s)
            self.tell(place)
        elif not done.cancelled():
            self.works_again(place)

    def configure(self, settings: config.Placement) -> None:
        """Go by other settings: places that are known keep what was learned of them, the next request ranks anew."""
        self._settings, self._subject = settings, self._subject.placed_by(settings)
        for place in self.known.values():
            place.breaker.limit(max_failures=settings.max_failures, retry_s=settings.retry_s)
        for version in self._versions.values():
            version.configure(settings)
        self.replan()

    def replan(self) -> None:
        """Let the next request rank the places anew."""
        self._ranked_at_s = -math.inf
        for version in self._versions.values():
            version.replan()

    async def ranked(self, *, fresh: bool = False) -> PlacedModel:
        """See that the ranking is there and not older than REPLAN_S."""
        now_s = asyncio.get_running_loop().time()
        if self._ranking is not None and not fresh and now_s - self._ranked_at_s < REPLAN_S:
            return self
        await self._subject.ready()
        shown = {place.name: place.shown_s(now_s) for place in self.known.values()}
        self._ranking = self._subject.rank(lambda candidate: shown.get(str(candidate)))
        self._ranked_at_s = now_s
        self.order = [self._place(row) for row in self._ranking.ranked]
        for place in self.order:
            if place.row.is_hot:
                if not place.was_hot:
                    _log.warning("%s is left for now: %s", place.name, place.row.reason)
                if place.breaker.state(now_s) == "closed":
                    place.breaker.trip(now_s)
                if not place.was_hot and any(p.row.tier < place.row.tier and not p.wrong for p in self.order):
                    place.move(max(0, place.n_open - place.n_joined))
                place.was_hot = True
            elif place.was_hot:
                place.breaker.retry_now(now_s)
                place.was_hot = False
            self.tell(place)
        return self

    def _place(self, row: Ranked) -> Place:
        name = str(row.candidate)
        if (place := self.known.get(name)) is not None:
            place.reranked(row, asyncio.get_running_loop().time())
            return place
        key = f"{self._slot} {name}" if self.known else self._slot
        settings = self._settings
        breaker = Breaker(max_failures=settings.max_failures, retry_s=settings.retry_s)
        place = Place(key, row, breaker, n_to_check=0 if row.candidate.kind == "cpu" else settings.n_checked)

        def make(events: WorkerEvents, force: bool) -> ModelWorker:
            return self._make_worker(self._subject.load(row.candidate, force=force), events)

        self._residency.add(key, make, keep_alive_s=self.keep_alive_s)
        self.known[name] = place
        return place

    def settle(self, failures: Sequence[Failure], *, is_answered: bool) -> None:
        """Charge the devices that failed; of a request that no device answers only those that died or did not load."""
        now_s = asyncio.get_running_loop().time()
        for failure in failures:
            if is_answered or isinstance(failure.error, _ELSEWHERE):
                failure.place.breaker.failed(failure.ticket, now_s, lost_s=failure.lost_s)
            else:
                failure.place.breaker.abandoned(failure.ticket)
            self.tell(failure.place)

    def tell(self, place: Place) -> None:
        state = place.state(asyncio.get_running_loop().time())
        if state != place.told:
            place.told = state
            self._events.place_state(self.name, place.name, state)

    def nowhere(self) -> BackendLoadError:
        assert self._ranking is not None
        reasons = [f"{refused.what}: {refused.reason}" for refused in self._ranking.refused]
        reasons += [f"{place.name}: {place.wrong}" for place in self.order if place.wrong]
        return BackendLoadError(model=self.name, reason="; ".join(reasons) or "no device runs it")
