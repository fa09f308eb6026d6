"""OpenAI's Responses API. Nothing is kept: each request brings its whole conversation."""

from __future__ import annotations

import uuid
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_rt.api.adapters import named_adapter
from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with, named_as
from edge_rt.api.openai import with_wishes
from edge_rt.api.outcome import Written
from edge_rt.api.responses_answers import NAMES, ResponseWriter
from edge_rt.api.responses_wire import DECODER, ResponsesRequest, generate_request
from edge_rt.api.schemas import encode
from edge_rt.api.status import HttpError
from edge_rt.types import GenerateRequest

_NOT_KEPT: Final = "no response is kept: send the conversation with each request, to POST /v1/responses"


class _InputTokens(msgspec.Struct, kw_only=True):
    object: str = "response.input_tokens"
    input_tokens: int


def routes(api: Api) -> list[Route]:
    async def read(request: Request) -> tuple[ResponsesRequest, GenerateRequest]:
        wire = decode_with(await read_body(request, api), DECODER)
        request_id = f"resp_{uuid.uuid4().hex}"
        asked = generate_request(
            wire, request_id=request_id, model=api.model_id(wire.model), tenant=request.state.tenant
        )
        return wire, named_adapter(with_wishes(asked, request.headers), api.adapters)

    async def create(request: Request) -> ASGIApp:
        wire, asked = await read(request)
        return Written(api, asked, ResponseWriter(wire, asked))

    async def count(request: Request) -> ASGIApp:
        _, asked = await read(request)
        with named_as(NAMES):
            n_tokens = await api.runtime.count_prompt(asked)
        return Response(encode(_InputTokens(input_tokens=n_tokens)), media_type="application/json")

    async def not_kept(_: Request) -> ASGIApp:
        raise HttpError(404, _NOT_KEPT)

    return [
        Route("/v1/responses", Endpoint(create), methods=["POST"]),
        Route("/v1/responses/input_tokens", Endpoint(count), methods=["POST"]),
        Route("/v1/responses/{response_id:path}", Endpoint(not_kept), methods=["GET", "POST", "DELETE"]),
    ]
