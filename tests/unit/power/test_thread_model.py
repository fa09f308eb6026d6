"""How time and power follow the number of threads: what a fit finds, and what it refuses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.power import thread_model
from edge_rt.power.calibration import ThreadPoint

CLOCKS_HZ = (1.2e9, 1.8e9, 2.4e9)
TOP_HZ = CLOCKS_HZ[-1]
COUNTS = (1, 2, 3, 4)
IDLE_W = 2.8


def _decode_s(x: float, n: int, r: int, n_full: float = 2.0) -> float:
    return (0.027 + 0.0005 * r) * float((1 + (n_full / n) ** 4) ** 0.25) + r * (0.0005 + 0.028 / n) / x


def _prefill_s(x: float, n: int) -> float:
    return 0.0004 + 0.018 / n / x


def _power_w(x: float, n: int, core_w: float) -> float:
    return IDLE_W + 0.5 + n * core_w * x**3


def _points(noise: float = 0.0, n_full: float = 2.0, clocks_hz: tuple[float, ...] = CLOCKS_HZ) -> list[ThreadPoint]:
    rng = random.Random(1)

    def read(value: float) -> float:
        return value * (1 + rng.gauss(0, noise)) if noise else value

    points = []
    for hz in clocks_hz:
        x = hz / TOP_HZ
        for n in COUNTS:
            for r in (1, 4):
                s = read(_decode_s(x, n, r, n_full))
                watts = read(_power_w(x, n, 0.4))
                points.append(
                    ThreadPoint(phase="decode", max_hz=hz, n_threads=n, n_streams=r, s_per_token=s, power_w=watts)
                )
            watts, s = read(_power_w(x, n, 0.8)), read(_prefill_s(x, n))
            points.append(
                ThreadPoint(phase="prefill", max_hz=hz, n_threads=n, n_streams=1, s_per_token=s, power_w=watts)
            )
    return points


def _fit(points: list[ThreadPoint]) -> thread_model.ThreadModel:
    model = thread_model.fit(points, idle_w=IDLE_W, top_hz=TOP_HZ)
    assert model is not None
    return model


def test_a_fit_foretells_what_its_points_were_made_of() -> None:
    model = _fit(_points())
    assert model.counts == COUNTS
    assert model.has_power
    for x in (0.5, 0.75, 1.0):
        for n in COUNTS:
            assert model.prefill.seconds(x, n) == pytest.approx(_prefill_s(x, n), rel=0.01)
            for r in (1, 2, 4, 8):
                assert model.decode.seconds(x, n, r) == pytest.approx(_decode_s(x, n, r), rel=0.01)


@pytest.mark.parametrize("n_full", [1.0, 2.0, 3.0])
def test_it_finds_where_the_bandwidth_of_memory_is_full(n_full: float) -> None:
    assert _fit(_points(n_full=n_full)).decode.n_full == pytest.approx(n_full, abs=0.5)


def test_a_file_as_large_as_may_be_is_fitted_while_powerd_starts() -> None:
    points = []
    for k in range(1, 65):
        n = 16 * k
        for i in range(8):
            hz = TOP_HZ * (i + 8) / 15
            decode_s, prefill_s = _decode_s(hz / TOP_HZ, n, 1, n_full=200.0), _prefill_s(hz / TOP_HZ, n)
            points.append(
                ThreadPoint(phase="decode", max_hz=hz, n_threads=n, n_streams=1, s_per_token=decode_s, power_w=None)
            )
            points.append(
                ThreadPoint(phase="prefill", max_hz=hz, n_threads=n, n_streams=1, s_per_token=prefill_s, power_w=None)
            )
    model = _fit(points)
    assert (len(points), model.n_most) == (1024, 1024)
    assert max(model.decode.error, model.prefill.error) < 0.02


def test_noise_of_two_percent_leaves_errors_of_as_much() -> None:
    model = _fit(_points(noise=0.02))
    for n in COUNTS:
        assert model.decode.seconds(0.75, n, 2) == pytest.approx(_decode_s(0.75, n, 2), rel=0.05)
        assert model.prefill.seconds(0.75, n) == pytest.approx(_prefill_s(0.75, n), rel=0.05)


def test_power_follows_the_threads_that_are_active() -> None:
    model = _fit(_points())
    for hz in (*CLOCKS_HZ, 2.1e9):
        x = hz / TOP_HZ
        whole_w = _power_w(x, 4, 0.4) - IDLE_W
        for n in COUNTS:
            foretold = whole_w * model.decode.power_share(hz, n, 4)
            assert foretold == pytest.approx(_power_w(x, n, 0.4) - IDLE_W, rel=0.06 if hz == 2.1e9 else 0.001)
    assert model.decode.power_share(0.4e9, 4, 4) == 1
    assert 0 < model.decode.power_share(9e9, 1, 4) < 1


def test_one_clock_is_enough_where_none_can_be_set() -> None:
    model = _fit(_points(clocks_hz=(2.4e9,)))
    for n in COUNTS:
        assert model.decode.seconds(1.0, n, 1) == pytest.approx(_decode_s(1.0, n, 1), rel=0.01)
        assert model.prefill.seconds(1.0, n) == pytest.approx(_prefill_s(1.0, n), rel=0.01)


def test_threads_that_are_in_each_others_way_are_seen() -> None:
    """Step times that rise again with many threads: what no division of work explains."""
    points = [
        replace(point, s_per_token=point.s_per_token + 0.004 * point.n_threads)
        for point in _points()
        if point.phase == "decode"
    ] + [point for point in _points() if point.phase == "prefill"]
    decode = _fit(points).decode
    assert decode.sync_s > 0.002
    assert decode.seconds(1.0, 4) > decode.seconds(1.0, 3)


@pytest.mark.parametrize("keep", ["prefill", "decode"])
def test_without_one_of_the_phases_there_is_no_model(keep: str) -> None:
    points = [point for point in _points() if point.phase == keep]
    assert thread_model.fit(points, idle_w=IDLE_W, top_hz=TOP_HZ) is None


def test_one_count_alone_is_no_model() -> None:
    points = [point for point in _points() if point.n_threads == 4]
    assert thread_model.fit(points, idle_w=IDLE_W, top_hz=TOP_HZ) is None
    assert thread_model.fit([], idle_w=IDLE_W, top_hz=TOP_HZ) is None


def test_times_that_follow_no_law_are_no_model() -> None:
    points = [replace(point, s_per_token=point.s_per_token * (3 if point.n_threads == 2 else 1)) for point in _points()]
    assert thread_model.fit(points, idle_w=IDLE_W, top_hz=TOP_HZ) is None


def test_without_watts_times_are_known_and_joules_are_not() -> None:
    model = _fit([replace(point, power_w=None) for point in _points()])
    assert not model.has_power
    assert model.decode.seconds(1.0, 2) == pytest.approx(_decode_s(1.0, 2, 1), rel=0.01)


def test_one_missing_watt_makes_no_share_of_the_others() -> None:
    first, *rest = _points()
    assert not _fit([replace(first, power_w=None), *rest]).has_power


@given(
    st.lists(
        st.builds(
            ThreadPoint,
            phase=st.sampled_from(("prefill", "decode")),
            max_hz=st.sampled_from(CLOCKS_HZ),
            n_threads=st.integers(1, 64),
            n_streams=st.integers(1, 8),
            s_per_token=st.floats(1e-9, 1e4),
            power_w=st.none() | st.floats(IDLE_W, 1e5),
        ),
        max_size=12,
    )
)
def test_whatever_a_file_holds_a_model_tells_times_and_shares_that_can_be(points: list[ThreadPoint]) -> None:
    model = thread_model.fit(points, idle_w=IDLE_W, top_hz=TOP_HZ)
    if model is None:
        return
    for phase in (model.prefill, model.decode):
        for n in model.counts:
            assert phase.seconds(0.3, n) > 0
            assert phase.seconds(0.3, n) >= phase.seconds(1.0, n)
            if phase.shares:
                assert 0 <= phase.power_share(1.5e9, n, model.n_most) <= 1
