"""Which compiled grammars are kept, and whose make room: bounded by the bytes they take, shared among tenants."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

_ENTRY_BYTES: Final = 512  # of an entry without what it keeps


@dataclass(frozen=True, slots=True)
class Kept:
    """A compiled grammar, or the reason why it is none.

    matcher  the library's, at its beginning; nobody moves it
    n_bytes  memory that it takes
    """

    matcher: Any = None
    problem: str = ""
    n_bytes: int = 0


class GrammarStore:
    """Keeps grammars by tenant and text, the least recently used of who holds most out first.

    So nobody throws out the grammars of others who hold less than he does. One that takes more than a quarter of all
    is not kept. Belongs to who holds a lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._kept: dict[str, OrderedDict[bytes, Kept]] = {}
        self._bytes: dict[str, int] = {}

    def get(self, tenant: str, text: str) -> Kept | None:
        mine, key = self._kept.get(tenant), _key(text)
        if mine is None or (found := mine.get(key)) is None:
            return None
        mine.move_to_end(key)
        return found

    def put(self, tenant: str, text: str, kept: Kept) -> None:
        """Keep one that get has not found."""
        n_bytes = kept.n_bytes + _ENTRY_BYTES
        if n_bytes > self.max_bytes // 4:
            return
        self._kept.setdefault(tenant, OrderedDict())[_key(text)] = kept
        self._count(tenant, n_bytes)
        while self.n_bytes > self.max_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            _, dropped = self._kept[most].popitem(last=False)
            self._count(most, -dropped.n_bytes - _ENTRY_BYTES)
            if not self._kept[most]:
                del self._kept[most], self._bytes[most]

    def _count(self, tenant: str, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + n_bytes


def _key(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=32).digest()
