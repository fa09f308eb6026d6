"""Do two answers say the same? What a verification learns from.

Equal texts do, but for case, spaces and punctuation. Else they must lie near each other and pass the lexical guard, and
a short answer must also begin alike, because its one word is all it says. This is no judge of truth: two wordings of
one answer may be called different (which costs a hit), and two long answers that differ in one fact which is neither
number, name nor negation may be called the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from edge_rt.cache.lexical import differs, read

Similarity = Callable[[str, str], float]

_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"-?\d+(?:[.,:/]\d+)*%?")
_YES_NO = frozenset({"yes", "no", "true", "false", "correct", "incorrect"})
_MIN_SIMILARITY = 0.9
_SHORT_WORDS = 6  # of an answer that is a name, a number or a word rather than a text
_GUARDED_WORDS = 60  # beyond, sentences differ in everything but what they say


def is_same_answer(one: str, other: str, similarity: Similarity) -> bool:
    """Compare two answers; similarity gives the cosine of two texts. Symmetric if it is."""
    words_a, words_b = (_WORD.findall(text.lower()) for text in (one, other))
    if words_a == words_b and _numbers(one) == _numbers(other):
        return bool(words_a) or one.strip() == other.strip()
    if not words_a or not words_b or _opening(words_a) != _opening(words_b):
        return False
    if sorted(_numbers(one)) != sorted(_numbers(other)):
        return False
    if min(len(words_a), len(words_b)) <= _SHORT_WORDS:
        return _short_agree(words_a, words_b)
    if max(len(words_a), len(words_b)) <= _GUARDED_WORDS and differs(read(one), read(other)):
        return False
    return similarity(one, other) >= _MIN_SIMILARITY


def _opening(words: Sequence[str]) -> str:
    return words[0] if words[0] in _YES_NO else ""


def _numbers(text: str) -> list[str]:
    """Give the numbers as they are written, with signs and points: 1.5 is not 15, -3 not 3."""
    return _NUMBER.findall(text)


def _short_agree(words_a: Sequence[str], words_b: Sequence[str]) -> bool:
    """A short answer's words must all be in the other one: "Paris" and "The capital is Paris"."""
    articles = {"the", "a", "an", "it", "is", "it's", "s"}
    short, long = sorted((words_a, words_b), key=len)
    if len(long) > 4 * _SHORT_WORDS:
        return False
    wanted = [word for word in short if word not in articles]
    negations = {"not", "no", "never", "t", "isn"}
    return bool(wanted) and set(wanted) <= set(long) and (negations & set(short)) == (negations & set(long))
