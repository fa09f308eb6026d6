"""Chooses for each request where it is answered, and keeps account of what came of it.

The decisions themselves are pure (rules, scorer, budget, decide, confidence); this holds their state and gathers what
they need to know.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

from edge_rt.config import Router as Settings
from edge_rt.errors import InvalidRequestError, MustStayError
from edge_rt.router.budget import AnswerLength, Budget, Pace
from edge_rt.router.decide import Decision, Judged, decide
from edge_rt.router.rules import REASONS, Circumstances, Rules
from edge_rt.types import Choice, Chunk, Energy, GenerateRequest, Origin, TokenSignal

_MAX_OPEN: Final = 1024  # requests remembered: those that are answered, and those that feedback may come for
_P_CLOUD: Final = 0.85  # that the cloud's answer is good enough, where nothing is known of the question
Source = Literal["feedback", "regenerate", "shadow"]

_REGENERATED: Final = 0.2  # what an answer was worth to somebody who asks again at once
_ON_PROBATION: Final = frozenset({"easy", "share", "no-score"})


class Confidence(Protocol):
    """Judges an answer's beginning; router.confidence.Judge is one."""

    def doubt(self, signals: Sequence[TokenSignal], text: str, *, is_whole: bool = False) -> float | None:
        """Give the probability that the answer is no good; None where too little of it is there."""
        ...


class Scores(Protocol):
    """Judges difficulty; router.scorer.Scorer is one."""

    def score(self, text: str, *, n_turns: int = 1, max_tokens: int | None = None) -> Judged: ...


class Surroundings(Protocol):
    """How things stand, from the models here and the endpoints there."""

    def circumstances(self, request: GenerateRequest) -> Circumstances: ...

    def pace(self, request: GenerateRequest, expected_tokens: float) -> Pace: ...

    def expected_cost(self, request: GenerateRequest, expected_tokens: float) -> float | None: ...

    def take_unfinished_cost(self) -> float:
        """Give what cloud answers that had no end have cost since the last call."""
        ...

    def answered(self, origin: Origin, last: Chunk) -> None: ...


@dataclass(slots=True)
class _Open:
    """A request that was decided on: what it was judged, and what has been counted."""

    decision: Decision
    score: Judged | None
    tenant: str
    question: int  # its hash
    answered_by: str | None = None  # endpoint, "" for the device; None: not yet


class Teacher(Protocol):
    """Takes labels and changes what the scorer says; learner.Learner is one."""

    def score_seen(self, score: Any) -> None:
        """Watch the scores of requests as they come."""
        ...

    def label(self, score: Any, *, source: Source, local: float | None, cloud: float | None, tenant: str) -> None: ...


