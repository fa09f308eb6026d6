from __future__ import annotations

import re
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.router import private_words
from edge_rt.router.privacy import CLASSES, MAX_CHARS, Finding, Privacy

ALL = Privacy(CLASSES)
USUAL = Privacy([kind for kind in CLASSES if kind != "confidential"])


def kinds(text: str, privacy: Privacy = USUAL) -> set[str]:
    return {finding.kind for finding in privacy.find([text])}


def luhn_last(head: str) -> str:
    """Complete a number so that Luhn's sum is a multiple of ten, reckoned another way than the product does."""
    doubled = [int(d) * 2 if i % 2 == 0 else int(d) for i, d in enumerate(reversed(head))]
    return str(-sum(sum(divmod(d, 10)) for d in doubled) % 10)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("pay with 4111 1111 1111 1111 12/27 123", "card"),
        ("5500-0000-0000-0004", "card"),
        ("amex 378282246310005.", "card"),
        ("30569309025904 is a Diners card", "card"),
        ("card:6011111111111117,", "card"),
        ("卡号４１１１１１１１１１１１１１１１", "card"),
        ("my account is DE89 3704 0044 0532 0130 00, thanks", "iban"),
        ("GB82WEST12345698765432", "iban"),
        ("iban fr14 2004 1010 0505 0001 3m02 606 and so on", "iban"),
        ("mail jane.doe+x@mail.example.org!", "email"),
        ("MÜLLER@BÜCHER.EXAMPLE", "email"),
        ("call +49 30 901820", "phone"),
        ("+1 (212) 555-0187", "phone"),
        ("(212) 555-0187", "phone"),
        ("212-555-0187", "phone"),
        ("my phone: 555 01 87 23", "phone"),
        ("Tel. 030 / 12345678", "phone"),
        ("电话 13812345678", "phone"),
        ("appelez le 04 94 57 23 37", "phone"),
        ("ring 08-407 54 40", "phone"),
        ("ligue (11) 91361-8717", "phone"),
        ("03-1234-5678", "phone"),
        ("my number is 01314960517", "phone"),
        ("contact 5272868387", "phone"),
        ("ssn 078-05-1120", "id_number"),
        ("身份证 11010519491231002X", "id_number"),
        ("use sk-proj-aB3dE5fG7hJ9kL1mN3pQ5rS7", "secret"),
        ("AKIAIOSFODNN7EXAMPLE", "secret"),
        ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "secret"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA", "secret"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P", "secret"),
        ("postgres://app:hunter2x@db.internal/app", "secret"),
        ('"password": "Tr0ub4dor&3"', "secret"),
        ("DB_PASSWORD=correct-horse-7", "secret"),
        ("my password is hunter22", "secret"),
        ("PASSWORD=F(5Phw4d%0db", "secret"),
        ("use the password ($3JkD#Ih_A to log in", "secret"),
        ("das Passwort lautet Gar7enzwerg!", "secret"),
        ("密码是 Abc12345xyz", "secret"),
        ("Authorization: Bearer 9f86d081884c7d659a2feaa0c55ad015", "secret"),
        ("here is the api key 9f86d081884c7d659a2feaa0c55ad015", "secret"),
        ("Keep this on-prem, it is confidential.", "directive"),
        ("Please process this locally", "directive"),
        ("do not send this to the cloud", "directive"),
        ("the data must not leave our data center", "directive"),
        ("请在本地处理", "directive"),
    ],
)
def test_what_is_private_is_found(text: str, kind: str) -> None:
    assert kind in kinds(text)
    assert kind in kinds(f"Some words before. {text} Some words after.")


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112 fails its checksum",
        "9999999999999995 is nobody's range",
        "0000 0000 0000 0000",
        "DE89 3704 0044 0532 0130 01 fails its checksum",
        "GB12 is a road",
        "pi is 3.14159265358979323846264338327950288",
        "between 2024-01-15 and 2024-02-20 10:30:00",
        "on 01-02-2024 10:30 and 01.02.2024 10.30",
        "seasons 10 2020-2021 and 11 2021-2022",
        "the digits 0123456789",
        "1+22+55555+666666+7777777+88888888",
        "a Base64-encoded password SHA256-hashed with salt",
        "password: <your-password-1>",
        "password = input('x1')",
        "password: ********",
        "1,234,567,890 people",
        "add 123456789 and 987654321",
        "version 10.12.2024.1",
        "the address 192.168.100.200",
        "a@b, x @ y, @decorator and user@localhost",
        "What is a good password policy?",
        "password: required",
        "password = getpass()",
        'api_key = os.environ["API_KEY"]',
        "token: ${TOKEN}",
        "the token bucket holds 4096 tokens",
        "sk-learn-is-a-library-for-machine-learning",
        "https://example.org:8080/path?x=1",
        "Why can't Persian cats go outside?",
        "Compare cloud and on-prem deployments.",
        "find a local minimum of x^2 - 4x",
        "Do not use the internet as a source.",
        "uuid 123e4567-e89b-12d3-a456-426614174000",
        "1700000000000 ms since the epoch",
        "How do I send a file to the cloud?",
    ],
)
def test_what_only_looks_private_is_not(text: str) -> None:
    assert kinds(text) == set()


