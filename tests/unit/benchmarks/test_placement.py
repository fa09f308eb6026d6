"""The simulation's oracle: as good as trying everything on small cases."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest

from edge_rt.scheduler.placement import WEIGHTS

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import placement  # type: ignore[import-not-found]


def small(seed: int, n: int) -> placement.Scenario:
    rng = random.Random(seed)
    whole = placement.scenario(seed, 30.0)
    arrivals = tuple(sorted(rng.uniform(0, 0.02) for _ in range(n)))
    faults = (
        {"npu": ((0.0, 0.03),), "fpga": (), "cpu": ()} if seed % 2 else {"npu": (), "fpga": ((0.01, 0.04),), "cpu": ()}
    )
    devices = tuple(device | {"faults": faults[device["name"]], "hot": ()} for device in whole.devices)
    return placement.Scenario(devices=devices, arrivals=arrivals, factors=whole.factors[:n])


def best_total(given: placement.Scenario) -> float:
    totals = []
    for where in itertools.product(range(3), repeat=len(given.arrivals)):
        plan = placement.Plan(given, WEIGHTS["balanced"])
        free, total = [0.0, 0.0, 0.0], 0.0
        for i, device in enumerate(where):
            free[device] = plan.end_s(i, device, free[device])
            total += plan.cost(i, device, free[device])
        totals.append(total)
    return min(totals)


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_within_three_percent_of_trying_everything(seed: int) -> None:
    given = small(seed, 7)
    plan = placement.Plan(given, WEIGHTS["balanced"]).greedy()
    greedy = plan.total()
    improved = plan.improve().total()
    assert improved <= greedy + 1e-9
    assert best_total(given) - 1e-9 <= improved <= 1.03 * best_total(given)


def test_its_bookkeeping_of_moves_is_what_a_replay_gives() -> None:
    given = placement.scenario(3, 20.0)
    plan = placement.Plan(given, WEIGHTS["balanced"]).greedy().improve()
    free = [0.0, 0.0, 0.0]
    for i, device in enumerate(plan.where):
        free[device] = plan.end_s(i, device, free[device])
        assert plan.ends[i] == pytest.approx(free[device])
    assert sorted(i for row in plan.rows for i in row) == list(range(len(given.arrivals)))


def test_the_product_loses_nothing_in_a_short_simulation() -> None:
    given = placement.scenario(1, 20.0)
    played = placement.product(given, "balanced", 2.0)
    assert played.n_lost == 0
    assert len(played.latencies) == len(given.arrivals)
