"""Card, account, phone and identity numbers in a text. Pure, linear in its length.

A run is a stretch of digits with at most two separators between them; each run is looked at as a whole, because where a
number begins and ends decides what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

KINDS: Final = frozenset({"card", "iban", "phone", "id_number"})

# Digits are ASCII ones: normalisation has made those of full width so.
_RUN: Final = re.compile(r"[0-9](?:[ \u00a0().\-/]{0,2}[0-9])*")
_GROUP: Final = re.compile(r"[0-9]+")
_CARD_RUN: Final = re.compile(r"[0-9](?:[ /_-]{0,2}[0-9]){12,}")
_DOTTED_CARD: Final = re.compile(r"[0-9]{4}\.[0-9]{4,6}\.[0-9]{4,5}(?:\.[0-9]{4})?(?![0-9.])")
_IBAN: Final = re.compile(r"[A-Za-z]{2}[0-9]{2}(?:[ .-]{0,2}[A-Za-z0-9]){11,40}")
_MAX_RUN: Final = 400  # digits and separators; a longer run is a table or a number of mathematics
_MAX_ACCOUNTS: Final = 5_000
_WORD_DISTANCE: Final = 24  # characters between "phone" and the number it announces

# ISO 13616: lengths by country.
_COUNTRIES: Final = {
    15: "NO",
    16: "BE",
    18: "DK FI FO GL NL",
    19: "MK SI",
    20: "AT BA EE KZ LT LU XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "PT",
    26: "IS TR",
    27: "FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HU LB PL",
    29: "BR EG PS QA UA",
    30: "JO KW MU",
    31: "MT SC",
    32: "LC",
}
_IBAN_LENGTH: Final = {country: n for n, countries in _COUNTRIES.items() for country in countries.split()}
_PHONE_WORDS: Final = re.compile(
    r"phone|mobile|\btel\b|\bcell\b|\bfax\b|whatsapp|\bcall\b|\bcontact\b|\bsms\b|telefon|téléphone|teléfono|handy|rufnummer"
    r"|电话|手机|联系方式|電話|携帯"
)
_NANP: Final = re.compile(r"(?<!\d)(?:\([2-9]\d{2}\)[ .-]{0,2}|[2-9]\d{2}[.-])[2-9]\d{2}[ .-]\d{4}(?!\d)")
# By country: Germany and others, Sweden, France, Brazil, Japan and Korea, and numbers that begin with a zero.
_NATIONAL: Final = re.compile(
    r"0[1-9][0-9]{1,3}[)/ -]{1,2}[0-9]{3,8}(?:[ -][0-9]{2,5}){0,3}"
    r"|0[1-9][0-9]{0,2}-[0-9]{2,3}(?: [0-9]{2}){2,3}"
    r"|0[1-9](?:[ .-][0-9]{2}){4}"
    r"|[1-9][0-9]\)? (?!(?:19|20)[0-9]{2}-)[0-9]{4,5}-[0-9]{4}"
    r"|[0-9]{2,3}-[0-9]{3,4}-[0-9]{4}"
    r"|0(?!123456789)[1-9][0-9]{8,9}"
)
_CN_MOBILE: Final = re.compile(r"1[3-9]\d{9}")
_SSN: Final = re.compile(r"(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}")
_CN_ID_WEIGHTS: Final = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)


def kinds(text: str, lowered: str, wanted: frozenset[str]) -> Iterator[str]:
    """Give the wanted kinds that the text has, each once."""
    open_ = set(wanted)
    if "card" in open_ and has_card(text):
        open_.discard("card")
        yield "card"
    n_accounts = 0  # that looked like account numbers
    for found in _RUN.finditer(text):
        if not open_:
            return
        start = found.start()
        if "iban" in open_ and start >= 2 and _is_latin(text[start - 1]):
            n_accounts += 1
            # A text made of such is taken for private rather than checked to its end.
            if n_accounts > _MAX_ACCOUNTS or _is_iban(text, start - 2):
                open_.discard("iban")
                yield "iban"
        if not 7 <= found.end() - start <= _MAX_RUN:
            continue
        for kind in _kinds_of(found[0], text, lowered, start) & open_:
            open_.discard(kind)
            yield kind


def _kinds_of(run: str, text: str, lowered: str, start: int) -> set[str]:
    before = text[start - 1] if start else ""
    # Part of a name (v2.10), of a longer number with other separators (1,234,567), of a sum: no number of anybody. What
    # stands behind a comma alone is a cell of a table.
    if _is_latin(before) or before in ("_", ".", "#") or (before == "," and text[max(start - 2, 0)].isdigit()):
        return set()
    found: set[str] = set()
    groups = _GROUP.findall(run)
    n_digits = sum(map(len, groups))
    after = text[start + len(run) : start + len(run) + 1]
    if _SSN.fullmatch(run) or any(len(digits) in (17, 18) and _is_cn_id(digits, after) for digits in groups):
        found.add("id_number")
    if not found and _is_phone(run, n_digits, groups, before, text, lowered, start):
        found.add("phone")
    return found


def has_card(text: str) -> bool:
    """Look for card numbers, whatever stands before them: range, length and checksum say enough. Decimals are none."""
    for found in _CARD_RUN.finditer(text):
        start = found.start()
        is_fraction = text[max(start - 1, 0) : start] == "." and text[max(start - 2, 0) : start - 1].isdigit()
        if len(found[0]) <= _MAX_RUN and not is_fraction and _has_card(_GROUP.findall(found[0])):
            return True
    for found in _DOTTED_CARD.finditer(text):
        is_inside = found.start() > 0 and text[found.start() - 1] in "0123456789."
        if not is_inside and _is_card(found[0].replace(".", "")):
            return True
    return False


def _is_phone(run: str, n_digits: int, groups: list[str], before: str, text: str, lowered: str, start: int) -> bool:
    if _NANP.search(f"({run}" if before == "(" else run) or any(map(_CN_MOBILE.fullmatch, groups)):
        return True
    if not 7 <= n_digits <= 15:
        return False
    if before == "+" or text[max(start - 2, 0) : start] == "+(":
        is_sum = text[max(start - 2, 0) : start - 1].isalnum()
        return n_digits >= 8 and not run.startswith("0") and not is_sum
    if n_digits >= 9 and _NATIONAL.fullmatch(run):
        return True
    return _PHONE_WORDS.search(lowered, max(start - _WORD_DISTANCE, 0), start) is not None and "." not in run


def _has_card(groups: list[str]) -> bool:
    """Look for consecutive groups that make a card's number: 4111 1111 1111 1111 12/27 has one in its first four."""
    for first in range(len(groups)):
        digits = ""
        for group in groups[first : first + 5]:
            digits += group
            if len(digits) > 19:
                break
            if len(digits) >= 13 and _is_card(digits):
                return True
    return False


