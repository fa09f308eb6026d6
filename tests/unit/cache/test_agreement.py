"""Comparing two answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.cache.agreement import is_same_answer

LONG = "Water boils at a hundred degrees at sea level, and at less on a high mountain where the air is thin."


@pytest.mark.parametrize(
    ("one", "other", "similarity", "expected"),
    [
        ("Paris", "paris.", 0.0, True),
        ("Paris", "The capital is Paris.", 0.0, True),
        ("Paris", "The capital is Rome.", 1.0, False),
        ("Yes, it is.", "No, it is not.", 1.0, False),
        ("Yes", "Yes.", 0.0, True),
        ("-3", "3", 1.0, False),
        ("1.5", "15", 1.0, False),
        ("It is safe.", "It is not safe.", 1.0, False),
        ("In 1989, in the autumn, the wall fell.", "In 1990, in the autumn, the wall fell.", 1.0, False),
        (LONG, LONG.replace("Water boils", "The boiling point of water lies"), 0.95, True),
        (LONG, LONG.replace("Water boils", "The boiling point of water lies"), 0.8, False),
        (LONG, LONG.replace("boils", "never boils"), 0.99, False),
        ("", "", 1.0, True),
        ("", "Something", 1.0, False),
    ],
)
def test_answers_are_compared_by_what_they_say(one: str, other: str, similarity: float, expected: bool) -> None:
    assert is_same_answer(one, other, lambda _a, _b: similarity) is expected
    assert is_same_answer(other, one, lambda _a, _b: similarity) is expected


@given(st.text(max_size=200))
def test_an_answer_says_the_same_as_itself(text: str) -> None:
    assert is_same_answer(text, text, lambda _a, _b: 0.0)
