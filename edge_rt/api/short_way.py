"""Inferences with binary tensors over the Unix socket, past uvicorn's cycle, ASGI and the router.

Those take longer than everything else that the front process does for such a request. Whatever is unusual about one is
left to the long way, which answers the same bytes: other paths and methods, JSON alone, TCP, headers that change how a
body is read or what the cache may give, and bodies that are too large, too slow or beyond server.max_bodies_bytes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Final, Protocol

from edge_rt import logs
from edge_rt.api.callers import Peer, tenant
from edge_rt.api.context import Api
from edge_rt.api.exchange import HUNG_UP, Exchange, Ledger, told
from edge_rt.api.kserve_infer import (
    HEADER_LENGTH,
    JOINED_BYTES,
    Caller,
    Converter,
    Headers,
    Inference,
    described,
    split,
)
from edge_rt.api.kserve_plan import Plan, Plans
from edge_rt.api.loans import Loan
from edge_rt.api.read_buffers import READ_BYTES, Buffer, LentBuffer, ReadBuffers
from edge_rt.api.sse import HangUps, HungUpError
from edge_rt.api.status import open_inference_body
from edge_rt.errors import EdgeRtError, OverloadedError, ShuttingDownError, WorkerLostError
from edge_rt.tensor_types import Data, Datatype, Reply, TensorAnswer, TensorRequest

_PATH: Final = re.compile(rb"/v2/models/([\w.:~-]+)(?:/versions/([\w.:~-]+))?/infer")
# Smaller bodies are copied. With copies of 100 kB the heap grew by 0.2 kB a request, and without them it did not; that
# they leave holes in it is a guess.
_TAKEN_BYTES: Final = READ_BYTES // 8
_MAX_ARRIVING_BYTES: Final = 16 * 2**20  # that are made room for before they are here: a head is quickly sent
_NOTHING: Final = memoryview(b"")
_MAX_HEADS: Final = 64
_MAX_HEAD_BYTES: Final = 2048  # of one that is remembered
_MAX_JSON_BYTES: Final = 4096  # likewise
_HEAD_END: Final = b"\r\n\r\n"
_NO_ID: Final = (b"x-request-id", b"")
_LENGTH: Final = HEADER_LENGTH.encode()
_LONG: Final = frozenset({b"cache-control", b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})


class _Expected:
    """The last answer but for its tensors' bytes: the next one may be the same, and the worker write it itself."""

    __slots__ = ("date_s", "headers", "json", "lines", "outputs", "place", "variant")

    def __init__(self, headers: Headers, json: bytes, answer: TensorAnswer) -> None:
        self.date_s, self.lines = 0, b""  # of the second in which the head was written last
        self.headers, self.json, self.place, self.variant = headers, json, answer.place, answer.variant
        self.outputs: tuple[tuple[str, Datatype, tuple[int, ...], int], ...] = tuple(
            (tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) for tensor in answer.outputs
        )


class _Head:
    """What a request's head says, and what the last JSON behind it did.

    version  "" for none
    length   of the JSON, as it was sent
    size     of the body; held_bytes: the most that it holds
    plan     of json, which was taken without a task before
    expected  what that was answered
    """

    __slots__ = ("expected", "held_bytes", "json", "length", "model", "path", "plan", "route", "size", "version")

    def __init__(self, model: str, version: str, length: str, size: int) -> None:
        self.model, self.version, self.length, self.size = model, version, length, size
        self.held_bytes = max(size, READ_BYTES) if size >= _TAKEN_BYTES else size
        of_version = f"/versions/{version}" if version else ""
        self.path = f"/v2/models/{model}{of_version}/infer"
        self.route = "/v2/models/{model}/versions/{version}/infer" if version else "/v2/models/{model}/infer"
        self.json = b""
        self.plan: Plan | None = None
        self.expected: _Expected | None = None


