"""The ladder: from a calibration, and for a chip that nobody has calibrated."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from edge_rt.devices.meters import Quality
from edge_rt.power import levels
from edge_rt.power.calibration import CalibratedDomain, Calibration, Phase, Point, ThreadPoint
from edge_rt.power.state import Domain

BIG = Domain(name="policy4", kind="cpu", points_hz=(0.4e9, 1.2e9, 1.8e9, 2.4e9), n_cpus=4, capacity=1.0)
LITTLE = Domain(name="policy0", kind="cpu", points_hz=(0.4e9, 1.0e9, 1.8e9), n_cpus=4, capacity=0.5)
NPU = Domain(name="fdab0000.npu", kind="npu", points_hz=(0.3e9, 1.0e9))


def _calibration(quality: Quality = "measured", *, name: str = "policy4", scale: float = 1.0) -> Calibration:
    points = [
        Point(max_hz=hz * scale, prefill_s_per_token=0.01, decode_s_per_token=0.05, prefill_w=4.0 + i, decode_w=3.0 + i)
        for i, hz in enumerate(BIG.points_hz)
    ]
    domain = CalibratedDomain(name=name, points=tuple(points))
    return Calibration(
        board="any", made_at="2026-11-30T08:00:00Z", boundary="board", quality=quality, idle_w=2.0, domains=(domain,)
    )


def test_the_strongest_cpus_lead_and_the_others_follow_in_proportion() -> None:
    model = levels.generic([LITTLE, BIG, NPU])
    assert model.lead == "policy4"
    assert [level.hz for level in model.levels] == list(BIG.points_hz)
    assert [level.max_hz["policy0"] for level in model.levels] == [0.4e9, 1.0e9, 1.8e9, 1.8e9]


def test_accelerators_are_left_at_their_highest_clock() -> None:
    assert {level.max_hz["fdab0000.npu"] for level in levels.generic([BIG, NPU]).levels} == {1.0e9}


def test_every_clock_is_a_point_of_its_domain() -> None:
    domains = [LITTLE, BIG, NPU]
    points = {domain.name: domain.points_hz for domain in domains}
    for model in (levels.generic(domains), levels.calibrated(domains, _calibration())):
        assert model is not None
        for level in model.levels:
            assert set(level.max_hz) == set(points)
            assert all(hz in points[name] for name, hz in level.max_hz.items())


def test_a_calibrated_clock_may_be_rounded_but_has_to_be_of_the_clock_that_leads() -> None:
    rounded = levels.calibrated([BIG, LITTLE], _calibration(scale=1.0005))
    assert rounded is not None
    assert [level.hz for level in rounded.levels] == list(BIG.points_hz)
    assert levels.calibrated([BIG, LITTLE], _calibration(scale=1.05)) is None
    assert levels.calibrated([BIG, LITTLE], _calibration(name="policy0")) is None


def test_the_worst_case_has_a_margin_that_grows_as_trust_falls() -> None:
    worst = []
    for quality in get_args(Quality):
        model = levels.calibrated([BIG], _calibration(quality))
        assert model is not None
        worst.append(model.levels[-1].worst_w)
    assert worst == sorted(worst)
    assert worst[0] > 7.0


def test_without_a_cpu_clock_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="no CPU clock"):
        levels.generic([NPU])


def test_a_generic_chip_is_thriftiest_somewhere_below_the_highest_clock() -> None:
    model = levels.generic([Domain(name="policy0", kind="cpu", points_hz=tuple(i * 1e8 for i in range(4, 25)))])
    costs = [(level.decode_w - model.idle_w) * level.decode_s for level in model.levels]
    assert costs.index(min(costs)) < model.top // 2
    assert not model.is_calibrated


def _with_threads(clocks_hz: tuple[float, ...] = (0.4e9, 2.4e9)) -> Calibration:
    phases: tuple[tuple[Phase, float], ...] = (("prefill", 0.01), ("decode", 0.05))
    points = [
        ThreadPoint(
            phase=phase,
            max_hz=hz,
            n_threads=n,
            n_streams=1,
            s_per_token=whole_s * (max(1.0, 2 / n) if phase == "decode" else 4 / n * 2.4e9 / hz),
            power_w=2.5 + 0.5 * n,
        )
        for phase, whole_s in phases
        for hz in clocks_hz
        for n in (1, 2, 4)
    ]
    return replace(_calibration(), threads=tuple(points))


def test_levels_on_fewer_threads_take_what_was_measured() -> None:
    model = levels.calibrated([BIG], _with_threads())
    assert model is not None
    fewer = levels.on_threads(model, 4, 2)
    for whole, found in zip(model.levels, fewer.levels, strict=True):
        assert found.decode_s == pytest.approx(whole.decode_s, rel=0.15)  # the knee of the fit is a little rounder
        # Of 2.5 W above idling on 4 threads 0.5 W are there whatever their number.
        assert found.decode_w - 2.0 == pytest.approx((whole.decode_w - 2.0) * 1.5 / 2.5)
        assert (found.prefill_s, found.prefill_w) == pytest.approx((whole.prefill_s, whole.prefill_w))
        assert found.worst_w == whole.worst_w
    assert levels.on_threads(model, 2, 4).levels[-1].prefill_s == pytest.approx(0.02, rel=0.05)


def test_levels_on_all_threads_and_without_a_sweep_are_the_model_itself() -> None:
    model = levels.calibrated([BIG], _with_threads())
    assert model is not None
    assert levels.on_threads(model, 4, 4) is model
    plain = levels.calibrated([BIG], _calibration())
    assert plain is not None
    assert plain.threads is None
    assert levels.on_threads(plain, 1, 1) is plain


def test_points_of_clocks_that_this_machine_lacks_are_left_out() -> None:
    model = levels.calibrated([BIG], _with_threads((3.0e9,)))
    assert model is not None
    assert model.threads is None


def test_where_no_clock_can_be_set_there_is_one_level() -> None:
    model = levels.fixed(_with_threads((2.4e9,)))
    assert len(model.levels) == 1
    assert model.levels[0].max_hz == {}
    assert model.levels[0].hz == 2.4e9
    assert model.threads is not None
    assert model.threads.counts == (1, 2, 4)
