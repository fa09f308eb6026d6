"""The lexical guard: what embeddings do not see. Two questions of nearly the same vector may ask for opposite things.

read() takes a question apart once; differs() compares two of them and names the first thing that tells them apart;
it errs on the side of telling apart, because a refused hit costs a computation and a false one is a wrong answer. Pure
Python, a few dozen microseconds, English.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from edge_rt.cache import lexicon

_TOKEN = re.compile(r"\d+(?:[.,:/]\d+)*|[^\W\d_]\+\+|[^\W\d_]#|[^\W\d_]+(?:['’][^\W\d_]+)*|[%$€£₹]")
_OPENS = frozenset('.?!:"“(')  # after one of these a capital is a sentence's own


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@lru_cache(4096)
def _stem(word: str) -> str:
    """Cut the endings that change no meaning here: a word's forms must meet, and need not be words."""
    for ending in ("ingly", "edly", "ing", "ies", "ied", "ed", "es", "ly", "s", "y", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


def _opposites(text: str) -> dict[str, frozenset[str]]:
    """Read lines "a|b c|d": each of a, b is opposed to each of c, d. By stem."""
    found: dict[str, set[str]] = {}
    for line in text.strip().splitlines():
        sides = [[_stem(word) for word in side.split("|")] for side in line.split()]
        for one in sides:
            for other in sides:
                if one is not other:
                    for word in one:
                        found.setdefault(word, set()).update(other)
    return {word: frozenset(others - {word}) for word, others in found.items()}


_SCALES = _opposites(lexicon.SCALES)
_SIDES = _opposites(lexicon.SIDES)
_NEGATIONS = _words(lexicon.NEGATIONS)
_UNITS = _words(lexicon.UNIT_WORDS)
_DATES = _words(lexicon.DATES)
_PAST = _words(lexicon.PAST)
_FUTURE = _words(lexicon.FUTURE)
_FILLERS = _words(lexicon.FILLERS)
_FUNCTION = _words(lexicon.FUNCTION_WORDS)
_JOINING = _words(lexicon.JOINING)
_SYMMETRIC = frozenset(_stem(word) for word in _words(lexicon.SYMMETRIC))
_VERBS = _words(
    "is are was were am do does did can could should would will shall may might must has have had isn't aren't don't "
    "doesn't didn't can't won't shouldn't wouldn't"
)
_LAST_SENTENCE = re.compile(r"(?:^|[.?!,]\s+)[^\w]*(\w+(?:['’]t)?)[^.?!,]*[^\w]*$")
_ARTICLES = _words("a an the")
_GROUPS = {_stem(word): n for n, line in enumerate(lexicon.SYNONYMS.strip().splitlines()) for word in line.split()}
_BE = _words("is are was were be been being am get gets got")


@dataclass(frozen=True, slots=True)
class Reading:
    """A question taken apart.

    words      in order, lower case, fillers left out, "n't" as "not"
    stems      of words, one for one; "" for a function word
    numbers    in order, number words as digits
    units      units and dates met
    n_negated  negations
    entities   words written with a capital inside a sentence
    genders    of pronouns, in order
    tense      past, future, becoming
    asks       kind of answer wanted: why, when, where, who, number or ""
    roles      stems in order of who does, what, to whom: a passive is turned round
    is_passive it was
    is_yes_no  the last sentence begins with a verb: any other word in it may turn the answer round
    """

    words: tuple[str, ...]
    stems: tuple[str, ...]
    numbers: tuple[str, ...]
    units: frozenset[str]
    n_negated: int
    entities: frozenset[str]
    genders: str
    tense: frozenset[str]
    asks: str
    roles: tuple[str, ...]
    is_passive: bool
    is_yes_no: bool


def read(question: str) -> Reading:
    """Take a question apart; the result is kept with the entry."""
    tokens = [(match.group().lower().replace("’", "'"), match) for match in _TOKEN.finditer(question)]
    words: list[str] = []
    numbers: list[str] = []
    entities: set[str] = set()
    n_negated = 0
    for token, match in tokens:
        for word in _split(token):
            if word[0].isdigit():
                numbers.append(word.replace(",", "").rstrip("."))
            elif word in lexicon.NUMBER_WORDS:
                numbers.append(lexicon.NUMBER_WORDS[word])
            elif word in _NEGATIONS:
                n_negated += 1
            if word not in _FILLERS:
                words.append(word)
        if match.group()[0].isupper() and token not in _FUNCTION:
            before = question[max(match.start() - 8, 0) : match.start()].rstrip()
            if before and before[-1] not in _OPENS:
                entities.add(token.removesuffix("'s"))
    stems = tuple("" if word in _FUNCTION else _stem(word) for word in words)
    met = frozenset(words)
    roles = _roles(words, stems)
    if len(entities) * 2 > len(words):  # A Title Or A SHOUT Says Nothing
        entities.clear()
    return Reading(
        words=tuple(words),
        stems=stems,
        numbers=tuple(numbers),
        units=frozenset(_stem(word) for word in met if (numbers and word in _UNITS) or word in _DATES),
        n_negated=n_negated,
        entities=frozenset(entities),
        genders="".join(lexicon.PRONOUN_GENDER.get(word, "") for word in words),
        tense=_tense(words, met),
        asks=_asks(words, met),
        roles=roles,
        is_passive=roles != tuple(stem for stem in stems if stem),
        is_yes_no=_opening(question) in _VERBS,
    )


def differs(a: Reading, b: Reading) -> str:
    """Name what tells two questions apart, "" if nothing is seen. Symmetric; a question never differs from itself."""
    if a.words == b.words and a.entities == b.entities:
        return ""
    if a.numbers != b.numbers:
        return "number"
    if a.units != b.units and (a.units and b.units):
        return "unit or date"
    if a.genders != b.genders and a.genders and b.genders:
        return "pronoun"
    if a.asks != b.asks and a.asks and b.asks:
        return "kind of answer"
    if _names_swapped(a, b):
        return "name"
    only_a, only_b = _only(a, b)
    if a.tense != b.tense and a.is_yes_no and b.is_yes_no and len(only_a) + len(only_b) <= 2:
        return "tense"
    if reason := _polarity(a, b):
        return reason
    if _frame_differs(a, b, only_a, only_b):
        return "one word"
    return "order" if _order_differs(a, b) else ""


def _split(token: str) -> tuple[str, ...]:
    """Take a contraction apart: don't is do and not, it's is it."""
    if "'" not in token:
        return (token,)
    head, _, tail = token.partition("'")
    if tail == "t" and head.endswith("n"):
        return (head[:-1] or head, "not") if head != "can" else ("can", "not")
    return (head,) if tail in {"s", "re", "m", "d", "ve"} else (head, tail)


def _opening(question: str) -> str:
    found = _LAST_SENTENCE.search(question)
    return found.group(1).lower().replace("’", "'") if found else ""


def _tense(words: Sequence[str], met: frozenset[str]) -> frozenset[str]:
    found = set()
    if met & _PAST or any(pair == ("used", "to") for pair in pairwise(words)):
        found.add("past")
    if met & _FUTURE or any(pair == ("going", "to") for pair in pairwise(words)):
        found.add("future")
    if "becoming" in met:
        found.add("becoming")
    return frozenset(found)


def _asks(words: Sequence[str], met: frozenset[str]) -> str:
    for word, following in zip(words, (*words[1:], ""), strict=False):
        if word == "why":
            return "why"
        if word in {"when", "where", "who", "whom", "whose"}:
            return "who" if word.startswith("who") else word
        if word == "how" and following in {
            "many",
            "much",
            "long",
            "old",
            "far",
            "often",
            "tall",
            "big",
            "high",
            "fast",
        }:
            return f"how {following}"
        if word in {"how", "what", "which", "is", "are", "do", "does", "can", "should"}:
            break
    return "why" if "reason" in met or "reasons" in met else ""


def _roles(words: Sequence[str], stems: Sequence[str]) -> tuple[str, ...]:
    """Order the content words as an active sentence has them: what follows "by" in a passive comes before the rest."""
    content = tuple(stem for stem in stems if stem)
    if "by" not in words or not _BE & set(words):
        return content
    at = len(words) - 1 - tuple(reversed(words)).index("by")
    before, after = [s for s in stems[:at] if s], [s for s in stems[at + 1 :] if s]
    if not before or not after or not words[at - 1].endswith(("ed", "en", "t", "n", "d", "e", "g")):
        return content
    return (*after, before[-1], *before[:-1])


def _names_swapped(a: Reading, b: Reading) -> bool:
    """Each has a name that is no word of the other, whatever its capitals. One more name is left to the vectors."""
    return bool(a.entities - b.entities - {*b.words}) and bool(b.entities - a.entities - {*a.words})


def _only(a: Reading, b: Reading) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give the content stems that one has and the other has not, with repetition."""
    count_a, count_b = Counter(a.roles), Counter(b.roles)
    return tuple((count_a - count_b).elements()), tuple((count_b - count_a).elements())


def _polarity(a: Reading, b: Reading) -> str:
    """Opposites on a scale and negations cancel each other in pairs; opposite sides never do."""
    words_a, words_b = ({_stem(w) for w in reading.words} for reading in (a, b))
    lone_a, lone_b = words_a - words_b, words_b - words_a
    n_flips = abs(a.n_negated - b.n_negated)
    if any(_SIDES[word] & words_b for word in lone_a if word in _SIDES):
        return "opposite"
    if any(_SIDES[word] & words_a for word in lone_b if word in _SIDES):
        return "opposite"
    for word in lone_a:
        n_flips += bool(_SCALES.get(word, frozenset()) & lone_b or _prefixed(word, lone_b))
    if n_flips % 2:
        return "opposite" if a.n_negated == b.n_negated else "negation"
    return "negation" if abs(a.n_negated - b.n_negated) >= 2 else ""


def _prefixed(word: str, others: set[str]) -> bool:
    """Tell whether one of the others is the word with un-, dis- or their like, or the word is one of them so."""
    if len(word) > 2 and any(f"{prefix}{word}" in others for prefix in lexicon.OPPOSING_PREFIXES):
        return True
    return any(word.startswith(p) and word[len(p) :] in others for p in lexicon.OPPOSING_PREFIXES)


def _frame_differs(a: Reading, b: Reading, only_a: Sequence[str], only_b: Sequence[str]) -> bool:
    """In an otherwise equal sentence another content word is what the question is about.

    One more word is so only where yes or no is asked: "what are (good) ways to ..." gets the same answer.
    """
    if len(only_a) > 1 or len(only_b) > 1 or not (only_a or only_b):
        return False
    if not (only_a and only_b) and not (a.is_yes_no or b.is_yes_no):
        return False
    if only_a and only_b and _same_word(only_a[0], only_b[0]):
        return False
    return _rest(a, only_a) == _rest(b, only_b)


def _rest(reading: Reading, only: Sequence[str]) -> list[str]:
    pairs = zip(reading.stems, reading.words, strict=True)
    return [stem or word for stem, word in pairs if not (stem and stem in only) and word not in _ARTICLES]


def _same_word(a: str, b: str) -> bool:
    """Spellings and forms of a word: favourite and favorite, photo and photograph, found and find."""
    if a.startswith(b) or b.startswith(a) or _GROUPS.get(a, 0) == _GROUPS.get(b, -1):
        return True
    short, long = sorted((a, b), key=len)
    if len(short) < 5 or len(long) - len(short) > 1:
        return False
    n_same = next((i for i, (x, y) in enumerate(zip(short, long, strict=False)) if x != y), len(short))
    return short[n_same:] == long[n_same + 1 :] or short[n_same + 1 :] == long[n_same + 1 :]


def _order_differs(a: Reading, b: Reading) -> bool:
    """Two things have changed places around the same relation: who did what, from where to where, what before what."""
    once = [stem for stem, n in Counter(a.roles).items() if n == 1 and b.roles.count(stem) == 1]
    place_a = {stem: a.roles.index(stem) for stem in once}
    place_b = {stem: b.roles.index(stem) for stem in once}
    once.sort(key=place_a.__getitem__)
    for i, u in enumerate(once):
        for v in once[i + 1 :]:
            if place_b[v] < place_b[u]:
                between_a, between_b = _between(a, u, v), _between(b, v, u)
                if a.is_passive != b.is_passive and between_a and between_b:  # found and find do not meet
                    return True
                if _turns_round(between_a, between_b):
                    return True
    return False


def _between(reading: Reading, first: str, second: str) -> frozenset[str]:
    """Give what stands between two words in the order of roles, with the function words of the sentence there."""
    if reading.is_passive:
        start, end = sorted((reading.roles.index(first), reading.roles.index(second)))
        return frozenset(reading.roles[start + 1 : end])
    start, end = sorted((reading.stems.index(first), reading.stems.index(second)))
    return frozenset(
        s or w for s, w in zip(reading.stems[start + 1 : end], reading.words[start + 1 : end], strict=True)
    )


def _turns_round(a: frozenset[str], b: frozenset[str]) -> bool:
    relation = (a & b) - _JOINING
    return bool(relation) and not relation & _SYMMETRIC
