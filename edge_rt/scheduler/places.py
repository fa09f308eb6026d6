"""A model's places at run time: what each has shown of itself, and which of them takes the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from edge_rt.breaker import Breaker
from edge_rt.scheduler.placement import Option, PolicyName, Ranked, choose, wait_s
from edge_rt.tensor_types import TensorTimings

PRIOR_LOAD_S = 2.0
SHOWN_S = 60.0  # a device that was slow and is left for it gets another chance after so long
_NEWEST = 0.2  # weight of the newest request in the moving averages


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceStatus:
    """One place of a model as it stands; times in seconds.

    state  of its breaker: closed, open or half_open; or wrong: its answers were, and it is out
    load   of its worker, as a model's state is told
    """

    candidate: str
    place: str
    state: str
    load: str
    reason: str
    latency_s: float
    service_s: float
    energy_j: float
    memory_bytes: int
    queue: int
    n_answered: int
    n_to_check: int
    retry_in_s: float | None
    wrong: str


class Place:
    """A candidate and its state. Pure but for the numbers that its owner keeps up.

    key         of its slot in the residency
    n_open      requests under way, those that wait in its worker among them
    n_to_check  answers that are still to be compared, n_checking of them now; waiting: what waits for an end of these
    was_hot     its breaker was opened for heat
    told        the state that was told last
    wrong       why its answers are not to be trusted, "" if they are
    latency_s   of a request computed alone; service_s: of a request's share of the device, when it is busy
    """

    def __init__(self, key: str, row: Ranked, breaker: Breaker, *, n_to_check: int) -> None:
        self.key, self.row, self.breaker, self.n_to_check = key, row, breaker, n_to_check
        self.wrong, self.was_hot, self.told = "", False, ""
        self.n_open = self.n_checking = 0
        self.n_joined = 1  # requests computed at a time, when last seen
        self.movable: dict[asyncio.Timeout, None] = {}  # of those under way, in the order they came; see n_to_move
        self.waiting: list[asyncio.Future[None]] = []
        self.n_answered = 0
        self.load_s = PRIOR_LOAD_S
        self.latency_s = self.service_s = row.latency_s
        self._has_shown = False  # latency_s is its own by now, rather than the profile's or a guess
        self._answered_at_s = 0.0

    @property
    def name(self) -> str:
        return str(self.row.candidate)

    def shown_s(self, now_s: float) -> float | None:
        """Give the latency that it has shown; an old one gives way to the profile, a guess never comes back."""
        is_recent = now_s - self._answered_at_s < SHOWN_S
        return self.latency_s if self._has_shown and (is_recent or not self.row.is_profiled) else None

    def reranked(self, row: Ranked, now_s: float) -> None:
        """Take a new rank; what was not shown lately goes by it."""
        if self.shown_s(now_s) is None:
            self.latency_s = self.service_s = row.latency_s
            self._has_shown = False
        self.row = row

    def answered(self, timings: TensorTimings | None, wall_s: float, now_s: float) -> None:
        """Learn from an answer of its own; wall_s stands in where the answer tells no times.

        What the CPU has computed in a lost device's place says nothing of the device. Learnt all the same, it would
        make the place look slow long after the device is back, and send requests elsewhere that would bring it back.
        """
        self.n_joined = batch_size = timings.batch_size if timings is not None else 1
        compute_s = timings.compute_s if timings is not None else wall_s
        weight = _NEWEST if self._has_shown else 1.0
        self.service_s += weight * (compute_s / max(batch_size, 1) - self.service_s)
        if batch_size <= 1 or not self._has_shown:
            self.latency_s += weight * (compute_s - self.latency_s)
        self._has_shown, self._answered_at_s = True, now_s
        self.n_answered += 1

    def option(self, *, n_ahead: int = 0, load_s: float = 0.0) -> Option:
        """Describe it as it takes a request behind n_ahead others. A guess goes with the time that it really takes."""
        row = self.row
        energy_j = row.energy_j if row.has_energy else row.energy_j * self.latency_s / max(row.latency_s, 1e-9)
        wait = wait_s(n_ahead=n_ahead, service_s=self.service_s, load_s=load_s)
        return Option(latency_s=self.latency_s, energy_j=energy_j, wait_s=wait)

    def move(self, n: int) -> None:
        """Call back the last n requests that can be, in the order they came; each is placed anew."""
        for attempt in list(self.movable)[-n:] if n else ():
            del self.movable[attempt]
            if not attempt.expired():
                attempt.reschedule(0.0)

    def wake(self) -> None:
        """Let those look again who wait for a verdict on its answers."""
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)
        self.waiting.clear()

    def state(self, now_s: float) -> str:
        return "wrong" if self.wrong else self.breaker.state(now_s)

    def status(self, now_s: float, *, load: str) -> PlaceStatus:
        retry_at_s = self.breaker.retry_at_s
        return PlaceStatus(
            candidate=self.name,
            place=self.row.candidate.place,
            state=self.state(now_s),
            load=load,
            reason=self.row.reason,
            latency_s=self.latency_s,
            service_s=self.service_s,
            energy_j=self.row.energy_j,
            memory_bytes=self.row.memory_bytes,
            queue=self.n_open,
            n_answered=self.n_answered,
            n_to_check=self.n_to_check,
            retry_in_s=None if retry_at_s is None else max(0.0, retry_at_s - now_s),
            wrong=self.wrong,
        )


def pick(
    places: Sequence[Place],
    *,
    tried: Collection[Place],
    now_s: float,
    policy: PolicyName,
    load_s: Callable[[Place], float | None],
    can_copy: bool = False,
) -> tuple[Place, bool] | None:
    """Pick the place for a request, and say whether it spilled over to it from one that comes before.

    places     in the ranking's order
    tried      where the request has failed already
    load_s     what loading a place will take, 0 if it is loaded, None if that would push out another model
    can_copy   places that were left are tried by a copy of the request (see to_try): it goes to one that works

    None when it has failed on all that can be used. Where every breaker is open the place that is to be tried next
    takes it all the same: a request is worth more than a pause. Pure.
    """
    if len(places) == 1 and not tried and not places[0].wrong and places[0].breaker.allows(now_s):
        return places[0], False  # most models have one place, and each request comes by here
    usable = [place for place in places if place not in tried and not place.wrong]
    allowed = [place for place in usable if place.breaker.allows(now_s)]
    if not allowed:
        rest = sorted(usable, key=lambda p: (p.row.tier, p.breaker.retry_at_s or now_s))
        return (rest[0], False) if rest else None
    if can_copy:
        allowed = [place for place in allowed if place.breaker.state(now_s) == "closed"] or allowed
    best_tier = min(place.row.tier for place in allowed)
    # Of several forms on one device only the best: they share it, and a second worker makes neither faster.
    by_device: dict[str, Place] = {}
    for place in allowed:
        if place.row.tier == best_tier:
            by_device.setdefault(place.row.candidate.place, place)
    loads = {place: load_s(place) for place in by_device.values()}
    candidates = [place for place, seconds in loads.items() if seconds is not None] or list(loads)[:1]
    options = [place.option(n_ahead=place.n_open, load_s=loads[place] or 0.0) for place in candidates]
    # What a second and a joule are worth does not change when the best place is left for a while.
    chosen = choose(options, policy, places[0].option())
    return candidates[chosen], chosen > 0


def to_try(
    places: Sequence[Place],
    chosen: Place,
    *,
    tried: Collection[Place],
    now_s: float,
    load_s: Callable[[Place], float | None],
) -> Place | None:
    """Name a place that was left and shall be tried by a copy of a request that goes to chosen.

    One whose pause is over is due. Another is tried early if the request would wait longer than that place takes: the
    queues grow, and to know that it works again is worth more than the copy costs. Pure.
    """
    wait = chosen.option(n_ahead=chosen.n_open).wait_s
    for place in places:
        if place is chosen or place in tried or place.wrong or place.row.tier > chosen.row.tier:
            continue
        state = place.breaker.state(now_s)
        if state == "closed" or not place.breaker.allows_copy(now_s):
            continue
        seconds = load_s(place)
        if (seconds is not None and state == "half_open") or (seconds == 0.0 and wait > place.latency_s):
            return place
    return None


def n_to_move(source: Place, target: Place, policy: PolicyName, unit: Option) -> int:
    """Say how many of source's last requests cost less behind those of target, which has just become usable. Pure."""
    n = 0
    while (n_ahead := source.n_open - n - 1) >= source.n_joined:
        options = [source.option(n_ahead=n_ahead), target.option(n_ahead=target.n_open + n)]
        if choose(options, policy, unit) == 0:
            break
        n += 1
    return n
