"""The endpoints of pinned prefixes: which beginnings of prompts stay.

Where users are isolated, whoever asks sees and changes the own ones, and sees those of the configuration.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with
from edge_rt.types import PinnedPrefix


class PinRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body that pins a system prompt; a pin of the configuration has a name with a colon in it."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,100}\Z")]
    system: Annotated[str, Meta(min_length=1)]
    model: str | None = None


_PIN: Final = msgspec.json.Decoder(PinRequest)


def routes(api: Api) -> list[Route]:
    """Give the endpoints below /v1/prefixes."""

    async def listing(request: Request) -> ASGIApp:
        model = api.model_id(request.query_params.get("model"))
        return _answer(await api.runtime.pins(model, request.state.tenant))

    async def pin(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), _PIN)
        model = api.model_id(asked.model)
        return _answer(
            await api.runtime.pins(model, request.state.tenant, action="pin", name=asked.name, text=asked.system)
        )

    async def drop(request: Request) -> ASGIApp:
        model = api.model_id(request.query_params.get("model"))
        name = request.path_params["name"]
        return _answer(await api.runtime.pins(model, request.state.tenant, action="unpin", name=name))

    return [
        Route("/v1/prefixes", Endpoint(listing), methods=["GET"]),
        Route("/v1/prefixes", Endpoint(pin), methods=["POST"]),
        Route("/v1/prefixes/{name}", Endpoint(drop), methods=["DELETE"]),
    ]


def _answer(pins: list[PinnedPrefix]) -> Response:
    return Response(msgspec.json.encode({"pinned": pins}), media_type="application/json")
