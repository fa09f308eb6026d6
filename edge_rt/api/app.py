"""The HTTP API: its routes."""

from __future__ import annotations

import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from edge_rt import telemetry
from edge_rt.api import (
    anthropic,
    cache,
    embeddings,
    kserve,
    media,
    ollama,
    openai,
    prefixes,
    rerank,
    responses,
    schemas,
)
from edge_rt.api.boundary import Boundary
from edge_rt.api.callers import ApiKeys
from edge_rt.api.context import Api, RuntimeProtocol
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.model_cards import ModelCards
from edge_rt.config import Config
from edge_rt.errors import InvalidRequestError, ModelNotFoundError
from edge_rt.guard.limits import check_text, check_token_ids

_JSON: Final = "application/json"


def build_app(
    runtime: RuntimeProtocol,
    config: Config,
    metrics: telemetry.Telemetry,
    *,
    api_keys: ApiKeys | None = None,
    api: Api | None = None,
) -> ASGIApp:
    """Build the ASGI app. A scope's state holds the Peer of a Unix socket as "peer"; all else needs one of api_keys.

    api  what it shares with other servers, None: nothing
    """
    api = api or Api(runtime=runtime, config=config, telemetry=metrics)
    router = Router(
        [
            *openai.routes(api),  # first what is asked most: routes are tried one after the other
            *kserve.routes(api),
            *_health_routes(api),
            *embeddings.routes(api),
            *rerank.routes(api),
            *media.routes(api),
            *anthropic.routes(api),  # before the models, which it lists in its own way
            *_model_routes(api),
            *cache.routes(api),
            *prefixes.routes(api),
            *_token_routes(api),
            *ollama.routes(api),
            *responses.routes(api),
        ],
        redirect_slashes=False,
    )
    return Boundary(router, metrics, api_keys=api_keys, access_log=config.server.access_log)


def _health_routes(api: Api) -> list[Route]:
    async def live(_: Request) -> ASGIApp:
        return Response(b'{"status":"ok"}', media_type=_JSON)

    async def ready(_: Request) -> ASGIApp:
        if api.runtime.ready():
            return Response(b'{"status":"ok"}', media_type=_JSON)
        # llama-server's words; probes of it look for them
        body = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
        return Response(body, status_code=503, media_type=_JSON, headers={"retry-after": "1"})

    async def metrics(_: Request) -> ASGIApp:
        return Response(api.telemetry.exposition(), headers={"content-type": telemetry.CONTENT_TYPE})

    return [
        Route("/health", Endpoint(ready), methods=["GET"]),
        Route("/health/live", Endpoint(live), methods=["GET"]),
        Route("/health/ready", Endpoint(ready), methods=["GET"]),
        Route("/metrics", Endpoint(metrics), methods=["GET"]),
    ]


def _model_routes(api: Api) -> list[Route]:
    cards = ModelCards(api.runtime, created=int(time.time()))

    async def listing(_: Request) -> ASGIApp:
        """List what can be asked for now: models that have been pulled, and chains of them."""
        found = [cards.model(status) for status in api.runtime.models() if status.pulled]
        found += [card for chain in api.runtime.chains() if (card := cards.chain(chain)) is not None]
        return Response(schemas.encode(schemas.ModelList(data=found)), media_type=_JSON)

    async def one(request: Request) -> ASGIApp:
        model_id = request.path_params["model_id"]
        for chain in api.runtime.chains():
            if chain.id == model_id and (card := cards.chain(chain)) is not None:
                return Response(schemas.encode(card), media_type=_JSON)
        status = api.runtime.model(model_id)
        if not status.pulled:
            raise ModelNotFoundError(model=model_id)
        return Response(schemas.encode(cards.model(status)), media_type=_JSON)

    async def placement(request: Request) -> ASGIApp:
        """Tell where a tensor model's requests go: candidates, best first, with their breakers and queues."""
        status = await api.runtime.placement(request.path_params["model_id"])
        return Response(schemas.encode(status), media_type=_JSON)

    return [
        Route("/v1/placement/{model_id:path}", Endpoint(placement), methods=["GET"]),
        Route("/v1/models", Endpoint(listing), methods=["GET"]),
        Route("/v1/models/{model_id:path}", Endpoint(one), methods=["GET"]),
    ]


def _token_routes(api: Api) -> list[Route]:
    limits = api.config.limits

    async def tokenize(request: Request) -> ASGIApp:
        wire = schemas.decode(await read_body(request, api), schemas.TokenizeRequest)
        schemas.refuse_unsupported(wire)
        name, text, add_bos = _text_to_tokenize(wire)
        check_text(name, text, limits.max_prompt_bytes)
        model = api.model_id(wire.model)
        token_ids = await api.runtime.tokenize(model, text, special=wire.parse_special, add_bos=add_bos)
        tokens = schemas.Tokens(tokens=token_ids)
        if name == "prompt":
            tokens.count, tokens.max_model_len = len(token_ids), api.runtime.model(model).n_ctx
        return Response(schemas.encode(tokens), media_type=_JSON)

    async def detokenize(request: Request) -> ASGIApp:
        wire = schemas.decode(await read_body(request, api), schemas.DetokenizeRequest)
        check_token_ids("tokens", wire.tokens, limits)
        text = await api.runtime.detokenize(api.model_id(wire.model), wire.tokens)
        return Response(schemas.encode(schemas.Content(content=text, prompt=text)), media_type=_JSON)

    async def tokenizer_info(request: Request) -> ASGIApp:
        model = api.model_id(request.query_params.get("model"))
        if (info := api.runtime.model(model).info) is None:
            await api.runtime.tokenize(model, "", special=False, add_bos=False)  # which loads it
            info = api.runtime.model(model).info
        if info is None:
            raise ModelNotFoundError(model=model)
        told = schemas.TokenizerInfo(
            bos_token=info.bos_text or None, eos_token=info.eos_text or None, model_max_length=info.caps.n_ctx
        )
        return Response(schemas.encode(told), media_type=_JSON)

    return [
        Route("/tokenizer_info", Endpoint(tokenizer_info), methods=["GET"]),
        Route("/tokenize", Endpoint(tokenize), methods=["POST"]),
        Route("/detokenize", Endpoint(detokenize), methods=["POST"]),
    ]


def _text_to_tokenize(wire: schemas.TokenizeRequest) -> tuple[str, str, bool]:
    """Give the text's field, which tells llama-server's dialect from vLLM's, the text, and whether BOS comes first."""
    if wire.content is not None and wire.prompt is not None:
        raise InvalidRequestError(param="prompt", problem="and content are both there; give one")
    if wire.content is not None:
        if wire.add_special_tokens is not None:
            raise InvalidRequestError(param="add_special_tokens", problem="goes with prompt; content has add_special")
        return "content", wire.content, bool(wire.add_special)
    if wire.prompt is None:
        raise InvalidRequestError(param="content", problem="is required, or vLLM's prompt")
    if wire.add_special is not None:
        raise InvalidRequestError(param="add_special", problem="goes with content; prompt has add_special_tokens")
    return "prompt", wire.prompt, wire.add_special_tokens is not False
