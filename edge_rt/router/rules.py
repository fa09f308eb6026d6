"""The rules that come before any judgement of difficulty: what must stay, what must go, what should. Pure.

A rule names its reason by a fixed word; REASONS says each in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from edge_rt.config import Router
from edge_rt.errors import ConfigError
from edge_rt.router.privacy import Finding, Privacy
from edge_rt.types import CLOUD_FORMATS, GenerateRequest

# must_stay and must_go bind; local and cloud are wishes that give way to what binds; free is undecided.
Side = Literal["must_stay", "local", "free", "cloud", "must_go"]
Reason = Literal[
    "asked-local",
    "asked-cloud",
    "battery",
    "cloud-down",
    "context",
    "cost",
    "deadline",
    "device-only",
    "easy",
    "energy",
    "hard",
    "heat",
    "metered",
    "needs",
    "no-cloud",
    "no-score",
    "offline",
    "private",
    "share",
    "slow-cloud",
]

REASONS: Final[dict[Reason, str]] = {
    "asked-local": "the request or its user is to be answered on the device",
    "asked-cloud": "the request or its user is to be answered by the cloud",
    "battery": "the battery is low",
    "cloud-down": "no cloud endpoint can be asked now",
    "context": "the prompt is longer than the device's model can hold",
    "cost": "the day's cost budget is spent",
    "deadline": "only one side answers in time",
    "device-only": "it holds what only the device's model understands",
    "easy": "the device's answer is expected to be good enough",
    "energy": "the day's energy budget is spent",
    "hard": "the cloud's answer is expected to be better by enough",
    "heat": "the device is too hot",
    "metered": "the network is paid by the byte",
    "needs": "it needs what the device's model lacks",
    "no-cloud": "no cloud endpoint is configured",
    "no-score": "nothing tells how hard it is",
    "offline": "sending is switched off, or there is no network",
    "private": "it holds what must not leave the device",
    "share": "the wanted share of cloud answers is used up",
    "slow-cloud": "the device answers sooner, and the deadline is near",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """How things stand when a request comes. None and 0 mean that it is not known, and stop nothing.

    cloud                 none is configured, all are down, or one can be asked
    device_n_ctx,
    cloud_n_ctx           tokens that either side holds
    prompt_tokens         of this request, estimated
    needs                 what it needs beside text, as "tools" or "image"
    device_offers,
    cloud_offers          of that
    battery_share         0..1; is_charging makes it irrelevant
    device_c, max_device_c
    energy_spent_j        today, by the device's answers
    """

    cloud: Literal["none", "down", "up"] = "up"
    is_online: bool = True
    is_metered: bool = False
    device_n_ctx: int = 0
    cloud_n_ctx: int = 0
    prompt_tokens: int = 0
    needs: frozenset[str] = frozenset()
    device_offers: frozenset[str] = frozenset()
    cloud_offers: frozenset[str] = frozenset()
    battery_share: float | None = None
    is_charging: bool = False
    device_c: float | None = None
    max_device_c: float | None = None
    energy_spent_j: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the rules say of one request.

    may_leave  nothing forbids to send it: holds for judging, hedging and handing over too, whatever the side
    is_asked   the request itself asked for the cloud, so that staying is refused rather than silent
    findings   what of it is private
    """

    side: Side
    reason: Reason | None
    may_leave: bool
    is_asked: bool = False
    findings: tuple[Finding, ...] = ()


