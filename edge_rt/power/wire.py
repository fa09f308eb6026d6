"""What powerd and its clients say to each other: one JSON object a datagram, at most 4 kB, checked to the last field.

    {"type": "hint", "work": "decode", "n_waiting": 0, …}   no answer, so that it costs the daemon nothing
    {"type": "takes_advice", "version": 1, …}               {"type": "advice", "version": 1, …}, whenever it changes
    {"type": "cap", "max_w": 12.5}                          {"type": "done"}
    {"type": "status"}                                      {"type": "status", …}
    {"type": "power"}                                       {"type": "power", "meter": …, "energy_j": …}
    anything else                                           {"type": "error", "code": …, "problem": …}

Advice is given to who has said within which limits it takes any, and is repeated each second while it works. A powerd
or a daemon that does not know it goes on as before.

Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, get_args

from edge_rt.power.state import Advice, Hint, Work

MAX_BYTES: Final = 4096
ADVICE_VERSION: Final = 1
MAX_CAP_W: Final = 10_000.0

_MAX_COUNT: Final = 1_000_000
_MAX_SECONDS: Final = 1e6
_COUNTS: Final = ("n_waiting", "n_running", "n_prompt_tokens", "n_threads")
_ADVICE: Final = ("n_prefill_threads", "n_decode_threads", "max_batch")
_WORKS: Final = frozenset(get_args(Work))


class BadMessageError(Exception):
    """A message breaks the protocol; the text says how and holds nothing of the message."""


@dataclass(frozen=True, slots=True)
class Cap:
    """Hold the power below max_w until told otherwise or until powerd ends; 0 takes the cap away."""

    max_w: float


@dataclass(frozen=True, slots=True)
class TakesAdvice:
    """Give advice from now on, within these limits of the daemon's own."""

    max_threads: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Tell the status."""


@dataclass(frozen=True, slots=True)
class AskPower:
    """Tell what the meter has counted."""


def encode_hint(hint: Hint) -> bytes:
    values: dict[str, Any] = {"type": "hint", "work": hint.work, "sent_s": hint.sent_s}
    values |= {name: min(getattr(hint, name), _MAX_COUNT) for name in _COUNTS}
    for name in ("ttft_left_s", "tpot_s"):
        if (value := getattr(hint, name)) is not None:
            values[name] = max(-_MAX_SECONDS, min(value, _MAX_SECONDS))
    return _encode(values)


def encode_takes_advice(takes: TakesAdvice) -> bytes:
    return _encode({"type": "takes_advice", "version": ADVICE_VERSION} | asdict(takes))


def encode_advice(advice: Advice, *, is_dry: bool) -> bytes:
    """Write advice; is_dry: it is to be shown and not to be taken."""
    return _encode({"type": "advice", "version": ADVICE_VERSION, "is_dry": is_dry} | asdict(advice))


def advice_of(values: Mapping[str, Any]) -> tuple[Advice, bool]:
    """Read a parsed advice message; True: it is only to be shown. Raises BadMessageError."""
    values = dict(values)
    if values.pop("type", None) != "advice":
        raise BadMessageError("is no advice")
    _version(values)
    is_dry = values.pop("is_dry", None)
    if not isinstance(is_dry, bool):
        raise BadMessageError("is_dry is neither true nor false")
    counts = {name: None if values.get(name) is None else _count(values, name, least=1) for name in _ADVICE}
    _nothing_more({name: value for name, value in values.items() if name not in _ADVICE})
    return Advice(**counts), is_dry


def encode(kind: str, **values: Any) -> bytes:
    """Write a message or an answer. Raises ValueError for one that is too long or holds no plain values."""
    return _encode({"type": kind, **values})


def decode(raw: bytes) -> Hint | TakesAdvice | Cap | Ask | AskPower:
    """Read a client's message. Raises BadMessageError."""
    values = parse(raw)
    kind = values.pop("type", None)
    if kind == "hint":
        return _hint(values)
    found: TakesAdvice | Cap | Ask | AskPower
    if kind == "takes_advice":
        _version(values)
        found = TakesAdvice(**{name: _count(values, name, least=1) for name in ("max_threads", "max_batch")})
    elif kind == "cap":
        found = Cap(_number(values, "max_w", 0.0, MAX_CAP_W))
    elif kind == "status":
        found = Ask()
    elif kind == "power":
        found = AskPower()
    else:
        raise BadMessageError("its type is none of hint, takes_advice, cap, status and power")
    _nothing_more(values)
    return found


def parse(raw: bytes) -> dict[str, Any]:
    """Read one JSON object, in which no name stands twice and every number is finite. Raises BadMessageError."""
    if len(raw) > MAX_BYTES:
        raise BadMessageError(f"is longer than {MAX_BYTES} bytes")
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadMessageError("is no JSON") from None
    if not isinstance(values, dict):
        raise BadMessageError("is no object")
    return values


def _hint(values: dict[str, Any]) -> Hint:
    work = values.pop("work", None)
    if not isinstance(work, str) or work not in _WORKS:
        raise BadMessageError(f"work is none of {', '.join(sorted(_WORKS))}")
    counts = {name: _count(values, name) for name in _COUNTS if name in values}
    seconds = {
        name: _number(values, name, -_MAX_SECONDS if name == "ttft_left_s" else 0.0, _MAX_SECONDS)
        for name in ("ttft_left_s", "tpot_s")
        if name in values
    }
    sent_s = _number(values, "sent_s", 0.0, math.inf)
    _nothing_more(values)
    return Hint(work=work, sent_s=sent_s, **counts, **seconds)  # type: ignore[arg-type]


def _count(values: dict[str, Any], name: str, *, least: int = 0) -> int:
    value = values.pop(name, None)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_COUNT:
        raise BadMessageError(f"{name} is no whole number from {least} to {_MAX_COUNT}")
    return value


def _version(values: dict[str, Any]) -> None:
    if _count(values, "version") != ADVICE_VERSION:
        raise BadMessageError(f"is not of version {ADVICE_VERSION}, which is the one that is known here")


def _number(values: dict[str, Any], name: str, least: float, most: float) -> float:
    value = values.pop(name, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadMessageError(f"{name} is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (least <= number <= most and math.isfinite(number)):
        raise BadMessageError(f"{name} is not from {least:g} to {most:g}")
    return number


def _nothing_more(values: Mapping[str, Any]) -> None:
    if values:
        raise BadMessageError(f"has {len(values)} fields that it may not have")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _encode(values: Mapping[str, Any]) -> bytes:
    raw = json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{len(raw)} bytes are more than {MAX_BYTES}")
    return raw
