"""The plain client against a server that says what each test wants: bytes, and ends of connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_rt.api.client import Client
from edge_rt.api.plain_http import ConnectingError, PlainHttp
from edge_rt.errors import DaemonLostError, DaemonUnreachableError, ModelNotFoundError

OK = b"HTTP/1.1 200 OK\r\nX-Seen: Yes\r\ncontent-length: 5\r\n\r\nhello"


@contextmanager
def serving(path: Path, *connections: list[bytes | None]) -> Iterator[list[bytes]]:
    """Answer each connection's requests with these bytes, one after the other; None keeps silent until the end."""
    seen: list[bytes] = []
    over = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        for answers in connections:
            peer, _ = listener.accept()
            with peer:
                for answer in answers:
                    received = b""
                    while b"\r\n\r\n" not in received or len(received.partition(b"\r\n\r\n")[2]) < 4:
                        received += peer.recv(65536)
                    seen.append(received)
                    if answer is None:
                        over.wait()
                    else:
                        peer.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield seen
        over.set()
        thread.join()


def plain(path: Path, timeout_s: float = 10.0) -> PlainHttp:
    return PlainHttp(path, connect_timeout_s=10.0, timeout_s=timeout_s)


def test_one_connection_serves_one_request_after_the_other(socket_dir: Path) -> None:
    chunked = b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    with serving(socket_dir / "s", [OK, chunked]) as seen:
        client = plain(socket_dir / "s")
        reply = client.post("/a", {"X-Mine": "1"}, [b"bo", b"dy"])
        assert (reply.status, reply.header("x-seen"), reply.body) == (200, "Yes", b"hello")
        reply = client.post("/b", {}, [b"more"])
        assert (reply.status, reply.body) == (400, b"hello")
        client.close()
    assert seen[0] == b"POST /a HTTP/1.1\r\nHost: edge_rt\r\nContent-Length: 4\r\nX-Mine: 1\r\n\r\nbody"
    assert seen[1].startswith(b"POST /b ")


@pytest.mark.parametrize("first", [OK, OK.replace(b"X-Seen: Yes", b"connection: close")])
def test_a_connection_that_was_closed_is_not_used_again(socket_dir: Path, first: bytes) -> None:
    with serving(socket_dir / "s", [first], [OK]):
        client = plain(socket_dir / "s")
        assert client.post("/", {}, [b"body"]).status == 200
        while client._kept and not client._kept[0].is_stale():
            pass  # until its end is seen here
        assert client.post("/", {}, [b"body"]).status == 200
        client.close()


def test_requests_under_way_have_connections_of_their_own(socket_dir: Path) -> None:
    with serving(socket_dir / "s", [OK, OK], [OK]):
        client = plain(socket_dir / "s")
        first = client._connection()
        client._keep(first, can_keep=True)
        assert client._connection() is first
        second_is_first = client._kept
        assert second_is_first == []
        first.ask(b"POST / HTTP/1.1\r\n\r\n", [b"body"])
        first.ask(b"POST / HTTP/1.1\r\n\r\n", [b"body"])
        other = client._connection()
        assert other is not first
        other.ask(b"POST / HTTP/1.1\r\n\r\n", [b"body"])
        first.close()
        other.close()


def test_the_clients_errors_say_what_happened(socket_dir: Path) -> None:
    path = socket_dir / "s"
    with pytest.raises(ConnectingError):
        plain(path).post("/", {}, [b"body"])
    with Client(path) as client, pytest.raises(DaemonUnreachableError, match="No such file"):
        client.infer("m", {})
    body = b'{"error": "x", "code": "model_not_found", "details": {"model": "m", "known": []}}'
    failed = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with serving(path, [OK[:20]], [b"nonsense\r\n\r\n"], [failed], [None]):
        for words in ("closed", "no HTTP"):
            with Client(path) as client, pytest.raises(DaemonLostError, match=words):
                client.infer("m", {})
        with Client(path) as client, pytest.raises(ModelNotFoundError):
            client.infer("m", {})
        with Client(path, timeout_s=0.01) as client, pytest.raises(DaemonLostError, match="silent"):
            client.infer("m", {})


def test_a_large_body_goes_in_as_many_writes_as_it_takes(socket_dir: Path) -> None:
    received = bytearray()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_dir / "s"))
    listener.listen()
    body = bytes(range(256)) * 40_000

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            while not received.endswith(body[-1000:]) or len(received) < len(body):
                received.extend(peer.recv(65536))
            peer.sendall(OK)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        client = plain(socket_dir / "s")
        assert client.post("/", {}, [body[:1000], body[1000:]]).status == 200
        client.close()
        thread.join()
    assert received.endswith(b"\r\n\r\n" + body)
