"""OpenAI's embeddings, from tensor models whose task is to embed."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_rt import logs
from edge_rt.api import media_wire as wire
from edge_rt.api.context import Api
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with
from edge_rt.api.media import check_task
from edge_rt.api.schemas import encode
from edge_rt.api.sse import StopOnHangUp
from edge_rt.errors import InvalidRequestError
from edge_rt.tensor_types import MediaAnswer, MediaRequest

MAX_INPUTS: Final = 2048  # as OpenAI's
_AT_A_TIME: Final = 16  # of one request: as many as are joined, and other callers keep their places in the queue

_DECODER = wire.EMBEDDINGS_DECODER

Input = str | tuple[int, ...]  # a text, or its token ids


def routes(api: Api) -> list[Route]:
    async def embeddings(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), _DECODER)
        model = check_task(api, asked.model, ("embed",))
        return _Embedding(api, model, read_inputs(asked.input), asked, request.state.tenant)

    return [Route("/v1/embeddings", Endpoint(embeddings), methods=["POST"])]


class _Embedding:
    """Embed a list of texts and answer: an ASGI app."""

    def __init__(self, api: Api, model: str, texts: list[Input], asked: wire.EmbeddingsRequest, tenant: str) -> None:
        self._api = api
        self._model = model
        self._texts = texts
        self._asked = asked
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with StopOnHangUp(receive):
            answers = await embed_texts(
                self._api,
                self._model,
                self._texts,
                tenant=self._tenant,
                deadline_s=self._asked.deadline_s,
                dimensions=self._asked.dimensions,
                truncate=self._asked.truncate,
            )
        n_tokens = sum(answer.n_tokens for answer in answers)
        body = wire.Embeddings(
            model=self._model,
            data=[wire.Embedding(index=i, embedding=self._written(answer)) for i, answer in enumerate(answers)],
            usage=wire.EmbeddingsUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
        )
        await Response(encode(body), media_type="application/json")(scope, receive, send)

    def _written(self, answer: MediaAnswer) -> tuple[float, ...] | str:
        if self._asked.encoding_format == "float":
            return answer.embedding
        return base64.b64encode(struct.pack(f"<{len(answer.embedding)}f", *answer.embedding)).decode()


def check_texts(texts: Sequence[Input]) -> None:
    """Raise InvalidRequestError for none, too many, or one that is empty."""
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise InvalidRequestError(param="input", problem=f"holds {len(texts)} texts, it may be 1 to {MAX_INPUTS}")
    for i, text in enumerate(texts):
        if not text:
            raise InvalidRequestError(param=f"input[{i}]", problem="must not be empty")


def read_inputs(given: str | Sequence[str | int | list[int]]) -> list[Input]:
    """Give the texts of a request: one, its token ids, or a list of these. Raises InvalidRequestError."""
    inputs: list[Input] = []
    if isinstance(given, str):
        given = [given]
    elif given and all(isinstance(item, int) for item in given):
        given = [cast("list[int]", given)]
    for i, item in enumerate(given):
        if isinstance(item, int):
            problem = "is a token id between texts; give one list of token ids, or a list of texts"
            raise InvalidRequestError(param=f"input[{i}]", problem=problem)
        inputs.append(item if isinstance(item, str) else tuple(item))
    check_texts(inputs)
    return inputs


async def embed_texts(
    api: Api,
    model: str,
    texts: Sequence[Input],
    *,
    tenant: str,
    deadline_s: float | None = None,
    dimensions: int | None = None,
    truncate: bool = False,
    param: str = "input",
) -> list[MediaAnswer]:
    """Embed texts, in their order. Raises what look raises; of a text that is refused the error names the place.

    param  what the request calls its texts
    """
    answers: dict[int, MediaAnswer] = {}
    left = iter(enumerate(texts))
    common = MediaRequest(
        id=logs.request_id.get(),
        model=model,
        data=b"",
        tenant=tenant,
        deadline_s=deadline_s,
        dimensions=dimensions,
        truncate=truncate,
    )

    async def one(i: int, text: Input) -> MediaAnswer:
        own: dict[str, Any] = {"token_ids": text}
        if isinstance(text, str):
            own = {"data": text.encode("utf-8", "surrogatepass")}
        try:
            return await api.runtime.look(replace(common, **own))
        except InvalidRequestError as exc:
            name, _, place = exc.param.partition("[")
            if name not in ("data", "token_ids"):
                raise
            place = f"[{place}" if place else ""
            raise InvalidRequestError(param=f"{param}[{i}]{place}", problem=exc.problem) from exc

    async def work() -> None:
        for i, text in left:
            answers[i] = await one(i, text)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_AT_A_TIME, len(texts))):
                group.create_task(work())
    except BaseExceptionGroup as exc:
        raise exc.exceptions[0] from exc  # the others are of the same kind, or follow from it
    return [answers[i] for i in range(len(texts))]
