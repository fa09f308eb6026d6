"""What the wording of a request shows of its difficulty: surface features and hashed words. Pure, without numpy."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

MAX_CHARS = 4096  # of a text; of a longer one its beginning and its end count, which bounds the time
N_HASHED = 2**15  # words and pairs of neighbouring words fall into so many bins

NAMES = (
    "log_chars",
    "log_words",
    "digit_share",
    "log_numbers",
    "symbol_share",
    "log_lines",
    "mean_word_chars",
    "distinct_word_share",
    "has_negation",
    "has_code",
    "has_formula",
    "log_questions",
    "asks_amount",
    "asks_to_make",
    "upper_share",
    "has_options",
    "longest_word",
    "foreign_share",
    "begins_lower",
    "ends_with_question",
    "begins_with_question_word",
    "log_sentences",
    "log_turns",
    "log_max_tokens",
)

_WORD = re.compile(r"\w+")
_TERM = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"\d+")
_SENTENCE = re.compile(r"[.!?]\s")
_NEGATION = re.compile(r"\b(?:not|no|never|except|cannot|least|false|incorrect)\b|n't", re.IGNORECASE)
_CODE = re.compile(r"```|\b(?:def|return|class|import|function)\b[^\n]*[(:;]")
_FORMULA = re.compile(r"[\\$^=_{}]")
_AMOUNT = re.compile(r"\b(?:how many|how much|total|each|percent|calculate|compute|solve)\b", re.IGNORECASE)
_MAKE = re.compile(r"\b(?:why|explain|prove|derive|write|generate|implement)\b", re.IGNORECASE)
_OPTIONS = re.compile(r"\n\(?[A-E][.):]")
_QUESTION_WORD = re.compile(r"\W*(?:who|what|when|where|which|how|why)\b", re.IGNORECASE)


def shortened(text: str) -> str:
    """Cut a long text to its beginning and end, as text_vectors does."""
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS // 2]}\n{text[-MAX_CHARS // 2 :]}"


def surface(text: str, *, n_turns: int = 1, max_tokens: int | None = None) -> tuple[float, ...]:
    """Give the features of NAMES.

    n_turns     messages of the conversation that the text is the last of
    max_tokens  that the answer may have; None counts as 0
    """
    n_chars = len(text)
    text = shortened(text)
    words = _WORD.findall(text)
    n, n_words = len(text) + 1, len(words) + 1
    letters = sum(map(len, words))
    stripped = text.strip()
    return (
        math.log1p(n_chars),
        math.log1p(len(words)),
        sum(map(str.isdigit, text)) / n,
        math.log1p(len(_NUMBER.findall(text))),
        len(re.findall(r"[^\w\s]", text)) / n,
        math.log1p(text.count("\n")),
        letters / n_words,
        len({word.lower() for word in words}) / n_words,
        float(_NEGATION.search(text) is not None),
        float(_CODE.search(text) is not None),
        float(_FORMULA.search(text) is not None),
        math.log1p(text.count("?")),
        float(_AMOUNT.search(text) is not None),
        float(_MAKE.search(text) is not None),
        sum(map(str.isupper, text)) / n,
        float(_OPTIONS.search(text) is not None),
        math.sqrt(max(map(len, text.split()), default=0)),
        1 - len(text.encode("ascii", errors="ignore")) / max(len(text), 1),
        float(stripped[:1].islower()),
        float(stripped.endswith("?")),
        float(_QUESTION_WORD.match(text) is not None),
        math.log1p(len(_SENTENCE.findall(text))),
        math.log1p(n_turns),
        math.log1p(max_tokens or 0),
    )


def hashed_terms(text: str) -> Mapping[int, int]:
    """Count words, marks and pairs of neighbours by the bin they fall into, of N_HASHED."""
    terms = [term.lower() for term in _TERM.findall(shortened(text))]
    pairs = (f"{a} {b}" for a, b in pairwise(terms))
    return Counter(zlib.crc32(each.encode(errors="replace")) % N_HASHED for group in (terms, pairs) for each in group)