class ShortWay:
    """Takes what can go this way. api is the one of the long way: they count the same bodies."""

    def __init__(self, api: Api, *, access_log: bool) -> None:
        self.api = api
        self.n_arriving_bytes = 0
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()
        self._begun: _Head
        self.ledger = Ledger(api.telemetry, access_log=access_log)
        self.convert, self.plans = Converter(), Plans(api.config.limits.max_tensor_bytes)
        server = api.config.server
        self._max_body_bytes = server.max_body_bytes
        self.max_bodies_bytes = max(server.max_bodies_bytes, server.max_body_bytes)

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
        if not (size.isdigit() and len(size) < 20 and 0 < int(size) <= self._max_body_bytes):
            return None
        self._begun = _Head(*path, length.decode("latin-1"), int(size))
        return self._request(self._begun, headers, peer, hang_ups)

    def remember(self, head: bytes) -> None:
        """Remember the bytes of the head that begin has just taken: the next request with the same is not parsed.

        Not where it names its request.
        """
        if len(head) <= _MAX_HEAD_BYTES and b"x-request-id" not in head.lower():
            self._heads[head] = self._begun
            if len(self._heads) > _MAX_HEADS:
                self._heads.popitem(last=False)

    def begin_again(self, head: bytes, peer: Peer | None, hang_ups: HangUps) -> ShortRequest | None:
        """Take a request whose head is remembered; None: it is not."""
        if peer is None or (begun := self._heads.get(head)) is None:
            return None
        return self._request(begun, (), peer, hang_ups)

    def _request(
        self, head: _Head, headers: Sequence[tuple[bytes, bytes]], peer: Peer, hang_ups: HangUps
    ) -> ShortRequest | None:
        if self.n_arriving_bytes + head.held_bytes > _MAX_ARRIVING_BYTES:
            return None
        self.n_arriving_bytes += head.held_bytes
        exchange = self.ledger.begin(headers, peer)
        exchange.tenant = tenant(peer, None, ())
        return ShortRequest(self, exchange, head, hang_ups)


class Connection(Protocol):
    """What a request is answered to."""

    def write_now(self, status: int, headers: Headers, parts: Sequence[Data]) -> bool:
        """Write a whole answer if nothing has to be waited for; False: write must be asked."""
        ...

    async def write(self, status: int, headers: Headers, parts: Sequence[Data]) -> None: ...

    def loan(self, model: str) -> Loan | None:
        """Give the connection to be lent to the model's worker, which answers; None: it cannot be."""
        ...

    def head_of(self, status: int, headers: Headers) -> bytes: ...

    def written(self, rest: bytes) -> None:
        """Write the rest of an answer that a worker has begun, which may be none."""
        ...

    def take_back(self) -> bool:
        """Take an answer back that a worker may write. False: it has written all of it, or maybe a part.

        A connection with a part of an answer is ended.
        """
        ...

    def is_answered(self) -> bool:
        """Say whether a whole answer has been written."""
        ...

    def spawn(self, answering: Coroutine[None, None, None]) -> None:
        """Answer in a task that a shutdown waits for."""
        ...


