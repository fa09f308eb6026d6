"""What may be stored and given again, and for how long: pure decisions.

An answer is stored if the same request would get it again (greedy or seeded sampling), or if the request or the
configuration asks for drawn ones to be kept; and if it is whole and worth having: no refusal, nothing cut off, filtered
or abandoned, nothing over max_answer_bytes.

The same question from one client within REPEAT_S of its answer is taken as "regenerate" where computing it anew can
give something else: for an answer drawn without a seed, for one from a cloud, which promises no determinism, and for
one to another wording. A greedy or seeded answer of this device would come out the same, so it is given again; the
repeat is still reported, since it says that the user was not content.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final, Literal

from edge_rt.config import Cache
from edge_rt.types import CacheWishes, GenerateRequest

REPEAT_S: Final = 60.0

Decision = Literal[
    "store",
    "disabled",
    "no-store",
    "sampled",
    "empty",
    "truncated",
    "filtered",
    "tool calls",  # of one conversation: a call's id is not for another
    "aborted",
    "refusal",
    "too large",
    "corrected",  # by hand, which stands
    "cleared",  # since it was begun
    "not taken",  # by a disk that is full or does not keep up
]

_MAX_REMEMBERED: Final = 4096  # questions of the last REPEAT_S; one more forgets the oldest
_OPENING_CHARS: Final = 200  # of an answer, in which a refusal shows
_MAX_SECONDS: Final = 2**31  # RFC 9111, 1.2.2: what a delta-seconds too large to represent counts as

# Words in a question whose answer is another one tomorrow.
_VOLATILE: Final = re.compile(
    r"\b(?:today|tonight|tomorrow|yesterday|now|currently|current|latest|newest|recent|recently|news|"
    r"this (?:morning|afternoon|evening|week|month|year|weekend|season)|(?:last|next) (?:night|week|month|year)|"
    r"so far|up to date|as of|at the moment|right now|these days|"
    r"weather|forecast|temperature (?:in|outside)|stock price|share price|exchange rate|score of|"
    r"what time|what day|what date|how long ago|live|breaking)\b",
    re.IGNORECASE,
)
# How an answer opens that declines.
_REFUSAL: Final = re.compile(
    r"^\W*(?:"
    + "|".join(
        (
            r"(?:i['’]?m|i am|we are|we['’]re)\s+(?:(?:very|so|really|truly|deeply)\s+)?(?:sorry|afraid)\b",
            r"(?:i['’]?m|i am|we are|we['’]re)\s+(?:unable|not able|not allowed|not comfortable)\b",
            r"(?:sorry|apologies|my apologies|unfortunately|i apologi[sz]e)\b",
            r"as an? (?:ai|artificial intelligence|(?:large )?language model)\b",
            r"(?:i|we) (?:can['’]?t|cannot|can not|couldn['’]t|could not|won['’]?t|will not)\b",
            r"(?:i|we) (?:must|have to) (?:decline|refuse)\b",
            r"(?:i|we) (?:refuse|decline) to\b",
            r"(?:i|we) do(?:n['’]t| not) (?:know|have (?:access|the ability|(?:enough )?information))\b",
        )
    )
    + ")",
    re.IGNORECASE,
)


def wishes(header: str, *, sampled: bool = False, tags: tuple[str, ...] = ()) -> CacheWishes:
    """Read a request's Cache-Control header (several are joined by commas).

    As RFC 9111 says, unknown directives are ignored, names count in any case, and a directive that is given twice
    counts in its strictest form. A max-age that is no number counts as 0: a limit is wanted, and none is known.
    """
    no_cache = no_store = only_if_cached = False
    max_age_s: float | None = None
    for name, argument in _directives(header):
        if name == "no-cache":
            no_cache = True
        elif name == "no-store":
            no_store = True
        elif name == "only-if-cached":
            only_if_cached = True
        elif name == "max-age":
            age_s = float(min(int(argument[:12]), _MAX_SECONDS)) if re.fullmatch(r"[0-9]+", argument) else 0.0
            max_age_s = age_s if max_age_s is None else min(max_age_s, age_s)
    return CacheWishes(
        no_cache=no_cache,
        no_store=no_store,
        only_if_cached=only_if_cached,
        max_age_s=max_age_s,
        sampled=sampled,
        tags=tags,
    )


def is_deterministic(request: GenerateRequest) -> bool:
    """Tell whether this device answers the request in the same way each time."""
    return request.sampling.temperature == 0 or request.sampling.seed is not None


def is_shareable(request: GenerateRequest, settings: Cache) -> bool:
    """Tell whether one answer may serve several like requests: those that come later, and those in flight.

    Two clients that ask for a draw each want one of their own, so those in flight share under the same condition.
    """
    wish = request.cache
    if request.prompt_logprobs is not None or request.beams is not None:  # a measurement; more than one answer
        return False
    return settings.enabled and not wish.no_store and (is_deterministic(request) or wish.sampled or settings.sampled)


def decide(
    request: GenerateRequest, settings: Cache, *, text: str, finish_reason: str | None, size_bytes: int
) -> Decision:
    """Decide whether a finished answer is stored; anything but "store" says why not.

    finish_reason  None where the answer broke off or its client left
    size_bytes     of the answer as it would be stored
    """
    if not settings.enabled:
        return "disabled"
    if request.cache.no_store:
        return "no-store"
    if not is_shareable(request, settings):
        return "sampled"
    if finish_reason != "stop":
        reasons: dict[str | None, Decision] = {None: "aborted", "length": "truncated", "tool_calls": "tool calls"}
        return reasons.get(finish_reason, "filtered")
    if size_bytes > settings.max_answer_bytes:
        return "too large"
    if not text.strip():
        return "empty"
    return "refusal" if is_refusal(text) else "store"


def is_refusal(text: str) -> bool:
    """Tell whether an answer opens by declining. Errs towards yes: what is not stored costs only time."""
    return _REFUSAL.match(text[:_OPENING_CHARS]) is not None


def is_volatile(question: str) -> bool:
    """Tell whether the answer to a question is soon another one."""
    return _VOLATILE.search(question) is not None


def ttl_s(question: str, settings: Cache) -> float:
    """Give how long an answer to a question stands."""
    return min(settings.volatile_ttl_s, settings.ttl_s) if is_volatile(question) else settings.ttl_s


def age_s(created_at_s: float, now_s: float) -> float | None:
    """Give a stored answer's age by the wall clock; None if it comes from the future, so that its age is not known.

    A device without a battery-backed clock wakes up in the past, and one that had been set ahead is set back.
    """
    age = now_s - created_at_s
    return None if age < -_CLOCK_SLACK_S else max(0.0, age)


_CLOCK_SLACK_S: Final = 2.0  # by which a clock is slewed and stepped in ordinary keeping


def is_fresh(created_at_s: float, ttl_s: float | None, wish: CacheWishes, now_s: float) -> bool:
    """Tell whether a stored answer may be given now. ttl_s None: it gets old by a request's wish only."""
    age = age_s(created_at_s, now_s)
    if ttl_s is None and wish.max_age_s is None:
        return True
    if age is None:
        return False
    return (ttl_s is None or age < ttl_s) and (wish.max_age_s is None or age <= wish.max_age_s)


class Repeats:
    """Who asked what within the last REPEAT_S. Takes now_s of a monotonic clock; bounded."""

    def __init__(self, *, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._asked: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._max_remembered = max_remembered

    def note(self, tenant: str, key: bytes, now_s: float) -> bool:
        """Take note of a question, and tell whether this client had its answer within REPEAT_S."""
        asked_at_s = self._asked.pop((tenant, key), None)
        self._asked[(tenant, key)] = now_s
        if len(self._asked) > self._max_remembered:
            self._asked.popitem(last=False)
        return asked_at_s is not None and now_s - asked_at_s < REPEAT_S


def regenerates(*, repeated: bool, is_deterministic: bool, endpoint: str, is_exact: bool = True) -> bool:
    """Tell whether a repeated question asks for another answer than the stored one; see the module's words."""
    return repeated and not (is_deterministic and is_exact and not endpoint)


def _directives(header: str) -> list[tuple[str, str]]:
    """Split `a, b=1, c="x, y"`; a quoted argument may hold commas."""
    found = re.findall(r'([^\s,;="]+)(?:\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,]*)))?', header)
    return [(name.lower(), quoted or plain) for name, quoted, plain in found]
