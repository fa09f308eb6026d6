from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.peers.append(scope["state"]["peer"])
        if scope["path"] == "/wait":
            self.waiting.set()
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class HurriedProtocol(PeerProtocol):
    head_timeout_s = 0.01


def serving(
    socket_dir: Path,
    scenario: Callable[[App, Server, Path], Awaitable[None]],
    *,
    protocol: type[PeerProtocol] = PeerProtocol,
) -> None:
    async def run() -> None:
        app, path = App(), socket_dir / "s"
        server = Server(app, protocol=protocol)
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
