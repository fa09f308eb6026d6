"""Whose grammar is compiled next."""

from __future__ import annotations

import threading

from edge_rt.types import GenerateRequest, Priority
from edge_rt.worker import channel
from edge_rt.worker.forms_desk import FormsDesk
from tests.fakes import FakeClock


def ask(desk: FormsDesk, name: str, tenant: str, priority: Priority = "normal") -> None:
    desk.put(channel.Generate(GenerateRequest(id=name, model="m", prompt="x", tenant=tenant, priority=priority)))


def served(desk: FormsDesk, clock: FakeClock, n: int, *, slow: str = "h") -> list[str]:
    names = []
    for _ in range(n):
        names.append(desk.get().request.id)
        clock.advance(1.0 if names[-1].startswith(slow) else 0.01)
    return names


def test_one_tenants_requests_come_in_their_order() -> None:
    clock = FakeClock()
    desk = FormsDesk(clock=clock)
    for i in range(5):
        ask(desk, f"a{i}", "1000")
    assert served(desk, clock, 5) == [f"a{i}" for i in range(5)]


def test_who_asks_for_slow_ones_waits_for_himself() -> None:
    clock = FakeClock()
    desk = FormsDesk(clock=clock)
    for i in range(20):
        ask(desk, f"h{i}", "1001")
    first = served(desk, clock, 1)
    for i in range(10):
        ask(desk, f"a{i}", "1000")
    assert first + served(desk, clock, 11) == ["h0", *(f"a{i}" for i in range(10)), "h1"]


def test_the_more_urgent_come_first() -> None:
    clock = FakeClock()
    desk = FormsDesk(clock=clock)
    ask(desk, "b", "1000", "background")
    ask(desk, "i", "1001", "interactive")
    assert served(desk, clock, 2) == ["i", "b"]


def test_what_nobody_wants_is_not_given() -> None:
    desk = FormsDesk()
    for name in "abc":
        ask(desk, name, "1000")
    assert [desk.drop("b"), desk.drop("b")] == [True, False]
    assert [desk.get().request.id for _ in range(2)] == ["a", "c"]


def test_it_waits_for_what_comes() -> None:
    desk = FormsDesk()
    found: list[str] = []
    clerk = threading.Thread(target=lambda: found.append(desk.get().request.id))
    clerk.start()
    ask(desk, "a", "1000")
    clerk.join(5.0)
    assert found == ["a"]
