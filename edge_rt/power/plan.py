"""What powerd would write now in each situation, by the same governor on files that take no writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from edge_rt.devices.kernel_files import DryFiles, KernelFiles
from edge_rt.devices.meters import Boundary
from edge_rt.power.actuators import Actuators
from edge_rt.power.conflicts import rivals
from edge_rt.power.governor import Governor, Policy
from edge_rt.power.sensing import Sensing
from edge_rt.power.settings import Settings
from edge_rt.power.snapshot import Value, is_held_down
from edge_rt.power.state import NO_ADVICE, Advice, Domain, Hint, Limits, Observation, Power
from edge_rt.power.wire import TakesAdvice

Situation = Literal["idle", "prefill", "decode", "hot", "cap"]
SITUATIONS: Final[tuple[Situation, ...]] = get_args(Situation)

_STEP_S: Final = 0.05
_N_STEPS: Final = 200  # 10 s: longer than anything the policy waits for but a cap's slow return
_TOO_HOT_C: Final = 5.0  # above the limit
_TOO_MUCH: Final = 1.3  # of the cap
_N_PROMPT_TOKENS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One file: what it holds and what it would."""

    path: str
    now: str
    then: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What would be written in a situation, the decision's word for it, and what the daemon would be advised.

    nothing  why nothing would be written
    """

    situation: Situation
    reason: str
    changes: tuple[Change, ...]
    nothing: str = ""
    advice: Advice = NO_ADVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All situations, and why powerd would not write at all now; () if it would."""

    situations: tuple[Planned, ...]
    obstacles: tuple[str, ...]


class _Told(Sensing):
    """Sensors that say what a situation is made of, and the real ones for the rest."""

    def __init__(self, real: Sensing, change: Callable[[Observation], Observation]) -> None:
        self._real, self._change = real, change
        self.groups, self.power = real.groups, real.power

    def observe(
        self, now_s: float, hint: Hint | None, max_hz: Mapping[str, float], advice: Advice = NO_ADVICE
    ) -> Observation:
        return self._change(self._real.observe(now_s, hint, max_hz, advice))


def plan(
    settings: Settings,
    files: KernelFiles,
    domains: tuple[Domain, ...],
    sensing: Sensing,
    make_policy: Callable[[], Policy],
    now_s: float,
    own: Mapping[str, Value],
    takes: TakesAdvice,
) -> Plan:
    """Ask the policy in every situation, some seconds long, from what is in force now.

    own    the user's own limits, where powerd has changed them already
    takes  the daemon's limits, within which it is advised
    """
    limits = Limits(
        max_w=settings.max_w,
        battery_w=settings.battery_w,
        max_c=settings.max_c,
        ttft_slo_s=settings.ttft_slo_s,
        tpot_slo_s=settings.tpot_slo_s,
    )
    found = []
    for situation in SITUATIONS:
        dry = DryFiles(files)
        actuators = Actuators(dry, domains, None, also=settings.actuators, own=own)
        told = _Told(sensing, _changed(situation, limits, sensing))
        governor = Governor(told, actuators, make_policy(), is_dry=True, say=lambda *_: None)
        for i in range(_N_STEPS):
            at_s = now_s + i * _STEP_S
            governor.step(at_s, [_hint(situation, limits, takes, i, at_s)], limits)
        changes = tuple(
            Change(path=path, now=now, then=then) for path, (now, then) in dry.written.items() if now != then
        )
        found.append(
            Planned(
                situation=situation,
                reason=governor.decision.reason,
                changes=changes,
                nothing="" if changes else _nothing(situation, settings, domains, governor),
                advice=governor.advice,
            )
        )
    return Plan(situations=tuple(found), obstacles=_obstacles(settings, files, domains))


def _changed(situation: Situation, limits: Limits, sensing: Sensing) -> Callable[[Observation], Observation]:
    """Give what makes an observation one of the situation; otherwise it is cool and takes little."""
    boundary: Boundary = sensing.power.meter.boundary if sensing.power is not None else "board"

    def change(seen: Observation) -> Observation:
        if situation == "hot":
            return replace(seen, temperature_c=limits.max_c + _TOO_HOT_C)
        if situation == "cap" and limits.max_w > 0:
            power = Power(power_w=limits.max_w * _TOO_MUCH, boundary=boundary, quality="measured", age_s=0.0)
            return replace(seen, power=power)
        return seen

    return change


def _hint(situation: Situation, limits: Limits, takes: TakesAdvice, i: int, now_s: float) -> Hint:
    """Give what a daemon would say. It tells no time per token: how fast it is here only the calibration knows."""
    told = Hint(work="idle", max_threads=takes.max_threads, max_batch=takes.max_batch, sent_s=now_s)
    if situation == "idle":
        return told
    if situation == "decode":
        return replace(told, work="decode", n_running=1)
    n_tokens = _N_PROMPT_TOKENS + i % 2  # another one each time: one that takes seconds would be late
    return replace(told, work="prefill", n_running=1, n_prompt_tokens=n_tokens, ttft_left_s=limits.ttft_slo_s)


def _nothing(situation: Situation, settings: Settings, domains: tuple[Domain, ...], governor: Governor) -> str:
    if not domains:
        return "no clock can be set here"
    if situation == "cap" and settings.max_w == 0:
        return "power.max_w is 0: there is no cap; this is prefill"
    if governor.applied.is_postponed:
        return "the kernel holds clocks down for heat, so the user's own limits cannot be read"
    if governor.applied.faults:
        return str(governor.applied.faults[0])
    return "all is as it should be"


def _obstacles(settings: Settings, files: KernelFiles, domains: tuple[Domain, ...]) -> tuple[str, ...]:
    found = []
    if not domains:
        wanted = ", ".join(settings.actuators)
        why = f"{wanted}): this kernel, hypervisor or container shows none" if wanted else "empty)"
        found.append(f"no clock can be set (power.actuators is {why}")
    if not settings.enabled:
        found.append("power.enabled is false: powerd only says what it would do")
    found += [
        f"{rival.name} sets clocks too ({rival.evidence}). Remedy: {rival.remedy}"
        for rival in rivals(files)
        if rival.writes and not settings.force
    ]
    if is_held_down(files):
        found.append("the kernel's thermal framework holds clocks down: powerd waits until it lets go before it begins")
    return tuple(found)
