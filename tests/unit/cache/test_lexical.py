"""The guard: what it must tell apart, what it must let pass, and what holds for any two texts."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.cache.lexical import differs, read
from edge_rt.cache.refusal import MAX_WORDS, has_own_numbers, refusal

DIFFERENT = [
    # negation
    ("How can I become a patient person?", "How can I become a person who is not patient?", "negation"),
    ("Is it legal to vote in Slovenia?", "Is it legal not to vote in Slovenia?", "negation"),
    ("Can dogs eat grapes?", "Can't dogs eat grapes?", "negation"),
    ("Why do people like religion?", "Why don’t people like religion?", "negation"),
    # opposites
    ("How do I enable dark mode?", "How do I disable dark mode?", "opposite"),
    ("How can I become more visible?", "How can I become less visible?", "opposite"),
    ("Is smoking healthy?", "Is smoking unhealthy?", "opposite"),
    ("How do I turn on the heating?", "How do I turn off the heating?", "opposite"),
    ("How do I increase the volume?", "How do I decrease the volume?", "opposite"),
    ("What are the advantages of solar power?", "What are the disadvantages of solar power?", "opposite"),
    # time
    ("Is it healthy to drink before 6am?", "Is it healthy to drink after 6am?", "opposite"),
    ("What was her life before becoming a judge?", "What was her life after becoming a judge?", "opposite"),
    ("Should I wash rice before or after cooking?", "Should I wash rice after cooking?", "opposite"),
    ("Is James Hall a candidate?", "Is James Hall becoming a candidate?", "tense"),
    ("Is Ruth a pilot?", "Did Ruth use to be a pilot?", "tense"),
    ("Should I eat breakfast before training?", "Should I do training before eating breakfast?", "order"),
    # numbers, units, dates
    ("How many calories are in 2 eggs?", "How many calories are in 3 eggs?", "number"),
    ("How many calories are in two eggs?", "How many calories are in three eggs?", "number"),
    ("Which phone is best under 10,000?", "Which phone is best under 20,000?", "number"),
    ("Is 5 km far to walk?", "Is 5 miles far to walk?", "unit or date"),
    ("Is it hot in Rome in July?", "Is it hot in Rome in August?", "unit or date"),
    ("Was the second world war longer?", "Was the third world war longer?", "number"),
    # names
    ("Where does Elizabeth Wright live?", "Where does Amanda Price live?", "name"),
    ("What is the capital of Kenya and its river?", "What is the capital and main river of Ghana?", "name"),
    # who did what, from where to where
    ("Is Mary poisoning James?", "Is James poisoning Mary?", "order"),
    ("Did Jacob find the rifle?", "Was Jacob found by the rifle?", "order"),
    ("Are lions faster than bears?", "Are bears faster than lions?", "order"),
    ("How do I fly from Paris to London?", "How do I fly from London to Paris?", "order"),
    ("If Tom and Ann were alone, would he reject her?", "If Tom and Ann were alone, would she reject him?", "pronoun"),
    # one other word
    ("I hurt my rib. Should I never play again?", "I hurt my finger. Should I never play again?", "one word"),
    ("Is Melissa an analyst?", "Is Melissa a successful analyst?", "one word"),
    ("How do I boil an egg?", "How do I fry an egg?", "one word"),
    ("Who invented the telephone?", "When was the telephone invented by Bell?", "kind of answer"),
]  # fmt: skip

SAME = [
    ("How do I learn Python?", "how do I learn python"),
    ("What's the best way to learn cooking?", "What is the best way to learn to cook?"),
    ("Did Melissa keep the school?", "Was the school kept by Melissa?"),
    ("Is Maria an agent or an assistant?", "Is Maria an assistant or an agent?"),
    ("Is Jennifer dating Benjamin?", "Is Benjamin dating Jennifer?"),
    ("Is Jonathan an Egyptian accountant?", "Is Jonathan an accountant and Egyptian?"),
    ("Who do women think is the best cook in the world?", "Who is the best cook in the world according to women?"),
    ("Is that rat on the sofa?", "Is that rat really on the sofa?"),
    ("What are some facts about cavemen?", "What are some great facts about cavemen?"),
    ("What is your favorite colour?", "What is your favourite colour?"),
    ("How can I become more patient?", "How can I become less impatient?"),
    ("What is the difference between gravel and sand?", "What's the difference between sand and gravel?"),
    ("How do I take a photo of the moon?", "How do I take a photograph of the moon?"),
    ("How can I boost sales?", "How can I increase sales?"),
]

REFUSED = {
    "personal": ["What is my account balance?", "When is our delivery due", "Did I pay already?", "Who am I?"],
    "volatile": ["What is the weather like?", "Who is the current president?", "Is the shop open right now?"],
    "code": ["Why does `x = 1` fail?", "What does foo() return?", "fix\ndef f(x):\n  return x", "a -> b in Haskell?"],
    "maths": ["What is 3 + 4?", "Solve x^2 = 4 please", "If 3 men dig 4 holes in 5 days, how fast is one?"],
    "payload": [
        "Translate hello to French",
        "Summarise this: the quick brown fox jumps over the lazy dog",
        "What does “the quick brown fox jumps over the lazy dog and runs” mean?",
    ],
    "long": ["word " * (MAX_WORDS + 1)],
}
FIT = [
    "What is the capital of France?",
    "How do I improve my English?",
    "Who wrote Faust?",
    "What happened in 1989?",
    "How does a code review work?",
]

WORDS = """how do i learn is the not never before after more less 2 three Paris London Mary he she by was found happy
unhappy and or to from dog's don't why when will becoming"""
words = st.sampled_from(WORDS.split())
sentences = st.lists(words, max_size=14).map(" ".join)
any_text = st.one_of(sentences, st.text(max_size=60), st.text(string.printable, max_size=80))


@pytest.mark.parametrize(("one", "other", "reason"), DIFFERENT)
def test_what_differs_is_told_apart_and_named(one: str, other: str, reason: str) -> None:
    assert differs(read(one), read(other)) == reason


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_means_the_same_passes(one: str, other: str) -> None:
    assert differs(read(one), read(other)) == ""


@pytest.mark.parametrize(("reason", "question"), [(r, q) for r, questions in REFUSED.items() for q in questions])
def test_what_only_its_own_answer_fits_is_refused(reason: str, question: str) -> None:
    assert refusal(question) == reason


@pytest.mark.parametrize("question", FIT)
def test_ordinary_questions_are_not_refused(question: str) -> None:
    assert refusal(question) == ""


@given(any_text, any_text)
def test_the_guard_is_symmetric(one: str, other: str) -> None:
    assert bool(differs(read(one), read(other))) == bool(differs(read(other), read(one)))


@given(any_text)
def test_a_text_never_differs_from_itself_nor_from_other_spacing(text: str) -> None:
    assert differs(read(text), read(text)) == ""
    assert differs(read(text), read(f"  {text}  ")) == ""


@given(sentences, st.integers(2, 10**6), st.integers(2, 10**6))
def test_a_changed_number_is_always_seen(text: str, one: int, other: int) -> None:
    assert bool(differs(read(f"{text} {one} apples"), read(f"{text} {other} apples"))) == (one != other)


@given(sentences)
def test_one_more_negation_is_always_seen(text: str) -> None:
    assert differs(read(f"is it good {text}"), read(f"is it not good {text}"))


@given(any_text)
def test_any_text_is_judged_and_a_refusal_depends_on_the_text_alone(text: str) -> None:
    assert refusal(text) == refusal(text)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris.", False),
        ("It costs 12.50 today.", True),
        ("1. Read.\n2. Write.", False),
        ("There are 7 of them.", False),
    ],
)
def test_an_answer_with_numbers_of_its_own_is_known(answer: str, expected: bool) -> None:
    assert has_own_numbers(answer, ["What are the 7 wonders?"]) == expected
