"""The router's state: what it decides, doubts, spends and tells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from edge_rt.config import Router as Settings
from edge_rt.errors import ConfigError, InvalidRequestError, MustStayError
from edge_rt.router.budget import Budget, Pace
from edge_rt.router.chooser import Chooser
from edge_rt.router.rules import Circumstances
from edge_rt.types import Chunk, Energy, GenerateRequest, Message, Origin, Timings, TokenSignal, Usage
from tests.unit.router.scores import Score

ASKED = GenerateRequest(id="r", model="m", messages=(Message(role="user", content="why is the sky blue"),))
SIGNALS = (TokenSignal(logprob=-2.0, margin=0.1, entropy=3.0),) * 16
LAST = Chunk(
    text="",
    finish_reason="stop",
    usage=Usage(prompt_tokens=5, completion_tokens=40),
    timings=Timings(queue_s=0, prefill_s=0.1, prefill_tokens=5, decode_s=0.4, decode_tokens=39, ttft_s=0.1),
)


@dataclass
class FakeScorer:
    scored: Score
    asked: list[str] = field(default_factory=list)

    def score(self, text: str, *, n_turns: int = 1, max_tokens: int | None = None) -> Score:
        self.asked.append(text)
        return self.scored


@dataclass
class FakeJudge:
    p_wrong: float | None

    def doubt(self, signals: Sequence[TokenSignal], text: str, *, is_whole: bool = False) -> float | None:
        return self.p_wrong


@dataclass
class FakeSurroundings:
    now: Circumstances = Circumstances()  # noqa: RUF009 - frozen
    ended: list[Origin] = field(default_factory=list)
    unfinished_cost: float = 0.0

    def take_unfinished_cost(self) -> float:
        cost, self.unfinished_cost = self.unfinished_cost, 0.0
        return cost

    def circumstances(self, request: GenerateRequest) -> Circumstances:
        return self.now

    def pace(self, request: GenerateRequest, expected_tokens: float) -> Pace:
        return Pace(expected_tokens=expected_tokens)

    def expected_cost(self, request: GenerateRequest, expected_tokens: float) -> float | None:
        return 0.001

    def answered(self, origin: Origin, last: Chunk) -> None:
        self.ended.append(origin)


def make(p_local: float = 0.8, p_cloud: float = 0.9, p_wrong: float | None = 0.1, share: float = 0.5) -> Chooser:
    return Chooser(
        Settings(cloud_share=share),
        FakeSurroundings(),
        scorer=FakeScorer(Score(p_local, p_cloud)),
        judge=FakeJudge(p_wrong),
        budget=Budget(share=share, prior=[0.2, 0.3]),
    )


def test_a_hard_question_goes_and_an_easy_one_is_begun_here() -> None:
    hard = make(p_local=0.2).choose(ASKED)
    assert (hard.where, hard.reason, hard.on_probation) == ("cloud", "hard", False)
    easy = make(p_local=0.95).choose(ASKED)
    assert (easy.where, easy.reason, easy.on_probation) == ("local", "easy", True)


def test_what_must_stay_is_never_on_probation() -> None:
    private = replace(ASKED, messages=(Message(role="user", content="mail jane.doe@example.com the plan"),))
    choice = make(p_local=0.2).choose(private)
    assert (choice.where, choice.reason, choice.on_probation) == ("local", "private", False)
    with pytest.raises(MustStayError, match="must not leave the device"):
        make().choose(replace(private, route="cloud"))


def test_without_a_share_nothing_is_held_back_for_a_cloud_that_may_not_be_asked() -> None:
    assert not make(share=0.0).choose(ASKED).on_probation


@pytest.mark.parametrize(("p_wrong", "is_doubtful"), [(0.9, True), (0.05, False), (None, False)])
def test_an_answer_is_doubtful_if_the_cloud_would_now_add_enough(p_wrong: float | None, is_doubtful: bool) -> None:
    chooser = make(p_wrong=p_wrong)
    chooser.choose(ASKED)
    assert chooser.is_doubtful(ASKED, "perhaps", SIGNALS, is_whole=False) is is_doubtful


def test_an_unknown_answer_is_never_handed_over() -> None:
    assert not make(p_wrong=0.99).is_doubtful(ASKED, "perhaps", SIGNALS, is_whole=False)


def test_hand_overs_count_for_the_share() -> None:
    chooser = make(p_wrong=0.9)
    for i in range(20):
        asked = replace(ASKED, id=str(i))
        if chooser.choose(asked).on_probation:
            chooser.is_doubtful(asked, "perhaps", SIGNALS, is_whole=False)
    assert chooser.budget.share_of("") == pytest.approx(0.5, abs=0.2)


def test_what_an_answer_cost_is_spent_and_kept() -> None:
    kept: list[dict[str, Any]] = []
    surroundings = FakeSurroundings()
    chooser = Chooser(Settings(max_cost_per_day=1.0), surroundings, spent=kept.append)
    chooser.finished(ASKED, Origin(endpoint="c", cost=0.4), LAST)
    chooser.finished(ASKED, Origin(), LAST)
    assert (chooser.budget.spent, [state["spent"] for state in kept]) == (0.4, [0.4])
    assert len(surroundings.ended) == 2


def test_what_unfinished_answers_cost_is_spent_before_the_next_decision() -> None:
    kept: list[dict[str, Any]] = []
    surroundings = FakeSurroundings(unfinished_cost=1.5)
    chooser = Chooser(Settings(max_cost_per_day=1.0, route="cloud"), surroundings, spent=kept.append)
    choice = chooser.choose(ASKED)
    assert (choice.where, choice.reason) == ("local", "cost")
    assert (chooser.budget.spent, [state["spent"] for state in kept]) == (1.5, [1.5])
    chooser.choose(ASKED)
    assert len(kept) == 1


def test_explaining_counts_nothing() -> None:
    chooser = make(p_local=0.2)
    decision = chooser.explain(ASKED)
    assert decision.where == "cloud"
    assert math.isfinite(decision.threshold)
    assert chooser.budget.share_of("") == 0.0
    assert "sky" not in "".join(decision.lines)


def test_the_last_user_message_is_judged() -> None:
    scorer = FakeScorer(Score(0.9, 0.9))
    chooser = Chooser(Settings(), FakeSurroundings(), scorer=scorer)
    talk = (Message(role="user", content="one"), Message(role="assistant", content="two"))
    chooser.choose(replace(ASKED, messages=(*talk, Message(role="user", content="three"))))
    chooser.choose(replace(ASKED, messages=None, prompt="four"))
    assert scorer.asked == ["three", "four"]


@dataclass
class FakeTeacher:
    labels: list[tuple[str, float | None, float | None]] = field(default_factory=list)
    n_seen: int = 0

    def score_seen(self, score: Any) -> None:
        self.n_seen += 1

    def label(self, score: Any, *, source: str, local: float | None, cloud: float | None, tenant: str) -> None:
        self.labels.append((source, local, cloud))


def taught(share: float = 0.0) -> tuple[Chooser, FakeTeacher]:
    teacher = FakeTeacher()
    scorer = FakeScorer(Score(0.9, 0.9))
    settings = Settings(shadow_share=share)
    return Chooser(settings, FakeSurroundings(), scorer=scorer, teacher=teacher, chance=lambda: 0.5), teacher


def test_feedback_labels_whoever_answered_and_is_its_users_own() -> None:
    chooser, teacher = taught()
    chooser.choose(ASKED)
    with pytest.raises(InvalidRequestError, match="no answer of this id"):
        chooser.feedback("r", "", is_good=True)  # not answered yet
    chooser.finished(ASKED, Origin(), LAST)
    chooser.feedback("r", "", is_good=True)
    chooser.finished(ASKED, Origin(endpoint="c"), LAST)
    chooser.feedback("r", "", is_good=False)
    assert teacher.labels == [("feedback", 1.0, None), ("feedback", None, 0.0)]
    with pytest.raises(InvalidRequestError):
        chooser.feedback("r", "uid:7", is_good=True)


def test_asking_again_at_once_speaks_against_the_last_answer() -> None:
    chooser, teacher = taught()
    chooser.choose(ASKED)
    chooser.finished(ASKED, Origin(endpoint="c"), LAST)
    again = replace(ASKED, id="s")
    chooser.choose(again)
    chooser.repeated(again)
    assert teacher.labels == [("regenerate", None, 0.2)]
    assert teacher.n_seen == 2


@pytest.mark.parametrize(
    ("share", "answer", "endpoint", "wants"),
    [
        (0.6, "blue", "", True),
        (0.4, "blue", "", False),
        (0.6, "jane.doe@example.com", "", False),
        (0.6, "b", "c", False),
    ],
)
def test_a_share_of_the_devices_answers_is_judged_unless_private(
    share: float, answer: str, endpoint: str, wants: bool
) -> None:
    chooser, teacher = taught(share)
    chooser.choose(ASKED)
    assert chooser.wants_verdict(ASKED, Origin(endpoint=endpoint), answer) is wants
    chooser.judged(ASKED, 1.0)
    assert teacher.labels == [("shadow", 1.0, None)]


def test_what_an_answer_took_counts_for_the_day_s_energy() -> None:
    kept: list[dict[str, Any]] = []
    chooser = Chooser(Settings(max_energy_j_per_day=100.0), FakeSurroundings(), spent=kept.append)
    assert LAST.usage is not None
    measured = replace(LAST, usage=replace(LAST.usage, energy=Energy(total_j=60.0)))
    assert chooser.choose(ASKED).where == "local"
    chooser.finished(ASKED, Origin(), measured)
    assert chooser.explain(ASKED).where == "local"
    chooser.finished(ASKED, Origin(), measured)
    assert (chooser.explain(ASKED).where, chooser.explain(ASKED).reason) == ("cloud", "energy")
    assert [state["spent_j"] for state in kept] == [60.0, 120.0]


def test_energy_of_answers_without_an_end_counts_too() -> None:
    kept: list[dict[str, Any]] = []
    chooser = Chooser(Settings(max_energy_j_per_day=100.0), FakeSurroundings(), spent=kept.append)
    chooser.aborted(Energy(total_j=60.0))
    assert chooser.explain(ASKED).reason != "energy"
    chooser.aborted(Energy(total_j=60.0))
    assert (chooser.explain(ASKED).where, chooser.explain(ASKED).reason) == ("cloud", "energy")
    assert kept[-1]["spent_j"] == 120.0


def test_energy_without_a_limit_is_neither_counted_nor_written() -> None:
    kept: list[dict[str, Any]] = []
    chooser = Chooser(Settings(), FakeSurroundings(), spent=kept.append)
    assert LAST.usage is not None
    chooser.finished(ASKED, Origin(), replace(LAST, usage=replace(LAST.usage, energy=Energy(total_j=60.0))))
    assert kept == []


def test_small_amounts_of_energy_are_written_together() -> None:
    kept: list[dict[str, Any]] = []
    chooser = Chooser(Settings(max_energy_j_per_day=1000.0), FakeSurroundings(), spent=kept.append)
    assert LAST.usage is not None
    for _ in range(100):
        chooser.finished(ASKED, Origin(), replace(LAST, usage=replace(LAST.usage, energy=Energy(total_j=0.1))))
    assert len(kept) == pytest.approx(10, abs=1)


def test_other_settings_count_from_the_next_request_on_and_what_was_learnt_is_kept() -> None:
    chooser = make(p_local=0.2)
    chooser.choose(ASKED)
    chooser.finished(ASKED, Origin(endpoint="big"), LAST)
    chooser.budget.spend(3.0, now_s=1.0, wall_s=1.0)
    commit = chooser.prepare(Settings(cloud_share=0.0, max_cost_per_day=2.0, tenants={"t": "local"}), None)
    assert chooser.choose(replace(ASKED, id="2", tenant="t")).where == "cloud"
    commit()
    assert chooser.choose(replace(ASKED, id="3", tenant="t")).reason == "asked-local"
    assert chooser.budget.allowance("", now_s=2.0, wall_s=2.0).is_spent
    chooser.feedback("r", "", is_good=True)  # decided before


def test_a_rule_that_cannot_be_changes_nothing() -> None:
    chooser = make(p_local=0.2)
    with pytest.raises(ConfigError, match="keep_private"):
        chooser.prepare(Settings(keep_private=("nonsense",)), None)
    assert chooser.choose(ASKED).where == "cloud"
