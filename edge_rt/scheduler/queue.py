"""Admission of one model's requests: how many run, how many wait, whose turn it is.

Admission is the pure part; Queue adds waiting, deadlines and cancellation on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from types import TracebackType

from edge_rt.errors import DeadlineError, EdgeRtError, QueueFullError

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_SERVICE_WEIGHT = 0.2  # of the newest request in the moving average of service times


class Admission:
    """Tickets that wait and run. Tenants take turns; within a tenant the order is that of arrival.

    max_waiting_per_tenant  0: only max_waiting limits a tenant
    """

    def __init__(self, *, max_running: int, max_waiting: int, max_waiting_per_tenant: int = 0) -> None:
        self.max_running = self._most_running = max_running
        self.limit(max_waiting=max_waiting, max_waiting_per_tenant=max_waiting_per_tenant)
        self._running: set[int] = set()
        self._tenant_of: dict[int, str] = {}  # of those that wait
        # The tenant in front is served next and then goes to the back; dicts are ordered sets of tickets.
        self._waiting: OrderedDict[str, dict[int, None]] = OrderedDict()
        self._service_s = _MIN_RETRY_S

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._tenant_of)

    def arrive(self, ticket: int, tenant: str) -> bool:
        """Run a ticket at once (True) or let it wait (False). Raises QueueFullError."""
        if self.n_running < self.max_running:
            # Nobody waits while there is room: leave fills every place it frees.
            self._running.add(ticket)
            return True
        # Who waits only because fewer run than could takes nobody's place among those that may wait.
        n_lent = self._most_running - self.max_running
        if self.n_waiting >= self.max_waiting + n_lent:
            raise self._full(self.n_waiting, self.max_waiting)
        own = self._waiting.get(tenant, {})
        if len(own) >= self.max_waiting_per_tenant + n_lent:
            raise self._full(len(own), self.max_waiting_per_tenant)
        own[ticket] = None
        self._waiting[tenant] = own
        self._tenant_of[ticket] = tenant
        return False

    def limit(self, *, max_waiting: int, max_waiting_per_tenant: int) -> None:
        """Let other numbers wait from now on; those that wait already stay."""
        self.max_waiting = max_waiting
        self.max_waiting_per_tenant = max_waiting_per_tenant or max_waiting

    def run_at_most(self, max_running: int | None) -> tuple[int, ...]:
        """Let fewer run than could, from now on; None ends that. Those that run go on. Give those that may run now."""
        self.max_running = max(1, min(max_running or self._most_running, self._most_running))
        return tuple(self._admit())

    def leave(self, ticket: int, service_s: float | None = None) -> tuple[int, ...]:
        """Forget a ticket, wherever it is, and give those that run in its stead.

        service_s  how long it ran, for the estimate in QueueFullError; None if it was not served in full
        """
        if service_s is not None:
            self._service_s += _SERVICE_WEIGHT * (service_s - self._service_s)
        tenant = self._tenant_of.pop(ticket, None)
        if tenant is not None:
            del self._waiting[tenant][ticket]
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        self._running.discard(ticket)
        return tuple(self._admit())

    def _admit(self) -> list[int]:
        admitted = []
        while self._waiting and self.n_running < self.max_running:
            tenant, own = next(iter(self._waiting.items()))
            ticket = next(iter(own))
            del own[ticket], self._tenant_of[ticket]
            if own:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            self._running.add(ticket)
            admitted.append(ticket)
        return admitted

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

    def place(self, tenant: str, deadline_s: float) -> Place:
        """Wait for a place and hold it, in an `async with`.

        Raises QueueFullError at once, DeadlineError when deadline_s has passed while waiting, and what close was given.
        """
        return Place(self, tenant, deadline_s)

    async def enter(self, tenant: str, deadline_s: float) -> int:
        """Wait for a place; give its ticket, which leave takes back."""
        if self._closed is not None:
            raise self._closed()
        ticket = next(self._tickets)
        try:
            is_admitted = self._admission.arrive(ticket, tenant)
            self._report()
            if not is_admitted:
                await self._wait(ticket, deadline_s)
        except BaseException:
            self.leave(ticket, None)
            raise
        return ticket

    def enter_now(self, tenant: str) -> int | None:
        """Take a place that is free; give its ticket, which leave takes back. None: enter must be asked.

        Who takes one calls entered soon, when there is nothing more urgent to do.
        """
        if self._closed is not None or self._admission.n_running >= self._admission.max_running:
            return None
        ticket = next(self._tickets)
        self._admission.arrive(ticket, tenant)
        return ticket

    def entered(self) -> None:
        """Report what enter_now has not."""
        self._report()

    def leave(self, ticket: int, service_s: float | None) -> None:
        """Let the next one run. service_s as in Admission.leave."""
        self._let_run(self._admission.leave(ticket, service_s))
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

    async def _wait(self, ticket: int, deadline_s: float) -> None:
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await waiter
        except TimeoutError:
            raise DeadlineError(deadline_s=deadline_s) from None
        finally:
            del self._waiters[ticket]

    def _report(self) -> None:
        self._on_change(self._admission.n_running, self._admission.n_waiting)


class Place:
    """A place in a queue, held by an `async with`. A class: generators take longer, and each request holds one."""

    __slots__ = ("_deadline_s", "_queue", "_started_s", "_tenant", "_ticket")

    def __init__(self, queue: Queue, tenant: str, deadline_s: float) -> None:
        self._queue, self._tenant, self._deadline_s = queue, tenant, deadline_s

    async def __aenter__(self) -> None:
        self._ticket = await self._queue.enter(self._tenant, self._deadline_s)
        self._started_s = asyncio.get_running_loop().time()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_served = kind is None
        service_s = asyncio.get_running_loop().time() - self._started_s if is_served else None
        self._queue.leave(self._ticket, service_s)
