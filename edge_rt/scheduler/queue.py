"""Admission of one model's requests: how many run, how many wait, whose turn it is.

Admission is the pure part; Queue adds waiting, deadlines and cancellation on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import TracebackType

from edge_rt.errors import DeadlineError, DeadlineUnreachableError, EdgeRtError, QueueFullError
from edge_rt.turns import PRIORITIES, Flow, Turns, rank
from edge_rt.types import Priority

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_SERVICE_WEIGHT = 0.2  # of the newest request in the moving averages of service times and work
_MIN_SERVED = 5  # requests, until their time tells how long others take


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of a queue.

    deadline_s  until it must run, if that is known
    width       places that it takes, one for each of its beams, and at most all
    """

    tenant: str
    priority: Priority = "normal"
    deadline_s: float | None = None
    width: int = 1


class Admission:
    """Tickets that wait and run. Priorities and tenants take turns (turns.py); within both the order is of arrival.

    max_running             places
    max_waiting_per_tenant  0: only max_waiting limits a tenant
    displaces   who runs them puts less urgent ones back for more urgent ones, which are let in beyond max_running
                as long as no more than max_running are as urgent
    """

    def __init__(
        self, *, max_running: int, max_waiting: int, max_waiting_per_tenant: int = 0, displaces: bool = False
    ) -> None:
        self.max_running = self._most_running = max_running
        self._displaces = displaces
        self.limit(max_waiting=max_waiting, max_waiting_per_tenant=max_waiting_per_tenant)
        self._turns = Turns()
        self._running: dict[int, tuple[Flow, float]] = {}  # with the work that was counted for it
        self._n_used = 0  # places
        self._wide: dict[int, int] = {}  # the widths of tickets that take more than one place
        self._flow_of: dict[int, Flow] = {}  # of those that wait
        self._waiting: dict[Flow, dict[int, None]] = {}  # dicts are ordered sets of tickets
        self._n_here: dict[Flow, int] = {}  # that run or wait
        self._service_s = _MIN_RETRY_S
        self._n_served = 0
        self._work = 1.0  # of a request, on average

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._flow_of)

    @property
    def has_room(self) -> bool:
        """Say whether one that arrives now runs at once, whatever its priority."""
        return self._n_used < self.max_running and not self._waiting

    def by_priority(self) -> dict[Priority, tuple[int, int]]:
        """Count who runs and who waits."""
        running, waiting = Counter(flow[0] for flow, _ in self._running.values()), Counter[str]()
        for (priority, _), tickets in self._waiting.items():
            waiting[priority] += len(tickets)
        return {priority: (running[priority], waiting[priority]) for priority in PRIORITIES}

    def arrive(self, ticket: int, wish: Wish) -> bool:
        """Run a ticket at once (True) or let it wait (False).

        Raises QueueFullError, and DeadlineUnreachableError where by the usual time of those before it, it will be late.
        """
        flow = (wish.priority, wish.tenant)
        self._turns.join(*flow, self._n_here)
        width, urgency = min(wish.width, self._most_running), rank(wish.priority)
        # Who waits as urgently for more places is not passed by, or it would never get them.
        if self._fits(wish.priority, width) and not any(rank(other) <= urgency for other, _ in self._waiting):
            self._count(flow, 1)
            self._note(ticket, width)
            self._run(ticket, flow)
            return True
        if wish.deadline_s is not None:
            self._check_deadline(flow, wish.deadline_s)
        # Who waits only because fewer run than could takes nobody's place among those that may wait.
        n_lent = self._most_running - self.max_running
        if self.n_waiting >= self.max_waiting + n_lent:
            raise self._full(self.n_waiting, self.max_waiting)
        if (n_own := self._waiting_by_tenant()[wish.tenant]) >= self.max_waiting_per_tenant + n_lent:
            raise self._full(n_own, self.max_waiting_per_tenant)
        self._count(flow, 1)
        self._note(ticket, width)
        self._waiting.setdefault(flow, {})[ticket] = None
        self._flow_of[ticket] = flow
        return False

    def yielding(self, tenant: str) -> int | None:
        """Give the ticket that must go for one of a tenant that was refused, None where the refusal is fair.

        It is the youngest of the least urgent ones of the tenant with the most that wait, if that one keeps at least
        as many as the other then has: so nobody can fill the queue for all others.
        """
        if self.n_waiting > self.max_waiting + self._most_running - self.max_running:
            return None  # the limit was lowered: one that goes would not make room
        n_waiting = self._waiting_by_tenant()
        n_own = n_waiting[tenant]
        most = max(n_waiting, key=n_waiting.__getitem__, default=tenant)
        if n_own + 1 >= n_waiting[most] or n_own >= self.max_waiting_per_tenant:
            return None
        flow = max((flow for flow in self._waiting if flow[1] == most), key=lambda flow: rank(flow[0]))
        return next(reversed(self._waiting[flow]))

    def limit(self, *, max_waiting: int, max_waiting_per_tenant: int) -> None:
        """Let other numbers wait from now on; those that wait already stay."""
        self.max_waiting = max_waiting
        self.max_waiting_per_tenant = max_waiting_per_tenant or max_waiting

    def run_at_most(self, max_running: int | None) -> tuple[int, ...]:
        """Let fewer run than could, from now on; None ends that. Those that run go on. Give those that may run now."""
        self.max_running = max(1, min(max_running or self._most_running, self._most_running))
        return tuple(self._admit())

    def leave(self, ticket: int, service_s: float | None = None, work: float | None = None) -> tuple[int, ...]:
        """Forget a ticket, wherever it is, and give those that run in its stead.

        service_s  how long it ran, for the estimate in QueueFullError; None if it was not served in full
        work       that was done for it, in any one unit; None if that is not known
        """
        if service_s is not None:
            self._n_served += 1
            self._service_s += _SERVICE_WEIGHT * (service_s - self._service_s)
        flow = self._flow_of.pop(ticket, None)
        if flow is not None:
            self._count(flow, -1)
            self._take_from(flow, ticket)
        if (ran := self._running.pop(ticket, None)) is not None:
            flow, counted = ran
            self._count(flow, -1)
            self._n_used -= self._width(ticket)
            if work is not None:
                self._turns.charge(*flow, work - counted)
                self._work += _SERVICE_WEIGHT * (work - self._work)
        self._wide.pop(ticket, None)
        return tuple(self._admit())

    def _waiting_by_tenant(self) -> Counter[str]:
        n_waiting = Counter[str]()
        for (_, tenant), tickets in self._waiting.items():
            n_waiting[tenant] += len(tickets)
        return n_waiting

    def _width(self, ticket: int) -> int:
        return self._wide.get(ticket, 1)

    def _note(self, ticket: int, width: int) -> None:
        if width > 1:
            self._wide[ticket] = width

    def _fits(self, priority: Priority, width: int) -> bool:
        if self._n_used + width <= self.max_running or not self._n_used:  # fewer may run now than it needs
            return True
        if not self._displaces or self._n_used + width > 2 * self.max_running:
            return False
        urgency = rank(priority)
        as_urgent = [ticket for ticket, ((other, _), _) in self._running.items() if rank(other) <= urgency]
        return sum(map(self._width, as_urgent)) + width <= self.max_running

    def _run(self, ticket: int, flow: Flow) -> None:
        # What it will take is not known yet; as much as the others did, until it leaves.
        self._running[ticket] = (flow, self._work)
        self._n_used += self._width(ticket)
        self._turns.charge(*flow, self._work)

    def _admit(self) -> list[int]:
        admitted = []
        while flows := [flow for flow in self._waiting if self._fits(flow[0], 1)]:
            flow = min(flows, key=lambda flow: self._turns.key(*flow))
            ticket = next(iter(self._waiting[flow]))
            if not self._fits(flow[0], self._width(ticket)):
                break  # what it needs more is kept for it
            del self._flow_of[ticket]
            self._take_from(flow, ticket)
            self._run(ticket, flow)
            admitted.append(ticket)
        return admitted

    def _count(self, flow: Flow, n: int) -> None:
        self._n_here[flow] = n_here = self._n_here.get(flow, 0) + n
        if not n_here:
            del self._n_here[flow]

    def _take_from(self, flow: Flow, ticket: int) -> None:
        own = self._waiting[flow]
        del own[ticket]
        if not own:
            del self._waiting[flow]

    def _check_deadline(self, flow: Flow, deadline_s: float) -> None:
        if self._n_served < _MIN_SERVED:
            return
        urgency, tenant = rank(flow[0]), flow[1]
        n_ahead = sum(
            sum(map(self._width, tickets))
            for (priority, other), tickets in self._waiting.items()
            if rank(priority) < urgency or (rank(priority) == urgency and other == tenant)
        )
        # A place is free after half of a usual request at the latest, if those that run began at different times.
        need_s = (n_ahead + 0.5) / self.max_running * self._service_s
        if need_s > deadline_s:
            raise DeadlineUnreachableError(needed_s=round(need_s, 3), deadline_s=deadline_s)

    def _full(self, waiting: int, limit: int) -> QueueFullError:
        turns = (waiting + 1) / self.max_running
        retry_after_s = min(max(turns * self._service_s, _MIN_RETRY_S), _MAX_RETRY_S)
        return QueueFullError(waiting=waiting, limit=limit, retry_after_s=round(retry_after_s, 1))


