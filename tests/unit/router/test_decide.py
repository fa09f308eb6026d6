from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.config import Router
from edge_rt.router.budget import Allowance, Pace
from edge_rt.router.decide import Decision, decide
from edge_rt.router.rules import REASONS, Circumstances, Rules, Verdict
from edge_rt.types import GenerateRequest, Message
from tests.unit.router.scores import Score

FREE = Verdict(side="free", reason=None, may_leave=True)
UP = Circumstances()
OPEN = Allowance(threshold=0.1, cost_left=None)
HARD, EASY = Score(0.2, 0.9), Score(0.9, 0.95)


def money(left: float) -> Allowance:
    return Allowance(threshold=0.1, cost_left=left)


def choose(verdict: Verdict = FREE, allowance: Allowance = OPEN, **rest: Any) -> tuple[str, str]:
    decision = decide(verdict, UP, allowance, **rest)
    return decision.where, decision.reason


def pace(local_s: float, cloud_s: float) -> Pace:
    return Pace(expected_tokens=1, local_first_s=local_s, cloud_first_p50_s=cloud_s / 2, cloud_first_p95_s=cloud_s)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"score": HARD}, ("cloud", "hard")),
        ({"score": EASY}, ("local", "share")),
        ({"score": Score(0.9, 0.8)}, ("local", "easy")),
        ({"score": Score(0.9, 0.8), "allowance": Allowance(threshold=-math.inf, cost_left=None)}, ("local", "easy")),
        ({"score": HARD, "allowance": Allowance(threshold=math.inf, cost_left=None)}, ("local", "share")),
        ({}, ("local", "no-score")),
        ({"verdict": Verdict(side="cloud", reason="heat", may_leave=True)}, ("cloud", "heat")),
        ({"verdict": Verdict(side="local", reason="metered", may_leave=True), "score": HARD}, ("local", "metered")),
        ({"score": HARD, "deadline_s": 3.0, "pace": pace(2.0, 9.0)}, ("local", "slow-cloud")),
        ({"score": EASY, "deadline_s": 3.0, "pace": pace(9.0, 2.0)}, ("cloud", "deadline")),
        ({"score": HARD, "deadline_s": 3.0, "pace": pace(7.0, 8.0)}, ("local", "slow-cloud")),
        ({"score": EASY, "deadline_s": 3.0, "pace": pace(8.0, 7.0)}, ("cloud", "deadline")),
        ({"score": HARD, "deadline_s": 3.0, "pace": pace(1.0, 2.0)}, ("cloud", "hard")),
        ({"score": HARD, "deadline_s": 3.0, "pace": Pace(expected_tokens=1)}, ("cloud", "hard")),
        (
            {"score": HARD, "allowance": money(0.0), "expected_cost": 0.1},
            ("local", "cost"),
        ),
        (
            {"score": HARD, "allowance": money(0.2), "expected_cost": 0.3},
            ("local", "cost"),
        ),
        (
            {"score": HARD, "allowance": money(0.2), "expected_cost": 0.1},
            ("cloud", "hard"),
        ),
        (
            {"score": HARD, "allowance": money(0.0), "expected_cost": 0.0},
            ("cloud", "hard"),
        ),
        (
            {
                "verdict": Verdict(side="must_go", reason="asked-cloud", may_leave=True, is_asked=True),
                "allowance": money(-1.0),
            },
            ("local", "cost"),
        ),
    ],
)
def test_each_stage(kwargs: dict[str, Any], expected: tuple[str, str]) -> None:
    assert choose(**kwargs) == expected


def test_what_asked_for_the_cloud_and_must_stay_is_refused() -> None:
    verdict = Verdict(side="must_stay", reason="private", may_leave=False, is_asked=True)
    assert choose(verdict) == ("refused", "private")
    assert choose(Verdict(side="must_stay", reason="private", may_leave=False)) == ("local", "private")


def test_a_decision_explains_itself_without_the_text() -> None:
    request = GenerateRequest(id="1", model="m", messages=(Message(role="user", content="x@mail.example.org"),))
    verdict = Rules(Router()).judge(request, UP)
    lines = decide(verdict, UP, OPEN, score=HARD).lines
    assert lines == (
        "rules: must stay (private)",
        "private: email in text 1",
        "judged: the device is right with 0.20, the cloud with 0.90; gain +0.700, threshold +0.100",
        "local: it holds what must not leave the device",
    )


# What must hold whatever else is the case.