def test_talk_of_confidential_things_is_found_where_it_is_wanted() -> None:
    assert kinds("Summarise our customer list", ALL) == {"confidential"}
    assert kinds("Summarise our customer list") == set()


@pytest.mark.parametrize("text", ["patient_id: 7", "the Patient ID", "PATIENT-ID", "patientId", "(patient id)"])
def test_names_of_protected_fields_are_found_however_they_are_written(text: str) -> None:
    assert kinds(text, Privacy([], ["patient_id"])) == {"word"}
    assert kinds(text, Privacy([], ["patientId"])) == {"word"}


def test_a_word_is_not_found_inside_another() -> None:
    assert kinds("impatient identities", Privacy([], ["patient"])) == set()
    assert kinds("患者编号", Privacy([], ["患者"])) == {"word"}


def test_a_finding_says_where_and_not_what() -> None:
    found = USUAL.find(["hello", "4111 1111 1111 1111", "x@mail.example.org 4111 1111 1111 1111"])
    assert found == (Finding("card", 1), Finding("email", 2))
    assert [str(one) for one in found] == ["card in text 2", "email in text 3"]


@settings(max_examples=40)
@given(st.integers(10**14, 10**15 - 1), st.sampled_from(["", " ", "-"]))
def test_every_valid_card_number_is_found_and_no_other(tail: int, separator: str) -> None:
    head = "4" + str(tail)[1:]
    last = luhn_last(head)
    for digit in "0123456789":
        number = head + digit
        written = separator.join(number[i : i + 4] for i in range(0, 16, 4))
        assert ("card" in kinds(f"number {written} here", Privacy(["card"]))) == (digit == last)


@given(st.text())
def test_any_text_is_looked_through(text: str) -> None:
    assert {finding.kind for finding in ALL.find([text, text])} == kinds(text, ALL)


@given(st.text(st.characters(categories=("L", "Zs", "P"))), st.text(st.characters(categories=("L", "Zs", "P"))))
def test_what_stands_around_hides_nothing(before: str, after: str) -> None:
    assert "card" in kinds(f"{before} 4111 1111 1111 1111 {after}")
    assert "email" in kinds(f"{before} jane@mail.example.org {after}")


@pytest.mark.parametrize(
    "text",
    [
        "卡号4111111111111111谢谢",
        "账户GB82WEST12345698765432。",
        "邮箱jane@mail.example.org谢谢",
        "钥匙AKIAIOSFODNN7EXAMPLE。",
    ],
)
def test_scripts_without_blanks_hide_nothing(text: str) -> None:
    assert kinds(text) & {"card", "iban", "email", "secret"}


# Time. What twice the text costs is counted in calls, and patterns are checked not to repeat what repeats.


HOSTILE: dict[str, str] = {
    "digits": "1",
    "digit groups": "1 ",
    "at signs": "a@",
    "secret words": "password ",
    "assignments": "password=aaa ",
    "plus signs": "+1",
    "key formats": "sk-a",
    "tokens": "eyJ.",
    "accounts": "DE12 ",
    "accounts in a row": "DE12",
    "urls": "://a:",
    "prohibitions": "do not ",
    "wishes": "keep process ",
    "cards": "4111 ",
    "blanks": " ",
    "letters": "a",
    "chinese": "密码",
}