class Chooser:
    """Belongs to one event loop.

    scorer  None: difficulty is not judged before decoding
    judge   None: an answer that the device has begun is its to end
    teacher None: nothing is learnt here
    spent   takes the budget's state, whenever an answer has cost something
    """

    def __init__(
        self,
        settings: Settings,
        surroundings: Surroundings,
        *,
        scorer: Scores | None = None,
        judge: Confidence | None = None,
        teacher: Teacher | None = None,
        budget: Budget | None = None,
        spent: Callable[[dict[str, Any]], None] | None = None,
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._rules = Rules(settings)
        self._counts_energy = settings.max_energy_j_per_day > 0
        self._keep_every_j, self._kept_j = settings.max_energy_j_per_day / 1000, 0.0
        self._surroundings, self._scorer, self._judge = surroundings, scorer, judge
        self.budget = budget or Budget(share=settings.cloud_share, max_cost_per_day=settings.max_cost_per_day)
        self._spent, self._clock, self._wall_clock = spent, clock, wall_clock
        self._teacher, self._shadow_share, self._chance = teacher, settings.shadow_share, chance
        self._last_by: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._length = AnswerLength()
        self._open: OrderedDict[str, _Open] = OrderedDict()

    def prepare(self, settings: Settings, judge: Confidence | None) -> Callable[[], None]:
        """Make ready to decide by other settings; what is given does it, at once and without fail.

        Raises ConfigError. What was decided, learnt and spent is kept.
        """
        rules = Rules(settings)

        def commit() -> None:
            self._rules, self._judge, self._shadow_share = rules, judge, settings.shadow_share
            self._counts_energy = settings.max_energy_j_per_day > 0
            self._keep_every_j = settings.max_energy_j_per_day / 1000
            self.budget.configure(share=settings.cloud_share, max_cost_per_day=settings.max_cost_per_day)

        return commit

    def judge_by(self, scorer: Scores | None, teacher: Teacher | None, prior: Sequence[float]) -> None:
        """Judge difficulty by another scorer, or not at all, from the next request on."""
        self._scorer, self._teacher = scorer, teacher
        self.budget.begin_anew(prior)

    def explain(self, request: GenerateRequest) -> Decision:
        """Decide without counting it."""
        return self._decide(request)[0]

    def choose(self, request: GenerateRequest) -> Choice:
        """Decide. Raises MustStayError for a request that asks for the cloud and may not leave."""
        self._spend(0.0)
        decision, score = self._decide(request)
        if decision.where == "refused":
            raise MustStayError(rule=REASONS[decision.reason])
        gain = None if score is None else score.gain
        if score is not None and self._teacher is not None:
            self._teacher.score_seen(score)
        self.budget.observe(request.tenant, gain, went=decision.where == "cloud")
        self._open[request.id] = _Open(decision, score, request.tenant, hash(request.question))
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        on_probation = (
            self._judge is not None
            and decision.where == "local"
            and decision.may_go
            and decision.reason in _ON_PROBATION
            and decision.threshold < 1.0
        )
        where: Literal["local", "cloud"] = "cloud" if decision.where == "cloud" else "local"
        return Choice(where=where, reason=decision.reason, on_probation=on_probation, may_go=decision.may_go)

    def is_doubtful(
        self, request: GenerateRequest, text: str, signals: Sequence[TokenSignal], *, is_whole: bool
    ) -> bool:
        """Tell from an answer's beginning whether the cloud should take over: if what it is expected to add, now that
        the device's own confidence is known, exceeds the threshold that held before."""
        found = self._open.get(request.id)
        p_wrong = None if self._judge is None else self._judge.doubt(signals, text, is_whole=is_whole)
        if found is None or p_wrong is None:
            return False
        p_cloud = _P_CLOUD if found.score is None else found.score.p_cloud
        gain = p_cloud - (1.0 - p_wrong)
        is_doubtful = gain > max(found.decision.threshold, 0.0)
        if is_doubtful:
            self.budget.observe(request.tenant, gain, went=True)
        return is_doubtful

    def finished(self, request: GenerateRequest, origin: Origin, last: Chunk) -> None:
        """Take note of a finished answer."""
        if (found := self._open.get(request.id)) is not None:
            found.answered_by = origin.endpoint
            self._last_by[(found.tenant, found.question)] = origin.endpoint
            if len(self._last_by) > _MAX_OPEN:
                self._last_by.popitem(last=False)
        self._surroundings.answered(origin, last)
        if last.usage is not None:
            self._length.observe(last.usage.completion_tokens)
        energy = None if last.usage is None else last.usage.energy
        self._spend(origin.cost or 0.0, 0.0 if energy is None else energy.total_j)

    def aborted(self, energy: Energy) -> None:
        """Count what this device spent on an answer without an end."""
        self._spend(0.0, energy.total_j)

    def _spend(self, cost: float, energy_j: float = 0.0) -> None:
        """Count a cost, and that of answers which had no end since the last time, and this device's energy."""
        cost += self._surroundings.take_unfinished_cost()
        energy_j = energy_j if self._counts_energy else 0.0
        if cost or energy_j:
            now_s, wall_s = self._clock(), self._wall_clock()
            self.budget.spend(cost, now_s=now_s, wall_s=wall_s)
            self.budget.spend_energy(energy_j, now_s=now_s, wall_s=wall_s)
            # Every answer of the device takes energy; not each of them is worth a write.
            spent_j = self.budget.energy_spent_j(now_s=now_s, wall_s=wall_s)
            if self._spent is not None and (cost or not 0 <= spent_j - self._kept_j < self._keep_every_j):
                self._kept_j = spent_j
                self._spent(self.budget.state())

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        """Learn from what a user says of an answer. Raises InvalidRequestError for an answer that is not known, or is
        another user's; the last ones only are remembered."""
        found = self._open.get(request_id)
        if found is None or found.tenant != tenant or found.answered_by is None:
            raise InvalidRequestError(param="id", problem="no answer of this id is remembered for this user")
        self._label(found, "feedback", float(is_good), found.answered_by)

    def repeated(self, request: GenerateRequest) -> None:
        """Learn that a user asked again at once: the answer was not what he wanted."""
        found = self._open.get(request.id)
        endpoint = None if found is None else self._last_by.get((found.tenant, found.question))
        if found is not None and endpoint is not None:
            self._label(found, "regenerate", _REGENERATED, endpoint)

    def wants_verdict(self, request: GenerateRequest, origin: Origin, answer: str) -> bool:
        """Tell whether the cloud shall judge this answer of the device, which nothing private may be in."""
        found = self._open.get(request.id)
        return (
            self._teacher is not None
            and found is not None
            and found.decision.may_go
            and not origin.endpoint
            and self._chance() < self._shadow_share
            and not self._rules.is_private(answer)
        )

    def judged(self, request: GenerateRequest, worth: float) -> None:
        """Learn from a verdict of the cloud on the device's answer."""
        if (found := self._open.get(request.id)) is not None:
            self._label(found, "shadow", worth, "")

    def _label(self, found: _Open, source: Source, worth: float, endpoint: str) -> None:
        if self._teacher is None or found.score is None:
            return
        local, cloud = (None, worth) if endpoint else (worth, None)
        self._teacher.label(found.score, source=source, local=local, cloud=cloud, tenant=found.tenant)

    def _decide(self, request: GenerateRequest) -> tuple[Decision, Judged | None]:
        now = self._surroundings.circumstances(request)
        if self._counts_energy:
            spent_j = self.budget.energy_spent_j(now_s=self._clock(), wall_s=self._wall_clock())
            now = replace(now, energy_spent_j=spent_j)
        verdict = self._rules.judge(request, now)
        expected = self._length.expected(request.max_tokens)
        score = None
        if verdict.may_leave and self._scorer is not None:
            n_turns = len(request.messages or ()) or 1
            score = self._scorer.score(request.question, n_turns=n_turns, max_tokens=request.max_tokens)
        allowance = self.budget.allowance(request.tenant, now_s=self._clock(), wall_s=self._wall_clock())
        decision = decide(
            verdict,
            now,
            allowance,
            score=score,
            pace=self._surroundings.pace(request, expected),
            deadline_s=request.deadline_s,
            expected_cost=self._surroundings.expected_cost(request, expected),
        )
        return decision, score
