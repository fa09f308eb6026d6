"""PrefixRoom: a part of what is free, and less as that gets less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.base import known, unknown
from edge_rt.engine.prefix_room import MAX_BYTES, PrefixRoom, room_bytes
from tests.fakes import FakeClock

GIB = 2**30
sizes = st.integers(0, 64 * GIB)


@given(sizes, sizes, st.integers(0, GIB))
def test_the_margin_stays_free_whatever_is_kept(n_kept: int, available: int, margin: int) -> None:
    limit = room_bytes(n_kept, available, margin)
    assert 0 <= limit <= MAX_BYTES
    assert available - (limit - n_kept) >= margin or limit == 0


def test_half_of_what_is_spare() -> None:
    assert room_bytes(GIB, 100 * 2**20, 256 * 2**20) == (GIB - 156 * 2**20) // 2
    assert room_bytes(0, 4 * GIB, 0) == 2 * GIB
    assert room_bytes(0, 512 * 2**20, 256 * 2**20) == 128 * 2**20


def test_memory_is_looked_at_twice_a_second() -> None:
    clock, free = FakeClock(), [2 * GIB]
    room = PrefixRoom(lambda: known(free[0], "meminfo"), 0, clock=clock)
    assert room(0) == GIB
    free[0] = 0
    clock.advance(0.4)
    assert room(1000) == GIB
    clock.advance(0.2)
    assert room(1000) == 500


def test_where_nobody_knows_it_is_128_mib() -> None:
    room = PrefixRoom(lambda: unknown("meminfo", "no such file"), 0, clock=FakeClock())
    assert room(0) == 128 * 2**20
