"""Shared memory: what is taken, whose it is, how long it lives, and what a hostile client can do with it."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import select
import socket
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_rt.api.callers import Peer
from edge_rt.api.context import Api
from edge_rt.api.regions import Regions, RegionServer
from edge_rt.api.shm_client import SharedMemory
from edge_rt.api.status import reply
from edge_rt.config import Config, Server
from edge_rt.errors import ConfigError, DaemonUnreachableError, EdgeRtError, InvalidRequestError, OverloadedError
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import Tensor, TensorRegion
from edge_rt.worker.regions import fetch, put
from tests.api.asgi import PEER, Call, FakeTensorRuntime, app_of
from tests.patience import PATIENCE_S

UID = PEER.uid


def memfd(size_bytes: int = 4096, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def regions(**limits: int) -> Regions:
    return Regions(**{"max_regions": 4, "max_bytes": 2**20, **limits})


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def mode_of(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


# The registry


def test_a_sealed_memfd_can_be_leased_and_cannot_shrink() -> None:
    known, fd = regions(), memfd()
    name, size_bytes = known.register(fd, UID)
    assert (len(name), size_bytes) == (32, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 100)
    with known.lease(name, 96, 4000, UID) as region:
        assert (region.offset, region.size_bytes) == (96, 4000)
        assert os.stat(region.path).st_ino == region.inode  # noqa: PTH116  the file behind the link
    known.unregister(name, UID)
    assert not is_open(fd)


def test_a_region_lives_on_under_a_request() -> None:
    known, fd = regions(), memfd()
    name, _ = known.register(fd, UID)
    with known.lease(name, 0, 1, UID), known.lease(name, 1, 1, UID):
        known.unregister(name, UID)
        assert is_open(fd)
        with pytest.raises(InvalidRequestError, match="no region"), known.lease(name, 0, 1, UID):
            pass
    assert not is_open(fd)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: memfd(seals=0), InvalidRequestError),
        (lambda: memfd(seals=fcntl.F_SEAL_GROW), InvalidRequestError),
        (lambda: memfd(0), InvalidRequestError),
        (lambda: os.open("/dev/null", os.O_RDWR), InvalidRequestError),
        (lambda: os.open("/", os.O_RDONLY), InvalidRequestError),
        (lambda: os.open(__file__, os.O_RDONLY), InvalidRequestError),
        (lambda: os.eventfd(0), InvalidRequestError),
        (lambda: socket.socket(socket.AF_UNIX).detach(), InvalidRequestError),
        (lambda: memfd(2**20 + 1), OverloadedError),
        (lambda: memfd(2**40), OverloadedError),
    ],
)
def test_what_is_not_taken(make: Callable[[], int], error: type[EdgeRtError]) -> None:
    known, fd = regions(), make()
    with pytest.raises(error):
        known.register(fd, UID)
    assert is_open(fd)  # still the caller's
    os.close(fd)


def test_there_are_limits_on_count_and_bytes() -> None:
    known = regions(max_regions=2, max_bytes=10_000)
    first = [known.register(memfd(4096), UID)[0] for _ in range(2)]
    with pytest.raises(OverloadedError, match=r"server\.max_regions\)"):
        known.register(fd := memfd(4096), UID)
    known.unregister(first[0], UID)
    with pytest.raises(OverloadedError, match=r"server\.max_regions_bytes"):
        known.register(larger := memfd(8192), UID)
    known.register(fd, UID)
    os.close(larger)


@pytest.mark.parametrize(("offset", "size_bytes"), [(0, 4097), (4096, 1), (4000, 97), (2**62, 1), (0, 2**62)])
def test_a_part_must_lie_inside(offset: int, size_bytes: int) -> None:
    known = regions()
    name, _ = known.register(memfd(), UID)
    with pytest.raises(InvalidRequestError, match="not inside"), known.lease(name, offset, size_bytes, UID):
        pass


def test_another_users_region_is_as_good_as_unknown() -> None:
    known = regions()
    name, _ = known.register(memfd(), UID)
    with pytest.raises(InvalidRequestError, match="no region"), known.lease(name, 0, 1, UID + 1):
        pass
    with pytest.raises(InvalidRequestError, match="no region"):
        known.unregister(name, UID + 1)
    with known.lease(name, 0, 1, None):  # over gRPC it is the name that counts
        pass


# What the worker does with a region


@pytest.fixture
def leased() -> Iterator[TensorRegion]:
    known = regions()
    name, _ = known.register(memfd(), UID)
    with known.lease(name, 0, 8, UID) as region:
        yield region
    known.unregister(name, UID)


def tensor(region: TensorRegion | None, data: bytes = b"") -> Tensor:
    return Tensor(name="x", datatype="UINT8", shape=(8,), data=data, region=region)


def test_tensors_are_read_and_written(leased: TensorRegion) -> None:
    placed = put(tensor(None, b"12345678"), replace(leased, offset=16, size_bytes=100))
    assert placed.region == replace(leased, offset=16, size_bytes=8)
    assert placed.data == b""
    assert fetch(placed) == tensor(None, b"12345678")
    assert fetch(tensor(leased)).data == bytes(8)
    assert fetch(tensor(None, b"87654321")).data == b"87654321"


def test_what_is_read_is_a_copy(leased: TensorRegion) -> None:
    read = fetch(tensor(leased))
    put(tensor(None, b"changed!"), leased)
    assert read.data == bytes(8)


def test_an_output_that_does_not_fit_is_refused_and_writes_nothing(leased: TensorRegion) -> None:
    with pytest.raises(InvalidRequestError, match="has 4 bytes for output x, which takes 8"):
        put(tensor(None, b"12345678"), replace(leased, size_bytes=4))
    assert fetch(tensor(leased)).data == bytes(8)


def test_a_descriptor_that_is_another_file_by_now_is_not_touched(leased: TensorRegion, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secrets!")
    for gone in (
        replace(leased, path=str(secret)),
        replace(leased, path=str(tmp_path / "none")),
        replace(leased, inode=1),
    ):
        with pytest.raises(InvalidRequestError, match=r"gone|cannot be used"):
            fetch(tensor(gone))
        with pytest.raises(InvalidRequestError, match=r"gone|cannot be used"):
            put(tensor(None, b"12345678"), gone)
    assert secret.read_bytes() == b"secrets!"


def test_memory_that_ends_or_cannot_be_written_is_an_error_of_the_request() -> None:
    known = regions()
    name, _ = known.register(memfd(4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE), UID)
    with known.lease(name, 0, 8, UID) as region:
        assert fetch(tensor(region)).data == bytes(8)
        with pytest.raises(InvalidRequestError, match="cannot be used"):
            put(tensor(None, b"12345678"), region)
        with pytest.raises(InvalidRequestError, match="ends 4 bytes before"):
            fetch(tensor(replace(region, offset=4092)))


# The socket


@asynccontextmanager
async def serving(known: Regions, path: Path, **settings: Any) -> AsyncIterator[RegionServer]:
    server = RegionServer(known, path, Server(**settings))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)


def with_server(path: Path, talk: Callable[[], Any], known: Regions | None = None, **settings: Any) -> Any:
    """Run a blocking client beside a server."""

    async def run() -> Any:
        async with serving(known or regions(), path, **settings):
            return await asyncio.wait_for(asyncio.to_thread(talk), 20)

    return asyncio.run(run())


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ert-") as directory:
        yield Path(directory) / "m"


def test_the_client_makes_registers_and_forgets_regions(path: Path) -> None:
    known = regions()

    def talk() -> None:
        with SharedMemory(path) as shared:
            with shared.region(5000) as region:
                assert shared.regions() == {region.name: 5000}
                region.buffer[:3] = b"abc"
                with known.lease(region.name, 0, 8, os.getuid()) as part:
                    assert fetch(tensor(part)).data == b"abc\0\0\0\0\0"
                    put(tensor(None, b"12345678"), part)
                assert region.buffer[:8] == b"12345678"
            assert shared.regions() == {}
            with pytest.raises(InvalidRequestError, match="not one of this connection"):
                shared.unregister(region.name)
            with pytest.raises(OverloadedError, match="max_regions_bytes"):
                shared.region(2**21)
            unsealed = memfd(seals=0)
            with pytest.raises(InvalidRequestError, match="F_SEAL_SHRINK"):
                shared.register(unsealed)
            os.close(unsealed)

    with_server(path, talk, known)
    with pytest.raises(DaemonUnreachableError):
        SharedMemory(path)


def test_regions_go_with_their_connection(path: Path) -> None:
    known = regions()

    def talk() -> None:
        with SharedMemory(path) as keeper:
            kept = keeper.region(100)
            with SharedMemory(path) as shared:
                lost = shared.region(100)
                with pytest.raises(InvalidRequestError, match="not one of this connection"):
                    shared.unregister(kept.name)
            keeper.regions()  # answered after the other's end was seen
            with known.lease(kept.name, 0, 1, os.getuid()):
                pass
            with pytest.raises(InvalidRequestError, match="no region"), known.lease(lost.name, 0, 1, os.getuid()):
                pass

    with_server(path, talk, known)


def test_odd_packets_are_answered_and_leak_no_descriptor(path: Path) -> None:
    def send(sock: socket.socket, packet: bytes, *fds: int) -> dict[str, Any]:
        sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
        answer: dict[str, Any] = json.loads(sock.recv(65536))
        return answer

    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def talk() -> None:
        fds = [memfd() for _ in range(6)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(path))
            assert send(sock, b'{"op":"status"}') == {"regions": []}  # it has accepted the connection
            before = n_open()
            register = b'{"op":"register"}'
            for packet, sent, word in (
                (register, [], "0 descriptors"),
                (register, fds[:2], "2 descriptors"),
                (register, fds, "more than 4 descriptors"),
                (b'{"op":"status"}', fds[:1], "1 descriptors"),
                (b"\xff", fds[:1], "not a message"),
                (b"{}", [], "not a message"),
                (b"[" * 4000, [], "not a message"),
                (b'{"op":"status","x":1}', [], "not a message"),
                (b'{"op":"unregister"}', [], "not one of"),
                (b"x" * 5000, [], "longer"),
            ):
                assert word in send(sock, packet, *sent)["error"]
            assert "region" in send(sock, register, fds[0])
            assert len(send(sock, b'{"op":"status"}')["regions"]) == 1
            for thread in threading.enumerate():
                if thread.name == "close":
                    thread.join()
            assert n_open() == before + 1
        for fd in fds:
            os.close(fd)

    with_server(path, talk)


def test_connections_have_a_limit(path: Path) -> None:
    def talk() -> None:
        with SharedMemory(path) as first:
            first.regions()
            second = SharedMemory(path)
            with pytest.raises(OverloadedError):
                second.regions()
            second.close()
            assert first.regions() == {}

    with_server(path, talk, max_regions=1)


def test_an_answer_that_came_before_the_connection_was_closed_is_read(path: Path) -> None:
    def refuse() -> None:
        sock, _ = listener.accept()
        assert select.select([sock], [], [], 10)[0]  # the question is there, and is never read
        sock.send(reply(OverloadedError(resource="connections", limit=1, setting="server.max_regions")).body)
        sock.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=refuse)
        thread.start()
        with SharedMemory(path) as shared, pytest.raises(OverloadedError):
            shared.regions()
        thread.join()


def ask_for_ever(sock: socket.socket) -> None:
    while True:
        sock.send(b'{"op":"status"}')


def test_a_client_that_does_not_read_is_cut_off(path: Path) -> None:
    def talk() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(path))
            with pytest.raises(OSError, match=r"pipe|reset"):
                ask_for_ever(sock)

    with_server(path, talk)


def test_the_socket_has_its_mode_and_stale_ones_are_replaced(path: Path) -> None:
    async def run() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
            stale.bind(str(path))
        async with serving(regions(), path, socket_mode="0600"):
            assert mode_of(path) == 0o600
            with pytest.raises(ConfigError, match=r"server\.shm_socket_path: is served"):
                await RegionServer(regions(), path, Server()).start()
        assert mode_of(path) is None

    asyncio.run(run())


# Requests


def infer(runtime: FakeTensorRuntime, known: Regions | None, body: dict[str, Any], *, peer: Peer | None = PEER) -> Any:
    config = Config()
    api = Api(runtime=runtime, config=config, telemetry=Telemetry(), regions=known)
    app = app_of(runtime, api=api)
    return asyncio.run(Call(app, "POST", "/v2/models/eyes/infer", json.dumps(body).encode(), peer=peer).reply())


def asked(name: str, shape: list[int] | None = None, **output: Any) -> dict[str, Any]:
    where = {"shared_memory_region": name, "shared_memory_offset": 8, "shared_memory_byte_size": 4}
    return {
        "inputs": [{"name": "x", "datatype": "UINT8", "shape": shape or [4], "parameters": where}],
        "outputs": [{"name": "x", "parameters": output}] if output else [],
    }


class Leases(FakeTensorRuntime):
    """Looks at a request's regions while it runs."""

    async def infer(self, request: Any) -> Any:
        assert request.inputs[0].region is not None
        assert mode_of(Path(request.inputs[0].region.path)) is not None
        return await super().infer(request)


