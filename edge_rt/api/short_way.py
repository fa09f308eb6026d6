"""Inferences with binary tensors over the Unix socket, past uvicorn's cycle, ASGI and the router.

Those take longer than everything else that the front process does for such a request. Whatever is unusual about one is
left to the long way, which answers the same bytes: other paths and methods, JSON alone, TCP, headers that change how a
body is read or what the cache may give, and bodies that are too large, too slow or beyond server.max_bodies_bytes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Final

from edge_rt import telemetry
from edge_rt.api.callers import Peer, tenant
from edge_rt.api.context import Api
from edge_rt.api.exchange import HUNG_UP, Exchange, Ledger, told
from edge_rt.api.kserve_infer import HEADER_LENGTH, Caller, Converter, Headers, Inference
from edge_rt.api.kserve_plan import Plans
from edge_rt.api.sse import HangUps, HungUpError
from edge_rt.api.status import open_inference_body
from edge_rt.errors import OverloadedError, ShuttingDownError
from edge_rt.tensor_types import Data

Write = Callable[[int, Headers, Sequence[Data]], Awaitable[None]]  # status, headers, the body's parts

_PATH: Final = re.compile(rb"/v2/models/([\w.:~-]+)(?:/versions/([\w.:~-]+))?/infer")
_LENGTH: Final = HEADER_LENGTH.encode()
_LONG: Final = frozenset({b"cache-control", b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})


class ShortWay:
    """Takes what can go this way. api is the one of the long way: they count the same bodies."""

    def __init__(self, api: Api, *, access_log: bool) -> None:
        self.api = api
        self.ledger = Ledger(api.telemetry, access_log=access_log)
        self.convert, self.plans = Converter(), Plans(api.config.limits.max_tensor_bytes)
        self._max_body_bytes = api.config.server.max_body_bytes

    def begin(
        self, url: bytes, headers: Sequence[tuple[bytes, bytes]], peer: Peer | None, hang_ups: HangUps
    ) -> ShortRequest | None:
        """Take a POST of HTTP/1.1 whose head is here; None: it goes the long way."""
        if peer is None or (path := _parsed(url)) is None:
            return None
        given = dict(headers)
        length, size = given.get(_LENGTH), given.get(b"content-length", b"")
        if length is None or len(given) != len(headers) or not _LONG.isdisjoint(given):
            return None
        if not (size.isdigit() and len(size) < 20 and int(size) <= self._max_body_bytes):
            return None
        exchange = self.ledger.begin(headers, peer)
        exchange.tenant = tenant(peer, None, ())
        return ShortRequest(self, exchange, *path, length.decode("latin-1"), hang_ups)


class ShortRequest:
    """One request: its body is taken, then it is answered; or it is given up while the body is not whole."""

    __slots__ = ("_exchange", "_hang_ups", "_length", "_model", "_n_bytes", "_parts", "_version", "_way")

    def __init__(
        self, way: ShortWay, exchange: Exchange, model: str, version: str, length: str, hang_ups: HangUps
    ) -> None:
        self._way, self._exchange, self._hang_ups = way, exchange, hang_ups
        self._model, self._version, self._length = model, version, length
        self._parts: list[bytes] = []
        self._n_bytes = 0

    def take(self, body: bytes) -> bool:
        """Take a part of the body; False: it must go the long way, which says that there is no room."""
        server = self._way.api.config.server
        try:
            self._way.api.bodies.take(len(body), max(server.max_bodies_bytes, server.max_body_bytes))
        except OverloadedError:
            return False
        self._n_bytes += len(body)
        self._parts.append(body)
        return True

    def give_up(self) -> bytes:
        """Give the body as far as it is here. The request is somebody else's from now on."""
        self._way.api.bodies.give_back(self._n_bytes)
        return b"".join(self._parts)

    def hung_up(self) -> None:
        """Hear that the client has left before its body was whole."""
        self._exchange.status, self._exchange.outcome = HUNG_UP, "hung_up"
        self._end()

    async def answer(self, write: Write) -> None:
        """Run it and write its answer, whatever becomes of it."""
        exchange = self._exchange
        telemetry.request_id.set(exchange.request_id)  # the task has a context of its own
        try:
            headers, parts = await self._answer()
            exchange.status = 200
            await write(200, [*headers, (b"x-request-id", exchange.request_id.encode())], parts)
        except HungUpError:
            exchange.status, exchange.outcome = exchange.status or HUNG_UP, "hung_up"
        except asyncio.CancelledError:  # only the server's last resort in a shutdown cancels a request
            await self._fail(ShuttingDownError(), write)
        except Exception as exc:  # noqa: BLE001  the request boundary: nothing may end without an answer
            await self._fail(exc, write)
        finally:
            self._end()

    async def _answer(self) -> tuple[Headers, list[Data]]:
        way, exchange = self._way, self._exchange
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        caller = Caller(tenant=exchange.tenant, peer=exchange.peer)
        inference = await Inference.read(
            way.api, body, self._length, caller, way.convert, way.plans, model=self._model, version=self._version
        )
        del body
        return await inference.answer(None, self._hang_ups)

    async def _fail(self, error: BaseException, write: Write) -> None:
        answer = told(error)
        self._exchange.outcome = answer.code
        if self._exchange.status == 0:
            self._exchange.status = answer.status
            body = open_inference_body(answer)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *answer.headers]
            await write(answer.status, [*headers, (b"x-request-id", self._exchange.request_id.encode())], [body])

    def _end(self) -> None:
        self._way.api.bodies.give_back(self._n_bytes)
        version = f"/versions/{self._version}" if self._version else ""
        self._way.ledger.end(
            self._exchange,
            method="POST",
            path=f"/v2/models/{self._model}{version}/infer",
            route="/v2/models/{model}/versions/{version}/infer" if version else "/v2/models/{model}/infer",
            client=None,
        )


@lru_cache(maxsize=256)
def _parsed(url: bytes) -> tuple[str, str] | None:
    """Give model and version, "" for none. None: it is another path, or written in an unusual way."""
    found = _PATH.fullmatch(url)
    return (found[1].decode(), (found[2] or b"").decode()) if found is not None else None
