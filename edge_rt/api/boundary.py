"""The outermost layer of the API: who asks, the request's id, errors, the access log and the request metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.routing import Match, Router
from starlette.types import Message, Receive, Scope, Send

from edge_rt import telemetry
from edge_rt.api.callers import ApiKeys, Peer, tenant
from edge_rt.api.endpoint import Endpoint
from edge_rt.api.sse import HungUpError, error_event
from edge_rt.api.status import HttpError, reply
from edge_rt.errors import AuthError, EdgeRtError, ShuttingDownError

_log = logging.getLogger("edge_rt.api")
_access = logging.getLogger("edge_rt.access")
# Probes carry no key.
_OPEN_PATHS: Final = ("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
_PROBES = frozenset({*_OPEN_PATHS, "/metrics"})  # asked every few seconds, for ever
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HUNG_UP: Final = 499  # what proxies log for a client that left; it is never sent


@dataclass(slots=True)
class _Exchange:
    """One request and what became of it."""

    request_id: str
    peer: Peer | None
    started_s: float
    tenant: str = ""
    status: int = 0  # 0 until the response starts
    is_stream: bool = False
    outcome: str = "ok"


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
        self._metrics = metrics
        self._api_keys = api_keys
        self._access_log = access_log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the API speaks HTTP, not {scope['type']}")
        state: dict[str, Any] = scope.setdefault("state", {})
        exchange = _Exchange(_request_id(scope), state.get("peer"), self._clock())
        telemetry.request_id.set(exchange.request_id)  # the request's task has a context of its own
        scope["app"] = self  # makes the router raise for unknown paths and methods instead of answering itself

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = message["headers"] = [*message["headers"], (b"x-request-id", exchange.request_id.encode())]
                exchange.is_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
            await send(message)

        try:
            await self._answer(scope, receive, observed, exchange)
        finally:
            self._record(scope, exchange)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        try:
            self._identify(scope, exchange)
            await self._router(scope, receive, send)
        except HungUpError:
            exchange.outcome = "hung_up"
            exchange.status = exchange.status or _HUNG_UP
        except asyncio.CancelledError:  # only the server's last resort in a shutdown cancels a request
            await self._fail(scope, send, exchange, ShuttingDownError())
        except HTTPException as exc:  # from the router
            message = f"{HTTPStatus(exc.status_code).phrase.lower()}: {scope['method']} {scope['path']}"
            headers = [(name.lower().encode(), value.encode()) for name, value in (exc.headers or {}).items()]
            await self._fail(scope, send, exchange, HttpError(exc.status_code, message, headers=headers))
        except Exception as exc:  # noqa: BLE001  the request boundary: nothing may end without an answer
            await self._fail(scope, send, exchange, exc)

    def _identify(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            exchange.tenant = tenant(exchange.peer, self._api_keys, scope["headers"])
        except AuthError:
            if scope["path"] not in _OPEN_PATHS:
                scope["endpoint"] = self._endpoint(scope)  # whose protocol's error it shall be
                raise
        scope["state"]["tenant"] = exchange.tenant

    def _endpoint(self, scope: Scope) -> object:
        matches = (route.matches(scope) for route in self._router.routes)
        return next((found.get("endpoint") for match, found in matches if match is not Match.NONE), None)

    async def _fail(self, scope: Scope, send: Send, exchange: _Exchange, error: BaseException) -> None:
        """Answer with an error: as a response, or as the last event of a stream that has begun."""
        if not isinstance(error, EdgeRtError | HttpError):
            _log.error("a request failed unexpectedly", exc_info=error)
        answer = reply(error)
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
            await send({"type": "http.response.body", "body": error_event(body), "more_body": False})

    def _record(self, scope: Scope, exchange: _Exchange) -> None:
        route = scope.get("route")
        duration_s = self._clock() - exchange.started_s
        self._metrics.request_finished(
            route.path if route is not None else "unmatched",
            status=exchange.status,
            outcome=exchange.outcome,
            duration_s=duration_s,
        )
        if self._access_log:
            peer = exchange.peer
            extra = {
                "duration_s": round(duration_s, 4),
                "outcome": exchange.outcome,
                "tenant": exchange.tenant or None,
                "uid": peer.uid if peer else None,
                "gid": peer.gid if peer else None,
                "pid": peer.pid if peer else None,
                "client": scope["client"][0] if scope.get("client") else None,
            }
            level = logging.DEBUG if scope["path"] in _PROBES and exchange.status == 200 else logging.INFO
            _access.log(level, "%s %s %d", scope["method"], scope["path"][:200], exchange.status, extra=extra)


def _request_id(scope: Scope) -> str:
    """Take over the caller's X-Request-Id where it is harmless, else make one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
