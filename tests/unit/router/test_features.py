from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.router import features


def named(text: str, **options: int) -> dict[str, float]:
    return dict(zip(features.NAMES, features.surface(text, **options), strict=True))


@given(st.text(max_size=300), st.integers(1, 1000), st.none() | st.integers(1, 10**9))
def test_any_text_has_finite_features(text: str, n_turns: int, max_tokens: int | None) -> None:
    found = features.surface(text, n_turns=n_turns, max_tokens=max_tokens)
    assert len(found) == len(features.NAMES)
    assert all(map(math.isfinite, found))
    assert all(0 <= each < features.N_HASHED for each in features.hashed_terms(text))


def test_features_say_what_they_are_named_after() -> None:
    sums = named("Tom has 3 apples and buys 12 more. How many apples does he have?")
    code = named("```python\ndef f(x):\n    return x\n```\nWhy is this slow?")
    exam = named("Which is not a metal?\nA. iron\nB. sulphur\nAnswer:")
    assert (sums["asks_amount"], sums["has_code"], sums["has_options"], sums["has_negation"]) == (1, 0, 0, 0)
    assert (code["has_code"], code["asks_to_make"]) == (1, 1)
    assert (exam["has_options"], exam["has_negation"], exam["begins_with_question_word"]) == (1, 1, 1)
    assert sums["log_numbers"] == pytest.approx(math.log(3))
    assert sums["ends_with_question"] == 1
    assert exam["ends_with_question"] == 0
    assert named("qué")["foreign_share"] > 0
    assert named("x", n_turns=3)["log_turns"] > named("x")["log_turns"]
    assert named("x", max_tokens=900)["log_max_tokens"] > named("x")["log_max_tokens"]


def test_the_middle_of_a_long_text_is_left_out_but_its_length_counts() -> None:
    long = "begin " + "word " * 100_000 + "end"
    assert len(features.shortened(long)) == features.MAX_CHARS + 1
    assert named(long)["log_chars"] == pytest.approx(math.log1p(len(long)))
    assert sum(features.hashed_terms(long).values()) < 2 * features.MAX_CHARS


def test_terms_are_words_and_their_neighbours_whatever_their_case() -> None:
    assert features.hashed_terms("The cat") == features.hashed_terms("the CAT")
    assert sum(features.hashed_terms("the cat sat").values()) == 3 + 2
    assert features.hashed_terms("cat the") != features.hashed_terms("the cat")
    assert not features.hashed_terms("")
