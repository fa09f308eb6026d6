"""Looking at stored entries, correcting and removing them; for the API and, without a daemon, the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import msgspec

from edge_rt.cache import stored
from edge_rt.cache.admission import age_s
from edge_rt.cache.entries import Found, Meta
from edge_rt.cache.store import Store
from edge_rt.errors import CacheEntryNotFoundError, InvalidRequestError, UnsupportedFeatureError

MIN_KEY_DIGITS: Final = 6
MAX_TEXT_BYTES: Final = 2**20

# Whether the one who asks may see an entry.
Sees = Callable[[Meta], bool]


def everything(_: Meta) -> bool:
    """Let the owner of the store see all entries."""
    return True


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry in a list.

    ttl_s, age_s  as of now by the wall clock; age_s None: it was stored in what is now the future
    """

    key: str
    kind: str
    model: str
    title: str
    size_bytes: int
    n_hits: int
    age_s: float | None
    ttl_s: float | None
    saved_s: float
    endpoint: str = ""
    tenant: str = ""
    tags: tuple[str, ...] = ()


class Detail(Entry, frozen=True, kw_only=True, omit_defaults=True):
    """One entry with what was asked and answered; tensors have no text."""

    question: str = ""
    text: str = ""
    variant: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    is_corrected: bool = False


def stats(store: Store) -> dict[str, Any]:
    return asdict(store.stats())


def entries(
    store: Store, now_s: float, *, sees: Sees = everything, model: str = "", tag: str = "", limit: int = 100
) -> list[Entry]:
    """List entries, those with the most hits first, then the newest."""
    meant = [
        (key, meta, size_bytes, n_hits)
        for key, meta, size_bytes, n_hits in store.items()
        if sees(meta) and (not model or meta.model == model) and (not tag or tag in meta.tags)
    ]
    meant.sort(key=lambda item: (-item[3], -item[1].created_at_s))
    return [Entry(**_facts(*item, now_s)) for item in meant[:limit]]


def find(store: Store, prefix: str, *, sees: Sees = everything) -> bytes:
    """Give the key that begins with so many hexadecimal digits.

    Raises CacheEntryNotFoundError, and InvalidRequestError for too few digits or where several keys begin so.
    """
    prefix = prefix.lower()
    if len(prefix) < MIN_KEY_DIGITS or set(prefix) - set("0123456789abcdef"):
        problem = f"must be at least {MIN_KEY_DIGITS} hexadecimal digits, got {prefix[:40]!r}"
        raise InvalidRequestError(param="key", problem=problem)
    found = [key for key, meta, *_ in store.items() if sees(meta) and key.hex().startswith(prefix)]
    if len(found) > 1:
        raise InvalidRequestError(param="key", problem=f"{len(found)} keys begin with {prefix}; give more digits")
    if not found:
        raise CacheEntryNotFoundError(key=prefix)
    return found[0]


def detail(store: Store, key: bytes, found: Found | None, now_s: float) -> Detail:
    """Describe one entry whose value has been read. Raises CacheEntryNotFoundError for one that is gone."""
    indexed = next((item for item in store.items() if item[0] == key), None)
    if found is None or indexed is None:
        raise CacheEntryNotFoundError(key=key.hex())
    facts = _facts(*indexed, now_s)
    answer = stored.decode(found.value) if found.meta.kind == stored.KIND else None
    if answer is None:
        return Detail(**facts)
    return Detail(
        **facts,
        question=answer.question,
        text=answer.text,
        variant=answer.variant,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cost=answer.cost,
        is_corrected=answer.is_corrected,
    )


def correct(store: Store, key: bytes, found: Found | None, text: str, now_s: float) -> None:
    """Set an answer's text; it stands until it is removed, and is not replaced by a computed one.

    Raises CacheEntryNotFoundError, InvalidRequestError and UnsupportedFeatureError.
    """
    if found is None:
        raise CacheEntryNotFoundError(key=key.hex())
    if not text.strip() or len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        problem = f"must have between 1 and {MAX_TEXT_BYTES} bytes of text"
        raise InvalidRequestError(param="text", problem=problem)
    answer = stored.decode(found.value) if found.meta.kind == stored.KIND else None
    if answer is None:
        raise UnsupportedFeatureError(feature="correcting stored tensors", remedy="remove the entry instead")
    value = stored.encode(
        msgspec.structs.replace(
            answer, pieces=stored.pieces_of(text), is_corrected=True, stopped_by="", created_at_s=now_s
        )
    )
    meta = msgspec.structs.replace(found.meta, ttl_s=None, created_at_s=now_s)
    if not store.put(key, meta, value):
        raise InvalidRequestError(
            param="text", problem=f"cannot be stored: {store.stats().problem or 'it is over cache.max_answer_bytes'}"
        )


def remove(store: Store, *, sees: Sees = everything, model: str = "", tag: str = "") -> int:
    """Remove entries of a model, or with a tag, or both; give how many there were."""
    if not model and not tag:
        raise InvalidRequestError(param="tag", problem="give a tag or a model, or clear the cache")
    return store.remove_if(
        lambda meta: sees(meta) and (not model or meta.model == model) and (not tag or tag in meta.tags)
    )


def _facts(key: bytes, meta: Meta, size_bytes: int, n_hits: int, now_s: float) -> dict[str, Any]:
    return {
        "key": key.hex(),
        "kind": meta.kind,
        "model": meta.model,
        "title": meta.title,
        "size_bytes": size_bytes,
        "n_hits": n_hits,
        "age_s": age_s(meta.created_at_s, now_s),
        "ttl_s": meta.ttl_s,
        "saved_s": meta.saved_s,
        "endpoint": meta.endpoint,
        "tenant": meta.tenant,
        "tags": meta.tags,
    }
