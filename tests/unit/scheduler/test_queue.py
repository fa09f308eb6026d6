from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_rt.errors import DeadlineError, DeadlineUnreachableError, QueueFullError, ShuttingDownError
from edge_rt.scheduler.queue import Admission, Queue, Wish
from tests import virtual_time

MAX_RUNNING, MAX_WAITING, MAX_PER_TENANT = 2, 5, 3
TENANTS = ("a", "b", "c")


class AdmissionMachine(RuleBasedStateMachine):
    """Any mixture of arrivals and departures keeps the limits, the order and every request."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(
            max_running=MAX_RUNNING, max_waiting=MAX_WAITING, max_waiting_per_tenant=MAX_PER_TENANT
        )
        self.n_tickets = 0
        self.running: set[int] = set()
        self.waiting: dict[str, deque[int]] = {tenant: deque() for tenant in TENANTS}
        self.passed_over: dict[str, int] = dict.fromkeys(TENANTS, 0)

    def n_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @rule(tenant=st.sampled_from(TENANTS))
    def arrive(self, tenant: str) -> None:
        ticket = self.n_tickets
        self.n_tickets += 1
        has_room = len(self.running) < MAX_RUNNING
        is_full = self.n_waiting() >= MAX_WAITING or len(self.waiting[tenant]) >= MAX_PER_TENANT
        if is_full and not has_room:
            with pytest.raises(QueueFullError) as caught:
                self.admission.arrive(ticket, Wish(tenant))
            assert caught.value.waiting >= caught.value.limit
            assert 1.0 <= caught.value.retry_after_s <= 60.0
            return
        assert self.admission.arrive(ticket, Wish(tenant)) == has_room
        if has_room:
            self.running.add(ticket)
        else:
            self.waiting[tenant].append(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), service_s=st.none() | st.floats(0, 1e6))
    def finish(self, data: st.DataObject, service_s: float | None) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(ticket)
        self.took_over(self.admission.leave(ticket, service_s))

    @precondition(lambda self: self.n_waiting())
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from([t for t in TENANTS if self.waiting[t]]))
        ticket = data.draw(st.sampled_from(list(self.waiting[tenant])))
        self.waiting[tenant].remove(ticket)
        assert self.admission.leave(ticket) == ()

    @rule()
    def leave_unknown(self) -> None:
        assert self.admission.leave(-1) == ()

    def took_over(self, admitted: tuple[int, ...]) -> None:
        assert len(admitted) == min(1, self.n_waiting())
        for ticket in admitted:
            (tenant,) = [t for t in TENANTS if ticket in self.waiting[t]]  # a cancelled one is nowhere
            assert self.waiting[tenant].popleft() == ticket  # within a tenant: in order of arrival
            self.running.add(ticket)
            self.passed_over[tenant] = 0
            for other in TENANTS:
                self.passed_over[other] += other != tenant and bool(self.waiting[other])

    @invariant()
    def counts_agree(self) -> None:
        assert self.admission.n_running == len(self.running) <= MAX_RUNNING
        assert self.admission.n_waiting == self.n_waiting() <= MAX_WAITING

    @invariant()
    def nobody_starves(self) -> None:
        for tenant in TENANTS:
            if not self.waiting[tenant]:
                self.passed_over[tenant] = 0
            assert self.passed_over[tenant] < len(TENANTS)

    @invariant()
    def no_place_is_left_empty(self) -> None:
        assert len(self.running) == MAX_RUNNING or not self.n_waiting()

    def teardown(self) -> None:
        """Nothing is lost: all who wait run in the end."""
        while self.running:
            ticket = self.running.pop()
            self.took_over(self.admission.leave(ticket))
        assert not self.n_waiting()
        assert self.admission.n_waiting == self.admission.n_running == 0


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase


def test_retry_after_grows_with_the_queue_and_the_service_time() -> None:
    def retry_after_s(n_waiting: int, service_s: float) -> float:
        admission = Admission(max_running=1, max_waiting=n_waiting)
        for _ in range(100):
            admission.arrive(0, Wish("t"))
            admission.leave(0, service_s)
        for ticket in range(n_waiting + 1):
            admission.arrive(ticket, Wish("t"))
        with pytest.raises(QueueFullError) as caught:
            admission.arrive(1000, Wish("t"))
        return caught.value.retry_after_s

    assert retry_after_s(0, 3.0) == pytest.approx(3.0)
    assert retry_after_s(4, 3.0) == pytest.approx(15.0)
    assert retry_after_s(4, 0.001) == 1.0
    assert retry_after_s(4, 1000.0) == 60.0


def make(*, max_running: int = 1, max_waiting: int = 4, depths: list[tuple[int, int]] | None = None) -> Queue:
    heard = depths if depths is not None else []
    return Queue(
        Admission(max_running=max_running, max_waiting=max_waiting),
        lambda running, waiting: heard.append((running, waiting)),
    )


async def hold(
    queue: Queue, log: list[str], name: str, seconds: float, *, tenant: str = "", deadline_s: float = 99.0
) -> None:
    async with queue.place(Wish(tenant), deadline_s):
        log.append(name)
        await asyncio.sleep(seconds)


def test_tenants_take_turns() -> None:
    async def main() -> None:
        queue, log = make(), list[str]()
        names = ["a1", "a2", "a3", "b1", "c1"]
        await asyncio.gather(*(hold(queue, log, name, 1.0, tenant=name[0]) for name in names))
        assert log == ["a1", "b1", "c1", "a2", "a3"]
        assert (queue.n_running, queue.n_waiting) == (0, 0)

    virtual_time.run(main())


async def outcome(queue: Queue, log: list[str], name: str) -> str:
    try:
        await hold(queue, log, name, 1.0, tenant=name[0])
    except QueueFullError:
        return f"{name} refused"
    return name


def test_nobody_fills_the_queue_for_others() -> None:
    async def main() -> None:
        queue, log = make(max_waiting=4), list[str]()
        names = ["a1", "a2", "a3", "a4", "a5", "a6", "b1", "b2", "b3"]
        outcomes = await asyncio.gather(*(outcome(queue, log, name) for name in names))
        # a6 finds the queue full; a5 and a4 make room for b1 and b2; b3 would leave a with less than b has.
        assert [name for name in outcomes if "refused" in name] == [
            "a4 refused",
            "a5 refused",
            "a6 refused",
            "b3 refused",
        ]
        assert log == ["a1", "b1", "a2", "b2", "a3"]
        assert (queue.n_running, queue.n_waiting) == (0, 0)

    virtual_time.run(main())


def test_the_least_urgent_of_who_waits_most_makes_room() -> None:
    admission = Admission(max_running=1, max_waiting=3)
    for ticket, priority in enumerate(("normal", "background", "interactive", "normal")):
        admission.arrive(ticket, Wish("a", priority))  # type: ignore[arg-type]
    assert admission.yielding("a") is None
    assert admission.yielding("b") == 1


def test_who_would_be_refused_all_the_same_displaces_nobody() -> None:
    admission = Admission(max_running=1, max_waiting=4, max_waiting_per_tenant=4)
    for ticket in range(5):
        admission.arrive(ticket, Wish("a"))
    admission.limit(max_waiting=4, max_waiting_per_tenant=1)
    assert admission.yielding("b") == 4
    admission.limit(max_waiting=2, max_waiting_per_tenant=1)
    assert admission.yielding("b") is None


def test_a_request_that_waits_too_long_is_refused_and_its_place_goes_on() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue, log = make(), list[str]()
        began_at_s = loop.time()
        long = asyncio.create_task(hold(queue, log, "long", 10.0))
        await asyncio.sleep(0)
        patient = asyncio.create_task(hold(queue, log, "patient", 1.0))
        with pytest.raises(DeadlineError) as caught:
            await hold(queue, log, "hasty", 1.0, deadline_s=2.0)
        assert caught.value.deadline_s == 2.0
        assert loop.time() - began_at_s == pytest.approx(2.0)
        await asyncio.gather(long, patient)
        assert log == ["long", "patient"]

    virtual_time.run(main())


def test_a_cancelled_request_is_never_admitted() -> None:
    async def main() -> None:
        queue, log = make(), list[str]()
        first = asyncio.create_task(hold(queue, log, "first", 1.0))
        await asyncio.sleep(0)
        gone = asyncio.create_task(hold(queue, log, "gone", 1.0))
        last = asyncio.create_task(hold(queue, log, "last", 1.0))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([first, gone, last])
        assert log == ["first", "last"]
        assert gone.cancelled()

    virtual_time.run(main())


def test_a_place_given_in_the_moment_of_cancellation_is_passed_on() -> None:
    async def main() -> None:
        queue, log = make(), list[str]()

        async def first() -> None:
            async with queue.place(Wish(""), 99.0):
                await asyncio.sleep(1.0)
            assert queue.n_running == 1  # its place has gone to `gone`, which has not run yet
            gone.cancel()

        holder = asyncio.create_task(first())
        await asyncio.sleep(0)
        gone = asyncio.create_task(hold(queue, log, "gone", 1.0))
        last = asyncio.create_task(hold(queue, log, "last", 1.0))
        await holder
        await asyncio.wait([gone, last])
        assert log == ["last"]
        assert (queue.n_running, queue.n_waiting) == (0, 0)

    virtual_time.run(main())


def test_a_request_cancelled_just_before_a_place_is_free_does_not_take_it() -> None:
    async def main() -> None:
        queue, log = make(), list[str]()

        async def first() -> None:
            async with queue.place(Wish(""), 99.0):
                await asyncio.sleep(1.0)
                gone.cancel()  # still in the queue when the place becomes free, in this very step

        holder = asyncio.create_task(first())
        await asyncio.sleep(0)
        gone = asyncio.create_task(hold(queue, log, "gone", 1.0))
        last = asyncio.create_task(hold(queue, log, "last", 1.0))
        await asyncio.wait([holder, gone, last])
        holder.result()
        assert log == ["last"]
        assert (queue.n_running, queue.n_waiting) == (0, 0)

    virtual_time.run(main())


def test_a_full_queue_refuses_at_once() -> None:
    async def main() -> None:
        queue, log = make(max_waiting=0), list[str]()
        running = asyncio.create_task(hold(queue, log, "runs", 1.0))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await hold(queue, log, "refused", 1.0)
        await running
        assert log == ["runs"]

    virtual_time.run(main())


def test_close_refuses_those_who_wait_and_come_and_lets_those_who_run_finish() -> None:
    async def main() -> None:
        queue, log = make(), list[str]()
        running = asyncio.create_task(hold(queue, log, "runs", 1.0))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(hold(queue, log, "waits", 1.0)) for _ in range(2)]
        await asyncio.sleep(0)
        queue.close(ShuttingDownError)
        for task in waiting:
            with pytest.raises(ShuttingDownError):
                await task
        with pytest.raises(ShuttingDownError):
            await hold(queue, log, "comes", 1.0)
        await running
        assert log == ["runs"]
        assert (queue.n_running, queue.n_waiting) == (0, 0)

    virtual_time.run(main())


def test_an_error_inside_frees_the_place() -> None:
    async def main() -> None:
        queue = make()
        with pytest.raises(ValueError, match="inside"):
            async with queue.place(Wish(""), 1.0):
                raise ValueError("inside")
        assert queue.n_running == 0

    virtual_time.run(main())


def test_every_change_of_depth_is_reported() -> None:
    async def main() -> None:
        depths: list[tuple[int, int]] = []
        queue = make(depths=depths)
        await asyncio.gather(*(hold(queue, [], name, 1.0) for name in "ab"))
        assert depths == [(1, 0), (1, 1), (1, 0), (0, 0)]

    virtual_time.run(main())


def test_another_limit_counts_for_those_that_come_and_not_for_those_that_wait() -> None:
    admission = Admission(max_running=1, max_waiting=3)
    assert [admission.arrive(ticket, Wish("a")) for ticket in range(4)] == [True, False, False, False]
    admission.limit(max_waiting=1, max_waiting_per_tenant=0)
    assert admission.n_waiting == 3
    with pytest.raises(QueueFullError) as caught:
        admission.arrive(4, Wish("b"))
    assert caught.value.limit == 1
    admission.limit(max_waiting=9, max_waiting_per_tenant=4)
    assert [admission.arrive(5, Wish("a")), admission.arrive(6, Wish("b"))] == [False, False]
    with pytest.raises(QueueFullError):
        admission.arrive(7, Wish("a"))


def test_fewer_may_run_than_could_and_those_that_run_go_on() -> None:
    admission = Admission(max_running=3, max_waiting=2)
    assert [admission.arrive(ticket, Wish("a")) for ticket in range(3)] == [True] * 3
    assert admission.run_at_most(1) == ()
    assert admission.n_running == 3
    assert [admission.arrive(ticket, Wish("a")) for ticket in (3, 4)] == [False, False]
    assert admission.leave(0) == admission.leave(1) == ()
    assert admission.leave(2) == (3,)
    assert admission.run_at_most(2) == (4,)
    assert admission.run_at_most(None) == ()
    assert admission.arrive(5, Wish("a"))


def test_no_request_is_refused_because_fewer_run_than_could() -> None:
    admission = Admission(max_running=3, max_waiting=2, max_waiting_per_tenant=2)
    admission.run_at_most(1)
    assert [admission.arrive(ticket, Wish("a")) for ticket in range(5)] == [True, False, False, False, False]
    with pytest.raises(QueueFullError):
        admission.arrive(5, Wish("a"))


@pytest.mark.parametrize(("most", "n_running"), [(0, 3), (-1, 1), (9, 3), (None, 3)])
def test_no_advice_lets_more_run_than_could_nor_none(most: int | None, n_running: int) -> None:
    admission = Admission(max_running=3, max_waiting=9)
    admission.run_at_most(most)
    assert sum(admission.arrive(ticket, Wish("a")) for ticket in range(6)) == n_running


def test_who_waits_begins_as_soon_as_more_may_run() -> None:
    async def main() -> None:
        queue, order = make(max_running=2), []
        begun_s = asyncio.get_running_loop().time()
        queue.run_at_most(1)
        held = [asyncio.create_task(hold(queue, order, name, 10.0)) for name in "ab"]
        await asyncio.sleep(1.0)
        assert (queue.n_running, queue.n_waiting) == (1, 1)
        queue.run_at_most(None)
        assert (queue.n_running, queue.n_waiting) == (2, 0)
        await asyncio.gather(*held)
        assert asyncio.get_running_loop().time() - begun_s < 12.0

    virtual_time.run(main())


def test_tenants_share_by_the_work_that_was_done_and_not_by_requests() -> None:
    admission = Admission(max_running=1, max_waiting=100)
    works = {"long": 1000.0, "short": 10.0}
    ticket, done = 0, dict.fromkeys(works, 0.0)
    running: dict[int, str] = {}
    tickets: dict[int, str] = {}
    for tenant in works:
        for _ in range(30):
            if admission.arrive(ticket, Wish(tenant)):
                running[ticket] = tenant
            tickets[ticket] = tenant
            ticket += 1
    for _ in range(20):
        (current,) = running
        tenant = running.pop(current)
        done[tenant] += works[tenant]
        (following,) = admission.leave(current, 1.0, works[tenant])
        running[following] = tickets[following]
    assert done["long"] <= done["short"] + 2 * works["long"]


def test_the_more_urgent_goes_in_where_it_can_take_a_place() -> None:
    admission = Admission(max_running=2, max_waiting=10, displaces=True)
    assert admission.arrive(0, Wish("a", "background"))
    assert admission.arrive(1, Wish("a", "background"))
    assert not admission.arrive(2, Wish("a", "background"))
    assert admission.arrive(3, Wish("b", "interactive"))
    assert admission.arrive(4, Wish("b", "normal"))
    assert not admission.arrive(5, Wish("b", "interactive"))  # the engine takes two at a time of what is as urgent
    assert admission.leave(3) == (5,)
    assert admission.leave(0) == ()
    assert admission.leave(4) == ()
    assert admission.leave(1) == (2,)


def test_where_nobody_is_put_back_all_wait_for_a_place() -> None:
    admission = Admission(max_running=1, max_waiting=10)
    assert admission.arrive(0, Wish("a", "background"))
    assert not admission.arrive(1, Wish("a", "normal"))
    assert not admission.arrive(2, Wish("b", "interactive"))
    assert admission.leave(0) == (2,)


def test_a_deadline_that_the_queue_cannot_keep_is_refused_at_once() -> None:
    admission = Admission(max_running=1, max_waiting=100)
    for ticket in range(50):
        admission.arrive(ticket, Wish("t"))
        admission.leave(ticket, 2.0)
    for ticket in range(100, 105):
        admission.arrive(ticket, Wish("t"))
    with pytest.raises(DeadlineUnreachableError) as caught:
        admission.arrive(200, Wish("t", deadline_s=5.0))
    assert caught.value.needed_s == pytest.approx(9.0, rel=0.05)
    assert admission.n_waiting == 4
    assert not admission.arrive(201, Wish("t", deadline_s=20.0))
    assert not admission.arrive(202, Wish("other", deadline_s=5.0))  # its turn comes sooner
    assert not admission.arrive(203, Wish("t", "interactive", deadline_s=5.0))


def test_a_wide_request_takes_its_places_and_is_not_passed_by() -> None:
    admission = Admission(max_running=4, max_waiting=10)
    assert [admission.arrive(i, Wish("a")) for i in range(2)] == [True, True]
    assert not admission.arrive(2, Wish("b", width=3))
    assert not admission.arrive(3, Wish("c"))  # there is a place, and it is kept for who came before
    assert not admission.has_room
    assert admission.leave(0) == (2,)
    assert admission.leave(1) == (3,)
    assert not admission.arrive(4, Wish("a"))  # three and one: all are taken
    assert admission.leave(2) == (4,)


def test_a_wide_request_that_gives_up_lets_the_others_in() -> None:
    admission = Admission(max_running=2, max_waiting=10)
    assert admission.arrive(0, Wish("a"))
    assert not admission.arrive(1, Wish("a", width=2))
    assert not admission.arrive(2, Wish("b"))
    assert admission.leave(1) == (2,)


def test_a_more_urgent_request_passes_a_wide_one() -> None:
    admission = Admission(max_running=2, max_waiting=10)
    assert admission.arrive(0, Wish("a"))
    assert not admission.arrive(1, Wish("b", "background", width=2))
    assert admission.arrive(2, Wish("c", "interactive"))


def test_a_request_wider_than_what_may_run_gets_all_of_it() -> None:
    admission = Admission(max_running=4, max_waiting=10)
    admission.run_at_most(2)
    assert admission.arrive(0, Wish("a", width=4))
    assert not admission.arrive(1, Wish("a"))
    assert admission.leave(0) == (1,)


class WideMachine(RuleBasedStateMachine):
    """Requests of any width: no more run than there are places, and where none runs none waits."""

    N_PLACES = 4

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(max_running=self.N_PLACES, max_waiting=6)
        self.widths: dict[int, int] = {}
        self.running: set[int] = set()
        self.n_tickets = 0

    @rule(tenant=st.sampled_from(TENANTS), width=st.integers(1, 6))
    def arrive(self, tenant: str, width: int) -> None:
        ticket, self.n_tickets = self.n_tickets, self.n_tickets + 1
        try:
            is_running = self.admission.arrive(ticket, Wish(tenant, width=width))
        except QueueFullError:
            return
        self.widths[ticket] = min(width, self.N_PLACES)
        if is_running:
            self.running.add(ticket)

    @precondition(lambda self: self.widths)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.widths)))
        del self.widths[ticket]
        self.running.discard(ticket)
        self.running |= set(self.admission.leave(ticket))

    @invariant()
    def no_place_is_taken_twice(self) -> None:
        assert sum(self.widths[ticket] for ticket in self.running) <= self.N_PLACES
        assert self.running or not self.widths
        assert (self.admission.n_running, self.admission.n_waiting) == (
            len(self.running),
            len(self.widths) - len(self.running),
        )


TestWideMachine = WideMachine.TestCase