PRIVATE = (
    "4111 1111 1111 1111",
    "password: Tr0ub4dor&3",
    "x@mail.example.org",
    "+49 30 901820",
    "process this locally",
)

numbers = st.one_of(st.none(), st.floats(0, 100))
circumstances = st.builds(
    Circumstances,
    cloud=st.sampled_from(["none", "down", "up"]),
    is_online=st.booleans(),
    is_metered=st.booleans(),
    device_n_ctx=st.integers(0, 100),
    cloud_n_ctx=st.integers(0, 100),
    prompt_tokens=st.integers(0, 200),
    needs=st.sets(st.sampled_from(["tools", "image"])).map(frozenset),
    device_offers=st.sets(st.sampled_from(["tools", "image"])).map(frozenset),
    cloud_offers=st.sets(st.sampled_from(["tools", "image"])).map(frozenset),
    battery_share=st.one_of(st.none(), st.floats(0, 1)),
    is_charging=st.booleans(),
    device_c=numbers,
    max_device_c=numbers,
    energy_spent_j=st.floats(0, 100),
)
routes = st.sampled_from(["auto", "local", "cloud"])
router_settings = st.builds(
    Router,
    route=routes,
    offline=st.booleans(),
    metered=st.booleans(),
    max_energy_j_per_day=st.floats(0, 100),
    tenants=st.dictionaries(st.sampled_from(["uid:1", "uid:2"]), routes),
)
texts = st.text(max_size=20)
requests = st.builds(
    lambda before, private, after, route, tenant: GenerateRequest(
        id="1",
        model="m",
        messages=(Message(role="user", content=f"{before} {private} {after}"),),
        route=route,
        tenant=tenant,
    ),
    texts,
    st.sampled_from(["", *PRIVATE]),
    texts,
    routes,
    st.sampled_from(["uid:1", "uid:2"]),
)
probability = st.floats(0, 1)
the_rest = st.fixed_dictionaries(
    {
        "score": st.one_of(st.none(), st.builds(Score, probability, probability)),
        "deadline_s": numbers,
        "expected_cost": numbers,
        "pace": st.one_of(
            st.none(),
            st.builds(
                Pace,
                expected_tokens=st.floats(0, 100),
                local_first_s=numbers,
                local_tokens_per_s=numbers,
                cloud_first_p50_s=numbers,
                cloud_first_p95_s=numbers,
                cloud_tokens_per_s=numbers,
            ),
        ),
    }
)
allowances = st.builds(Allowance, threshold=st.floats(-1, 1), cost_left=st.one_of(st.none(), st.floats(-1, 1)))


@given(router_settings, requests, circumstances, allowances, the_rest)
def test_what_must_stay_is_never_sent(
    settings: Router, request: GenerateRequest, now: Circumstances, allowance: Allowance, rest: dict[str, Any]
) -> None:
    verdict = Rules(settings).judge(request, now)
    decision = decide(verdict, now, allowance, **rest)
    text = request.messages[0].content if request.messages else ""
    is_private = any(private in text for private in PRIVATE)
    is_local = request.route == "local" or settings.tenants.get(request.tenant) == "local"
    if is_private or is_local or settings.offline or not now.is_online or now.cloud != "up":
        assert decision.where != "cloud"
        assert not decision.may_go
    if now.cloud == "down" and not (is_private or is_local or settings.offline or not now.is_online):
        own = settings.tenants.get(request.tenant) or (settings.route if request.route == "auto" else request.route)
        if own != "local":
            assert (decision.where, decision.reason) == ("local", "cloud-down")
    if decision.where == "refused":
        assert request.route == "cloud"
    if decision.where == "cloud" and allowance.cost_left is not None:
        assert rest["expected_cost"] == 0 or allowance.cost_left > 0
    check_told(decision, text)


@given(circumstances, allowances, the_rest, st.sampled_from(["must_stay", "local", "free", "cloud", "must_go"]))
def test_no_verdict_is_sent_where_it_may_not_leave(
    now: Circumstances, allowance: Allowance, rest: dict[str, Any], side: Any
) -> None:
    """Whatever a mistake in the rules might make of a side."""
    decision = decide(Verdict(side=side, reason=None, may_leave=False), now, allowance, **rest)
    assert decision.where != "cloud"
    assert not decision.may_go


def check_told(decision: Decision, text: str) -> None:
    assert decision.reason in REASONS
    assert decision.lines[-1] == f"{decision.where}: {REASONS[decision.reason]}"
    for private in PRIVATE:
        assert private not in "".join(decision.lines)