def n_calls(text: str) -> int:
    """Count calls of Python functions and returns of C functions while a text is looked through."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        ALL.find([text])
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("part", HOSTILE.values(), ids=HOSTILE.keys())
def test_twice_the_text_is_at_most_twice_the_work(part: str) -> None:
    few, many = (n_calls(part * (n // len(part))) for n in (4_000, 8_000))
    assert many <= 2 * few + 200


def patterns() -> list[re.Pattern[str]]:
    from edge_rt.router import numbers_private, privacy

    found: list[re.Pattern[str]] = []
    for module in (numbers_private, privacy, private_words):
        found += [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    return found + [pattern for formats in privacy._FORMATS.values() for _, pattern in formats]


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.pattern[:20])
def test_no_pattern_repeats_what_repeats(pattern: re.Pattern[str]) -> None:
    """An unbounded repeat of something that itself repeats without bound is how patterns become exponential."""
    assert n_unbounded(pattern.pattern) <= 1


def n_unbounded(pattern: str) -> int:
    """Count how deep repeats without bound are nested."""
    from re import _parser  # type: ignore[attr-defined]

    def depth(parsed: object) -> int:
        deepest = 0
        for operator, argument in parsed:  # type: ignore[attr-defined]
            own = str(operator) in ("MAX_REPEAT", "MIN_REPEAT") and argument[1] is _parser.MAXREPEAT
            inner = [depth(part) for part in _parts(argument) if isinstance(part, _parser.SubPattern)]
            deepest = max(deepest, own + max(inner, default=0))
        return deepest

    return depth(_parser.parse(pattern))


def _parts(argument: object) -> list[object]:
    if not isinstance(argument, (tuple, list)):
        return [argument]
    return [part for item in argument for part in _parts_of(item)]


def _parts_of(item: object) -> list[object]:
    return list(item) if isinstance(item, list) else [item]


def test_a_pattern_that_repeats_what_repeats_would_be_seen() -> None:
    assert n_unbounded(r"(?:a+)+b") == 2
    assert n_unbounded(r"(?:a{0,9})+b|c+") == 1


CARD = "4111111111111111"


@pytest.mark.parametrize(
    "text",
    [
        f"Bob,{CARD},Main St",
        f"card no.{CARD}",
        f"card #{CARD}",
        f"card_{CARD}",
        "4111  1111  1111  1111",
        "4111\t1111\t1111\t1111",
        "4111 1111\n1111 1111",
        "4111.1111.1111.1111",
        "4111/1111/1111/1111",
        "4111–1111–1111–1111",
        "4111\u20111111\u20111111\u20111111",
        "4111\u200b1111\u00ad11111111",
        "".join(chr(0x660 + int(digit)) for digit in CARD),
        "".join(chr(0x966 + int(digit)) for digit in CARD),
    ],
)
def test_a_card_is_found_however_it_is_written(text: str) -> None:
    assert kinds(text) == {"card"}


@pytest.mark.parametrize("text", ["pi is 3.4111111111111111", "0.4111111111111111", "sha1 a4111111111111112b"])
def test_a_decimal_is_no_card(text: str) -> None:
    assert kinds(text) == set()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Don’t send this to the cloud", "directive"),
        ("please do not send this\nto the cloud", "directive"),
        ("filler words here. " * 3000 + "Do not send this to the cloud. " + "more of them. " * 3000, "directive"),
        ("Bob,415-555-2671,x", "phone"),
        ("Bob,415–555–2671,x", "phone"),
        ("GB82 WEST 1234\n5698 7654 32", "iban"),
        ("GB82.WEST.1234.5698.7654.32", "iban"),
        ("GB82  WEST  1234  5698  7654  32", "iban"),
        ("password: correcthorsebatterystaple", "secret"),
    ],
)
def test_what_is_wrapped_or_typed_on_a_phone_is_found(text: str, kind: str) -> None:
    assert kind in kinds(text)


@pytest.mark.parametrize("text", ["Patient  ID", "Patient\nID", "Patient\u2011ID", "patientIDs", "the patient_ids"])
def test_a_protected_word_is_found_in_every_form(text: str) -> None:
    assert [finding.kind for finding in Privacy((), ("patient_id",)).find((text,))] == ["word"]


def test_a_secret_that_is_announced_in_the_text_before_is_found() -> None:
    (found,) = Privacy(("secret",)).find(("my password is:", "hunter2!xY77"))
    assert (found.kind, found.text_index) == ("secret", 1)
    assert Privacy(("secret",)).find(("what is a password", "tell me more")) == ()


def test_what_is_too_long_to_look_through_stays() -> None:
    (found,) = Privacy(("card",)).find(("a " * 100_000, "b " * 200_000))
    assert str(found) == "too long to look through in text 2"


def test_no_unseen_character_hides_a_card() -> None:
    """Every format character of Unicode, and what else is drawn as nothing."""
    unseen = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in {"Cf", "Cc", "Zl", "Zp"}]
    unseen += ["\u034f", "\u115f", "\u3164", "\ufe0f", "\U000e0101", "\u2800", "\ufffc"]
    assert [char for char in unseen if kinds(CARD[:6] + char + CARD[6:]) != {"card"}] == []


def test_control_characters_hide_neither_an_address_nor_a_wish() -> None:
    assert kinds("mail jane@exa\x00mple.org") == {"email"}
    assert kinds("process this lo\x08cally") == {"directive"}
    assert kinds("\x1b[1m4111 1111\x1b[0m\x1b[1m 1111 1111") == {"card"}


def test_what_stands_on_a_digit_does_not_hide_it() -> None:
    assert kinds("".join(f"{digit}\ufe0f\u20e3" for digit in CARD)) == {"card"}  # a phone's keycaps
    assert kinds("".join(f"{digit}\u0332" for digit in CARD)) == {"card"}
    assert kinds("jane@exa\u0336mple.org") == {"email"}


def test_marks_on_one_letter_do_not_stop_the_time() -> None:
    """Normalising takes time with the square of the marks on a letter: whole, this text would take minutes."""
    marks = "\u0301\u0323" * (MAX_CHARS // 2 - 10)
    assert kinds(f"{CARD} a{marks}") == {"card"}


def test_accents_may_be_written_apart() -> None:
    text = unicodedata.normalize("NFD", "la contraseña: hunter2!xY77")
    assert all("secret" in kinds("x" * n + " " + text) for n in range(120, 132))
