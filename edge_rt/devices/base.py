"""What every sensor reading is made of: a value, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """One reading and where it came from. An unknown value is None and has a reason; it is never 0.

    source  the file read, or the place where it was sought
    """

    value: T | None
    source: str
    reason: str = ""


def known(value: T, source: str) -> Reading[T]:
    return Reading(value=value, source=source)


def unknown(source: str, reason: str) -> Reading[T]:
    return Reading(value=None, source=source, reason=reason)
