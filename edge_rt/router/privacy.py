"""What in a text must not leave the device: found by form and checksum, in one linear pass. Pure; no model, no table.

Classes (router.keep_private):

    secret        keys by their format, private keys, passwords in URLs, random-looking tokens after words as "password"
    card          payment card numbers: issuer's range, length, Luhn's checksum
    iban          account numbers: country's length, ISO 7064 checksum
    email         addresses
    phone         numbers with +, in national grouping, or after words as "phone"
    id_number     US social security and Chinese resident identity numbers
    directive     the text itself says that it shall stay: "process this locally", "do not send to the cloud"
    confidential  talk of confidential, customers' or patients' data. Off by default: it knows words only

It finds what is careless, not what is hidden: a number in words or a key cut in pieces passes. A request of more than
MAX_CHARS characters stays unread. Every pattern is
anchored by a plain substring search or bounded in length, so that time grows with the text and not with what is in it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from edge_rt.router import numbers_private as numbers
from edge_rt.router.private_words import CONFIDENTIAL, SECRET_WORDS, says_it_stays

MAX_CHARS: Final = 512 * 1024  # of a request's texts together
_JOINED_CHARS: Final = 200  # around the border of two texts
_OF_WORDS: Final = frozenset({"directive", "confidential"})
_MAX_PLACES: Final = 5_000  # in one text that are looked at closely


@dataclass(frozen=True, slots=True)
class Finding:
    """A class and where it was found; what was found is not kept."""

    kind: str
    text_index: int

    def __str__(self) -> str:
        return f"{self.kind} in text {self.text_index + 1}"


class Privacy:
    """The classes and words that stay. Raises ValueError for a class that does not exist."""

    def __init__(self, classes: Sequence[str], words: Sequence[str] = ()) -> None:
        if unknown := sorted(set(classes) - set(CLASSES)):
            raise ValueError(f"no such class: {', '.join(unknown)}; there are {', '.join(CLASSES)}")
        self._classes = tuple(kind for kind in CLASSES if kind in classes)
        self._numbers = frozenset(classes) & numbers.KINDS
        self._words = tuple(dict.fromkeys(form for word in words for form in _forms(word)))

    def find(self, texts: Iterable[str]) -> tuple[Finding, ...]:
        """Give each class at most once, with the first text that has it. A protected word is of class word."""
        found: dict[str, int] = {}
        tail, n_chars = "", 0
        for index, text in enumerate(texts):
            n_chars += len(text)
            if n_chars > MAX_CHARS:  # nobody else shall wait while it is looked through
                found.setdefault("too long to look through", index)
                break
            meant = plain(text)
            for kind in self._in(meant):
                found.setdefault(kind, index)
            # "my password is:" in one message, the password in the next
            if "secret" in self._classes and "secret" not in found and tail:
                joined = f"{tail} {meant[:_JOINED_CHARS]}"
                if _finds(_has_secret, joined, joined.lower()):
                    found["secret"] = index
            tail = meant[-_JOINED_CHARS:].rstrip()
        return tuple(Finding(kind, index) for kind, index in found.items())

    def _in(self, text: str) -> Iterator[str]:
        lowered = text.lower()
        flowing = _flowing(lowered)
        if self._numbers:
            yield from numbers.kinds(text, lowered, self._numbers)
            if flowing != lowered:  # numbers that a line's end or a wide gap parts
                yield from numbers.kinds(flowing, flowing, self._numbers & {"card", "iban"})
        for kind in self._classes:
            seen = flowing if kind in _OF_WORDS else lowered
            if (detect := _DETECTORS.get(kind)) is not None and _finds(detect, text, seen):
                yield kind
        if self._words and _finds(lambda _, lowered: _has_word(lowered, self._words), text, flowing):
            yield "word"


def plain(text: str) -> str:
    """Write a text as it was meant: dashes, blanks, apostrophes and digits of any script in ASCII, nothing unseen.

    Phones write ’ and –, tables hard blanks, terminals colours, and copied text has soft hyphens.
    """
    if text.isascii():
        return _CONTROL.sub("", text)
    # In pieces, because the time of normalising grows with the square of how many marks stand on one letter.
    pieces = (unicodedata.normalize("NFKC", piece) for piece in _PIECE.findall(_UNSEEN.sub("", text)))
    text = _MARKED.sub(r"\1", _CONTROL.sub("", "".join(pieces)))
    text = _TYPED.sub(lambda found: _PLAIN[found[0]], text)
    return _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)


def _flowing(text: str) -> str:
    """Join lines that are wrapped, and make one blank of many; an empty line stays a border."""
    if not any(gap in text for gap in _GAPS):
        return text
    return _BLANKS.sub(lambda found: "\n" if found[0].count("\n") > 1 else " ", text)


_GAPS: Final = ("\n", "  ", "\t", "\r", "\f", "\v")
_BLANKS: Final = re.compile(r"[ \t\r\n\f\v]{2,}|[\t\r\n\f\v]")
_OTHER_DIGIT: Final = re.compile(r"(?![0-9])\d")
_PIECE: Final = re.compile(r".{1,128}[\u0300-\u036f]{0,8}", re.DOTALL)  # that parts no letter from its accents
# What terminals take for orders, but not blanks and the ends of lines.
_CONTROL: Final = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]|\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~])?")
# Frames, strokes and lines on a letter or digit; its accents have become one letter with it.
_MARKED: Final = re.compile("(\\w)[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff]+")
# Unicode's format characters (category Cf), and other letters and marks that are drawn as nothing.
_UNSEEN: Final = re.compile(
    "[\xad\u034f\u061c\u06dd\u070f\u08e2\u115f\u1160\u17b4\u17b5\u3164\ufeff\uffa0\u0600-\u0605\u0890\u0891\u180b-\u180f"
    "\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufff0-\ufffc\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_PLAIN: Final = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63", "-"),
    **dict.fromkeys("\u2018\u2019\u201b\u02bc", "'"),
    **dict.fromkeys("\x85\u2028\u2029", "\n"),
    **dict.fromkeys("\xa0\u1680\u202f\u205f\u2800\u3000" + "".join(map(chr, range(0x2000, 0x200B))), " "),
}
_TYPED: Final = re.compile(f"[{''.join(_PLAIN)}]")


def _finds(detect: Callable[[str, str], bool], text: str, lowered: str) -> bool:
    """Ask a detector; what would take too long to look at closely is taken for private."""
    try:
        return detect(text, lowered)
    except _TooManyError:
        return True


def _has_email(text: str, lowered: str) -> bool:  # noqa: ARG001 - detectors' signature
    return any(
        _MAILBOX.fullmatch(text[max(at - 1, 0) : at]) and _DOMAIN.match(text, at + 1, at + 260)
        for at in _places(text, "@")
    )


_MAILBOX: Final = re.compile(r"[\w.+%'-]")  # its last character; the others do not matter
_DOMAIN: Final = re.compile(r"(?:[^\W_][\w-]{0,62}\.){1,8}[^\W\d_]{2,24}(?![A-Za-z0-9])")


def _has_secret(text: str, lowered: str) -> bool:
    for mark, formats in _FORMATS.items():
        if mark not in text:
            continue
        for prefix, pattern in formats:
            if prefix in text and _has_format(text, prefix, pattern):
                return True
    if any(_PASSWORD_IN_URL.match(text, at) for at in _places(text, "://")):
        return True
    if len(lowered) != len(text):
        text = lowered  # a letter that grew in lower case; tokens are judged without their capitals then
    words = [word for stem, words in SECRET_WORDS.items() if stem in lowered for word in words if word in lowered]
    return any(_is_token_after(text, at + len(word)) for word in words for at in _places(lowered, word))


def _has_format(text: str, prefix: str, pattern: re.Pattern[str]) -> bool:
    for at in _places(text, prefix):
        is_start = not _is_letter(text, at - 1)
        if is_start and (found := pattern.match(text, at)) and (prefix in _SURE or _is_mixed(found[0])):
            return True
    return False


def _is_token_after(text: str, at: int) -> bool:
    """Say whether a word of secrets is followed by one: assigned, said ("is …"), or a long random one right behind."""
    if (found := _ASSIGNED.match(text, at)) is not None and _is_password(found[1]):
        return True
    if (found := _NEXT.match(text, at)) is None:
        return False
    tokens = found[0].split()
    return _is_strong(tokens[0]) or any(map(_is_random, tokens))


_MIN_PASSPHRASE: Final = 22
_ASSIGNED: Final = re.compile(
    r"[\w \"'\]]{0,12}(?:=>|[:=：]|(?:\bis|\bwas|\blautet|\best|是|为))\s{0,4}[\"'`]?([^\s\"'`,;<>]{6,256})"
)
_NEXT: Final = re.compile(r"[\s\"'`:(\[]{1,4}\S{1,256}(?:\s\S{1,256}){0,2}")
_PASSWORD_IN_URL: Final = re.compile(r"://[^\s/:@]{0,64}:[^\s/@${<*]{3,128}@[\w.-]")
# What stands where a secret would: a template's gap, a variable, a call, stars.
_PLACEHOLDER: Final = re.compile(
    r"[$%]?[<{]|[$%]\(|\$[A-Za-z_]{3,}$|[*.•_-]*$|x{4}|\.{3}|your|example|changeme|redacted|placeholder"
    r"|[A-Za-z_][\w.]{2,}[(\[{]",
    re.IGNORECASE,
)

# Formats that vendors publish, so that keys can be found: by a character that all of a group have, then by their first
# characters as plain text.
_FORMATS: Final = {
    mark: tuple((prefix, re.compile(re.escape(prefix) + rest)) for prefix, rest in formats)
    for mark, formats in {
        "-": (
            ("sk-", r"[\w-]{20,200}"),
            ("glpat-", r"[\w-]{20,200}"),
            ("xoxb-", r"[\w-]{10,200}"),
            ("xoxp-", r"[\w-]{10,200}"),
            ("xoxa-", r"[\w-]{10,200}"),
            ("xapp-", r"[\w-]{10,200}"),
            ("pypi-", r"[\w-]{50,300}"),
            ("AGE-SECRET-KEY-1", r"[A-Z0-9]{50,70}"),
            ("-----BEGIN ", r"[A-Z0-9 ]{0,40}PRIVATE KEY"),
        ),
        "_": (
            ("sk_live_", r"\w{16,200}"),
            ("rk_live_", r"\w{16,200}"),
            ("sk_test_", r"\w{16,200}"),
            ("whsec_", r"\w{20,200}"),
            ("ghp_", r"\w{30,200}"),
            ("gho_", r"\w{30,200}"),
            ("ghs_", r"\w{30,200}"),
            ("ghu_", r"\w{30,200}"),
            ("ghr_", r"\w{30,200}"),
            ("github_pat_", r"\w{22,200}"),
            ("npm_", r"\w{36}"),
            ("hf_", r"\w{30,200}"),
            ("dop_v1_", r"[0-9a-f]{64}"),
            ("shpat_", r"[0-9a-fA-F]{32}"),
        ),
        "": (
            ("AKIA", r"[A-Z0-9]{16}\b"),
            ("ASIA", r"[A-Z0-9]{16}\b"),
            ("AIza", r"[\w-]{35}"),
            ("ya29.", r"[\w-]{20,200}"),
            ("hooks.slack.com/services/", r"\w{8,}/\w{8,}"),
            ("SG.", r"[\w-]{16,80}\.[\w-]{16,80}"),
            ("eyJ", r"[\w-]{8,2000}\.[\w-]{8,4000}"),
        ),
    }.items()
}
_SURE: Final = frozenset({"-----BEGIN ", "AKIA", "ASIA", "AGE-SECRET-KEY-1", "hooks.slack.com/services/", "eyJ"})


def _is_mixed(token: str) -> bool:
    """Tell random letters and digits from words joined by hyphens."""
    return sum(map(str.isdigit, token)) >= 2 and sum(map(str.isalpha, token)) >= 2


def _is_password(token: str) -> bool:
    """Tell what somebody may have chosen from a word, a number, a placeholder and code."""
    token = token.rstrip(".!?:)")
    if len(token) < 6 or _PLACEHOLDER.match(token) or token.isdigit():
        return False
    if len(token) >= _MIN_PASSPHRASE and token.isalpha() and token.isascii():
        return True  # words written as one; no single word is as long
    kinds = (any(map(str.isdigit, token)), any(map(str.isalpha, token)), not token.replace("_", "").isalnum())
    return sum(kinds) >= 2 and kinds[1] and (kinds[0] or _n_odd(token) >= 1) and len(set(token)) >= 4


def _n_odd(token: str) -> int:
    """Count characters that names, paths and versions do not have."""
    return sum(char in "!#%^&*+=~|?@$" for char in token)


def _is_strong(token: str) -> bool:
    """Tell a password that rules of complexity have formed: nothing else looks so right behind the word."""
    token = token.strip("\"'`.,;:")
    if not 8 <= len(token) <= 64 or not token.isascii() or _PLACEHOLDER.match(token):
        return False
    has_case = token != token.lower() and token != token.upper()
    return has_case and any(map(str.isdigit, token)) and _n_odd(token[:-1]) >= 1


def _is_random(token: str) -> bool:
    token = token.strip("\"'`.,;:()[]{}<>")
    if len(token) < 16 or not token.isascii() or _PLACEHOLDER.match(token) or token[0] == "/":
        return False
    return _is_mixed(token) and _bits(token) >= 3.0 and not re.fullmatch(r"[\d.,:/-]+", token)


def _bits(token: str) -> float:
    """Estimate the entropy of a character."""
    return -sum(n / len(token) * math.log2(n / len(token)) for n in (token.count(char) for char in set(token)))


def _has_word(lowered: str, words: Sequence[str]) -> bool:
    """Look for protected words: "patient_id" is found as patient_id, patient-id, patient id and patientId."""
    spaced = lowered.replace("_", " ").replace("-", " ")
    for word in words:
        for at in _places(spaced, word):
            end = at + len(word)
            # Chinese and Japanese have no blanks between words, so that borders say nothing there.
            end += spaced.startswith("s", end)  # more than one of them
            if not word.isascii() or not (_is_letter(spaced, at - 1) or _is_letter(spaced, end)):
                return True
    return False


def _is_letter(text: str, at: int) -> bool:
    return 0 <= at < len(text) and text[at].isalnum() and text[at].isascii()


def _forms(word: str) -> tuple[str, ...]:
    apart = re.sub(r"[\s_-]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", word.strip())).lower()
    return tuple(form for form in (apart, apart.replace(" ", "")) if form)


class _TooManyError(Exception):
    pass


def _places(text: str, part: str) -> Iterator[int]:
    """Give where part is. Raises _TooManyError for a text that is made of it."""
    at = text.find(part)
    for _ in range(_MAX_PLACES):
        if at < 0:
            return
        yield at
        at = text.find(part, at + len(part))
    raise _TooManyError


def _is_confidential(text: str, lowered: str) -> bool:  # noqa: ARG001 - detectors' signature
    return _has_word(lowered, CONFIDENTIAL)


_DETECTORS: Final[dict[str, Callable[[str, str], bool]]] = {
    "secret": _has_secret,
    "email": _has_email,
    "directive": lambda _, lowered: says_it_stays(lowered),
    "confidential": _is_confidential,
}
CLASSES: Final = ("secret", "card", "iban", "email", "phone", "id_number", "directive", "confidential")
