"""The Ollama API: text, chat and embeddings for its clients, and what they ask of models.

Models are pulled, made and removed with edge_rt's own commands, so what would do that here is refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_rt import types
from edge_rt.api import ollama_models as models
from edge_rt.api import ollama_wire as wire
from edge_rt.api.adapters import read_adapters
from edge_rt.api.context import Api, ModelStatus
from edge_rt.api.embeddings import check_texts, embed_texts
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with, refuse_unsupported
from edge_rt.api.media import check_task
from edge_rt.api.ollama_answers import ChatWriter, Embeddings, OneEmbedding, TextWriter, error_body, loaded
from edge_rt.api.openai import with_wishes
from edge_rt.api.outcome import Written
from edge_rt.api.schemas import encode
from edge_rt.api.sse import StopOnHangUp
from edge_rt.api.status import HttpError
from edge_rt.errors import InvalidRequestError
from edge_rt.types import GenerateRequest, Message, goes_on
from edge_rt.version import VERSION

_JSON: Final = "application/json"
_NOT_HERE: Final = {
    "/api/pull": "`edge_rt models pull MODEL` fetches a model of the catalog",
    "/api/push": "edge_rt sends models nowhere",
    "/api/create": "a manifest makes a model (docs/models.md)",
    "/api/copy": "a manifest gives a model another name (docs/models.md)",
    "/api/delete": "`edge_rt models rm MODEL` removes a model's files",
    "/api/blobs/{digest}": "a manifest makes a model (docs/models.md)",
}


def routes(api: Api) -> list[Route]:
    """Give the endpoints. All of them, and unknown paths below /api, answer errors in Ollama's form."""
    started_at = datetime.now(UTC)

    async def probe(_: Request) -> ASGIApp:
        return Response("Ollama is running", media_type="text/plain")  # its words; clients look for them

    async def version(_: Request) -> ASGIApp:
        return _json(models.Version(version=models.API_VERSION, edge_rt=VERSION))

    async def tags(_: Request) -> ASGIApp:
        return _json(models.tags(api, started_at))

    async def running(_: Request) -> ASGIApp:
        return _json(models.running(api, datetime.now(UTC)))

    async def show(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), wire.DECODERS[wire.ShowRequest])
        refuse_unsupported(asked, {})
        status = models.find(api, asked.wanted())
        return _json(models.show(api, status, started_at))

    async def generate(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), wire.DECODERS[wire.GenerateRequest])
        status, base = _request(api, asked, request)
        if not asked.prompt:
            return _Loading(api, status, asked, TextWriter(asked.wanted()))
        system = () if not asked.system else (Message(role="system", content=asked.system),)
        if asked.raw:
            if system:
                raise InvalidRequestError(param="system", problem="has no place in a raw prompt; write it there")
            base = replace(base, prompt=asked.prompt)
        else:
            base = replace(base, messages=(*system, Message(role="user", content=asked.prompt)))
        return _answer(api, base, TextWriter(asked.wanted()), asked)

    async def chat(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), wire.DECODERS[wire.ChatRequest])
        status, base = _request(api, asked, request)
        if not asked.messages:
            return _Loading(api, status, asked, ChatWriter(asked.wanted()))
        messages = wire.messages(asked.messages)
        base = replace(base, messages=messages, tools=wire.tools(asked.tools), continues=goes_on(messages))
        return _answer(api, base, ChatWriter(asked.wanted()), asked)

    async def embed(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), wire.DECODERS[wire.EmbedRequest])
        asked.given_options()
        texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
        return _Embedding(api, asked, texts, request.state.tenant, is_one=False)

    async def embeddings(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), wire.DECODERS[wire.EmbeddingsRequest])
        asked.given_options()
        texts = [asked.prompt] if asked.prompt else []
        return _Embedding(api, asked, texts, request.state.tenant, is_one=True)

    async def not_here(request: Request) -> ASGIApp:
        raise HttpError(501, f"{request.scope['path'][:80]} is not served: {_NOT_HERE[request.scope['route'].path]}")

    async def unknown(request: Request) -> ASGIApp:
        path = request.scope["path"]
        allowed = next((known.methods or () for known in served if known.path == path), ())
        words = f"{request.method} {path[:200]}"
        if not allowed:
            raise HttpError(404, f"not found: {words}")
        headers = [(b"allow", ", ".join(sorted(allowed)).encode())]
        raise HttpError(405, f"method not allowed: {words}", headers=headers)

    def route(path: str, handler: Callable[[Request], Awaitable[ASGIApp]], *methods: str) -> Route:
        return Route(path, Endpoint(handler, error_body=error_body), methods=methods or None)

    served = [
        route("/api/chat", chat, "POST"),
        route("/api/generate", generate, "POST"),
        route("/api/embed", embed, "POST"),
        route("/api/embeddings", embeddings, "POST"),
        route("/api/tags", tags, "GET"),
        route("/api/ps", running, "GET"),
        route("/api/show", show, "POST"),
        route("/api/version", version, "GET"),
    ]
    return [
        *served,
        *(route(path, not_here) for path in _NOT_HERE),
        route("/api/{path:path}", unknown),
        Route("/", Endpoint(probe), methods=["GET"]),
    ]


