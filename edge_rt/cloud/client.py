"""One endpoint, one try: a request goes out, its answer streams through as it comes."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpcore2

from edge_rt.cloud import address, wire
from edge_rt.cloud.answer import Answer
from edge_rt.cloud.credential import Key, KeyFile
from edge_rt.cloud.events import EventError, EventReader
from edge_rt.cloud.retry import retry_after_s
from edge_rt.config import CloudEndpoint, dotted
from edge_rt.errors import (
    CloudAnswerError,
    CloudError,
    CloudRejectedError,
    CloudTimeoutError,
    CloudUnreachableError,
    ConfigError,
    DeadlineError,
)
from edge_rt.types import Chunk, GenerateRequest, Usage

_log = logging.getLogger(__name__)
# Its trace quotes what servers send, and they may send the key back.
logging.getLogger("httpcore2").setLevel(logging.WARNING)

_MAX_CONNECTIONS: Final = 1024  # more than the daemon has clients: a request that waited here would look like an outage
_MAX_IDLE: Final = 8
_IDLE_S: Final = 60.0  # many servers close after that
_AFTER_FINISH_S: Final = 2.0  # how long usage may come after the answer's end
_DRAIN_S: Final = 0.25  # how long the end of the body may come after [DONE]; the connection is closed without it
_ERROR_BODY_S: Final = 3.0
_HEADERS: Final = [
    (b"content-type", b"application/json"),
    (b"accept", b"text/event-stream"),
    (b"accept-encoding", b"identity"),  # nothing is unpacked, so nothing small becomes large
    (b"user-agent", b"edge_rt"),
    (b"x-edge-route", b"local"),  # another edge_rt answers itself: two that name each other must not go on for ever
]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an endpoint is, from its base_url."""

    scheme: bytes
    host: bytes
    port: int | None
    prefix: str
    socket_path: str | None


