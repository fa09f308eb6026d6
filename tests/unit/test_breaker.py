from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.breaker import MAX_PAUSE_FACTOR, Breaker, Ticket

RETRY_S = 10.0


def make(max_failures: int = 3) -> Breaker:
    return Breaker(max_failures=max_failures, retry_s=RETRY_S)


def fail(breaker: Breaker, now_s: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.failed(breaker.begin(now_s), now_s)


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = make()
    fail(breaker, 0.0, 2)
    breaker.succeeded(breaker.begin(0.0))
    fail(breaker, 0.0, 2)
    assert breaker.state(0.0) == "closed"
    fail(breaker, 1.0)
    assert breaker.state(1.0) == "open"
    assert not breaker.allows(1.0 + RETRY_S - 0.1)


def test_other_limits_count_from_the_next_failure_on() -> None:
    breaker = make()
    fail(breaker, 0.0, 3)
    breaker.limit(max_failures=1, retry_s=2.0)
    assert not breaker.allows(RETRY_S - 0.1)  # as it was to be
    breaker.succeeded(breaker.begin(RETRY_S))
    fail(breaker, 20.0)
    assert (breaker.allows(21.9), breaker.allows(22.0)) == (False, True)


def test_one_request_tries_and_its_success_closes() -> None:
    breaker = make()
    fail(breaker, 0.0, 3)
    assert breaker.allows(RETRY_S)
    probe = breaker.begin(RETRY_S)
    assert probe.role == "probe"
    assert not breaker.allows(RETRY_S), "only one request at a time may try"
    breaker.succeeded(probe)
    assert breaker.state(RETRY_S) == "closed"


def test_a_failed_try_doubles_the_pause_up_to_its_cap_and_a_success_resets_it() -> None:
    breaker = make(max_failures=1)
    now_s, pauses = 0.0, []
    for _ in range(8):
        fail(breaker, now_s)
        assert breaker.retry_at_s is not None
        pauses.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
    assert pauses == [10, 20, 40, 50, 50, 50, 50, 50]
    breaker.succeeded(breaker.begin(now_s))
    fail(breaker, now_s)
    assert breaker.retry_at_s == now_s + RETRY_S


def test_tries_that_take_long_are_seldom() -> None:
    breaker = make(max_failures=1)
    breaker.failed(breaker.begin(0.0), 60.0, lost_s=60.0)
    assert breaker.retry_at_s == 60.0 + 1200.0
    breaker.retry_now(70.0)
    assert breaker.state(70.0) == "half_open"


def test_a_try_whose_client_left_lets_the_next_one_try() -> None:
    breaker = make(max_failures=1)
    fail(breaker, 0.0)
    breaker.abandoned(breaker.begin(RETRY_S))
    assert breaker.state(RETRY_S) == "half_open"
    assert breaker.allows(RETRY_S)


def test_what_began_before_it_opened_is_not_counted() -> None:
    breaker = make()
    early_good, early_bad = breaker.begin(0.0), breaker.begin(0.0)
    fail(breaker, 0.0, 3)
    breaker.succeeded(early_good)
    assert breaker.state(0.0) == "open"
    breaker.failed(early_bad, 5.0)
    assert breaker.retry_at_s == RETRY_S


def test_requests_beside_an_open_breaker_close_it_but_do_not_lengthen_its_pause() -> None:
    breaker = make(max_failures=1)
    fail(breaker, 0.0)
    fail(breaker, 1.0, 5)
    assert breaker.retry_at_s == RETRY_S
    breaker.succeeded(breaker.begin(2.0))
    assert breaker.state(2.0) == "closed"


@pytest.mark.parametrize(("max_failures", "retry_s"), [(0, 1.0), (1, 0.0), (1, -1.0)])
def test_settings_that_make_no_sense_are_refused(max_failures: int, retry_s: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Breaker(max_failures=max_failures, retry_s=retry_s)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["begin", "good", "bad", "left", "trip", "wait"]), st.integers(0, 7))),
)
def test_invariants(max_failures: int, steps: list[tuple[str, int]]) -> None:
    breaker, now_s = make(max_failures), 0.0
    under_way: list[Ticket] = []
    for step, number in steps:
        opened_at = breaker.retry_at_s
        if step == "begin":
            allowed, state = breaker.allows(now_s), breaker.state(now_s)
            ticket = breaker.begin(now_s)
            under_way.append(ticket)
            assert (ticket.role != "beside") == allowed
            assert (ticket.role == "probe") == (allowed and state == "half_open")
        elif step == "wait":
            now_s += number * RETRY_S / 4
        elif step == "trip":
            breaker.trip(now_s)
        elif under_way:
            ticket = under_way.pop(number % len(under_way))
            if step == "good":
                breaker.succeeded(ticket)
            elif step == "bad":
                breaker.failed(ticket, now_s)
            else:
                breaker.abandoned(ticket)
        current = [t for t in under_way if t.role == "probe" and t.generation == breaker._generation]
        if breaker.state(now_s) == "half_open":
            assert len(current) <= 1, "two requests try at once"
            assert breaker.allows(now_s) == (not current), "a try that has ended blocks the next"
        if breaker.state(now_s) == "open":
            assert not breaker.allows(now_s)
        if breaker.retry_at_s is not None and breaker.retry_at_s != opened_at:
            assert RETRY_S <= breaker.retry_at_s - now_s <= RETRY_S * MAX_PAUSE_FACTOR