def _is_card(digits: str) -> bool:
    return _is_issued(digits) and len(set(digits)) > 1 and _luhn(digits)


def _is_issued(number: str) -> bool:
    """Say whether an issuer's range and length fit, which one random number in five does."""
    two, three, four, length = int(number[:2]), int(number[:3]), int(number[:4]), len(number)
    if number[0] == "4":
        return length in (13, 16, 19)
    if 51 <= two <= 55 or 2221 <= four <= 2720 or 2200 <= four <= 2204:
        return length == 16
    if two in (34, 37) or four in (1800, 2131):
        return length == 15
    if two in (36, 38, 39) or 300 <= three <= 305:
        return length == 14
    return (two in (35, 50, 62, 65) or four == 6011 or 644 <= three <= 649) and length >= 16


def _luhn(number: str) -> bool:
    total = 0
    for place, digit in enumerate(reversed(number)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def _is_iban(text: str, start: int) -> bool:
    if _is_latin(text[max(start - 1, 0) : start]) or (found := _IBAN.match(text, start)) is None:
        return False
    compact = re.sub(r"[ .-]", "", found[0]).upper()
    length = _IBAN_LENGTH.get(compact[:2], 0)
    if 0 < length <= len(compact) and _mod_97(compact[:length]) == 1:
        return True
    # Some write them too short; then the whole word must fit.
    return length > 0 and len(found[0]) == len(compact) and _mod_97(compact) == 1


def _is_latin(char: str) -> bool:
    """Say whether a character joins on to a number; those of scripts without blanks between words do not."""
    return char.isascii() and char.isalnum()


def _mod_97(iban: str) -> int:
    return int("".join(str(int(char, 36)) for char in iban[4:] + iban[:4])) % 97


def _is_cn_id(digits: str, after: str) -> bool:
    """Check a resident identity number: date of birth, and the last of 18 places, which may be an X."""
    number = digits + after.upper() if len(digits) == 17 else digits
    if len(number) != 18 or number[17] not in "0123456789X":
        return False
    if not (1900 <= int(number[6:10]) <= 2100 and 1 <= int(number[10:12]) <= 12 and 1 <= int(number[12:14]) <= 31):
        return False
    total = sum(int(digit) * weight for digit, weight in zip(number, _CN_ID_WEIGHTS, strict=False))
    return "10X98765432"[total % 11] == number[17]