class Queue:
    """Places for requests to run in. Belongs to one event loop, whose time() is the clock."""

    def __init__(self, admission: Admission, on_change: Callable[[int, int], None]) -> None:
        """on_change hears the numbers of running and of waiting requests."""
        self._admission = admission
        self._on_change = on_change
        self._tickets = count()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._closed: Callable[[], EdgeRtError] | None = None

    @property
    def n_running(self) -> int:
        return self._admission.n_running

    @property
    def n_waiting(self) -> int:
        return self._admission.n_waiting

    def by_priority(self) -> dict[Priority, tuple[int, int]]:
        """Count who runs and who waits, of each priority."""
        return self._admission.by_priority()

    def place(self, wish: Wish, limit_s: float) -> Place:
        """Wait for a place, or as many as are wished for, and hold it, in an `async with`.

        limit_s  how long to wait; DeadlineError then
        Raises DeadlineUnreachableError at once, where the request's own deadline cannot be kept, QueueFullError, at
        once or when its place is needed for another tenant, and what close was given.
        """
        return Place(self, wish, limit_s)

    async def enter(self, wish: Wish, limit_s: float) -> int:
        """Wait for a place as place does; give its ticket, which leave takes back."""
        if self._closed is not None:
            raise self._closed()
        ticket = next(self._tickets)
        try:
            is_admitted = self._arrive(ticket, wish)
            self._report()
            if not is_admitted:
                await self._wait(ticket, limit_s)
        except BaseException:
            self.leave(ticket, None)
            raise
        return ticket

    def _arrive(self, ticket: int, wish: Wish) -> bool:
        try:
            return self._admission.arrive(ticket, wish)
        except QueueFullError as full:
            if (yielding := self._admission.yielding(wish.tenant)) is None:
                raise
            self._let_run(self._admission.leave(yielding))
            if not (waiter := self._waiters[yielding]).done():
                waiter.set_exception(full)
        return self._admission.arrive(ticket, wish)

    def enter_now(self, tenant: str) -> int | None:
        """Take a place that is free; give its ticket, which leave takes back. None: enter must be asked.

        Who takes one calls entered soon, when there is nothing more urgent to do.
        """
        if self._closed is not None or not self._admission.has_room:
            return None
        ticket = next(self._tickets)
        self._admission.arrive(ticket, Wish(tenant))
        return ticket

    def entered(self) -> None:
        """Report what enter_now has not."""
        self._report()

    def leave(self, ticket: int, service_s: float | None, work: float | None = None) -> None:
        """Let the next one run. service_s and work as in Admission.leave."""
        self._let_run(self._admission.leave(ticket, service_s, work))
        self._report()

    def run_at_most(self, max_running: int | None) -> None:
        """Let fewer run than could, from now on; see Admission."""
        admitted = self._admission.run_at_most(max_running)
        self._let_run(admitted)
        if admitted:
            self._report()

    def _let_run(self, admitted: tuple[int, ...]) -> None:
        for ticket in admitted:
            # A waiter that is done was cancelled or refused in this very moment; it passes its place on itself.
            if not (waiter := self._waiters[ticket]).done():
                waiter.set_result(None)

    def limit(self, *, max_waiting: int, max_waiting_per_tenant: int) -> None:
        """Let other numbers wait from now on; see Admission."""
        self._admission.limit(max_waiting=max_waiting, max_waiting_per_tenant=max_waiting_per_tenant)

    def close(self, error: Callable[[], EdgeRtError]) -> None:
        """Refuse new requests and those that wait; running ones keep their places."""
        self._closed = error
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error())

    async def _wait(self, ticket: int, limit_s: float) -> None:
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                await waiter
        except TimeoutError:
            raise DeadlineError(deadline_s=limit_s) from None
        finally:
            del self._waiters[ticket]

    def _report(self) -> None:
        self._on_change(self._admission.n_running, self._admission.n_waiting)


class Place:
    """A place in a queue, held by an `async with`. A class: generators take longer, and each request holds one.

    work  that was done for the request, to be set when it is known
    """

    __slots__ = ("_limit_s", "_queue", "_started_s", "_ticket", "_wish", "work")

    def __init__(self, queue: Queue, wish: Wish, limit_s: float) -> None:
        self._queue, self._wish, self._limit_s = queue, wish, limit_s
        self.work: float | None = None

    async def __aenter__(self) -> Place:
        self._ticket = await self._queue.enter(self._wish, self._limit_s)
        self._started_s = asyncio.get_running_loop().time()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_served = kind is None
        service_s = asyncio.get_running_loop().time() - self._started_s if is_served else None
        self._queue.leave(self._ticket, service_s, self.work)
