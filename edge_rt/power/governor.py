"""One step of the control loop: look, decide, set. What goes wrong in it slows the machine down and ends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from edge_rt.power.actuators import Actuators, Applied
from edge_rt.power.sensing import Sensing
from edge_rt.power.state import HINT_S, NO_ADVICE, Advice, Decision, Domain, Hint, Limits, Observation, Work

DECIDE_S: Final = 0.1  # between two decisions of which the second knows nothing more than the first
_SAFE_SHARE: Final = 0.6  # of the highest clock, where nothing is known: about half of the power on most chips

State = Literal["acting", "dry-run", "stopped"]
Say = Callable[[int, str, str], None]  # priority, what it is about, text


class Policy(Protocol):
    """Chooses clocks and remembers what it has learned; edge_rt.power.assemble.Chooser is one."""

    def domains_changed(self, domains: Sequence[Domain]) -> None: ...

    def decide(self, observation: Observation, limits: Limits) -> Decision: ...


def safe(domains: Sequence[Domain]) -> Decision:
    """Give clocks that hold where nothing is known: for the CPUs some way below the highest, all others untouched."""
    chosen = {}
    for domain in domains:
        highest = domain.points_hz[-1]
        below = [hz for hz in domain.points_hz if hz <= highest * _SAFE_SHARE] if domain.kind == "cpu" else [highest]
        chosen[domain.name] = below[-1] if below else domain.points_hz[0]
    return Decision(max_hz=chosen, reason="safe")


def at_work(hints: Sequence[Hint], now_s: float) -> list[Hint]:
    """Give the fresh hints of those that work or have somebody waiting. Pure."""
    return [hint for hint in hints if now_s - hint.sent_s <= HINT_S and (hint.work != "idle" or hint.n_waiting)]


def merge(hints: Sequence[Hint], now_s: float) -> Hint | None:
    """Join what several daemons said to one hint; None if none of it is fresh. Pure.

    Several that work take no advice: how fast each is on how many threads depends on the others'. Who has just
    ended its work is none of them.
    """
    fresh = [hint for hint in hints if now_s - hint.sent_s <= HINT_S]
    fresh = at_work(fresh, now_s) or fresh[-1:]
    if len(fresh) <= 1:
        return fresh[0] if fresh else None
    works: tuple[Work, ...] = ("prefill", "decode", "idle")
    lefts = [h.ttft_left_s - (now_s - h.sent_s) for h in fresh if h.ttft_left_s is not None]
    return Hint(
        work=next(work for work in works if any(hint.work == work for hint in fresh)),
        n_waiting=sum(hint.n_waiting for hint in fresh),
        n_running=sum(hint.n_running for hint in fresh),
        n_prompt_tokens=max(hint.n_prompt_tokens for hint in fresh),
        ttft_left_s=min(lefts, default=None),
        tpot_s=max((hint.tpot_s for hint in fresh if hint.tpot_s is not None), default=None),
        n_threads=sum(hint.n_threads for hint in fresh),
        sent_s=now_s,
    )


def has_news(before: Observation, now: Observation) -> bool:
    """Tell whether a decision by what is seen now may be another one than before. Pure.

    A prompt has a deadline and whoever waits grows impatient, so time alone is news there; where answers are decoded or
    nothing is done it only counts after DECIDE_S.
    """
    hint = now.hint
    if hint is not None and (hint.work == "prefill" or hint.n_waiting or hint.ttft_left_s is not None):
        return True
    return (
        now.now_s - before.now_s >= DECIDE_S
        or hint is not before.hint
        or now.max_hz is not before.max_hz
        or (now.power.power_w if now.power is not None else None)
        != (before.power.power_w if before.power is not None else None)
        or now.temperature_c != before.temperature_c
        or now.throttled != before.throttled
        or now.utilisation != before.utilisation
        or now.is_on_battery != before.is_on_battery
        or now.advice != before.advice
    )


class Governor:
    """Sets clocks by a policy. Belongs to one thread.

    sleep       waits until a limit that was given back is in force; None: it is at once
    stopped_by  why it does not act, "" while it does
    """

    def __init__(
        self,
        sensing: Sensing,
        actuators: Actuators,
        policy: Policy,
        *,
        is_dry: bool,
        say: Say,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.sensing, self.actuators, self.policy = sensing, actuators, policy
        self.is_dry = is_dry
        self.stopped_by = ""
        self.observation: Observation | None = None
        self.decision = Decision(max_hz={}, reason="none yet")
        self.applied = Applied()
        self.n_steps = self.n_writes = 0
        self.n_at_work = 0  # daemons
        self._say, self._sleep = say, sleep
        self._hint: Hint | None = None
        self._decided_by: tuple[Observation, Limits] | None = None
        self._domains: tuple[Domain, ...] | None = None
        self._checked_hz: Mapping[str, float] | None = None  # clocks that are points of these domains

    @property
    def state(self) -> State:
        return "stopped" if self.stopped_by else "dry-run" if self.is_dry else "acting"

    @property
    def advice(self) -> Advice:
        """What the daemon is told: nothing while this does not act. In a dry run it is told, to be shown only."""
        return NO_ADVICE if self.stopped_by else self.decision.advice

    @property
    def is_busy(self) -> bool:
        """Tell whether the daemon works, so that a look is due soon again."""
        return self._hint is not None and self._hint.work != "idle"

    def step(self, now_s: float, hints: Sequence[Hint], limits: Limits) -> None:
        """Look, decide and set once. Raises nothing but what is no error of the machine's."""
        self.n_steps += 1
        self._hint = merge(hints, now_s)
        self.n_at_work = len(at_work(hints, now_s))
        self.applied = self.actuators.look(now_s)
        is_advised = not self.is_dry and self._hint is not None and self._hint.max_threads > 0
        advice = self.advice if is_advised else NO_ADVICE
        self.observation = self.sensing.observe(now_s, self._hint, self.actuators.max_hz(), advice)
        self._tell(self.applied)
        if self.stopped_by:
            return
        if self.applied.contested and not self.is_dry:
            self.stop(f"another program keeps writing /{self.applied.contested[0]}")
            return
        last = self._decided_by
        if last is not None and limits is last[1] and not has_news(last[0], self.observation):
            return
        self._decided_by = self.observation, limits
        self.decision = self._decide(self.observation, limits)
        self.applied = self.actuators.apply(self.decision, now_s, max_w=cap_w(self.observation, limits))
        self.n_writes += self.applied.n_writes
        self._tell(self.applied)

    def stop(self, reason: str) -> None:
        """Act no more, and give back what was changed."""
        if self.stopped_by:
            return
        self.stopped_by, self._decided_by = reason, None
        self._say(4, "stopped", f"stops setting clocks: {reason}")
        self.restore()

    def resume(self) -> None:
        """Act again."""
        if self.stopped_by:
            self.stopped_by = ""
            self._say(5, "resumed", "sets clocks again")

    def restore(self) -> bool:
        """Give the user's own limits back, which may take some hundredths of a second; False if not all of them are."""
        try:
            found = self.actuators.restore(self._sleep)
        except OSError as exc:
            self._say(3, "snapshot", f"the snapshot cannot be changed: {exc.strerror or exc}")
            return False
        for one in found:
            if not one.is_done:
                self._say(3, f"restore {one.value.path}", f"/{one.value.path} is not back: {one.reason}")
        return all(one.is_done for one in found)

    def _decide(self, observation: Observation, limits: Limits) -> Decision:
        domains = self.actuators.domains
        try:
            if domains is not self._domains:
                if domains != self._domains:
                    self.policy.domains_changed(domains)
                self._domains, self._checked_hz = domains, None
            decision = self.policy.decide(observation, limits)
            if decision.max_hz is not self._checked_hz:
                self._checked_hz = _checked(decision, domains).max_hz
            return decision
        except Exception as exc:  # noqa: BLE001  a mistake in the policy must not leave the clocks as they are
            self._domains = None
            self._say(3, "policy", f"the policy failed, safe clocks are set: {type(exc).__name__}: {exc}")
            return safe(domains)

    def _tell(self, applied: Applied) -> None:
        for fault in applied.faults:
            self._say(4, f"{fault.path} {fault.doing} {fault.code}", str(fault))
        for path, text in applied.foreign:
            self._say(
                4,
                f"foreign {path}",
                f"another program set /{path} to {text[:40]}: powerd sets its own again, and what stood there before "
                "it began comes back at its end. For another limit of yours stop it first, or use `edge_rt power cap`",
            )
        if applied.is_postponed:
            self._say(
                5, "postponed", "the kernel holds clocks down for heat: waits, to see the user's own limits first"
            )


def cap_w(observation: Observation, limits: Limits) -> float:
    """Give the cap that holds now, of mains or battery; 0: none."""
    if observation.is_on_battery and limits.battery_w > 0:
        return min(limits.battery_w, limits.max_w) if limits.max_w > 0 else limits.battery_w
    return limits.max_w


def _checked(decision: Decision, domains: Sequence[Domain]) -> Decision:
    """Pass a decision on if every clock in it is one of its domain's points. Raises ValueError."""
    points: dict[str, Any] = {domain.name: domain.points_hz for domain in domains}
    for name, hz in decision.max_hz.items():
        if hz not in points.get(name, ()):
            raise ValueError(f"{name} cannot be set to {hz:g} Hz")
    return decision
