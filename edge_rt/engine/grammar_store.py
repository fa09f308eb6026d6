"""Which compiled grammars are kept, and whose make room: bounded by the bytes they take, shared among tenants."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

_ENTRY_BYTES: Final = 512  # of an entry without what it keeps


@dataclass(slots=True, eq=False)
class Kept:
    """A compiled grammar, or the reason why it is none.

    key      key_of its text
    matcher  the library's, at its beginning; nobody moves it, but its copies share what it learns of its tokens
    n_bytes  memory that it takes, which grows with its use
    n_users  unfinished requests that have a copy
    fuel     what its lexer has taken, as far as n_bytes counts it
    """

    key: bytes
    matcher: Any = None
    problem: str = ""
    n_bytes: int = 0
    n_users: int = 0
    fuel: int = 0


class GrammarStore:
    """Keeps grammars by tenant and text, the least recently used of who holds most out first.

    So nobody throws out the grammars of others who hold less than he does. One that takes more than a quarter of all
    is not kept, from the moment on that it does. Belongs to who holds a lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._kept: dict[str, OrderedDict[bytes, Kept]] = {}
        self._bytes: dict[str, int] = {}

    def get(self, tenant: str, key: bytes) -> Kept | None:
        mine = self._kept.get(tenant)
        if mine is None or (found := mine.get(key)) is None:
            return None
        mine.move_to_end(key)
        return found

    def put(self, tenant: str, kept: Kept) -> None:
        """Keep one that get has not found."""
        self._kept.setdefault(tenant, OrderedDict())[kept.key] = kept
        self._count(tenant, kept.n_bytes + _ENTRY_BYTES)
        self._make_room(tenant, kept)

    def grow(self, tenant: str, kept: Kept, n_bytes: int) -> None:
        """Note that a grammar takes more than it did, kept or not."""
        if not n_bytes:
            return
        kept.n_bytes += n_bytes
        mine = self._kept.get(tenant)
        if mine is not None and mine.get(kept.key) is kept:  # another of its text may have taken its place
            self._count(tenant, n_bytes)
            self._make_room(tenant, kept)

    def _make_room(self, tenant: str, changed: Kept) -> None:
        if changed.n_bytes + _ENTRY_BYTES > self.max_bytes // 4:
            del self._kept[tenant][changed.key]
            self._dropped(tenant, changed)
        while self.n_bytes > self.max_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            _, oldest = self._kept[most].popitem(last=False)
            self._dropped(most, oldest)

    def _dropped(self, tenant: str, kept: Kept) -> None:
        self._count(tenant, -kept.n_bytes - _ENTRY_BYTES)
        if not self._kept[tenant]:
            del self._kept[tenant], self._bytes[tenant]

    def _count(self, tenant: str, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + n_bytes


def key_of(raw: bytes) -> bytes:
    """Give what a grammar's text is known by."""
    return blake2b(raw, digest_size=32).digest()
