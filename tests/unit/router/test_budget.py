from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.router.budget import DAY_S, AnswerLength, Budget, Pace

NOON_S = 20_000 * DAY_S + DAY_S / 2


def real_share(budget: Budget, draw: Callable[[], float], n: int, *, forced_every: int = 0) -> float:
    """Send what exceeds the threshold, and what a rule sends; give the share of the second half."""
    went: list[bool] = []
    for i in range(n):
        if forced_every and i % forced_every == 0:
            budget.observe("u", None, went=True)
            went.append(True)
            continue
        gain = draw()
        goes = gain > budget.allowance("u", now_s=0.0, wall_s=NOON_S).threshold
        budget.observe("u", gain, went=goes)
        went.append(goes)
    return sum(went[n // 2 :]) / (n - n // 2)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("mean", [-0.5, 0.0, 0.6])
def test_the_threshold_meets_the_share_whatever_the_gains_are_like(share: float, mean: float) -> None:
    chance = random.Random(1)
    assert real_share(Budget(share=share), lambda: chance.gauss(mean, 0.1), 3000) == pytest.approx(share, abs=0.03)


def test_what_rules_send_counts() -> None:
    chance = random.Random(1)
    assert real_share(Budget(share=0.4), chance.random, 4000, forced_every=4) == pytest.approx(0.4, abs=0.06)


def test_traffic_that_changes_is_followed() -> None:
    chance, budget = random.Random(1), Budget(share=0.3)
    real_share(budget, chance.random, 2000)
    assert real_share(budget, lambda: 5 + chance.random(), 3000) == pytest.approx(0.3, abs=0.05)


def test_no_share_sends_nothing_and_a_whole_one_everything() -> None:
    assert Budget(share=0.0).allowance("u", now_s=0.0, wall_s=NOON_S).threshold == math.inf
    assert Budget(share=1.0).allowance("u", now_s=0.0, wall_s=NOON_S).threshold == -math.inf


def test_tenants_have_thresholds_of_their_own_and_are_not_kept_without_end() -> None:
    chance, budget = random.Random(1), Budget(share=0.5)
    for _ in range(600):
        budget.observe("easy", chance.random(), went=chance.random() < 0.5)
        budget.observe("hard", 5 + chance.random(), went=chance.random() < 0.5)
    easy, hard = (budget.allowance(who, now_s=0.0, wall_s=NOON_S).threshold for who in ("easy", "hard"))
    assert 0.2 < easy < 0.8
    assert 5.2 < hard < 5.8
    for i in range(1000):
        budget.observe(f"uid:{i}", 0.1, went=False)
    assert len(budget._tenants) <= 256


def test_a_gain_that_is_no_number_changes_nothing() -> None:
    budget = Budget(share=0.5)
    before = budget.allowance("u", now_s=0.0, wall_s=NOON_S).threshold
    budget.observe("v", math.nan, went=False)
    assert budget.allowance("u", now_s=0.0, wall_s=NOON_S).threshold == before


# Cost.


def test_the_day_s_money_is_kept_and_a_new_day_brings_new() -> None:
    budget = Budget(share=0.5, max_cost_per_day=2.0)
    budget.spend(1.5, now_s=0.0, wall_s=NOON_S)
    assert budget.allowance("u", now_s=0.0, wall_s=NOON_S).cost_left == 0.5
    budget.spend(0.5, now_s=1.0, wall_s=NOON_S + 1)
    assert budget.allowance("u", now_s=1.0, wall_s=NOON_S + 1).is_spent
    tomorrow_s = DAY_S / 2 + 10
    assert budget.allowance("u", now_s=tomorrow_s, wall_s=NOON_S + tomorrow_s).cost_left == 2.0


def test_the_share_falls_as_money_goes_faster_than_the_day() -> None:
    budget = Budget(share=0.5, max_cost_per_day=1.0)
    dawn_s = 20_000 * DAY_S
    thresholds = []
    for _ in range(8):
        thresholds.append(budget.allowance("u", now_s=0.0, wall_s=dawn_s).threshold)
        budget.spend(0.1, now_s=0.0, wall_s=dawn_s)
    assert thresholds == sorted(thresholds)
    assert thresholds[2] == thresholds[0]  # a quarter of the day's money may go ahead of time
    assert thresholds[-1] == math.inf
    evening_s = dawn_s + 0.9 * DAY_S
    assert budget.allowance("u", now_s=0.9 * DAY_S, wall_s=evening_s).threshold == thresholds[0]


@given(st.lists(st.tuples(st.floats(0, 7200), st.floats(-30 * DAY_S, 30 * DAY_S)), max_size=60))
def test_a_clock_that_jumps_earns_at_most_one_budget_in_six_hours(jumps: list[tuple[float, float]]) -> None:
    budget = Budget(share=0.5, max_cost_per_day=1.0)
    now_s, spent = 0.0, 0.0
    for step_s, jump_s in jumps:
        now_s += step_s
        wall_s = NOON_S + now_s + jump_s
        if not budget.allowance("u", now_s=now_s, wall_s=wall_s).is_spent:
            budget.spend(1.0, now_s=now_s, wall_s=wall_s)
            spent += 1.0
    assert spent <= 1 + now_s // (6 * 3600)


def test_a_clock_that_was_ahead_does_not_stop_the_budget_for_good() -> None:
    budget = Budget(share=0.5, max_cost_per_day=1.0)
    budget.spend(1.0, now_s=0.0, wall_s=NOON_S + 4000 * DAY_S)
    assert budget.allowance("u", now_s=60.0, wall_s=NOON_S).is_spent  # put right
    assert not budget.allowance("u", now_s=DAY_S, wall_s=NOON_S + DAY_S).is_spent


@pytest.mark.parametrize("began_s", [0.0, NOON_S - 30 * DAY_S])
def test_a_board_without_a_clock_earns_nothing_by_a_restart(began_s: float) -> None:
    """It begins in the past, and is put right when it has found a time server."""

    def restarted(before: Budget) -> Budget:
        after = Budget(share=0.5, max_cost_per_day=1.0)
        assert after.restore(json.loads(json.dumps(before.state())), now_s=10.0)
        return after

    budget = Budget(share=0.5, max_cost_per_day=1.0)
    budget.spend(1.0, now_s=5.0, wall_s=NOON_S)
    once = restarted(budget)
    once.spend(0.1, now_s=20.0, wall_s=began_s)
    for again in (restarted(once), once):
        assert again.allowance("u", now_s=20.0, wall_s=began_s).is_spent
        assert again.allowance("u", now_s=80.0, wall_s=NOON_S + 60).is_spent
        assert not again.allowance("u", now_s=DAY_S, wall_s=NOON_S + DAY_S).is_spent


def test_what_was_spent_survives_a_restart() -> None:
    budget = Budget(share=0.5, max_cost_per_day=1.0)
    budget.spend(0.75, now_s=5.0, wall_s=NOON_S)
    again = Budget(share=0.5, max_cost_per_day=1.0)
    again.restore(json.loads(json.dumps(budget.state())), now_s=1.0)
    assert again.allowance("u", now_s=1.0, wall_s=NOON_S).cost_left == 0.25
    assert again.allowance("u", now_s=2.0, wall_s=NOON_S + DAY_S).cost_left == 1.0


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"day": "x", "spent": 1},
        {"day": 1, "spent": -1},
        {"day": 1, "spent": math.nan},
        {"day": 1, "spent": 10**400},
        {"day": 1},
    ],
)
def test_a_state_that_is_none_changes_nothing(state: dict[str, object]) -> None:
    budget = Budget(share=0.5, max_cost_per_day=1.0)
    budget.restore(state, now_s=0.0)
    assert budget.spent == 0.0


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_none_is_not_counted(cost: float) -> None:
    budget = Budget(share=0.5, max_cost_per_day=1.0)
    budget.spend(cost, now_s=0.0, wall_s=NOON_S)
    assert budget.spent == 0.0


