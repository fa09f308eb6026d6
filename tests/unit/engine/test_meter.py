"""Meter: what it counts, and what nested values weigh."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateRuntimeError

from edge_rt.engine.meter import NODE_CHARS, LimitError, Meter
from tests.fakes import FakeClock


def meter(clock: FakeClock, max_chars: int = 1000) -> Meter:
    return Meter(max_chars=max_chars, max_time_s=1.0, clock=clock)


def test_ticks_stop_at_the_deadline(clock: FakeClock) -> None:
    subject = meter(clock)
    assert all(subject.tick() for _ in range(1000))
    clock.advance(1.5)
    with pytest.raises(LimitError, match="takes more than 1 s"):
        all(subject.tick() for _ in range(100))


def test_charges_add_up(clock: FakeClock) -> None:
    subject = meter(clock)
    subject.charge(600)
    subject.charge(400)
    with pytest.raises(LimitError, match="more than 1000 characters"):
        subject.charge(1)


@pytest.mark.parametrize(
    ("value", "weight"),
    [
        ("abc", NODE_CHARS + 3),
        (None, NODE_CHARS),
        (True, NODE_CHARS),
        (7, NODE_CHARS),
        ([], NODE_CHARS),
        (["ab", 1], 3 * NODE_CHARS + 2),
        (("ab",), 2 * NODE_CHARS + 2),
        ({"a": "bc"}, 3 * NODE_CHARS + 3),
        ([["a"], ["b"]], 5 * NODE_CHARS + 2),
    ],
)
def test_weight_is_the_size_written_out(clock: FakeClock, value: object, weight: int) -> None:
    assert meter(clock).weigh(value) == weight


def test_what_is_in_a_list_twice_weighs_twice(clock: FakeClock) -> None:
    subject = meter(clock, max_chars=100_000)
    value: list[Any] = ["x"]
    single = subject.weigh(value)
    for _ in range(10):
        value = [value, value]
    assert subject.weigh(value) > 1024 * single


def test_doubling_stops_long_before_it_is_slow(clock: FakeClock) -> None:
    subject = meter(clock, max_chars=100_000)

    def double(value: list[Any], n: int) -> list[Any]:
        for _ in range(n):
            value = [value, value]
            subject.weigh(value)
        return value

    with pytest.raises(LimitError, match="list of more than 100000"):
        double(["x"], 100)


def test_only_plain_values_have_a_weight(clock: FakeClock) -> None:
    with pytest.raises(TemplateRuntimeError, match="a object cannot be kept in a list"):
        meter(clock).weigh([object()])
