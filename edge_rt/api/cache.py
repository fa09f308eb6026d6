"""The endpoints of the answer cache: figures, entries, corrections, removal.

Whoever asks sees the entries of their own questions, and all if the daemon runs under their uid or they are root.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with
from edge_rt.cache import admin
from edge_rt.cache.entries import Meta
from edge_rt.cache.store import Store
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError

_JSON: Final = "application/json"
_MAX_LIMIT: Final = 20_000


class Correction(msgspec.Struct, forbid_unknown_fields=True):
    """The body that corrects an answer."""

    text: str


def routes(api: Api) -> list[Route]:
    """Give the endpoints below /v1/cache."""

    async def stats(_: Request) -> ASGIApp:
        return _answer(admin.stats(_store(api)))

    async def clear(request: Request) -> ASGIApp:
        store = _store(api)
        if _is_owner(request):
            return _answer({"removed": store.clear()})
        return _answer({"removed": store.remove_if(_sees(request))})

    async def listing(request: Request) -> ASGIApp:
        found = admin.entries(
            _store(api),
            time.time(),
            sees=_sees(request),
            model=request.query_params.get("model", ""),
            tag=request.query_params.get("tag", ""),
            limit=_limit(request.query_params.get("limit", "100")),
        )
        return _answer({"entries": found})

    async def remove(request: Request) -> ASGIApp:
        n_removed = admin.remove(
            _store(api),
            sees=_sees(request),
            model=request.query_params.get("model", ""),
            tag=request.query_params.get("tag", ""),
        )
        return _answer({"removed": n_removed})

    async def show(request: Request) -> ASGIApp:
        store = _store(api)
        key = admin.find(store, request.path_params["key"], sees=_sees(request))
        return _answer(admin.detail(store, key, await store.get(key), time.time()))

    async def correct(request: Request) -> ASGIApp:
        store = _store(api)
        key = admin.find(store, request.path_params["key"], sees=_sees(request))
        asked = decode_with(await read_body(request, api), _CORRECTION)
        admin.correct(store, key, await store.get(key), asked.text, time.time())
        return _answer(admin.detail(store, key, await store.get(key), time.time()))

    async def remove_one(request: Request) -> ASGIApp:
        store = _store(api)
        return _answer({"removed": store.remove([admin.find(store, request.path_params["key"], sees=_sees(request))])})

    return [
        Route("/v1/cache", Endpoint(stats), methods=["GET"]),
        Route("/v1/cache", Endpoint(clear), methods=["DELETE"]),
        Route("/v1/cache/entries", Endpoint(listing), methods=["GET"]),
        Route("/v1/cache/entries", Endpoint(remove), methods=["DELETE"]),
        Route("/v1/cache/entries/{key}", Endpoint(show), methods=["GET"]),
        Route("/v1/cache/entries/{key}", Endpoint(correct), methods=["PUT"]),
        Route("/v1/cache/entries/{key}", Endpoint(remove_one), methods=["DELETE"]),
    ]


_CORRECTION: Final = msgspec.json.Decoder(Correction)


def _store(api: Api) -> Store:
    if api.answer_store is None:
        raise UnsupportedFeatureError(feature="the answer cache", remedy="cache.enabled turns it on")
    return api.answer_store


def _is_owner(request: Request) -> bool:
    peer = getattr(request.state, "peer", None)
    return peer is not None and peer.uid in (0, os.geteuid())


def _sees(request: Request) -> admin.Sees:
    if _is_owner(request):
        return admin.everything
    tenant: str = request.state.tenant

    def own(meta: Meta) -> bool:
        return meta.tenant == tenant

    return own


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= _MAX_LIMIT):
        raise InvalidRequestError(param="limit", problem=f"must be between 1 and {_MAX_LIMIT}, got {text[:40]!r}")
    return int(text)


def _answer(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type=_JSON)
