"""Stored answers."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


class CacheError(EdgeRtError):
    """Something about the answer cache."""

    code = "cache_error"


@dataclass(eq=False)
class NotCachedError(CacheError):
    """Cache-Control: only-if-cached, and it is not."""

    code = "not_cached"

    def __str__(self) -> str:
        return "no stored answer fits this request, and only-if-cached forbids computing one"


@dataclass(eq=False)
class CacheEntryNotFoundError(CacheError):
    """No stored entry has such a key, or it is somebody else's."""

    code = "cache_entry_not_found"
    key: str

    def __str__(self) -> str:
        return f"no stored answer has a key that begins with {self.key}. `edge_rt cache show` lists them"


@dataclass(eq=False)
class CacheStoreError(CacheError):
    """The file of stored answers cannot be used."""

    code = "cache_store"
    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. Delete the file to begin anew, or set cache.store_file"