def test_a_request_names_regions_for_inputs_and_outputs() -> None:
    known, fd = regions(), memfd()
    name, _ = known.register(fd, UID)
    runtime = Leases(outputs=[Tensor(name="x", datatype="UINT8", shape=(4,), data=b"abcd")])
    # The fake does not put its output where it shall be: the API does.
    output = {"shared_memory_region": name, "shared_memory_offset": 100, "shared_memory_byte_size": 50}
    reply = infer(runtime, known, asked(name, **output))
    assert reply.status == 200, reply.body
    [answer] = reply.json["outputs"]
    assert answer["parameters"] == {**output, "shared_memory_byte_size": 4}
    assert "data" not in answer
    assert os.pread(fd, 4, 100) == b"abcd"
    region = runtime.inferences[0].inputs[0].region
    assert region is not None
    assert (region.offset, region.size_bytes) == (8, 4)
    known.unregister(name, UID)
    assert not is_open(fd)  # no lease is left


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shape": [5]}, "takes 5 bytes, got 4"),
        ({"shape": [2**31 - 1]}, "max_tensor_bytes"),
        ({"shared_memory_region": "x"}, "no region"),
        ({"shared_memory_region": 5}, "needs a string"),
        ({"shared_memory_region": None}, "parameters"),
        ({"shared_memory_offset": -1}, "shared_memory_offset"),
        ({"shared_memory_offset": 4093}, "not inside"),
        ({"shared_memory_byte_size": 2**62}, "not inside"),
        ({"shared_memory_byte_size": "4"}, "shared_memory_byte_size"),
        ({"binary_data_size": 4}, "give one of"),
    ],
)
def test_requests_that_lie_about_regions(change: dict[str, Any], word: str) -> None:
    known, fd = regions(), memfd()
    name, _ = known.register(fd, UID)
    body = asked(name, change.pop("shape", None))
    body["inputs"][0]["parameters"].update(change)
    reply = infer(FakeTensorRuntime(), known, body)
    assert reply.status == 400
    assert word in reply.json["error"]
    known.unregister(name, UID)
    assert not is_open(fd)


def test_who_may_not_use_regions() -> None:
    known = regions()
    name, _ = known.register(memfd(), UID)
    other = infer(FakeTensorRuntime(), known, asked(name), peer=Peer(pid=1, uid=UID + 1, gid=1))
    assert (other.status, "no region" in other.json["error"]) == (400, True)
    off = infer(FakeTensorRuntime(), None, asked(name))
    assert "server.shm_socket_path" in off.json["error"]


def test_an_output_too_large_for_its_region() -> None:
    known = regions()
    name, _ = known.register(memfd(), UID)
    runtime = FakeTensorRuntime(outputs=[Tensor(name="x", datatype="UINT8", shape=(9,), data=bytes(9))])
    reply = infer(runtime, known, asked(name, shared_memory_region=name, shared_memory_byte_size=8))
    assert reply.status == 400
    assert "has 8 bytes for output x, which takes 9" in reply.json["error"]