class Rules:
    """The configured rules. Raises ConfigError for a class of privacy that does not exist."""

    def __init__(self, settings: Router) -> None:
        self._settings = settings
        try:
            self._privacy = Privacy(settings.keep_private, settings.private_words)
        except ValueError as exc:
            raise ConfigError(key="router.keep_private", problem=str(exc), origin="configuration") from exc

    def judge(self, request: GenerateRequest, now: Circumstances) -> Verdict:
        """Apply all rules, the binding ones first."""
        route = self._route(request)
        is_asked = request.route == "cloud"
        for reason, applies in _STAYS:
            if applies(request, now, self._settings):
                return Verdict(side="must_stay", reason=reason, may_leave=False, is_asked=is_asked)
        if findings := self._privacy.find(texts(request)):
            return Verdict(side="must_stay", reason="private", may_leave=False, is_asked=is_asked, findings=findings)
        if route == "local":
            # It may not leave for another purpose either: who asks for the device means it.
            return Verdict(side="must_stay", reason="asked-local", may_leave=False, is_asked=is_asked)
        if now.cloud == "down":
            return Verdict(side="local", reason="cloud-down", may_leave=True, is_asked=is_asked)
        if route == "cloud":
            return Verdict(side="must_go", reason="asked-cloud", may_leave=True, is_asked=is_asked)
        for reason, side, applies in _WISHES:
            if applies(request, now, self._settings):
                return Verdict(side=side, reason=reason, may_leave=True)
        return Verdict(side="free", reason=None, may_leave=True)

    def is_private(self, text: str) -> bool:
        """Tell whether a text may not leave the device."""
        return bool(self._privacy.find((text,)))

    def _route(self, request: GenerateRequest) -> str:
        """Take the request's own wish, else its user's, else the general one. A user's "local" binds the request."""
        own = self._settings.tenants.get(request.tenant)
        if own == "local" or request.route == "auto":
            return own or (self._settings.route if request.route == "auto" else request.route)
        return request.route


def texts(request: GenerateRequest) -> tuple[str, ...]:
    """Give every text of a request that would leave with it."""
    messages = request.messages or ()
    contents = tuple(message.content for message in messages)
    calls = tuple(text for message in messages for call in message.tool_calls for text in (call.name, call.arguments))
    tools = tuple(text for tool in request.tools for text in (tool.description, tool.parameters))
    form = () if request.response_format is None else (request.response_format.text,)
    return (*contents, *((request.prompt,) if request.prompt is not None else ()), *request.stop, *calls, *tools, *form)


_Rule = Callable[[GenerateRequest, Circumstances, Router], bool]


def _is_device_only(request: GenerateRequest, now: Circumstances, settings: Router) -> bool:  # noqa: ARG001
    # Token ids cannot be looked through for what is private either.
    sampling = request.sampling
    return (
        request.prompt_token_ids is not None
        or bool(sampling.logit_bias)
        or request.top_logprobs is not None
        or request.prompt_logprobs is not None
        or request.beams is not None
        or bool(request.adapters)
        or request.continues
        or request.ignore_eos
        or (request.response_format is not None and request.response_format.kind not in CLOUD_FORMATS)
    )


def _is_too_long(request: GenerateRequest, now: Circumstances, settings: Router) -> bool:  # noqa: ARG001
    return 0 < now.device_n_ctx <= now.prompt_tokens and not 0 < now.cloud_n_ctx <= now.prompt_tokens


def _lacks(request: GenerateRequest, now: Circumstances, settings: Router) -> bool:  # noqa: ARG001
    return not now.needs <= now.device_offers and now.needs <= now.cloud_offers


def _is_low(request: GenerateRequest, now: Circumstances, settings: Router) -> bool:  # noqa: ARG001
    return now.battery_share is not None and not now.is_charging and now.battery_share < settings.min_battery


def _is_hot(request: GenerateRequest, now: Circumstances, settings: Router) -> bool:  # noqa: ARG001
    return now.device_c is not None and now.max_device_c is not None and now.device_c > now.max_device_c


_STAYS: Final[tuple[tuple[Reason, _Rule], ...]] = (
    ("no-cloud", lambda _request, now, _settings: now.cloud == "none"),
    ("offline", lambda _request, now, settings: settings.offline or not now.is_online),
    ("device-only", _is_device_only),
)
_WISHES: Final[tuple[tuple[Reason, Side, _Rule], ...]] = (
    ("context", "must_go", _is_too_long),
    ("needs", "must_go", _lacks),
    ("metered", "local", lambda _request, now, settings: settings.metered or now.is_metered),
    ("heat", "cloud", _is_hot),
    ("battery", "cloud", _is_low),
    (
        "energy",
        "cloud",
        lambda _request, now, settings: 0 < settings.max_energy_j_per_day <= now.energy_spent_j,
    ),
)
