from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from edge_rt.api.callers import Peer
from edge_rt.api.listen import bind_unix
from edge_rt.api.server import MAX_HEAD_BYTES, PeerProtocol, Server

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Keeps what it saw; waits in a request to /wait until released."""

    def __init__(self) -> None:
        self.peers: list[Peer | None] = []
        self.waiting = asyncio.Event()
        self.release = asyncio.Event()
        self.gave_up = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.peers.append(scope["state"]["peer"])
        if scope["path"] == "/wait":
            self.waiting.set()
            await self.release.wait()
        if scope["path"] == "/body":
            self.waiting.set()
            while (await receive()).get("more_body", False):
                pass
        if scope["path"] == "/flood":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(2):  # the second waits for room
                await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
            self.gave_up.set()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class HurriedProtocol(PeerProtocol):
    head_timeout_s = 0.01


class ImpatientProtocol(PeerProtocol):
    send_timeout_s = 0.01


def serving(
    socket_dir: Path,
    scenario: Callable[[App, Server, Path], Awaitable[None]],
    *,
    protocol: type[PeerProtocol] = PeerProtocol,
    max_connections: int = 512,
) -> None:
    async def run() -> None:
        app, path = App(), socket_dir / "s"
        server = Server(app, protocol=protocol, max_connections=max_connections)
        task = asyncio.create_task(server.serve(sockets=[bind_unix(path, mode=0o600)]))
        await server.ready.wait()
        await scenario(app, server, path)
        server.stop(0.0)
        await task

    asyncio.run(run())


async def ask(path: Path, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(sent)
    answer = await reader.read(65536)
    writer.close()
    await writer.wait_closed()
    return answer


def test_a_request_knows_its_peer(socket_dir: Path) -> None:
    async def scenario(app: App, _: Server, path: Path) -> None:
        answer = await ask(path, GET)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
        assert app.peers == [Peer(pid=os.getpid(), uid=os.getuid(), gid=os.getgid())]

    serving(socket_dir, scenario)


def test_an_answers_head_and_body_come_in_one_piece(socket_dir: Path) -> None:
    async def scenario(_: App, __: Server, path: Path) -> None:
        for _ in range(3):
            assert (await ask(path, GET)).endswith(b"\r\n\r\nok")  # one read of it all
        expecting = b"POST /body HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n"
        assert await ask(path, expecting) == b"HTTP/1.1 100 Continue\r\n\r\n"
        head = await ask(path, GET.replace(b"GET", b"HEAD"))
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.endswith(b"content-length: 2\r\n\r\n")

    serving(socket_dir, scenario)


def test_pipelined_requests_are_each_answered_whole(socket_dir: Path) -> None:
    async def scenario(_: App, __: Server, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(GET * 3)
        for _ in range(3):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readexactly(2) == b"ok"
        writer.close()
        await writer.wait_closed()

    serving(socket_dir, scenario)


def test_an_endless_head_is_cut_off(socket_dir: Path) -> None:
    async def scenario(app: App, _: Server, path: Path) -> None:
        head = b"GET / HTTP/1.1\r\nx: "
        assert await ask(path, head + b"y" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n") != b""
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(head + b"y" * MAX_HEAD_BYTES)
        assert await reader.read() == b""
        writer.close()
        assert len(app.peers) == 1

    serving(socket_dir, scenario)


def test_an_idle_connection_is_closed_after_the_head_timeout(socket_dir: Path) -> None:
    async def scenario(_: App, server: Server, path: Path) -> None:
        for sent in (b"", b"GET / HT"):
            assert await ask(path, sent) == b""
        assert not server.server_state.connections

    serving(socket_dir, scenario, protocol=HurriedProtocol)


@pytest.mark.parametrize(
    "begun",
    [
        b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nt: ",
        b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nx: ",
    ],
    ids=["trailers", "head of the next request"],
)
def test_what_the_parser_keeps_behind_a_body_is_bounded_too(socket_dir: Path, begun: bytes) -> None:
    async def scenario(app: App, server: Server, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(begun)
        await app.waiting.wait()
        writer.write(b"y" * (4 * MAX_HEAD_BYTES))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert not server.server_state.connections
        writer.close()
        app.release.set()

    serving(socket_dir, scenario)


def test_a_client_that_does_not_read_is_cut_off(socket_dir: Path) -> None:
    async def scenario(app: App, server: Server, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await app.gave_up.wait()
        assert not server.server_state.connections
        writer.close()

    serving(socket_dir, scenario, protocol=ImpatientProtocol)


BODY = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf"
WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("idle", [b"", b"GET / HT", BODY], ids=["idle", "half a head", "half a body"])
def test_connections_that_only_sit_there_make_room_for_new_ones(socket_dir: Path, idle: bytes) -> None:
    async def scenario(app: App, server: Server, path: Path) -> None:
        busy = asyncio.create_task(ask(path, WAIT))
        await app.waiting.wait()
        app.waiting.clear()
        readers = []
        for _ in range(9):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(idle)
            readers.append((reader, writer))
            if idle == BODY:
                await app.waiting.wait()
                app.waiting.clear()
        assert (await ask(path, GET)).endswith(b"ok")
        assert len(server.server_state.connections) <= 4
        assert await readers[0][0].read() == b""
        app.release.set()
        assert (await busy).endswith(b"ok")
        for _, writer in readers:
            writer.close()

    serving(socket_dir, scenario, max_connections=4)


def test_a_connection_is_refused_where_all_others_are_being_answered(socket_dir: Path) -> None:
    async def scenario(app: App, server: Server, path: Path) -> None:
        busy = [asyncio.create_task(ask(path, WAIT)) for _ in range(2)]
        while len(app.peers) < 2:  # noqa: ASYNC110 - nothing else tells of the second one
            await asyncio.sleep(0)
        answer = await ask(path, GET)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")
        assert b"limit of 2 connections" in answer
        app.release.set()
        assert [(await task).endswith(b"ok") for task in busy] == [True, True]

    serving(socket_dir, scenario, max_connections=2)


def test_stop_closes_idle_connections_and_waits_for_busy_ones(socket_dir: Path) -> None:
    async def scenario(app: App, server: Server, path: Path) -> None:
        idle_reader, idle = await asyncio.open_unix_connection(path)
        idle.write(GET)
        assert (await idle_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        busy = asyncio.create_task(ask(path, b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"))
        await app.waiting.wait()
        server.stop(60.0)
        assert await idle_reader.read() == b""
        idle.close()
        assert not busy.done()
        app.release.set()
        assert (await busy).endswith(b"ok")

    serving(socket_dir, scenario)


def test_stop_does_not_wait_longer_than_its_grace(socket_dir: Path) -> None:
    async def scenario(app: App, server: Server, path: Path) -> None:
        busy = asyncio.create_task(ask(path, b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"))
        await app.waiting.wait()
        server.stop(0.0)
        assert (await busy).startswith(b"HTTP/1.1 500")  # uvicorn's word for this app; the boundary has its own

    serving(socket_dir, scenario)


def test_tcp_requests_have_no_peer() -> None:
    async def run() -> None:
        app = App()
        server = Server(app)
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await server.ready.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await reader.readuntil(b"ok")
        writer.close()
        await writer.wait_closed()
        assert app.peers == [None]
        server.stop(0.0)
        await task

    asyncio.run(run())