# Time.


def test_both_sides_take_first_token_and_rest() -> None:
    pace = Pace(
        expected_tokens=100,
        local_first_s=1.0,
        local_tokens_per_s=10.0,
        cloud_first_p50_s=0.5,
        cloud_first_p95_s=2.0,
        cloud_tokens_per_s=50.0,
    )
    assert (pace.local_s, pace.cloud_p50_s, pace.cloud_p95_s) == (11.0, 2.5, 4.0)
    assert Pace(expected_tokens=100).local_s is None
    assert Pace(expected_tokens=100, local_first_s=1.0).local_s == 1.0


def test_the_expected_length_is_learnt_and_never_above_what_is_allowed() -> None:
    length = AnswerLength(100.0)
    assert length.expected(None) == 100.0
    for _ in range(400):
        length.observe(30)
    assert length.expected(None) == pytest.approx(30, abs=1)
    assert length.expected(8) == 8


# Energy.


def test_the_day_s_energy_is_kept_over_a_restart_and_gone_with_the_day() -> None:
    budget = Budget(share=0.5)
    budget.spend_energy(30.0, now_s=5.0, wall_s=NOON_S)
    for nothing in (-1.0, math.nan, math.inf):
        budget.spend_energy(nothing, now_s=5.0, wall_s=NOON_S)
    again = Budget(share=0.5)
    assert again.restore(json.loads(json.dumps(budget.state())), now_s=1.0)
    again.spend_energy(10.0, now_s=2.0, wall_s=NOON_S)
    assert again.energy_spent_j(now_s=3.0, wall_s=NOON_S) == 40.0
    assert again.energy_spent_j(now_s=4.0, wall_s=NOON_S + DAY_S) == 0.0


def test_a_state_of_before_has_no_energy_and_a_broken_one_is_none() -> None:
    budget = Budget(share=0.5)
    assert budget.restore({"day": int(NOON_S // DAY_S), "spent": 0.5}, now_s=1.0)
    assert budget.energy_spent_j(now_s=1.0, wall_s=NOON_S) == 0.0
    assert not budget.restore({"day": 1, "spent": 0.5, "spent_j": -1}, now_s=1.0)
    assert not budget.restore({"day": 1, "spent": 0.5, "spent_j": "many"}, now_s=1.0)