class ShortRequest:
    """One request: its body is taken, then it is answered; or it is given up while the body is not whole."""

    __slots__ = (
        "_body",
        "_buffer",
        "_buffers",
        "_connection",
        "_drop",
        "_exchange",
        "_hang_ups",
        "_head",
        "_n_bytes",
        "_plan",
        "_reply",
        "_size",
        "_start",
        "_way",
    )

    def __init__(self, way: ShortWay, exchange: Exchange, head: _Head, hang_ups: HangUps) -> None:
        self._way, self._exchange, self._hang_ups = way, exchange, hang_ups
        self._head, self._size = head, head.size
        self._n_bytes = 0  # of it that are here
        self._body = _NOTHING
        self._connection: Connection
        self._buffer: Buffer | None = None  # which it lies in, if that is one of the connections'
        self._drop: Callable[[], None] | None = None  # while it is computed without a task
        self._reply: Reply | None = None  # that the worker may write

    def begin_body(self, buffers: ReadBuffers, start: int, n_bytes: int) -> int:
        """Begin the body with what lies from start on in the buffer that was read to; give how much of it that is.

        A large body stays there, and the buffer with it.
        """
        n_bytes = min(n_bytes, self._size)
        end = start + self._size
        view = memoryview(buffers.current.memory)
        if self._size >= _TAKEN_BYTES and end <= len(view):
            self._buffers, self._buffer, self._start = buffers, buffers.take(), start
            self._body = view[start:end]
        else:
            self._body = memoryview(bytearray(self._size))
            self._body[:n_bytes] = view[start : start + n_bytes]
        return n_bytes

    def room(self) -> memoryview:
        """Give where the rest of the body goes."""
        return self._body[self._n_bytes :]

    def received(self, n_bytes: int) -> bool:
        """Count a part of the body. False: it must go the long way, which says that there is no room."""
        try:
            self._way.api.bodies.take(n_bytes, self._way.max_bodies_bytes)
        except OverloadedError:
            return False
        self._n_bytes += n_bytes
        return True

    def is_whole(self) -> bool:
        return self._n_bytes == self._size

    def give_up(self, n_more: int = 0) -> memoryview:
        """Give the body as far as it is here, n_more bytes of it uncounted. It is somebody else's from now on."""
        self._way.n_arriving_bytes -= self._head.held_bytes
        self._way.api.bodies.give_back(self._n_bytes)
        if self._buffer is not None:
            self._buffer.drop()
        return self._body[: self._n_bytes + n_more]

    def hung_up(self) -> None:
        """Hear that the client has left before its body was whole, or while it was computed without a task."""
        if (drop := self._drop) is not None:
            self._drop = None
            drop()
        else:
            self._way.n_arriving_bytes -= self._head.held_bytes
        self._exchange.status, self._exchange.outcome = HUNG_UP, "hung_up"
        self._end()

    def answer(self, connection: Connection) -> None:
        """Run it, now that its body is whole, and write its answer, whatever becomes of it."""
        self._connection = connection
        self._way.n_arriving_bytes -= self._head.held_bytes
        token = logs.request_id.set(self._exchange.request_id)
        try:
            if not self._begin_now():
                connection.spawn(self._answer(None))
        except Exception as exc:  # noqa: BLE001  the request boundary: nothing may end without an answer
            connection.spawn(self._answer(exc))
        finally:
            logs.request_id.reset(token)

    # Without a task.

    def _begin_now(self) -> bool:
        head = self._head
        if head.version:
            return False
        plan, n_json = head.plan, len(head.json)
        is_checked = plan is not None and self._body[:n_json] == head.json
        if plan is None or not is_checked:
            json, binary = split(head.length, self._body)
            plan, n_json = self._way.plans.read(json), len(json)
            if not plan.gives_binary:
                return False
        else:
            binary = self._body[n_json:]
        if (inputs := plan.plain_inputs(binary)) is None:
            return False
        self._reply = self._expected_reply() if is_checked else None
        memory = None
        if isinstance(self._buffer, LentBuffer) and self._buffer.model == head.model:
            memory = (self._buffer, self._start + n_json)
        request = plan.request(head.model, "", inputs, self._exchange.tenant, reply=self._reply, memory=memory)
        if (drop := self._way.api.runtime.infer_now(request, self._ended, is_checked=is_checked)) is None:
            return False
        self._plan, self._drop = plan, drop
        self._hang_ups.add(self.hung_up)
        if not is_checked and n_json <= _MAX_JSON_BYTES:
            head.plan, head.json, head.expected = plan, bytes(self._body[:n_json]), None
        return True

    def _expected_reply(self) -> Reply | None:
        """Give what the worker may write if the answer is like the last one."""
        if (expected := self._head.expected) is None or (loan := self._connection.loan(self._head.model)) is None:
            return None
        if expected.date_s != (now_s := int(time.time())):
            expected.date_s = now_s
            expected.lines = self._connection.head_of(200, [*expected.headers, _NO_ID]).removesuffix(_HEAD_END)
        return Reply(
            loan=loan,
            head=b"".join((expected.lines, self._exchange.request_id.encode(), _HEAD_END, expected.json)),
            outputs=expected.outputs,
            place=expected.place,
            variant=expected.variant,
        )

    def _id_header(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._exchange.request_id.encode()

    def _ended(self, reply: TensorAnswer | EdgeRtError | TensorRequest) -> None:
        self._drop = None
        self._hang_ups.remove(self.hung_up)
        token = logs.request_id.set(self._exchange.request_id)
        try:
            if isinstance(reply, TensorAnswer) and reply.n_written:
                self._finish_written(reply)
            elif not self._connection.take_back():
                self._lose()
            elif isinstance(reply, TensorAnswer):
                self._write(reply)
            elif isinstance(reply, TensorRequest):
                self._connection.spawn(self._answer(None, reply))
            else:
                self._connection.spawn(self._answer(reply))
        except Exception as exc:  # noqa: BLE001  as above
            self._connection.spawn(self._answer(exc))
        finally:
            logs.request_id.reset(token)

    def _write(self, answer: TensorAnswer) -> None:
        headers, json, tensors = described(self._plan, self._head.model, answer)
        parts: list[Data] = [json, *tensors]
        if sum(map(len, parts)) <= JOINED_BYTES:
            parts = [b"".join(parts)]
            if self._head.plan is self._plan and not self._plan.options.stream and answer.energy is None:
                self._head.expected = _Expected(list(headers), json, answer)
        self._exchange.status = 200
        headers.append(self._id_header())
        if self._connection.write_now(200, headers, parts):
            self._end()
        else:
            self._connection.spawn(self._finish(headers, parts))

    def _finish_written(self, answer: TensorAnswer) -> None:
        """Write what of an answer the worker could not."""
        assert self._reply is not None
        self._exchange.status = 200
        rest = b""
        if answer.outputs:
            rest = b"".join((self._reply.head, *(tensor.data for tensor in answer.outputs)))[answer.n_written :]
        self._connection.written(rest)
        self._end()

    def _lose(self) -> None:
        """End an answer that a worker began which has died since: its client has all of it, or nobody can end it."""
        self._exchange.status = 200
        if not self._connection.is_answered():
            self._exchange.outcome = WorkerLostError.code
        self._end()

    async def _finish(self, headers: Headers, parts: Sequence[Data]) -> None:
        try:
            await self._connection.write(200, headers, parts)
        finally:
            self._end()

    def cut_off(self) -> None:
        """End it for a shutdown that cannot wait any longer, if it is computed without a task."""
        if (drop := self._drop) is not None:
            self._drop = None
            self._hang_ups.remove(self.hung_up)
            drop()
            if self._connection.take_back():
                self._connection.spawn(self._answer(ShuttingDownError()))
            else:
                self._lose()

    # In a task.

    async def _answer(self, error: Exception | None, request: TensorRequest | None = None) -> None:
        """Answer with an error, or with what an inference gives: of request, or of the body."""
        exchange = self._exchange
        logs.request_id.set(exchange.request_id)  # the task has a context of its own
        try:
            if error is not None:
                raise error
            inference = await self._inference(request)
            headers, parts = await inference.answer(None, self._hang_ups)
            exchange.status = 200
            headers.append((b"x-request-id", exchange.request_id.encode()))
            await self._connection.write(200, headers, parts)
        except HungUpError:
            exchange.status, exchange.outcome = exchange.status or HUNG_UP, "hung_up"
        except asyncio.CancelledError:  # only the server's last resort in a shutdown cancels a request
            await self._fail(ShuttingDownError())
        except Exception as exc:  # noqa: BLE001  as above
            await self._fail(exc)
        finally:
            self._end()

    async def _inference(self, request: TensorRequest | None) -> Inference:
        way, caller = self._way, Caller(tenant=self._exchange.tenant, peer=self._exchange.peer)
        if request is not None:
            return Inference.of(way.api, self._plan, caller, way.convert, request)
        head = self._head
        return await Inference.read(
            way.api, self._body, head.length, caller, way.convert, way.plans, model=head.model, version=head.version
        )

    async def _fail(self, error: BaseException) -> None:
        answer = told(error)
        self._exchange.outcome = answer.code
        if self._exchange.status == 0:
            self._exchange.status = answer.status
            body = open_inference_body(answer)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *answer.headers]
            headers.append((b"x-request-id", self._exchange.request_id.encode()))
            await self._connection.write(answer.status, headers, [body])

    def _end(self) -> None:
        self._body = _NOTHING  # the connection knows this request until its next one comes
        if self._buffer is not None:
            if self._exchange.status == 200 and self._exchange.outcome == "ok":
                self._buffers.give_back(self._buffer)
            else:  # something may still look at it
                self._buffer.drop()
        self._buffer = None
        self._way.api.bodies.give_back(self._n_bytes)
        head = self._head
        self._way.ledger.end(self._exchange, method="POST", path=head.path, route=head.route, client=None)


@lru_cache(maxsize=256)
def _parsed(url: bytes) -> tuple[str, str] | None:
    """Give model and version, "" for none. None: it is another path, or written in an unusual way."""
    found = _PATH.fullmatch(url)
    return (found[1].decode(), (found[2] or b"").decode()) if found is not None else None
