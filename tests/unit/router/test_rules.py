from __future__ import annotations

import time
from typing import Any

import pytest

from edge_rt.config import Router
from edge_rt.errors import ConfigError
from edge_rt.router.rules import Circumstances, Rules, Verdict
from edge_rt.types import GenerateRequest, Message, Sampling

CARD = "my card is 4111 1111 1111 1111"


def asks(text: str = "Hello", **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="1", model="m", messages=(Message(role="user", content=text),), **fields)


def judge(
    request: GenerateRequest | None = None, now: Circumstances | None = None, **settings: Any
) -> tuple[str, str | None]:
    verdict = Rules(Router(**settings)).judge(request or asks(), now or Circumstances())
    return verdict.side, verdict.reason


def test_nothing_special_is_free() -> None:
    assert Rules(Router()).judge(asks(), Circumstances()) == Verdict(side="free", reason=None, may_leave=True)


@pytest.mark.parametrize(
    ("request_", "now", "settings", "expected"),
    [
        (asks(route="local"), {}, {}, ("must_stay", "asked-local")),
        (asks(route="cloud"), {}, {}, ("must_go", "asked-cloud")),
        (asks(), {}, {"route": "local"}, ("must_stay", "asked-local")),
        (asks(), {}, {"route": "cloud"}, ("must_go", "asked-cloud")),
        (asks(route="local"), {}, {"route": "cloud"}, ("must_stay", "asked-local")),
        (asks(tenant="uid:7"), {}, {"tenants": {"uid:7": "local"}}, ("must_stay", "asked-local")),
        (asks(tenant="uid:7", route="cloud"), {}, {"tenants": {"uid:7": "local"}}, ("must_stay", "asked-local")),
        (asks(tenant="uid:7"), {}, {"tenants": {"uid:7": "cloud"}}, ("must_go", "asked-cloud")),
        (asks(tenant="uid:7", route="local"), {}, {"tenants": {"uid:7": "cloud"}}, ("must_stay", "asked-local")),
        (asks(tenant="uid:7"), {}, {"route": "local", "tenants": {"uid:7": "auto"}}, ("free", None)),
        (asks(tenant="uid:8"), {}, {"tenants": {"uid:7": "local"}}, ("free", None)),
        (asks(route="cloud"), {"cloud": "none"}, {}, ("must_stay", "no-cloud")),
        (asks(route="cloud"), {"cloud": "down"}, {}, ("local", "cloud-down")),
        (asks(route="cloud"), {"is_online": False}, {}, ("must_stay", "offline")),
        (asks(route="cloud"), {}, {"offline": True}, ("must_stay", "offline")),
        (asks(CARD, route="cloud"), {}, {}, ("must_stay", "private")),
        (asks(CARD, route="cloud"), {}, {"keep_private": ("email",)}, ("must_go", "asked-cloud")),
        (asks("x " * 9), {"prompt_tokens": 5000, "device_n_ctx": 4096}, {}, ("must_go", "context")),
        (asks(), {"prompt_tokens": 5000, "device_n_ctx": 0}, {}, ("free", None)),
        (asks(), {"prompt_tokens": 5000, "device_n_ctx": 4096, "cloud_n_ctx": 4096}, {}, ("free", None)),
        (
            asks(),
            {"needs": frozenset({"tools"}), "cloud_offers": frozenset({"tools", "image"})},
            {},
            ("must_go", "needs"),
        ),
        (asks(), {"needs": frozenset({"tools"}), "device_offers": frozenset({"tools"})}, {}, ("free", None)),
        (asks(), {"needs": frozenset({"tools"})}, {}, ("free", None)),
        (asks(), {"is_metered": True}, {}, ("local", "metered")),
        (asks(), {}, {"metered": True}, ("local", "metered")),
        (asks(), {"device_c": 91.0, "max_device_c": 85.0}, {}, ("cloud", "heat")),
        (asks(), {"device_c": 81.0, "max_device_c": 85.0}, {}, ("free", None)),
        (asks(), {"battery_share": 0.1}, {}, ("cloud", "battery")),
        (asks(), {"battery_share": 0.1, "is_charging": True}, {}, ("free", None)),
        (asks(), {"energy_spent_j": 5.0}, {"max_energy_j_per_day": 4.0}, ("cloud", "energy")),
        (asks(), {"energy_spent_j": 5.0}, {}, ("free", None)),
        (asks(CARD), {"device_c": 91.0, "max_device_c": 85.0}, {}, ("must_stay", "private")),
        (asks(), {"device_c": 91.0, "max_device_c": 85.0, "is_metered": True}, {}, ("local", "metered")),
        (asks(sampling=Sampling(logit_bias={1: 1.0})), {}, {}, ("must_stay", "device-only")),
        (asks(top_logprobs=0), {}, {}, ("must_stay", "device-only")),
        (asks(ignore_eos=True), {}, {}, ("must_stay", "device-only")),
        (GenerateRequest(id="1", model="m", prompt_token_ids=(1,)), {}, {}, ("must_stay", "device-only")),
    ],
)
def test_each_rule(
    request_: GenerateRequest, now: dict[str, Any], settings: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    assert judge(request_, Circumstances(**now), **settings) == expected


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(id="1", model="m", prompt=CARD),
        asks("hello", stop=("4111111111111111",)),
        GenerateRequest(
            id="1",
            model="m",
            messages=(
                Message(role="system", content="you help"),
                Message(role="user", content=CARD),
                Message(role="assistant", content="thanks"),
                Message(role="user", content="so?"),
            ),
        ),
    ],
)
def test_every_text_of_a_request_is_looked_through(request_: GenerateRequest) -> None:
    assert judge(request_) == ("must_stay", "private")


def test_what_stays_by_wish_may_leave_for_no_other_purpose() -> None:
    rules = Rules(Router())
    assert not rules.judge(asks(route="local"), Circumstances()).may_leave
    assert not rules.judge(asks(CARD), Circumstances()).may_leave
    assert rules.judge(asks(), Circumstances(is_metered=True)).may_leave


def test_a_class_that_does_not_exist_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="no such class: emails; there are"):
        Rules(Router(keep_private=("emails",)))


def test_the_rules_take_no_time_worth_mentioning() -> None:
    """Not a bar: that nothing grows faster than the text is tested in test_privacy."""
    rules, request = Rules(Router()), asks("Why is the sky blue, and what did 3 people say of it in 1871? " * 3)
    began_s = time.process_time()
    for _ in range(100):
        rules.judge(request, Circumstances())
    assert time.process_time() - began_s < 5.0
