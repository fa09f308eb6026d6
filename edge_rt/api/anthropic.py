"""Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from edge_rt.api import anthropic_wire as wire
from edge_rt.api.adapters import named_adapter
from edge_rt.api.anthropic_answers import NAMES, MessageWriter, error_body
from edge_rt.api.context import Api, ModelStatus
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with, named_as
from edge_rt.api.openai import with_wishes
from edge_rt.api.outcome import Written
from edge_rt.api.schemas import encode
from edge_rt.api.status import HttpError
from edge_rt.errors import InvalidRequestError, ModelNotFoundError

_VERSION: Final = "anthropic-version"
_Handler = Callable[[Request], Awaitable[ASGIApp]]


class _Model(msgspec.Struct, kw_only=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int


class _Models(msgspec.Struct, kw_only=True):
    data: list[_Model]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class _Count(msgspec.Struct, kw_only=True):
    input_tokens: int


def routes(api: Api) -> list[Route]:
    """Give the endpoints; all of them answer errors in Anthropic's form.

    Models are listed at OpenAI's address: who names a version of this API wants them as it lists them.
    """
    started_at = datetime.now(UTC)

    def card(status: ModelStatus) -> _Model:
        name = status.manifest.name if status.manifest is not None else status.id
        return _Model(id=status.id, display_name=name, created_at=started_at, max_input_tokens=status.n_ctx)

    async def models(_: Request) -> ASGIApp:
        found = [card(status) for status in api.runtime.models() if status.pulled and _answers(status)]
        ids = [model.id for model in found]
        listed = _Models(data=found, first_id=next(iter(ids), None), last_id=next(reversed(ids), None))
        return Response(encode(listed), media_type="application/json")

    async def model(request: Request) -> ASGIApp:
        status = api.runtime.model(request.path_params["model_id"])
        if not (status.pulled and _answers(status)):
            raise ModelNotFoundError(model=status.id)
        return Response(encode(card(status)), media_type="application/json")

    async def messages(request: Request) -> ASGIApp:
        _check_version(request)
        asked = wire.messages_request(
            decode_with(await read_body(request, api), wire.MESSAGES), request_id=_id(), tenant=request.state.tenant
        )
        asked = named_adapter(with_wishes(asked, request.headers), api.adapters)
        return Written(api, asked, MessageWriter(asked))

    async def count_tokens(request: Request) -> ASGIApp:
        _check_version(request)
        asked = wire.count_request(
            decode_with(await read_body(request, api), wire.COUNT), request_id=_id(), tenant=request.state.tenant
        )
        with named_as(NAMES):
            n_tokens = await api.runtime.count_prompt(named_adapter(asked, api.adapters))
        return Response(encode(_Count(input_tokens=n_tokens)), media_type="application/json")

    async def unknown(request: Request) -> ASGIApp:
        raise HttpError(404, f"not found: {request.method} {request.scope['path'][:200]}")

    def route(path: str, handler: _Handler, *methods: str, kind: type[Route] = Route) -> Route:
        endpoint = Endpoint(handler, error_body=error_body, id_header=b"request-id")
        return kind(path, endpoint, methods=methods or None)

    return [
        route("/v1/models", models, "GET", kind=_ForVersion),
        route("/v1/models/{model_id:path}", model, "GET", kind=_ForVersion),
        route("/v1/messages", messages, "POST"),
        route("/v1/messages/count_tokens", count_tokens, "POST"),
        route("/v1/messages/{path:path}", unknown),
    ]


class _ForVersion(Route):
    """A route of its own for requests that name a version of this API."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and any(name == _VERSION.encode() for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}


def _answers(status: ModelStatus) -> bool:
    return status.manifest is None or status.manifest.kind == "text"


def _check_version(request: Request) -> None:
    """Refuse another version of the API than this one; curl may leave the header out."""
    version = request.headers.get(_VERSION)
    if version not in (None, *wire.VERSIONS):
        raise InvalidRequestError(
            param=_VERSION, problem=f"must be {' or '.join(wire.VERSIONS)}, got {(version or '')[:40]!r}"
        )


def _id() -> str:
    return f"msg_{uuid.uuid4().hex}"