class Upstream:
    """One endpoint of the configuration. Belongs to one event loop, whose clock it uses.

    Raises ConfigError for a setting that cannot be used: the URL, the key's file, the file of certificates.
    """

    def __init__(
        self,
        name: str,
        settings: CloudEndpoint,
        *,
        environ: Mapping[str, str] = os.environ,
        resolve: address.Resolve | None = None,
    ) -> None:
        self.name, self.settings = name, settings
        self._place = _place(name, settings)
        self._keys = KeyFile(_key(name, "api_key_file"), settings.api_key_file, environ)
        if self.key is not None and self._place.scheme == b"http" and self._place.socket_path is None:
            _log.warning("the key of cloud endpoint %s goes over the network in the clear (allow_http)", name)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls() if self._place.scheme == b"https" else None,
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=_MAX_IDLE,
            keepalive_expiry=_IDLE_S,
            uds=self._place.socket_path,
            network_backend=address.GuardedNetwork(
                allow_private=settings.allow_private,
                setting=_key(name, "allow_private"),
                resolve=resolve or address.resolve,
            ),
        )

    @property
    def key(self) -> Key | None:
        """The key that the last request was sent with, or the next one will be unless its file changes."""
        return self._keys.key

    async def close(self) -> None:
        await self._pool.aclose()

    async def stream(
        self, request: GenerateRequest, *, due_at_s: float | None = None, idempotency_key: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Ask once. Closing the iterator hangs up, which stops the work at the other end.

        due_at_s  of the first text, by the loop's clock; the endpoint's own timeouts hold beside it

        The last chunk has timings, and usage, estimated where the endpoint counts nothing. Raises CloudError, and
        DeadlineError when due_at_s has come first.
        """
        clock = asyncio.get_running_loop().time
        answer = Answer(self.name, clock(), self._keys.current())
        content = wire.body(request, self.settings)
        async with self._asked(wire.path(request), content, answer, due_at_s, request, idempotency_key) as parts:
            async with aclosing(self._events(parts, answer, due_at_s, request)) as read:
                async for events in read:
                    text, calls = answer.take(events, clock())
                    if text or calls:
                        yield Chunk(text=text, tool_calls=calls)
                    if answer.is_over:
                        break
            yield answer.last(request, len(content))
            await _drained(parts)

    async def probe(self) -> tuple[float, Usage]:
        """Ask for one token; give the seconds until the first event, and what it took. Raises CloudError."""
        clock = asyncio.get_running_loop().time
        answer = Answer(self.name, clock(), self._keys.current())
        content = wire.probe(self.settings)
        async with self._asked("/chat/completions", content, answer, None, None, "") as parts:
            async with aclosing(self._events(parts, answer, None, None)) as read:
                if (events := await anext(read, None)) is None:
                    raise CloudAnswerError(endpoint=self.name, problem="its answer has no event")
                answer.take(events, clock())
                first_byte_s = clock() - answer.began_s
                # It works; what follows tells no more than what it counted.
                with suppress(CloudError, TimeoutError):
                    async with asyncio.timeout(_AFTER_FINISH_S):
                        while not answer.is_over and (events := await anext(read, None)) is not None:
                            answer.take(events, clock())
            await _drained(parts)
        return first_byte_s, answer.usage(wire.PROBE_PROMPT_TOKENS, 1, len(content))

    @asynccontextmanager
    async def _asked(
        self,
        path: str,
        content: bytes,
        answer: Answer,
        due_at_s: float | None,
        request: GenerateRequest | None,
        idempotency_key: str,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request and give the pieces of a successful answer's body. The connection is free again afterwards."""
        headers = [(b"host", self._host()), *_HEADERS]
        if answer.key is not None:
            headers.append((b"authorization", answer.key.authorization()))
        if idempotency_key:
            headers.append((b"idempotency-key", idempotency_key.encode()))
        headers.append((b"content-length", b"%d" % len(content)))
        place = self._place
        url = httpcore2.URL(scheme=place.scheme, host=place.host, port=place.port, target=place.prefix + path)
        timeouts = {"connect": self.settings.connect_timeout_s}
        asked = httpcore2.Request("POST", url, headers=headers, content=content, extensions={"timeout": timeouts})
        first_due_s = answer.began_s + self.settings.first_byte_timeout_s
        with self._failing(answer, "before it answered"):
            try:
                async with asyncio.timeout_at(min(first_due_s, math.inf if due_at_s is None else due_at_s)):
                    response = await self._pool.handle_async_request(asked)
            except TimeoutError:
                raise self._late(request, due_at_s, first_due_s) from None
        try:
            # The generator that it is, and not only the response, is closed: nothing is left for the collector.
            async with aclosing(response.aiter_stream()) as parts:
                await self._check(response, parts, answer.key)
                yield parts
        finally:
            await response.aclose()

    async def _events(
        self,
        parts: AsyncIterator[bytes],
        answer: Answer,
        due_at_s: float | None,
        request: GenerateRequest | None,
    ) -> AsyncGenerator[list[bytes], None]:
        """Give the events of each piece as it comes; the last list is empty when the stream just ends."""
        reader, settings, clock = EventReader(), self.settings, asyncio.get_running_loop().time
        first_due_s, whole_due_s = answer.began_s + settings.first_byte_timeout_s, answer.began_s + settings.timeout_s
        heard_s = clock()  # a comment is no sign that the answer goes on
        while True:
            next_due_s = heard_s + (_AFTER_FINISH_S if answer.finish_reason else settings.next_byte_timeout_s)
            due_s = min(next_due_s if answer.has_begun else first_due_s, whole_due_s)
            if due_at_s is not None and not answer.n_texts:
                due_s = min(due_s, due_at_s)
            with self._failing(answer, "in the middle of its answer"):
                try:
                    async with asyncio.timeout_at(due_s):
                        piece = await anext(parts, None)
                except TimeoutError:
                    if answer.finish_reason:
                        return
                    raise self._late(request, due_at_s, first_due_s, whole_due_s, has_begun=answer.has_begun) from None
            if piece is None:
                return
            try:
                events = reader.feed(piece)
            except EventError as exc:
                raise CloudAnswerError(
                    endpoint=self.name, problem=f"it sent {wire.shown(str(exc), answer.key)}"
                ) from exc
            if events:
                yield events
                heard_s = clock()  # after the client has taken them, as long as that may be

    def _late(
        self,
        request: GenerateRequest | None,
        due_at_s: float | None,
        first_due_s: float,
        whole_due_s: float = math.inf,
        *,
        has_begun: bool = False,
    ) -> CloudError | DeadlineError:
        """Say which limit it was."""
        now_s, settings = asyncio.get_running_loop().time(), self.settings
        if now_s >= whole_due_s:
            return CloudTimeoutError(endpoint=self.name, phase="whole answer", timeout_s=settings.timeout_s)
        if has_begun and (due_at_s is None or now_s < due_at_s):
            return CloudTimeoutError(endpoint=self.name, phase="next byte", timeout_s=settings.next_byte_timeout_s)
        if due_at_s is not None and due_at_s <= min(first_due_s, now_s):
            return DeadlineError(deadline_s=(request.deadline_s if request else None) or 0.0)
        return CloudTimeoutError(endpoint=self.name, phase="first byte", timeout_s=settings.first_byte_timeout_s)

    async def _check(self, response: httpcore2.Response, parts: AsyncIterator[bytes], key: Key | None) -> None:
        """Raise CloudError for anything but a stream of events."""
        headers = {name.lower(): value.decode("latin-1").strip() for name, value in response.headers}
        if response.status != 200:
            if 300 <= response.status < 400:
                text = "redirects are not followed; set base_url to where it really is"
            else:
                text = wire.message(await _beginning(parts), key)
            if response.status == 401:
                self._keys.doubt()
            wait_s = retry_after_s(headers.get(b"retry-after")) or 0.0
            raise CloudRejectedError(endpoint=self.name, status=response.status, message=text, retry_after_s=wait_s)
        if (coding := headers.get(b"content-encoding", "identity").lower()) not in ("", "identity"):
            coding = wire.shown(coding, key)
            raise CloudAnswerError(endpoint=self.name, problem=f"its answer is packed ({coding}), which was not asked")
        kind = headers.get(b"content-type", "")
        if kind.partition(";")[0].strip().lower() != "text/event-stream":
            text = wire.message(await _beginning(parts), key)
            kind = wire.shown(kind, key) or "nothing"
            raise CloudAnswerError(endpoint=self.name, problem=f"it answered with {kind}, not with a stream: {text}")

    def _failing(self, answer: Answer, when: str) -> _Failing:
        return _Failing(self.name, answer.key, self.settings.connect_timeout_s, when)

    def _host(self) -> bytes:
        place = self._place
        host = b"[%b]" % place.host if b":" in place.host else place.host
        return host if place.port is None else b"%b:%d" % (host, place.port)

    def _tls(self) -> ssl.SSLContext:
        try:
            return address.tls_context(self.settings.ca_file)
        except (OSError, ssl.SSLError) as exc:
            problem = f"cannot be read as certificates: {exc.strerror or exc}"
            raise ConfigError(
                key=_key(self.name, "ca_file"), problem=problem, origin=self.settings.ca_file or "the system's"
            ) from exc


class _Failing:
    """Turns the HTTP library's errors into edge_rt's. They may quote the server, and so the key."""

    def __init__(self, endpoint: str, key: Key | None, connect_timeout_s: float, when: str) -> None:
        self._endpoint, self._key, self._connect_timeout_s, self._when = endpoint, key, connect_timeout_s, when

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, httpcore2.ConnectTimeout):
            raise CloudTimeoutError(
                endpoint=self._endpoint, phase="connection", timeout_s=self._connect_timeout_s
            ) from error
        if isinstance(error, httpcore2.ConnectError):
            reason = wire.shown(address.reason(error), self._key)
            raise CloudUnreachableError(endpoint=self._endpoint, reason=reason) from None
        if isinstance(error, (httpcore2.NetworkError, httpcore2.ProtocolError)):
            problem = f"the connection broke off {self._when}: {wire.shown(address.reason(error), self._key)}"
            raise CloudAnswerError(endpoint=self._endpoint, problem=problem) from None


