"""One decision from all that is known of a request: where it is answered, why, explained line by line. Pure.

What binds comes first, then what is wished, then time, then the judgement of difficulty against the budget. Nothing
after the rules can send what the rules keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from edge_rt.router.budget import Allowance, Pace
from edge_rt.router.rules import REASONS, Circumstances, Reason, Verdict

# refused: the request asked for the cloud and must stay; MustStayError is better than an answer from elsewhere
Where = Literal["local", "cloud", "refused"]

# A cloud that cannot be reached is no refusal: the device answers with what it has, and says so.
_REFUSES: Final[frozenset[Reason]] = frozenset({"private", "asked-local", "device-only", "no-cloud"})


class Judged(Protocol):
    """What the scorer says of a request; router.scorer.Score is one."""

    @property
    def p_local(self) -> float: ...

    @property
    def p_cloud(self) -> float: ...

    @property
    def gain(self) -> float: ...

    @property
    def reasons(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes.

    reason     a fixed word, for headers and counters; rules.REASONS says it in a sentence
    may_go     one that stays may still be handed over, hedged or judged by the cloud
    lines      the explanation, for `edge_rt route explain`; nothing of the request's text is in it
    threshold  that the gain had to exceed
    """

    where: Where
    reason: Reason
    may_go: bool
    lines: tuple[str, ...]
    threshold: float


def decide(
    verdict: Verdict,
    now: Circumstances,
    allowance: Allowance,
    *,
    score: Judged | None = None,
    pace: Pace | None = None,
    deadline_s: float | None = None,
    expected_cost: float | None = None,
) -> Decision:
    """Decide where one request is answered.

    deadline_s     left for the whole answer; None is no deadline
    expected_cost  of the cloud's answer; 0 is free, as on a peer's device; None is not known
    """
    is_affordable = _is_affordable(allowance, expected_cost)
    where, reason, why = _choose(verdict, now, allowance, is_affordable, score, pace, deadline_s)
    lines = _told(verdict)
    if score is not None:
        lines.append(
            f"judged: the device is right with {score.p_local:.2f}, the cloud with {score.p_cloud:.2f}; gain "
            f"{score.gain:+.3f}, threshold {allowance.threshold:+.3f}" + "".join(f"; {one}" for one in score.reasons)
        )
    if allowance.cost_left is not None:
        lines.append(f"budget: {max(allowance.cost_left, 0.0):g} left today")
    lines += [*why, f"{where}: {REASONS[reason]}"]
    may_go = verdict.may_leave and verdict.side != "local" and now.cloud == "up" and now.is_online and is_affordable
    return Decision(where=where, reason=reason, may_go=may_go, lines=tuple(lines), threshold=allowance.threshold)


def _choose(
    verdict: Verdict,
    now: Circumstances,
    allowance: Allowance,
    is_affordable: bool,
    score: Judged | None,
    pace: Pace | None,
    deadline_s: float | None,
) -> tuple[Where, Reason, list[str]]:
    # may_leave is asked beside the side, and the cloud's state beside the rules' word for it: whoever calls this with
    # a verdict of another state of things sends nothing either.
    if verdict.side == "must_stay" or not verdict.may_leave:
        reason = verdict.reason or "private"
        return ("refused" if verdict.is_asked and reason in _REFUSES else "local"), reason, []
    if not now.is_online or now.cloud != "up":
        return "local", "offline" if not now.is_online else "no-cloud" if now.cloud == "none" else "cloud-down", []
    if not is_affordable:
        return "local", "cost", []
    if verdict.side == "must_go":
        return "cloud", verdict.reason or "asked-cloud", []
    if verdict.side == "local":
        return "local", verdict.reason or "asked-local", []
    timely, why = _timely(pace, deadline_s)
    if timely is not None:
        return *timely, why
    if verdict.side == "cloud":
        return "cloud", verdict.reason or "asked-cloud", why
    if score is None:
        return "local", "no-score", why
    # A gain of nothing is worth nothing, however much of the share is left.
    if score.gain > max(allowance.threshold, 0.0):
        return "cloud", "hard", why
    return "local", "share" if score.gain > 0 else "easy", why


def _is_affordable(allowance: Allowance, expected_cost: float | None) -> bool:
    if allowance.cost_left is None or expected_cost == 0:
        return True
    return (expected_cost or 0.0) < allowance.cost_left


def _told(verdict: Verdict) -> list[str]:
    lines = [f"rules: {verdict.side.replace('_', ' ')}" + (f" ({verdict.reason})" if verdict.reason else "")]
    if verdict.findings:
        lines.append(f"private: {', '.join(map(str, verdict.findings))}")
    return lines


def _timely(pace: Pace | None, deadline_s: float | None) -> tuple[tuple[Where, Reason] | None, list[str]]:
    """Choose the side that answers in time, where only one does; the sooner one, where none does."""
    if pace is None or deadline_s is None or pace.local_s is None or pace.cloud_p95_s is None:
        return None, []
    local_s, cloud_s = pace.local_s, pace.cloud_p95_s
    why = [
        f"time: {deadline_s:.1f} s left; the device takes {local_s:.1f} s, the cloud {pace.cloud_p50_s or 0.0:.1f} s, "
        f"and {cloud_s:.1f} s at most in 95 of 100 cases"
    ]
    if local_s <= deadline_s and cloud_s <= deadline_s:
        return None, why
    if local_s <= deadline_s or local_s <= cloud_s:
        return ("local", "slow-cloud"), why
    return ("cloud", "deadline"), why
