"""The controller: it learns in shadow, serves what is sure, keeps the declared error, and survives a restart."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.cache.threshold import ErrorController, Evidence, Judgement
from edge_rt.errors import CacheStoreError


class World:
    """A stream in which a match of log-odds s is right with a probability of its own, as the device would see it."""

    def __init__(self, controller: ErrorController, seed: int, *, slope: float = 1.0, shift: float = 0.0) -> None:
        self.controller = controller
        self._draw = random.Random(seed)
        self._slope, self._shift = slope, shift
        self.hits: list[bool] = []
        self.errors: list[bool] = []
        self.n_verified = 0

    def run(self, n: int, *, may_serve: bool = True) -> None:
        for _ in range(n):
            evidence = Evidence(self._draw.gauss(0.5, 2.5)) if self._draw.random() < 0.7 else None
            judgement = self.controller.judge(evidence, self._draw.random(), may_serve=may_serve)
            is_right = evidence is not None and self._is_right(evidence.score)
            self.hits.append(judgement.decision == "hit")
            self.errors.append(judgement.decision == "hit" and not is_right)
            self.n_verified += judgement.decision == "verify"
            if evidence is not None and judgement.decision != "hit":
                self.controller.learn(evidence, is_right, chance=judgement.chance)

    def _is_right(self, score: float) -> bool:
        return self._draw.random() < 1 / (1 + math.exp(-(self._slope * score + self._shift)))


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (1.0, -1.5), (0.6, -0.5), (1.5, 1.0)])
def test_the_declared_error_holds_whatever_the_scores_are_worth(slope: float, shift: float) -> None:
    world = World(ErrorController(0.02, 0.08), 1, slope=slope, shift=shift)
    world.run(6000)
    assert sum(world.errors) / 6000 <= 0.02
    assert all(sum(world.errors[at : at + 1000]) <= 30 for at in range(1000, 5001, 1000))
    assert sum(world.hits[3000:]) / 3000 >= 0.05, "a controller that serves nothing keeps any bound"


def test_nothing_is_served_while_learning_and_all_matches_are_compared() -> None:
    world = World(ErrorController(0.02, 0.08, n_shadow=400), 3)
    world.run(400)
    assert not any(world.hits)
    assert world.n_verified == 0
    world.run(2000)
    assert any(world.hits)


def test_about_the_declared_share_of_hits_is_verified() -> None:
    world = World(ErrorController(0.02, 0.08), 4)
    world.run(6000)
    assert 0.05 <= world.n_verified / (world.n_verified + sum(world.hits)) <= 0.11


def test_in_shadow_mode_every_would_be_hit_is_verified() -> None:
    world = World(ErrorController(0.02, 0.08, n_shadow=0), 5)
    world.run(3000, may_serve=False)
    assert not any(world.hits)
    assert world.n_verified > 100


def test_a_larger_declared_error_gives_more_hits() -> None:
    shares = []
    for max_error in (0.005, 0.02, 0.05):
        world = World(ErrorController(max_error, 0.08), 6)
        world.run(5000)
        shares.append(sum(world.hits))
    assert shares[0] < shares[1] < shares[2]


def test_when_matches_get_worse_the_threshold_follows() -> None:
    world = World(ErrorController(0.02, 0.08), 7)
    world.run(4000)
    before = sum(world.hits[-1000:])
    world._shift = -2.5
    world.run(4000)
    assert sum(world.errors[-2000:]) <= 60
    assert sum(world.hits[-1000:]) < before


def test_an_entry_that_was_wrong_nearby_is_less_likely_right() -> None:
    controller = ErrorController(0.02, 0.08)
    plain, wrong, right = (
        controller.probability(Evidence(1.0, **kept))
        for kept in ({}, {"wrong": 1.5, "n_wrong": 1}, {"right": 0.5, "n_right": 2})
    )
    assert wrong < plain < right


def test_a_trusted_entry_is_verified_less() -> None:
    controller = ErrorController(0.2, 0.08, n_shadow=0)
    World(controller, 8).run(2000)
    served = [controller.judge(Evidence(6.0, right=5.0, n_right=n), 0.999) for n in (1, 2)]
    assert [judgement.decision for judgement in served] == ["hit", "hit"]
    assert served[1].chance < served[0].chance


def test_an_entry_that_goes_on_serving_is_compared_sooner() -> None:
    controller = ErrorController(0.2, 0.08, n_shadow=0)
    World(controller, 8).run(2000)
    chances = [controller.judge(Evidence(6.0, n_right=2, n_served=n), 0.999).chance for n in (0, 1, 2)]
    assert chances == sorted(set(chances))


def test_other_matches_speak_for_and_against() -> None:
    controller = ErrorController(0.02, 0.08)
    plain, supported, opposed = (
        controller.probability(Evidence(1.0, **votes)) for votes in ({}, {"support": 0.9}, {"against": 0.9})
    )
    assert opposed < plain < supported


def test_no_candidate_is_a_miss() -> None:
    assert ErrorController(0.02, 0.08).judge(None, 0.0) == Judgement("miss", 0.0)


def test_it_goes_on_after_a_restart_as_if_there_were_none() -> None:
    one = ErrorController(0.02, 0.08)
    World(one, 9).run(1500)
    other = ErrorController(0.02, 0.08)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    probe = Evidence(2.0)
    assert other.probability(probe) == one.probability(probe)
    assert other.threshold == pytest.approx(one.threshold, abs=0.02)


DAMAGE: list[dict[str, Any]] = [
    {"mean": [0.0]}, {"mean": ["a"] * 8}, {"mean": [math.nan] * 8}, {"cov": [[1.0]]}, {"cov": 3}, {"recent": [2.0]},
    {"recent": [0.1]}, {"spent": None}, {"n_requests": -1}, {"n_labels": "x"}, {"seen": 0.0}, {"expected": math.inf},
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    controller = ErrorController(0.02, 0.08)
    before = controller.state()
    with pytest.raises(CacheStoreError, match="cannot be read"):
        controller.restore({**before, **damage})
    assert controller.state() == before


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans(), st.floats(0, 1)), max_size=60))
def test_any_scores_leave_it_sane(outcomes: list[tuple[float, bool, float]]) -> None:
    controller = ErrorController(0.02, 0.08, n_shadow=0)
    for score, is_right, draw in outcomes:
        evidence = Evidence(score, wrong=-score, right=score, n_wrong=5, n_right=1)
        judgement = controller.judge(evidence, draw)
        assert 0 <= judgement.p_right <= 1
        assert 0 < judgement.chance <= 1
        controller.learn(evidence, is_right, chance=judgement.chance)
    fresh = ErrorController(0.02, 0.08)
    fresh.restore(controller.state())
    assert 0.5 < controller.threshold <= 1
