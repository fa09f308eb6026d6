"""Reading request bodies: unknown fields are named, and those that ask for what is not there are refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError

T = TypeVar("T")
Neutral = Mapping[str, tuple[Any, ...]]  # by field, the values that ask for nothing

ABSENT: Final = Raw()  # the default of a field that is declared to be refused

_MAX_NEUTRAL_BYTES: Final = 64  # a neutral value is short, so that no large one is ever parsed
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def refuse_unsupported(
    request: msgspec.Struct, neutral: Neutral, place: str = "", *, read: Collection[str] = ()
) -> None:
    """Raise UnsupportedFeatureError for a Raw field whose value asks for something; null never does.

    read  fields that are Raw because somebody else reads them
    """
    for name in request.__struct_fields__:
        if name in read:
            continue
        value = getattr(request, name)
        if isinstance(value, Raw) and value is not ABSENT and not _is_neutral(bytes(value), neutral.get(name, ())):
            allowed = " or ".join(msgspec.json.encode(value).decode() for value in neutral.get(name, (None,)))
            raise UnsupportedFeatureError(feature=place + name, remedy=f"leave it out or send {allowed}")


def _is_neutral(raw: bytes, allowed: tuple[Any, ...]) -> bool:
    if len(raw) > _MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # 1e999, or bytes that are not UTF-8
        return False
    # 1 == True == 1.0 in Python, not on the wire.
    return value is None or any(value == v and type(value) is type(v) for v in allowed)


def decode_with(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a request body. Raises InvalidRequestError naming the field and what is wrong with it."""
    if not body:
        raise InvalidRequestError(param="", problem="the body is empty; it must be a JSON object")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc)) from exc
    except msgspec.DecodeError as exc:
        problem = f"the body is not valid JSON: {exc}"
        if _SURROGATE.search(body):
            problem += "; strings must not hold lone surrogates"
        raise InvalidRequestError(param="", problem=problem) from exc
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(param="", problem="the body is not valid UTF-8") from exc
    except RecursionError as exc:
        raise InvalidRequestError(param="", problem="the body is nested too deeply") from exc


def _invalid(problem: str) -> InvalidRequestError:
    problem, _, place = problem.partition(" - at `")
    # "$.messages[0].content", and "key` in `$.logit_bias" for a mapping's key
    place = place.rstrip("`").rpartition("$")[2].lstrip(".")
    if found := _UNKNOWN.search(problem):
        return InvalidRequestError(param=_join(place, found[1][:100]), problem="unknown field")
    if found := _MISSING.search(problem):
        return InvalidRequestError(param=_join(place, found[1]), problem="is required")
    return InvalidRequestError(param=place, problem=problem[:1].lower() + problem[1:])


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors from inside a `with` name a request's fields as its own protocol does: by names, OpenAI's → its.

    A name with "[]" stands for any place of a list; one that ends in "[" for a list whose places are others in the
    protocol: the place is left out.
    """
    try:
        yield
    except InvalidRequestError as exc:
        raise InvalidRequestError(param=_renamed(exc.param, names), problem=exc.problem) from exc
    except UnsupportedFeatureError as exc:
        raise UnsupportedFeatureError(feature=_renamed(exc.feature, names), remedy=exc.remedy) from exc


def _renamed(place: str, names: Mapping[str, str]) -> str:
    for name, own in names.items():
        if name.endswith("[") and place.startswith(name):
            return own
        pattern = re.escape(name).replace(r"\[\]", r"(\[\d+\])") + r"(?=[.\[#]|$)"
        if found := re.match(pattern, place):
            return own.replace("[]", found[1] if found.groups() else "") + place[found.end() :]
    return place


def given(value: T | None, param: str) -> T:
    """Give a field's value. Raises InvalidRequestError where there is none."""
    if value is None:
        raise InvalidRequestError(param=param, problem="is required")
    return value


def raw_text(raw: Raw, param: str) -> str:
    """Give the JSON text of a field as it came, "" for null and where there is none. Raises InvalidRequestError."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(param=param, problem="is not valid UTF-8") from exc
    return "" if text == "null" else text
