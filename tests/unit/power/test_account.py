from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.base import known, unknown
from edge_rt.devices.meters import Sample
from edge_rt.power.account import EnergyAccount, Part, Source
from edge_rt.types import Energy

SOURCE = Source("fake", "board", "measured")


class Bench:
    """An account whose meter tells what the test says, every 0.1 s."""

    def __init__(self, *, idle_w: float | None = None) -> None:
        self.account = EnergyAccount(SOURCE, 0.1, idle_w=idle_w)
        self.now_s = 0.0

    def run(self, seconds: float, watts: float | None) -> None:
        for _ in range(round(seconds * 10)):
            reading = unknown("fake", "gone") if watts is None else known(Sample(power_w=watts), "fake")
            self.account.log.take(reading, self.now_s)
            self.account.learn_idle(self.now_s)
            self.now_s = round(self.now_s + 0.1, 6)
        if watts is not None:
            self.account.log.take(known(Sample(power_w=watts), "fake"), self.now_s)


def found(energy: Energy | None) -> Energy:
    assert energy is not None
    return energy


def test_a_lone_answer_gets_all() -> None:
    bench = Bench(idle_w=2.0)
    answer = bench.account.begin("m", 0.0)
    bench.run(1.0, 10.0)
    bench.run(4.0, 5.0)
    energy = found(bench.account.end(answer, 5.0, prefill=Part(1.0, 1.0, 4.0), decode=Part(4.0, 4.0)))
    assert energy.prefill_j == pytest.approx(10.0, rel=0.05)
    assert energy.decode_j == pytest.approx(20.0, rel=0.05)
    assert energy.total_j == pytest.approx(30.0, rel=0.02)
    assert energy.above_idle_j == pytest.approx(20.0, rel=0.02)
    assert (energy.boundary, energy.quality, energy.source) == ("board", "measured", "fake")
    assert energy.coverage == pytest.approx(1.0)


def test_two_answers_of_one_model_share_by_their_rows() -> None:
    bench = Bench()
    one, other = bench.account.begin("m", 0.0), bench.account.begin("m", 0.0)
    bench.run(4.0, 10.0)
    parts = [found(bench.account.end(a, 4.0, prefill=Part(4.0, s))) for a, s in ((one, 3.0), (other, 1.0))]
    assert [part.total_j for part in parts] == pytest.approx([30.0, 10.0])


def test_two_models_share_by_their_time() -> None:
    bench = Bench()
    text, picture = bench.account.begin("text", 0.0), bench.account.begin("picture", 0.0)
    bench.run(4.0, 10.0)
    a = found(bench.account.end(text, 4.0, prefill=Part(4.0, 4.0)))
    b = found(bench.account.end(picture, 4.0, prefill=Part(4.0, 4.0)))
    assert (a.total_j, b.total_j) == (pytest.approx(20.0), pytest.approx(20.0))


def test_more_threads_take_more() -> None:
    bench = Bench()
    wide = bench.account.begin("wide", 0.0, weight=3.0)
    narrow = bench.account.begin("narrow", 0.0)
    bench.run(4.0, 10.0)
    a = found(bench.account.end(wide, 4.0, prefill=Part(4.0, 4.0)))
    b = found(bench.account.end(narrow, 4.0, prefill=Part(4.0, 4.0)))
    assert (a.total_j, b.total_j) == (pytest.approx(30.0), pytest.approx(10.0))


def test_who_came_late_shares_only_the_end() -> None:
    bench = Bench()
    text = bench.account.begin("text", 0.0)
    bench.run(3.0, 10.0)
    picture = bench.account.begin("picture", 3.0)
    bench.run(1.0, 10.0)
    b = found(bench.account.end(picture, 4.0, prefill=Part(1.0, 1.0)))
    assert b.total_j == pytest.approx(5.0)
    a = found(bench.account.end(text, 4.0, prefill=Part(4.0, 4.0)))
    assert a.total_j == pytest.approx(40.0 * 4 / 5)


def test_without_a_learned_idle_power_only_the_total_is_told() -> None:
    bench = Bench()
    answer = bench.account.begin("m", 0.0)
    bench.run(1.0, 10.0)
    energy = found(bench.account.end(answer, 1.0, prefill=Part(0.5, 0.5, 0.5), decode=Part(0.5, 0.5)))
    assert (energy.above_idle_j, energy.prefill_above_idle_j, energy.decode_above_idle_j) == (None, None, None)
    assert energy.saved_j == energy.total_j


def test_idle_power_is_learned_while_nobody_asks() -> None:
    bench = Bench()
    bench.run(10.0, 2.0)
    assert bench.account.idle_w == pytest.approx(2.0)
    answer = bench.account.begin("m", bench.now_s)
    bench.run(10.0, 9.0)
    assert bench.account.idle_w == pytest.approx(2.0)
    bench.account.abandon(answer, bench.now_s)
    bench.run(5.0, 30.0)  # a neighbour, for less than a quarter … of what is remembered
    bench.run(40.0, 2.5)
    assert bench.account.idle_w == pytest.approx(2.0, abs=0.51)


