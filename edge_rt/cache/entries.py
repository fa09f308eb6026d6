"""What is known of a stored entry and of all of them, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec


class Meta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of an entry without its value. Signed with it.

    kind         what the value is: answer, or tensors
    file_sha256  of the model's file; the entry goes when the model has another one
    endpoint     the cloud endpoint that answered; "" for this device
    title        the question's beginning
    created_at_s by the wall clock
    ttl_s        None: a corrected entry, which stands until it is removed
    saved_s, saved_j  what each hit saves: the time and energy that computing it took
    """

    kind: str
    model: str
    created_at_s: float
    file_sha256: str = ""
    endpoint: str = ""
    tenant: str = ""
    title: str = ""
    tags: tuple[str, ...] = ()
    ttl_s: float | None = None
    saved_s: float = 0.0
    saved_j: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """An entry whose signature was right."""

    meta: Meta
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """size_bytes of all entries; n_rejected edited or damaged ones; saved_s, saved_j since the store was made.

    problem  why nothing is written now, "" if it is
    """

    n_entries: int
    size_bytes: int
    max_bytes: int
    hot_bytes: int
    n_hits: int
    n_evicted: int
    n_rejected: int
    saved_s: float
    saved_j: float
    epoch: int
    problem: str
    path: str


class StoreEvents(Protocol):
    """Where the store's figures go; edge_rt.telemetry.Telemetry is one."""

    def cache_size(self, *, n_entries: int, size_bytes: int) -> None: ...

    def cache_evicted(self, n: int) -> None: ...

    def cache_rejected(self) -> None: ...


class NoEvents:
    """Takes figures and drops them, as for the command line's own use of a store."""

    def cache_size(self, *, n_entries: int, size_bytes: int) -> None: ...

    def cache_evicted(self, n: int) -> None: ...

    def cache_rejected(self) -> None: ...
