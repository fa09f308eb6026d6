"""Which questions, and which answers, only fit themselves: the semantic tier leaves them alone. English."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edge_rt.cache import lexicon

MAX_WORDS = 60  # longer texts are payloads, whose details decide
MAX_CHARS = 600

_CODE = re.compile(
    r"`|[{};]\s*$|[{}<>=]=|->|=>|\w\(\)|\bdef \w+\(|\bSELECT\b.+\bFROM\b|</?\w+>"
    r"|^\s*(?:import|#include|from \w+ import) ",
    re.MULTILINE,
)
_OPERATION = re.compile(
    r"\d\s*[-+*/^=×÷]\s*\(?\d|\bx\s*[-+^=]\s*\d|\d\s*(?:plus|minus|times|divided by|modulo)\s*\d", re.IGNORECASE
)
_PAYLOAD = re.compile(r"[:\n]\s*\S+(?:\s+\S+){5,}|[\"“”][^\"“”]{40,}[\"“”]")
_MY_STATE = re.compile(
    r"\b(?:who am i|am i (?:on|in|due|eligible|subscribed|insured)|what(?:'s| is) my|where(?:'s| is| are) my"
    r"|when(?:'s| is) my|did i|have i|do i have)\b"
)
_METHOD = re.compile(r"\bhow (?:do|can|could|should|would) (?:i|you|we|one)\b|\bhow to\b|\bbest way\b")
_DIGITS = re.compile(r"\d+(?:[.,:/]\d+)*")
_LIST_NUMBER = re.compile(r"^\s*\d{1,2}[.)]\s", re.MULTILINE)
_VOLATILE = frozenset(lexicon.VOLATILE.split())
_ACCOUNT = frozenset(lexicon.ACCOUNT_NOUNS.split())
_COMMANDS = frozenset(lexicon.COMMANDS.split())
_MATHS = frozenset(lexicon.MATHS.split())


def refusal(question: str) -> str:
    """Name the class for which only its own answer will do, "" if there is none."""
    if len(question) > MAX_CHARS:
        return "long"
    lower = question.lower().replace("’", "'")
    words = lower.split()
    met = {word.strip(".,;:?!\"'()") for word in words}
    if len(words) > MAX_WORDS:
        return "long"
    if met & _VOLATILE or "right now" in lower or "this week" in lower or "this year" in lower:
        return "volatile"
    if _MY_STATE.search(lower) or (met & _ACCOUNT and met & {"my", "our", "mine"} and not _METHOD.search(lower)):
        return "personal"
    if _CODE.search(question):
        return "code"
    if _OPERATION.search(question) or met & _MATHS or len(_DIGITS.findall(question)) >= 3:
        return "maths"
    if (met & _COMMANDS and (_PAYLOAD.search(question) or words[0] in _COMMANDS)) or _PAYLOAD.search(question):
        return "payload"
    return ""


def has_own_numbers(answer: str, prompts: Iterable[str]) -> bool:
    """Tell whether an answer holds digits that its prompts do not: prices, dates, scores, which grow old.

    The numbers of a numbered list do not count.
    """
    given = {digits for prompt in prompts for digits in _DIGITS.findall(prompt)}
    return any(digits not in given for digits in _DIGITS.findall(_LIST_NUMBER.sub("", answer)))