def test_power_that_is_missing_leaves_idle_power_alone() -> None:
    bench = Bench()
    bench.run(10.0, None)
    assert bench.account.idle_w is None


def test_an_answer_with_half_its_values_is_derived_and_with_fewer_unknown() -> None:
    bench = Bench()
    answer = bench.account.begin("m", 0.0)
    bench.run(3.0, 10.0)
    bench.run(1.0, None)
    bench.run(0.1, 10.0)
    energy = found(bench.account.end(answer, bench.now_s, prefill=Part(4.1, 4.1)))
    assert energy.quality == "derived"
    assert 0.5 < energy.coverage < 0.95
    assert energy.total_j == pytest.approx(41.0)  # by the mean of what is known, not with a hole of 0 W
    bench.run(9.0, None)
    bench.run(0.1, 10.0)
    assert bench.account.end(answer, bench.now_s, prefill=Part(9.0, 9.0)) is None


def test_a_phase_without_values_is_unknown_and_counts_in_the_total() -> None:
    bench = Bench(idle_w=2.0)
    answer = bench.account.begin("m", 0.0)
    bench.run(1.0, None)
    bench.run(4.0, 6.0)
    energy = found(bench.account.end(answer, 5.0, prefill=Part(1.0, 1.0, 4.0), decode=Part(4.0, 4.0)))
    assert (energy.prefill_j, energy.prefill_above_idle_j) == (None, None)
    assert (energy.decode_j, energy.decode_above_idle_j) == (pytest.approx(24.0), pytest.approx(16.0))
    assert (energy.total_j, energy.above_idle_j) == (pytest.approx(30.0), pytest.approx(20.0))
    assert (energy.quality, energy.coverage) == ("derived", pytest.approx(0.8, abs=0.03))


def test_an_answer_of_an_hour_is_told_as_well() -> None:
    """What is older is kept more coarsely, and no joule is lost by it."""
    bench = Bench()
    bench.run(10.0, 3.0)
    answer = bench.account.begin("m", 10.0)
    bench.run(600.0, 9.0)
    bench.run(3000.0, 6.0)
    energy = found(bench.account.end(answer, 3610.0, prefill=Part(600.0, 600.0, 3000.0), decode=Part(3000.0, 3000.0)))
    assert energy.prefill_j == pytest.approx(5400.0, rel=0.02)
    assert energy.total_j == pytest.approx(23_400.0, rel=0.005)


def test_no_meter_value_is_no_energy() -> None:
    bench = Bench(idle_w=2.0)
    answer = bench.account.begin("m", 0.0)
    bench.run(2.0, None)
    assert bench.account.end(answer, 2.0, prefill=Part(1.0, 1.0, 1.0), decode=Part(1.0, 1.0)) is None


def test_an_engine_that_tells_no_time_gets_no_energy() -> None:
    bench = Bench()
    answer = bench.account.begin("m", 0.0)
    bench.run(2.0, 5.0)
    assert bench.account.end(answer, 2.0, prefill=Part(1.0, 0.0, 1.0), decode=Part(1.0, 0.0)) is None


def test_an_answer_of_one_token_has_no_decode_energy() -> None:
    bench = Bench()
    answer = bench.account.begin("m", 0.0)
    bench.run(1.0, 5.0)
    energy = found(bench.account.end(answer, 1.0, prefill=Part(1.0, 1.0), decode=Part(0.0, 0.0)))
    assert (energy.prefill_j, energy.decode_j) == (pytest.approx(5.0), 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.0, 5.0), st.floats(0.2, 5.0), st.floats(0.05, 1.0)),
        min_size=1,
        max_size=6,
    ),
    st.floats(1.0, 40.0),
)
def test_answers_never_get_more_than_was_drawn(answers: list[tuple[str, float, float, float]], watts: float) -> None:
    """Answers of one model run one after the other here; those of several at the same time."""
    bench = Bench(idle_w=1.0)
    free_s: dict[str, float] = {}
    events = []
    for model, wait_s, span_s, share in answers:
        begun_s = free_s.get(model, 0.0) + wait_s
        free_s[model] = begun_s + span_s
        events += [(begun_s, 1, model, span_s, share), (begun_s + span_s, 0, model, span_s, share)]
    open_by_model = {}
    total_j = above_j = 0.0
    for at_s, kind, model, span_s, share in sorted(events):
        while bench.now_s < at_s + 0.1:
            bench.run(0.1, watts)
        if kind:
            open_by_model[model] = bench.account.begin(model, at_s)
            continue
        energy = bench.account.end(open_by_model[model], at_s, prefill=Part(span_s, span_s * share))
        bench.account.abandon(open_by_model.pop(model), at_s)
        if energy is not None:
            assert energy.total_j >= 0
            assert energy.above_idle_j is not None
            assert 0 <= energy.above_idle_j <= energy.total_j
            total_j += energy.total_j
            above_j += energy.above_idle_j
    assert total_j <= watts * max(free_s.values()) * 1.02 + 1e-6
    assert not bench.account.is_busy