async def _beginning(parts: AsyncIterator[bytes]) -> bytes:
    """Read the beginning of an error's body, as far as it comes soon."""
    found = bytearray()
    try:
        async with asyncio.timeout(_ERROR_BODY_S):
            async for piece in parts:
                found += piece
                if len(found) >= wire.MAX_ERROR_BYTES:
                    break
    except (TimeoutError, httpcore2.NetworkError, httpcore2.ProtocolError):
        pass  # what has come is shown; the status says the rest
    return bytes(found[: wire.MAX_ERROR_BYTES])


async def _drained(parts: AsyncIterator[bytes]) -> None:
    """Read the body's end, without which its connection cannot be used again."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await anext(parts, None) == b"":
                pass
    except (TimeoutError, httpcore2.NetworkError, httpcore2.ProtocolError):
        pass  # closed with the response


def _key(name: str, field: str) -> str:
    return dotted(("cloud", name, field))


def _place(name: str, settings: CloudEndpoint) -> _Place:
    """Take a base_url apart. Raises ConfigError."""

    def bad(problem: str, field: str = "base_url") -> ConfigError:
        return ConfigError(key=_key(name, field), problem=problem, origin="configuration")

    if not settings.model:
        raise bad("must name the model that the endpoint shall answer with", "model")
    url = settings.base_url
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        if not path.startswith("/") or "\0" in path:
            raise bad(f"unix: needs an absolute path, got {path!r}")
        return _Place(b"http", b"edge_rt", None, "/v1", path)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise bad(f"is no URL: {exc}") from exc
    if parts.username is not None or parts.password is not None:
        raise bad("must not hold a user or password; use api_key_file")
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.query or parts.fragment:
        raise bad(f"must be https://HOST/v1 or unix:PATH, got {url!r}")
    if parts.scheme == "http" and not settings.allow_http:
        raise bad(f"{url!r} is not encrypted; use https, or set allow_http for a network you trust")
    try:
        host = parts.hostname.encode("ascii" if ":" in parts.hostname else "idna")
    except UnicodeError as exc:
        raise bad(f"{parts.hostname!r} is no name of a host") from exc
    return _Place(parts.scheme.encode(), host, port, parts.path.rstrip("/"), None)
