"""Turns: shares by weight and by tenant, and nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.turns import PRIORITIES, WEIGHTS, Turns, in_turn, rank
from edge_rt.types import Priority


def serve(turns: Turns, flows: list[tuple[Priority, str]], n_turns: int, sizes: dict[str, int]) -> dict[object, int]:
    """Serve whoever comes next, all of them with endless work; give the rows that each flow got."""
    done = dict.fromkeys(flows, 0)
    for _ in range(n_turns):
        flow = in_turn(turns, ((*flow, flow) for flow in flows))[0]
        n = sizes.get(flow[1], 10)
        turns.charge(*flow, n)
        done[flow] += n
    return done


def test_priorities_share_by_weight_while_all_have_work() -> None:
    done = serve(Turns(), [(p, "a") for p in PRIORITIES], 2100, {})
    total = sum(WEIGHTS.values())
    for priority in PRIORITIES:
        assert abs(done[priority, "a"] / sum(done.values()) - WEIGHTS[priority] / total) < 0.01


def test_the_more_urgent_comes_first_where_nothing_was_done_yet() -> None:
    turns = Turns()
    flows: list[tuple[Priority, str]] = [("background", "a"), ("normal", "b"), ("interactive", "c")]
    assert in_turn(turns, ((*flow, flow[0]) for flow in flows)) == ["interactive", "normal", "background"]


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 100), min_size=2))
def test_tenants_share_by_rows_and_not_by_requests(sizes: dict[str, int]) -> None:
    done = serve(Turns(), [("normal", tenant) for tenant in sizes], 2000, sizes)
    assert max(done.values()) - min(done.values()) <= max(sizes.values())


def test_who_comes_after_a_pause_begins_where_the_others_are() -> None:
    turns = Turns()
    serve(turns, [("normal", "a")], 1000, {})
    turns.join("normal", "b", [("normal", "a")])
    done = serve(turns, [("normal", "a"), ("normal", "b")], 100, {})
    assert abs(done["normal", "a"] - done["normal", "b"]) <= 20


def test_a_priority_after_a_pause_saves_nothing_up() -> None:
    turns = Turns()
    serve(turns, [("interactive", "a")], 1600, {})
    turns.join("background", "b", [("interactive", "a")])
    done = serve(turns, [("interactive", "a"), ("background", "b")], 170, {})
    assert done["background", "b"] <= 120


def test_only_the_less_urgent_beyond_its_share_gives_its_place() -> None:
    turns = Turns()
    assert turns.may_displace("interactive", "background")
    assert not turns.may_displace("background", "interactive")
    assert not turns.may_displace("normal", "normal")
    turns.charge("interactive", "a", 1600)
    assert not turns.may_displace("interactive", "background")  # it is background's turn
    turns.charge("background", "b", 200)
    assert turns.may_displace("interactive", "background")


def test_tenants_that_are_level_are_forgotten() -> None:
    turns = Turns()
    for i in range(5000):
        turns.join("normal", str(i), [("normal", "x")])
    assert len(turns._tenants) <= 1024 + 1
    assert [rank(p) for p in PRIORITIES] == [0, 1, 2]
