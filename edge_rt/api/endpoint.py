"""An endpoint, and reading its request's body within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_rt.api.context import Api, Bodies
from edge_rt.api.sse import HungUpError
from edge_rt.api.status import ErrorReply, HttpError
from edge_rt.errors import InvalidRequestError

_CLOSE: Final = [(b"connection", b"close")]  # the rest of the body is not read


class Endpoint:
    """A handler as an ASGI app.

    starlette wraps plain functions so that each event of a stream passes more wrappers; errors are the boundary's here.

    error_body  writes error bodies as its protocol wants them; None takes OpenAI's
    id_header   in which its clients look for the request's id, beside x-request-id
    """

    def __init__(
        self,
        handler: Callable[[Request], Awaitable[ASGIApp]],
        *,
        error_body: Callable[[ErrorReply], bytes] | None = None,
        id_header: bytes = b"",
    ) -> None:
        self._handler = handler
        self.error_body = error_body
        self.id_header = id_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive))
        await answer(scope, receive, send)


async def read_body(request: Request, api: Api, *, max_bytes: int | None = None) -> bytes:
    """Read the whole body. Raises HttpError when it is too large, too slow or encoded, HungUpError when it breaks off,
    OverloadedError when all requests' bodies together are too large.

    The body counts until the calling task, which answers the request, ends: what is made of it lives as long.
    What Content-Length says is believed only where it makes the answer quicker.
    max_bytes  is server.max_file_bytes for files; None is server.max_body_bytes
    """
    if "upgrade" in request.headers:  # the parser takes what follows the headers for another protocol, not for a body
        raise InvalidRequestError(param="", problem="Upgrade is not supported; send plain HTTP/1.1 without that header")
    if encoding := request.headers.get("content-encoding"):
        raise HttpError(415, f"Content-Encoding {encoding[:40]!r} is not supported; send it plain", headers=_CLOSE)
    server = api.config.server
    setting = "server.max_body_bytes" if max_bytes is None else "server.max_file_bytes"
    max_bytes = server.max_body_bytes if max_bytes is None else max_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes, setting)
    try:
        async with asyncio.timeout(api.body_timeout_s):
            return await _collect(request, api.bodies, max_bytes, max(server.max_bodies_bytes, max_bytes), setting)
    except TimeoutError as exc:
        message = f"the body did not arrive within {api.body_timeout_s:g} s"
        raise HttpError(408, message, headers=_CLOSE) from exc


async def _collect(request: Request, bodies: Bodies, max_bytes: int, max_bodies_bytes: int, setting: str) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: bodies.give_back(size_bytes))
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise HungUpError
        body: bytes = message.get("body", b"")
        if size_bytes + len(body) > max_bytes:
            raise _too_large(max_bytes, setting)
        bodies.take(len(body), max_bodies_bytes)
        size_bytes += len(body)
        if not message.get("more_body", False):
            return b"".join((*parts, body)) if parts else body
        parts.append(body)


def _too_large(max_bytes: int, setting: str) -> HttpError:
    message = f"the body is larger than {max_bytes} bytes; {setting} sets the limit"
    return HttpError(413, message, headers=_CLOSE)
