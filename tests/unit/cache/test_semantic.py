"""The tier: what it finds, what it never gives, what one wrong answer does, and what survives a restart."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("wordllama", reason="needs edge_rt[vectors]")

from edge_rt.cache.semantic import Lookup, Mode, SemanticTier
from edge_rt.cache.threshold import ErrorController
from edge_rt.errors import CacheStoreError
from edge_rt.text_vectors import TextVectors

A, B = b"partition a", b"partition b"
ASKED = "What is the best way to learn cooking?"
SAME = "What's the best way to learn to cook?"
# Pairs to learn from: with them the controller has seen enough to serve.
LESSONS = [
    (f"How do I {verb} a {thing}?", f"How can I {verb} a {thing}?")
    for verb in ("paint", "clean", "repair", "build", "sell")
    for thing in ("bicycle", "garden fence", "wooden table", "mobile phone", "boat", "window", "guitar", "shed")
]


@pytest.fixture(scope="module")
def vectors() -> TextVectors:
    return TextVectors.load()


def tier_of(vectors: TextVectors, *, mode: Mode = "on", draw: float = 1.0, max_entries: int = 1000) -> SemanticTier:
    controller = ErrorController(0.4, 0.08, n_shadow=0)
    return SemanticTier(vectors, controller, mode=mode, max_entries=max_entries, draw=lambda: draw)


def teach(tier: SemanticTier) -> None:
    """Let it see that near questions have the same answer, until it serves."""
    for number, (question, other) in enumerate(LESSONS):
        tier.admit(b"lessons", question, b"lesson%d" % number, "")
        for match in tier.lookup(b"lessons", other).matches:
            tier.verified(match, is_right=match.answer_ref == b"lesson%d" % number)


@pytest.fixture
def tier(vectors: TextVectors) -> SemanticTier:
    tier = tier_of(vectors)
    teach(tier)
    return tier


def found(tier: SemanticTier, question: str, partition: bytes = A) -> Lookup:
    return tier.lookup(partition, question)


def test_a_question_that_means_the_same_is_a_hit(tier: SemanticTier) -> None:
    assert tier.admit(A, ASKED, b"ref", "Cook something simple every day.")
    hit = found(tier, SAME)
    assert hit.outcome == "hit"
    assert hit.match is not None
    assert hit.match.answer_ref == b"ref"
    assert 0.8 < hit.match.similarity <= 1
    assert found(tier, "Which planet has the most moons?").outcome == "miss"


def test_a_partition_is_never_crossed(tier: SemanticTier) -> None:
    tier.admit(A, ASKED, b"ref", "Cook.")
    for question in (ASKED, SAME):
        other = found(tier, question, B)
        assert (other.outcome, other.matches) == ("miss", ())


def test_what_another_tenant_was_told_wrongly_says_nothing_here(tier: SemanticTier) -> None:
    for partition, ref in ((A, b"a"), (B, b"b")):
        tier.admit(partition, ASKED, ref, "Cook.")
    match = found(tier, SAME, A).match
    assert match is not None
    before = tier.state()["verified"].get(b"b".hex())
    tier.verified(match, is_right=False)
    assert tier.state()["verified"].get(b"b".hex()) == before
    tier.admit(B, SAME, b"b2", "Cook.")
    assert b"b2".hex() not in tier.state()["verified"]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("Why is the best way to learn cooking not the fastest one to learn cooking?", "negation"),
        ("What is the worst way to learn cooking?", "opposite"),
        ("What is my account balance?", "personal"),
        ("What is the latest way to learn cooking?", "volatile"),
    ],
)
def test_what_the_guard_sees_is_named(tier: SemanticTier, question: str, reason: str) -> None:
    tier.admit(A, ASKED, b"ref", "Cook.")
    refused = found(tier, question)
    assert (refused.outcome, refused.reason, refused.matches) == ("miss", reason, ())


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is my account balance?", "None."), ("What does it cost?", "12 euros."), ("x " * 400, "Long.")],
)
def test_what_only_fits_itself_is_not_admitted(tier: SemanticTier, question: str, answer: str) -> None:
    n = len(tier)
    assert not tier.admit(A, question, b"ref", answer)
    assert len(tier) == n


def test_off_does_nothing(vectors: TextVectors) -> None:
    tier = tier_of(vectors, mode="off")
    assert not tier.admit(A, ASKED, b"ref", "Cook.")
    assert found(tier, ASKED) == Lookup("miss", reason="off")


def test_shadow_never_serves_and_says_what_would_have_been(vectors: TextVectors) -> None:
    tier = tier_of(vectors, mode="shadow")
    teach(tier)
    tier.admit(A, ASKED, b"ref", "Cook.")
    shadow = found(tier, SAME)
    assert shadow.outcome == "shadow"
    assert shadow.match is not None
    assert shadow.match.was_hit


def test_before_it_has_learned_it_only_compares(vectors: TextVectors) -> None:
    tier = tier_of(vectors)
    tier.admit(A, ASKED, b"ref", "Cook.")
    early = found(tier, SAME)
    assert early.outcome == "miss"
    assert early.match is not None


def test_the_draw_decides_what_is_verified(vectors: TextVectors) -> None:
    tier = tier_of(vectors, draw=0.0)
    teach(tier)
    tier.admit(A, ASKED, b"ref", "Cook.")
    assert found(tier, SAME).outcome == "verify"


def test_one_wrong_hit_and_an_entry_serves_no_other_question(vectors: TextVectors) -> None:
    tier = tier_of(vectors, draw=0.0)
    teach(tier)
    tier.admit(A, ASKED, b"ref", "Cook.")
    match = found(tier, SAME).match
    assert match is not None
    tier.verified(match, is_right=False)
    assert found(tier, SAME) == Lookup("miss", reason="vetoed")
    assert found(tier, "Which is the best way to learn cooking?").reason == "vetoed"
    tier.corrected(b"ref")
    assert found(tier, SAME).outcome == "verify"


def test_a_near_miss_found_wrong_forbids_the_pair_only(vectors: TextVectors) -> None:
    tier = tier_of(vectors)
    tier.admit(A, ASKED, b"ref", "Cook.")
    match = found(tier, SAME).match
    assert match is not None
    assert not match.was_hit
    tier.verified(match, is_right=False)
    assert found(tier, SAME).reason == "vetoed"
    assert found(tier, "Which is the best way to learn cooking?").match is not None


def test_matches_that_were_compared_with_each_other_speak_for_and_against_each_other(tier: SemanticTier) -> None:
    tier.admit(A, ASKED, b"one", "Cook.")
    other = "What is the best way to learn how to cook?"
    for is_same in (True, False):
        tier.forget(b"two")
        for match in found(tier, other).matches:
            tier.verified(match, is_same)
        tier.admit(A, other, b"two", "Cook.")
        match = next(m for m in found(tier, SAME).matches if m.answer_ref == b"two")
        assert (match.evidence.support > 0.5, match.evidence.against > 0.5) == (is_same, not is_same)
        if is_same:
            again = json.loads(json.dumps(tier.state()))["verified"][b"two".hex()]
            assert again[-1] == {b"one".hex(): True}
            tier.corrected(b"one")
            match = next(m for m in found(tier, SAME).matches if m.answer_ref == b"two")
            assert match.evidence.support == 0, "another answer: what was compared of the old one says nothing"


def test_what_an_entry_served_is_counted_until_it_is_compared(vectors: TextVectors) -> None:
    tier = tier_of(vectors)
    teach(tier)
    tier.admit(A, ASKED, b"ref", "Cook.")
    served = []
    for question in (SAME, "Which is the best way to learn cooking?", "What's the best way to learn cooking?"):
        match = found(tier, question).match
        assert match is not None
        served.append(match.evidence.n_served)
    assert served == [0, 1, 2]
    tier.verified(match, is_right=True)
    again = found(tier, SAME).match
    assert again is not None
    assert again.evidence.n_served == 0


def test_an_answer_that_is_gone_is_forgotten(tier: SemanticTier) -> None:
    tier.admit(A, ASKED, b"ref", "Cook.")
    tier.forget(b"ref")
    tier.forget(b"never there")
    assert found(tier, SAME).match is None
    tier.clear()
    assert len(tier) == 0


def test_the_longest_unused_go_first(vectors: TextVectors) -> None:
    tier = tier_of(vectors, max_entries=2)
    questions = ("How do bees fly?", "Who painted the ceiling?", "Where do eels live?")
    for number, question in enumerate(questions):
        tier.admit(A, question, bytes([number]), "")
    assert len(tier) == 2
    assert found(tier, questions[0]).match is None
    assert found(tier, questions[2]).match is not None


def test_an_evicted_entry_may_be_verified_late(tier: SemanticTier) -> None:
    tier.admit(A, ASKED, b"ref", "Cook.")
    match = found(tier, SAME).match
    assert match is not None
    tier.forget(b"ref")
    tier.verified(match, is_right=True)
    assert b"ref".hex() not in tier.state()["verified"]


def test_what_was_verified_survives_a_restart(vectors: TextVectors, tier: SemanticTier) -> None:
    for ref, question in ((b"bad", ASKED), (b"good", "How are clouds made?")):
        tier.admit(A, question, ref, "")
    wrong, right = found(tier, SAME).match, found(tier, "How do clouds get made?").match
    assert wrong is not None
    assert right is not None
    tier.verified(wrong, is_right=False)
    tier.verified(right, is_right=True)
    state = json.loads(json.dumps(tier.state()))
    again = tier_of(vectors)
    for ref, question in ((b"bad", ASKED), (b"good", "How are clouds made?")):
        again.admit(A, question, ref, "")
    again.restore(state)
    assert again.controller.state() == tier.controller.state()
    assert again.state()["verified"][b"good".hex()] == state["verified"][b"good".hex()]
    assert found(again, SAME).reason == "vetoed"


@pytest.mark.parametrize("damage", [{}, {"verified": 3, "controller": {}}, {"verified": {"zz": [1]}, "controller": {}}])
def test_a_damaged_state_is_refused(tier: SemanticTier, damage: dict[str, object]) -> None:
    before = tier.state()
    with pytest.raises(CacheStoreError):
        tier.restore(damage)
    assert tier.state() == before


def test_two_answers_are_compared_by_meaning(tier: SemanticTier) -> None:
    assert tier.same_answer("Paris", "The capital is Paris.")
    assert not tier.same_answer(
        "Cook something simple every day and taste it.", "The moon has no air and no water on it."
    )


def test_counts_are_kept(tier: SemanticTier) -> None:
    before = tier.stats()
    tier.admit(A, ASKED, b"ref", "Cook.")
    found(tier, SAME)
    after = tier.stats()
    assert after["hit"] == before["hit"] + 1
    assert after["entries"] == before["entries"] + 1