def _request(api: Api, asked: wire.Generation, request: Request) -> tuple[ModelStatus, GenerateRequest]:
    """Translate what generate and chat share; the prompt is still missing."""
    options = asked.given_options()
    wire.keep_alive_s(asked.keep_alive)
    model, adapters = read_adapters(asked.wanted(), None, api.adapters)
    status = models.find(api, model)
    if options.num_ctx is not None and options.num_ctx > status.n_ctx:
        raise InvalidRequestError(
            param="options.num_ctx",
            problem=f"is {options.num_ctx}, {status.id} runs with {status.n_ctx}; models.{status.id}.n_ctx sets it",
        )
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidRequestError(param="top_logprobs", problem="needs logprobs to be true")
    base = GenerateRequest(
        id=f"ollama-{uuid.uuid4().hex}",
        model=status.id,
        max_tokens=wire.max_tokens(options),
        stop=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        sampling=wire.sampling(options, n_ctx=status.n_ctx),
        stream=asked.stream is not False,
        top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        max_draft=options.draft_num_predict,
        tenant=request.state.tenant,
        adapters=adapters,
        response_format=wire.response_format(asked.format),
    )
    return status, with_wishes(base, request.headers)


def _answer(api: Api, asked: types.GenerateRequest, writer: TextWriter, options: wire.Asked) -> ASGIApp:
    keep_s = wire.keep_alive_s(options.keep_alive)

    def begun() -> None:
        if keep_s is not None:
            api.runtime.keep(asked.model, keep_s)

    return Written(api, asked, writer, begun=begun)


class _Loading:
    """Load a model, or unload it where it shall be kept for 0 s: what a request without a prompt asks for."""

    def __init__(self, api: Api, status: ModelStatus, asked: wire.Generation, writer: TextWriter) -> None:
        self._api, self._model, self._asked, self._writer = api, status.id, asked, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_s, begun_s = wire.keep_alive_s(self._asked.keep_alive), time.monotonic()
        async with StopOnHangUp(receive):
            if keep_s == 0:
                await self._api.runtime.unload(self._model)
            else:
                await self._api.runtime.load(self._model)
        if keep_s:
            self._api.runtime.keep(self._model, keep_s)
        line = loaded(self._writer, load_s=time.monotonic() - begun_s, reason="unload" if keep_s == 0 else "load")
        is_stream = self._asked.stream is not False
        await Response(line, media_type="application/x-ndjson" if is_stream else _JSON)(scope, receive, send)


class _Embedding:
    """Embed texts and answer: an ASGI app.

    is_one  as /api/embeddings answers, with one vector and nothing else
    """

    def __init__(self, api: Api, asked: wire.Asked, texts: list[str], tenant: str, *, is_one: bool) -> None:
        self._api, self._asked, self._texts, self._tenant, self._is_one = api, asked, texts, tenant, is_one
        self._keep_s = wire.keep_alive_s(asked.keep_alive)
        self._dimensions: int | None = None
        self._truncate = False
        if isinstance(asked, wire.EmbedRequest):
            self._dimensions, self._truncate = asked.dimensions, bool(asked.truncate)
        if texts:
            check_texts(texts)
        self._model = check_task(api, models.find(api, asked.wanted()).id, ("embed",))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun_s = time.monotonic()
        async with StopOnHangUp(receive):
            if not self._texts or self._api.runtime.model(self._model).tensor is None:
                await self._api.runtime.load(self._model, tensors=True)
            load_s = time.monotonic() - begun_s
            answers = await embed_texts(
                self._api,
                self._model,
                self._texts,
                tenant=self._tenant,
                dimensions=self._dimensions,
                truncate=self._truncate,
                param="prompt" if self._is_one else "input",
            )
        if self._keep_s is not None:
            self._api.runtime.keep(self._model, self._keep_s)
        vectors = [answer.embedding for answer in answers]
        body: msgspec.Struct
        if self._is_one:
            body = OneEmbedding(embedding=vectors[0] if vectors else ())
        else:
            body = Embeddings(
                model=self._asked.wanted(),
                embeddings=vectors,
                total_duration=round((time.monotonic() - begun_s) * 1e9),
                load_duration=round(load_s * 1e9),
                prompt_eval_count=sum(answer.n_tokens for answer in answers),
            )
        await _json(body)(scope, receive, send)


def _json(value: msgspec.Struct) -> Response:
    return Response(encode(value), media_type=_JSON)
