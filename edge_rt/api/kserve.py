"""The Open Inference Protocol (KServe v2) over HTTP, with its binary tensors, sequences and model repository."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_rt.api import kserve_models as models
from edge_rt.api import kserve_wire as wire
from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with
from edge_rt.api.kserve_infer import HEADER_LENGTH, Caller, Converter, Inference
from edge_rt.api.kserve_plan import Plans
from edge_rt.api.schemas import encode
from edge_rt.api.status import HttpError, open_inference_body
from edge_rt.cache.admission import wishes


def routes(api: Api) -> list[Route]:
    """Give the endpoints. All of them, and unknown paths below /v2, answer errors in the protocol's form."""
    convert, plans = Converter(), Plans(api.config.limits.max_tensor_bytes)

    async def server(_: Request) -> ASGIApp:
        return _answer(models.server_metadata(api))

    async def live(_: Request) -> ASGIApp:
        return _answer({"live": True})

    async def ready(_: Request) -> ASGIApp:
        is_ready = api.runtime.ready()
        return _answer({"ready": is_ready}, 200 if is_ready else 400)  # the protocol's "no" is a 4xx

    async def model_ready(request: Request) -> ASGIApp:
        model, version = _named(request)
        is_ready = models.is_ready(api, model, version)
        return _answer({"name": model, "ready": is_ready}, 200 if is_ready else 400)

    async def metadata(request: Request) -> ASGIApp:
        return _answer(await models.metadata(api, *_named(request)))

    async def infer(request: Request) -> ASGIApp:
        model, version = _named(request)
        body = await read_body(request, api)
        asked = wishes(", ".join(request.headers.getlist("cache-control")))
        caller = Caller(tenant=request.state.tenant, peer=getattr(request.state, "peer", None), wishes=asked)
        length = request.headers.get(HEADER_LENGTH)
        return await Inference.read(api, body, length, caller, convert, plans, model=model, version=version)

    async def index(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api) or b"{}", wire.DECODERS[wire.IndexRequest])
        return _answer(models.index(api, only_ready=asked.ready))

    async def load(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api) or b"{}", wire.DECODERS[wire.LoadRequest])
        models.refuse_load_parameters(asked.parameters)
        await api.runtime.load(models.find(api, request.path_params["model"]).id, tensors=True)
        return Response(status_code=200)

    async def unload(request: Request) -> ASGIApp:
        await read_body(request, api)
        await api.runtime.unload(models.find(api, request.path_params["model"]).id)
        return Response(status_code=200)

    async def unknown(request: Request) -> ASGIApp:
        raise HttpError(404, f"not found: {request.method} {request.url.path[:200]}")

    def route(path: str, handler: Callable[[Request], Awaitable[ASGIApp]], *methods: str) -> Route:
        return Route(path, Endpoint(handler, error_body=open_inference_body), methods=methods or None)

    of_models = [
        route(f"/v2/models/{{model}}{version}{path}", handler, method)
        for version in ("", "/versions/{version}")
        for path, handler, method in (("/infer", infer, "POST"), ("/ready", model_ready, "GET"), ("", metadata, "GET"))
    ]
    return [
        *of_models,
        route("/v2", server, "GET"),
        route("/v2/health/live", live, "GET"),
        route("/v2/health/ready", ready, "GET"),
        route("/v2/repository/index", index, "POST"),
        route("/v2/repository/models/{model}/load", load, "POST"),
        route("/v2/repository/models/{model}/unload", unload, "POST"),
        route("/v2/{path:path}", unknown),
    ]


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["model"], request.path_params.get("version", "")


def _answer(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")
