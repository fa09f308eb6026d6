"""Under which key an answer is kept: a hash of all that can change it, and of nothing else.

Two requests share an answer only if their keys are equal, so a field is part of the key unless UNKEYED names it: one
that is added to GenerateRequest later keys at once, and a test asks for a decision. Texts of prompt and messages are
compared in Unicode's NFC with line ends as \\n; stop strings are not, as they are compared with the answer's bytes.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any, Final

from edge_rt.types import GenerateRequest, Message

KEY_BYTES: Final = 32

# How an answer is carried, when it must have come, who asks and what shall be kept change nothing in it. Where it is
# computed is the Identity's to say, and the tenant counts where answers are isolated.
UNKEYED: Final = frozenset(
    {"id", "stream", "deadline_s", "max_draft", "max_signals", "cache", "route", "tenant", "tells_start", "priority"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who answers: one form of a model on this device, or a cloud endpoint's model.

    file_sha256    of the form's file; "" where it has none, as for the null back end
    backend        which engine computes it: two of them round differently
    template       the chat template where it is not the file's own
    n_ctx          the context it runs with: a smaller one ends an answer earlier
    adapters       files of those that the request names: name, size and time of the last change
    endpoint       the cloud endpoint's name, "" for this device; upstream is its base URL and model
    """

    model: str
    variant: str = ""
    file_sha256: str = ""
    backend: str = ""
    template: str = ""
    n_ctx: int = 0
    adapters: tuple[tuple[str, int, int], ...] = ()
    endpoint: str = ""
    upstream: str = ""


def answer_key(request: GenerateRequest, identity: Identity, *, epoch: int, isolate: bool) -> bytes:
    """Give the key of a request's answer: KEY_BYTES bytes.

    epoch    a cache's count of times it was told to forget everything
    isolate  nobody gets what another tenant asked for
    """
    return _hash("answer", request, identity, epoch, isolate, {})


def partition_key(request: GenerateRequest, identity: Identity, *, epoch: int, isolate: bool) -> bytes | None:
    """Give the key of everything but the last user message; questions are compared by meaning within one partition.

    None for a request that has no such message at its end: a raw prompt may hold anything, an assistant's message at
    the end is one to go on with.
    """
    if not request.messages or request.messages[-1].role != "user":
        return None
    return _hash("partition", request, identity, epoch, isolate, {"messages": request.messages[:-1]})


def normalised(text: str) -> str:
    """Give a text in NFC with \\n line ends."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _hash(
    kind: str,
    request: GenerateRequest,
    identity: Identity,
    epoch: int,
    isolate: bool,
    instead: Mapping[str, Any],
) -> bytes:
    asked = []
    for name in _REQUEST_FIELDS:
        value = instead.get(name, getattr(request, name))
        encode = _ENCODERS.get(name, _plain)
        asked.append((name, None if value is None else encode(value)))
    tenant = request.tenant if isolate else None
    # ASCII escapes also carry lone surrogates, which no other encoding of a str takes.
    whole = _JSON((kind, asked, _plain_identity(identity), epoch, tenant))
    return blake2b(whole.encode(), digest_size=KEY_BYTES, person=b"edge_rt answer").digest()


def _messages(messages: tuple[Message, ...]) -> list[Any]:
    names = _names(Message)
    return [
        [(name, normalised(v) if isinstance(v := getattr(message, name), str) else _plain(v)) for name in names]
        for message in messages
    ]


def _plain(value: Any) -> Any:
    """Turn a field into what JSON writes in one way only: equal values alike, different ones differently."""
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if kind is float:
        return int(value) if value.is_integer() else value  # 1 and 1.0 ask for the same
    if kind is tuple or kind is list:
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return [(_plain(k), _plain(v)) for k, v in sorted(value.items())]
    if is_dataclass(value):
        return [(name, _plain(getattr(value, name))) for name in _names(kind)]
    raise TypeError(f"no way to write {kind.__name__} into a key")


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@lru_cache(maxsize=64)
def _plain_identity(identity: Identity) -> Any:
    return _plain(identity)


_JSON: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_SCALARS: Final = frozenset({str, int, bool, type(None)})
_REQUEST_FIELDS: Final = tuple(name for name in _names(GenerateRequest) if name not in UNKEYED)
_ENCODERS: Final[dict[str, Any]] = {
    "messages": _messages,
    "prompt": normalised,
    "prompt_token_ids": list,  # may be long, and are plain already
}
