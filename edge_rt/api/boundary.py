"""The outermost layer of the API: who asks, the request's id, errors, the access log and the request metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Match, Router
from starlette.types import Message, Receive, Scope, Send

from edge_rt import logs, telemetry
from edge_rt.api.callers import ApiKeys, tenant
from edge_rt.api.endpoint import Endpoint
from edge_rt.api.exchange import HUNG_UP, OPEN_PATHS, Exchange, Ledger, told
from edge_rt.api.sse import EVENT_STREAM, JSON_LINES, HungUpError, error_event
from edge_rt.api.status import HttpError
from edge_rt.errors import AuthError, ShuttingDownError


class Boundary:
    """Wrap the routes. Whatever they raise becomes an answer here, and only here.

    api_keys    open the TCP port; without them only Unix sockets are answered
    """

    def __init__(
        self,
        router: Router,
        metrics: telemetry.Telemetry,
        *,
        api_keys: ApiKeys | None,
        access_log: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._ledger = Ledger(metrics, access_log=access_log, clock=clock)
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the API speaks HTTP, not {scope['type']}")
        state: dict[str, Any] = scope.setdefault("state", {})
        exchange = self._ledger.begin(scope["headers"], state.get("peer"))
        logs.request_id.set(exchange.request_id)  # the request's task has a context of its own
        scope["app"] = self  # makes the router raise for unknown paths and methods instead of answering itself

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                names = [b"x-request-id"]
                if isinstance(endpoint := scope.get("endpoint"), Endpoint) and endpoint.id_header:
                    names.append(endpoint.id_header)
                headers = [*message["headers"], *((name, exchange.request_id.encode()) for name in names)]
                message["headers"] = headers
                exchange.is_stream = any(value in (EVENT_STREAM, JSON_LINES) for _, value in headers)
            await send(message)

        try:
            await self._answer(scope, receive, observed, exchange)
        finally:
            self._record(scope, exchange)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        try:
            self._identify(scope, exchange)
            await self._router(scope, receive, send)
        except HungUpError:
            exchange.outcome = "hung_up"
            exchange.status = exchange.status or HUNG_UP
        except asyncio.CancelledError:  # only the server's last resort in a shutdown cancels a request
            await self._fail(scope, send, exchange, ShuttingDownError())
        except HTTPException as exc:  # from the router
            message = f"{HTTPStatus(exc.status_code).phrase.lower()}: {scope['method']} {scope['path']}"
            headers = [(name.lower().encode(), value.encode()) for name, value in (exc.headers or {}).items()]
            await self._fail(scope, send, exchange, HttpError(exc.status_code, message, headers=headers))
        except Exception as exc:  # noqa: BLE001  the request boundary: nothing may end without an answer
            await self._fail(scope, send, exchange, exc)

    def _identify(self, scope: Scope, exchange: Exchange) -> None:
        try:
            exchange.tenant = tenant(exchange.peer, self._api_keys, scope["headers"])
        except AuthError:
            if scope["path"] not in OPEN_PATHS:
                scope["endpoint"] = self._endpoint(scope)  # whose protocol's error it shall be
                raise
        scope["state"]["tenant"] = exchange.tenant

    def _endpoint(self, scope: Scope) -> object:
        matches = (route.matches(scope) for route in self._router.routes)
        return next((found.get("endpoint") for match, found in matches if match is not Match.NONE), None)

    async def _fail(self, scope: Scope, send: Send, exchange: Exchange, error: BaseException) -> None:
        """Answer with an error: as a response, or as the last event of a stream that has begun."""
        answer = told(error)
        exchange.outcome = answer.code
        body = answer.body
        if isinstance(endpoint := scope.get("endpoint"), Endpoint) and endpoint.error_body is not None:
            body = endpoint.error_body(answer)
        if exchange.status == 0:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *answer.headers,
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})
        elif exchange.is_stream:
            write = scope["state"].get("stream_error")  # of a protocol whose streams end otherwise
            event = error_event(body) if write is None else write(answer)
            await send({"type": "http.response.body", "body": event, "more_body": False})

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        route, client = scope.get("route"), scope.get("client")
        self._ledger.end(
            exchange,
            method=scope["method"],
            path=scope["path"],
            route=route.path if route is not None else "unmatched",
            client=client[0] if client else None,
        )
