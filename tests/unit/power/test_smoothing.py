"""Watts of a calibration, quietened by their neighbours."""

from __future__ import annotations

import math
import random

import pytest

from edge_rt.power import levels
from edge_rt.power.calibration import CalibratedDomain, Calibration, Point
from edge_rt.power.smoothing import smoothed
from tests.plants import board_model


def test_a_straight_curve_stays_as_it_is() -> None:
    hz = [1.5e9 + i * 1e8 for i in range(10)]
    watts = [3.0 * math.exp(0.4 * i / 9) for i in range(10)]
    assert smoothed(hz, watts) == pytest.approx(watts)


def test_clocks_far_apart_say_nothing_of_each_other() -> None:
    assert smoothed([0.6e9, 1.0e9, 1.5e9, 2.0e9, 2.4e9], [3.0, 9.0, 4.0, 8.0, 6.0]) == pytest.approx([3, 9, 4, 8, 6])
    assert smoothed([1e9], [2.5]) == pytest.approx([2.5])


@pytest.mark.parametrize("name", board_model.NAMES)
def test_noise_becomes_less(name: str) -> None:
    board = board_model.load(name)
    clean = [board.watts(i, 0.5, 0.5, 50.0)[1] for i in range(board.top + 1)]
    rng = random.Random(3)
    raw_error = error = 0.0
    for _ in range(50):
        raw = [watts * (1 + rng.gauss(0.0, 0.02)) for watts in clean]
        for read, fitted, true in zip(raw, smoothed(board.points_hz, raw), clean, strict=True):
            raw_error += abs(read / true - 1)
            error += abs(fitted / true - 1)
    assert error < 0.75 * raw_error


@pytest.mark.parametrize("name", board_model.NAMES)
def test_a_calibration_that_is_off_still_leads_to_the_fewest_joules(name: str) -> None:
    board = board_model.load(name)
    true = board.calibration()
    costs = [(level.decode_w - true.idle_w) * level.decode_s for level in true.levels]
    extra = []
    for seed in range(40):
        found = board.calibration(error=0.02, seed=seed)
        guessed = [(level.decode_w - found.idle_w) * true.levels[i].decode_s for i, level in enumerate(found.levels)]
        extra.append(costs[guessed.index(min(guessed))] / min(costs) - 1)
    assert sum(extra) / len(extra) < 0.01


def test_a_cap_goes_by_what_was_read_where_that_is_more() -> None:
    board = board_model.load("pi5_class")
    read = [5.0] * 4 + [9.0] + [5.0] * 5
    points = tuple(
        Point(max_hz=hz, prefill_s_per_token=0.01, decode_s_per_token=0.04, prefill_w=watts, decode_w=4.0)
        for hz, watts in zip(board.points_hz, read, strict=True)
    )
    found = Calibration(
        board="",
        made_at="2026-11-30T08:00:00Z",
        boundary="board",
        quality="measured",
        idle_w=3.0,
        domains=(CalibratedDomain(name=board.domain_name, points=points),),
    )
    model = levels.calibrated([board.domain], found)
    assert model is not None
    assert 5.0 < model.levels[4].prefill_w < 9.0
    for level, watts in zip(model.levels, read, strict=True):
        assert level.worst_w == pytest.approx(1.1 * max(watts, level.prefill_w))
