"""Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_rt.api import anthropic_wire as wire
from edge_rt.api.anthropic_answers import NAMES, MessageWriter, error_body
from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with, named_as
from edge_rt.api.openai import with_wishes
from edge_rt.api.outcome import Written, check_structure
from edge_rt.api.schemas import encode
from edge_rt.api.status import HttpError
from edge_rt.errors import InvalidRequestError

_VERSION: Final = "anthropic-version"


class _Count(msgspec.Struct, kw_only=True):
    input_tokens: int


def routes(api: Api) -> list[Route]:
    """Give the endpoints; all of them answer errors in Anthropic's form."""

    async def messages(request: Request) -> ASGIApp:
        _check_version(request)
        asked = wire.messages_request(
            decode_with(await read_body(request, api), wire.MESSAGES), request_id=_id(), tenant=request.state.tenant
        )
        asked = with_wishes(asked, request.headers)
        return Written(api, asked, MessageWriter(asked))

    async def count_tokens(request: Request) -> ASGIApp:
        _check_version(request)
        asked = wire.count_request(
            decode_with(await read_body(request, api), wire.COUNT), request_id=_id(), tenant=request.state.tenant
        )
        check_structure(asked)
        with named_as(NAMES):
            n_tokens = await api.runtime.count_prompt(asked)
        return Response(encode(_Count(input_tokens=n_tokens)), media_type="application/json")

    async def unknown(request: Request) -> ASGIApp:
        raise HttpError(404, f"not found: {request.method} {request.scope['path'][:200]}")

    def route(path: str, handler: Callable[[Request], Awaitable[ASGIApp]], *methods: str) -> Route:
        return Route(path, Endpoint(handler, error_body=error_body), methods=methods or None)

    return [
        route("/v1/messages", messages, "POST"),
        route("/v1/messages/count_tokens", count_tokens, "POST"),
        route("/v1/messages/{path:path}", unknown),
    ]


def _check_version(request: Request) -> None:
    """Refuse another version of the API than this one; curl may leave the header out."""
    version = request.headers.get(_VERSION)
    if version not in (None, *wire.VERSIONS):
        raise InvalidRequestError(
            param=_VERSION, problem=f"must be {' or '.join(wire.VERSIONS)}, got {(version or '')[:40]!r}"
        )


def _id() -> str:
    return f"msg_{uuid.uuid4().hex}"
