"""Reranking: documents in the order of their likeness to a query, as Jina, Cohere and llama-server have it.

No model that judges a query and a document together is in the catalog, so both are embedded and compared by the cosine
of the angle between them; the answer says so (method).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import mul

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_rt.api import media_wire as wire
from edge_rt.api.context import Api
from edge_rt.api.embeddings import MAX_INPUTS, embed_texts
from edge_rt.api.endpoint import Endpoint, read_body
from edge_rt.api.fields import decode_with
from edge_rt.api.media import check_task
from edge_rt.api.schemas import encode
from edge_rt.api.sse import StopOnHangUp
from edge_rt.errors import InvalidRequestError

PATHS = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")  # llama-server's


def routes(api: Api) -> list[Route]:
    async def rerank(request: Request) -> ASGIApp:
        asked = decode_with(await read_body(request, api), wire.RERANK_DECODER)
        model = check_task(api, asked.model, ("embed",))
        texts = [document if isinstance(document, str) else document.text for document in asked.documents]
        if not 1 <= len(texts) < MAX_INPUTS:
            problem = f"holds {len(texts)} documents, it may be 1 to {MAX_INPUTS - 1}"
            raise InvalidRequestError(param="documents", problem=problem)
        if not asked.query:
            raise InvalidRequestError(param="query", problem="must not be empty")
        for i, text in enumerate(texts):
            if not text:
                raise InvalidRequestError(param=f"documents[{i}]", problem="must not be empty")
        if asked.top_n is not None and asked.top_n < 1:
            raise InvalidRequestError(param="top_n", problem=f"must be at least 1, got {asked.top_n}")
        return _Reranking(api, model, texts, asked, request.state.tenant)

    return [Route(path, Endpoint(rerank), methods=["POST"]) for path in PATHS]


class _Reranking:
    """Rank documents and answer: an ASGI app."""

    def __init__(self, api: Api, model: str, texts: list[str], asked: wire.RerankRequest, tenant: str) -> None:
        self._api, self._model, self._texts, self._asked, self._tenant = api, model, texts, asked, tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._asked
        embed = partial(
            embed_texts,
            self._api,
            self._model,
            tenant=self._tenant,
            deadline_s=asked.deadline_s,
            truncate=asked.truncate,
        )
        async with StopOnHangUp(receive):
            try:
                (query,) = await embed([asked.query], param="query")
            except InvalidRequestError as exc:
                raise InvalidRequestError(param=exc.param.replace("query[0]", "query"), problem=exc.problem) from exc
            answers = await embed(self._texts, param="documents")
        scores = [cosine(query.embedding, answer.embedding) for answer in answers]
        n_tokens = query.n_tokens + sum(answer.n_tokens for answer in answers)
        results = [wire.Ranked(index=i, relevance_score=scores[i]) for i in ranked(scores)[: asked.top_n]]
        if asked.return_documents:
            for result in results:
                result.document = wire.Document(text=self._texts[result.index])
        body = wire.Reranked(
            model=self._model,
            results=results,
            usage=wire.EmbeddingsUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
        )
        await Response(encode(body), media_type="application/json")(scope, receive, send)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Give the cosine of the angle between two vectors, -1..1; 0 where one has no direction."""
    lengths = math.sqrt(math.fsum(map(mul, a, a)) * math.fsum(map(mul, b, b)))
    return max(-1.0, min(1.0, math.fsum(map(mul, a, b)) / lengths)) if lengths > 0.0 else 0.0


def ranked(scores: Sequence[float]) -> list[int]:
    """Give the places of the scores, the highest first, the first of equals first."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])
