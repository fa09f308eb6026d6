"""The short way answers what the long way does: the same requests to a server with it and to one without."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from edge_rt.api.app import build_app
from edge_rt.api.callers import ApiKeys
from edge_rt.api.context import Api
from edge_rt.api.cycles import ShortCycle
from edge_rt.api.listen import bind_unix
from edge_rt.api.server import MAX_HEAD_BYTES, PeerProtocol, Server
from edge_rt.api.short_way import ShortRequest, ShortWay
from edge_rt.config import Config
from edge_rt.config import Server as Settings
from edge_rt.errors import BackendStepError, DeadlineError, EdgeRtError, QueueFullError, WorkerLostError
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import Tensor
from tests.api.asgi import FakeTensorRuntime
from tests.patience import PATIENCE_S

PATH = "/v2/models/eyes/infer"


def request(
    head: Any,
    binary: bytes = b"",
    *,
    path: str = PATH,
    method: str = "POST",
    version: str = "1.1",
    headers: dict[str, str] | None = None,
    length: str | None = None,
) -> bytes:
    """Write a request down; length is the JSON's, "" leaves the header out."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    lines = {"Host": "x", "Content-Length": str(len(text) + len(binary)), "X-Request-Id": "mine"}
    if length != "":
        lines["Inference-Header-Content-Length"] = length or str(len(text))
    lines |= headers or {}
    written = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/{version}\r\n{written}\r\n".encode() + text + binary


def binary(name: str, shape: Sequence[int], size: Any, datatype: str = "UINT8") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "parameters": {"binary_data_size": size}}


ONE = {"inputs": [binary("image", [1, 4], 4)], "parameters": {"binary_data_output": True}}
GOOD = request(ONE, b"1234")


@dataclass
class Served:
    """A server, and what it is made of; n_long counts the requests that reached the app."""

    path: Path
    server: Server
    runtime: FakeTensorRuntime
    api: Api
    n_long: int = 0

    @property
    def metrics(self) -> str:
        """The counters of requests, without times."""
        lines = self.api.telemetry.exposition().decode().splitlines()
        return "\n".join(line for line in lines if re.match(r"edge_rt_requests_total|edge_rt_request_d.*_count", line))

    async def ask(self, sent: bytes) -> bytes:
        """Send bytes, and give what comes until the server closes or one answer is whole."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(sent)
        try:
            return await answer(reader)
        finally:
            writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    n_bytes = int(re.search(rb"\ncontent-length: (\d+)", head)[1])  # type: ignore[index]
    return re.sub(rb"date: [^\r]*", b"date: now", head) + await reader.readexactly(n_bytes)


class PatientProtocol(PeerProtocol):
    """Sends nothing the long way because the machine is slow."""

    whole_s = PATIENCE_S


def serving(
    folder: Path,
    scenario: Callable[[Served], Awaitable[None]],
    *,
    runtime: FakeTensorRuntime | None = None,
    has_short_way: bool = True,
    protocol: type[PeerProtocol] = PatientProtocol,
    keys: tuple[str, ...] = (),
    sock: socket.socket | None = None,
    **limits: Any,
) -> Served:
    async def run() -> Served:
        fake = runtime or FakeTensorRuntime()
        config = Config(server=Settings(**{"max_body_bytes": 100_000, **limits}))
        api = Api(runtime=fake, config=config, telemetry=Telemetry())
        app = build_app(fake, config, api.telemetry, api=api, api_keys=ApiKeys(keys) if keys else None)

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            served.n_long += 1
            await app(scope, receive, send)

        way = ShortWay(api, access_log=True) if has_short_way else None
        path = folder / ("short" if has_short_way else "long")
        server = Server(counted, protocol=protocol, short_way=way)
        served = Served(path, server, fake, api)
        task = asyncio.create_task(server.serve(sockets=[sock or bind_unix(path, mode=0o600)]))
        await server.ready.wait()
        await scenario(served)
        server.stop(0.0)
        await task
        assert api.bodies.n_bytes == 0
        return served

    return asyncio.run(run())


@pytest.mark.parametrize("is_direct", [False, True], ids=["in a task", "without a task"])
def test_it_answers_byte_for_byte_what_the_long_way_answers(
    socket_dir: Path, caplog: pytest.LogCaptureFixture, is_direct: bool
) -> None:
    two = {"inputs": [binary("a", [2], 2), binary("b", [3], 12, "FP32")], "id": "i", "outputs": [{"name": "b"}]}
    requests = {
        "one": GOOD,
        "one again": GOOD,
        "json answer": request({"inputs": ONE["inputs"]}, b"1234"),
        "two": request(two, b"12" + bytes(12)),
        "chosen": request({**two, "outputs": [{"name": "b", "parameters": {"binary_data": True}}]}, b"12" + bytes(12)),
        "mixed": request(
            {"inputs": [binary("a", [2], 2), {**binary("b", [1], 0), "parameters": {}, "data": [1]}]}, b"12"
        ),
        "bytes": request({"inputs": [binary("a", [1], 6, "BYTES")]}, b"\2\0\0\0ab"),
        "version": request(ONE, b"1234", path="/v2/models/eyes/versions/int8/infer"),
        "sequence": request({**ONE, "parameters": {"sequence_id": 7, "timeout": 1000}}, b"1234"),
        "empty": request({"inputs": [binary("a", [0], 0)]}),
        "no version": request(ONE, b"1234", path="/v2/models/eyes/versions/x/infer"),
        "no model": request(ONE, b"1234", path="/v2/models/nobody/infer"),
        "a language model": request(ONE, b"1234", path="/v2/models/text/infer"),
        "too few": request(ONE, b"123"),
        "too many": request(ONE, b"12345"),
        "a wrong size": request({"inputs": [binary("image", [1, 3], 4)]}, b"1234"),
        "a negative size": request({"inputs": [binary("image", [1, 4], -4)]}, b"1234"),
        "a huge shape": request({"inputs": [binary("image", [2**31 - 1], 4)]}, b"1234"),
        "no datatype": request({"inputs": [binary("image", [4], 4, "BF16")]}, b"1234"),
        "twice": request({"inputs": [binary("a", [2], 2), binary("a", [2], 2)]}, b"1234"),
        "shared memory": request(
            {
                "inputs": [
                    {**binary("a", [1], 0), "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 1}}
                ]
            }
        ),
        "no JSON": request(b"{", b"1234"),
        "a wrong length": request(ONE, b"1234", length="9999"),
        "a length that is none": request(ONE, b"1234", length="1e3"),
        "an odd request id": request(ONE, b"123", headers={"X-Request-Id": "x" * 128}),
    }

    def asked(*, has_short_way: bool) -> tuple[dict[str, bytes], Served, list[Any]]:
        caplog.clear()
        answers: dict[str, bytes] = {}

        async def scenario(served: Served) -> None:
            for name, sent in requests.items():
                answers[name] = await served.ask(sent)

        with caplog.at_level(logging.INFO, "edge_rt.access"):
            runtime = FakeTensorRuntime(is_direct=is_direct)
            served = serving(socket_dir, scenario, has_short_way=has_short_way, runtime=runtime)
        names = ("outcome", "tenant", "uid", "gid", "pid", "client")
        log = [(r.getMessage(), *(getattr(r, n) for n in names)) for r in caplog.records if r.name == "edge_rt.access"]
        return answers, served, log

    short, short_served, short_log = asked(has_short_way=True)
    long, long_served, long_log = asked(has_short_way=False)
    assert short == long
    assert short_log == long_log
    assert len(short_log) == len(requests)
    assert short_served.metrics == long_served.metrics
    assert 'outcome="invalid_request",route="/v2/models/{model}/infer",status="400"' in short_served.metrics
    assert short_served.runtime.inferences == long_served.runtime.inferences
    assert (short_served.n_long, long_served.n_long) == (0, len(requests))


@pytest.mark.parametrize("error", [DeadlineError(2.0), QueueFullError(1, 1, 3.0), BackendStepError("x"), KeyError("x")])
def test_errors_of_the_runtime_are_answered_alike(socket_dir: Path, error: Exception) -> None:
    answers = []

    async def scenario(served: Served) -> None:
        answers.append((await served.ask(GOOD), served.metrics))

    for has_short_way, is_direct in ((False, False), (True, False), (True, True)):
        if is_direct and not isinstance(error, EdgeRtError):
            continue  # what nobody foresaw comes from a task only
        runtime = FakeTensorRuntime(outputs=error, is_direct=is_direct)
        serving(socket_dir, scenario, runtime=runtime, has_short_way=has_short_way)
    assert answers[1:] == [answers[0]] * (len(answers) - 1)
    assert b"HTTP/1.1 200" not in answers[0][0]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request(ONE, b"1234", headers={"Cache-Control": "only-if-cached"}), 200),
        (request(ONE, b"1234", headers={"Content-Encoding": "gzip"}), 415),
        (request(ONE, b"1234", headers={"Connection": "Upgrade", "Upgrade": "x"}), 400),
        (request(ONE, b"1234", headers={"Connection": "close"}), 200),
        (request(ONE, b"1234", version="1.0"), 200),
        (request({"inputs": [{**ONE["inputs"][0], "parameters": {}, "data": [1, 2, 3, 4]}]}, length=""), 200),  # type: ignore[dict-item, index]
        (request(ONE, b"1234", path="/v2/models/ey%65s/infer"), 200),
        (request(ONE, b"1234", path=f"{PATH}?x=y"), 200),
        (request(ONE, b"1234", method="GET"), 404),
        (request(ONE, bytes(200_000)), 413),
        (GOOD.replace(b"X-Request-Id: mine", b"Inference-Header-Content-Length: 1"), 400),
    ],
    ids=["cache", "encoding", "upgrade", "close", "1.0", "json", "escape", "query", "get", "too large", "twice"],
)
def test_what_is_unusual_goes_the_long_way(socket_dir: Path, sent: bytes, status: int) -> None:
    async def scenario(served: Served) -> None:
        assert (await served.ask(sent)).startswith(b"HTTP/1.1 %d " % status)
        assert served.n_long == 1
        assert (await served.ask(GOOD)).startswith(b"HTTP/1.1 200 ")
        assert served.n_long == 1

    serving(socket_dir, scenario)


def test_a_chunked_body_and_one_that_is_asked_for_go_the_long_way(socket_dir: Path) -> None:
    head, _, body = GOOD.partition(b"\r\n\r\n")
    chunked = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head, count=1)
    chunked += b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    async def scenario(served: Served) -> None:
        assert (await served.ask(chunked)).startswith(b"HTTP/1.1 200 ")
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await answer(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert served.n_long == 2

    serving(socket_dir, scenario)


def test_over_tcp_a_key_is_asked_for(socket_dir: Path) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]

    async def scenario(served: Served) -> None:
        for key, status in ((b"wrong", 401), (b"secret", 200)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GOOD.replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer " + key))
            assert (await answer(reader)).startswith(b"HTTP/1.1 %d " % status)
            writer.close()
        assert served.n_long == 2
        assert [inference.tenant[:4] for inference in served.runtime.inferences] == ["key:"]

    serving(socket_dir, scenario, sock=sock, keys=("secret",))


def test_what_comes_behind_the_last_request_of_a_connection_costs_it_no_answer(socket_dir: Path) -> None:
    runtime = FakeTensorRuntime(hold=asyncio.Event())
    last = request(ONE, b"5678", headers={"Connection": "close"})

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(last)
        while not runtime.inferences:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        (connection,) = served.server.server_state.connections
        assert isinstance(connection, PeerProtocol)
        behind = GOOD * (2 * MAX_HEAD_BYTES // len(GOOD))
        writer.write(behind)
        while connection._unparsed_bytes < len(behind):
            assert not connection.transport.is_closing()
            await asyncio.sleep(0)
        assert runtime.hold is not None
        runtime.hold.set()
        assert (await answer(reader)).endswith(b"5678")
        assert await reader.read() == b""
        writer.close()
        assert len(runtime.inferences) == 1

    serving(socket_dir, scenario, runtime=runtime)


def test_a_body_in_many_parts_and_requests_one_behind_the_other(socket_dir: Path) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        big = request({"inputs": [binary("image", [90_000], 90_000)], "parameters": ONE["parameters"]}, bytes(90_000))
        for _ in range(2):
            for start in range(0, len(big), 30_000):
                writer.write(big[start : start + 30_000])
                await asyncio.sleep(0)
            assert (await answer(reader)).endswith(bytes(90_000))  # larger than what is written at once
        assert served.n_long == 0
        writer.write(GOOD + GOOD + b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" + GOOD)
        for end in (b"1234", b"1234", b'{"status":"ok"}', b"1234"):
            assert (await answer(reader)).endswith(end)
        writer.close()

    serving(socket_dir, scenario)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_client_that_hangs_up_ends_its_inference(socket_dir: Path, is_direct: bool) -> None:
    runtime = FakeTensorRuntime(hold=asyncio.Event(), is_direct=is_direct)

    async def scenario(served: Served) -> None:
        _, writer = await asyncio.open_unix_connection(served.path)
        writer.write(GOOD)
        await runtime.arrived.wait()
        writer.close()
        state = served.server.server_state
        while state.tasks or state.connections:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert runtime.n_closed == 1
        assert 'outcome="hung_up",route="/v2/models/{model}/infer",status="499"} 1.0' in served.metrics
        assert served.n_long == 0

    serving(socket_dir, scenario, runtime=runtime)


PLAIN = GOOD.replace(b"X-Request-Id: mine\r\n", b"")  # whose head is remembered
LARGE = request({"inputs": [binary("image", [60_000], 60_000)], "parameters": ONE["parameters"]}, bytes(60_000))
LONG = b"POST /v2/models/eyes/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n\r\n\r\n"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([PLAIN, GOOD, LARGE, LONG]), min_size=1, max_size=5), st.data())
def test_requests_are_answered_alike_however_they_are_cut(
    socket_dir: Path, requests: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    is_direct, is_paced = data.draw(st.booleans()), data.draw(st.booleans())

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            writer.write(stream[start:end])
            for _ in range(3 if is_paced else 0):
                await asyncio.sleep(0)
        for sent in requests:
            got = await answer(reader)
            assert got.startswith(b"HTTP/1.1 400 " if sent is LONG else b"HTTP/1.1 200 ")
            assert sent is LONG or got.endswith(bytes(60_000) if sent is LARGE else b"1234")
        writer.close()

    serving(socket_dir, scenario, runtime=FakeTensorRuntime(is_direct=is_direct))


def test_a_head_that_comes_again_is_not_parsed_and_is_another_request(socket_dir: Path) -> None:
    async def scenario(served: Served) -> None:
        answers = [await served.ask(PLAIN) for _ in range(3)]
        ids = {re.search(rb"x-request-id: (\w+)", head)[1] for head in answers}  # type: ignore[index]
        assert len(ids) == 3
        assert {re.sub(rb"x-request-id: \w+", b"", head) for head in answers} == {
            re.sub(rb"x-request-id: \w+", b"", answers[0])
        }
        other = PLAIN[:-4] + b"5678"
        assert (await served.ask(other)).endswith(b"5678")
        wrong = PLAIN.replace(b'"shape": [1, 4]', b'"shape": [1, 5]')
        assert (await served.ask(wrong)).startswith(b"HTTP/1.1 400 ")
        assert served.n_long == 0

    for is_direct in (False, True):
        serving(socket_dir, scenario, runtime=FakeTensorRuntime(is_direct=is_direct))


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_connection_keeps_none_of_the_requests_that_it_has_answered(socket_dir: Path, is_direct: bool) -> None:
    def count() -> int:
        gc.collect()
        return sum(isinstance(thing, ShortCycle | ShortRequest) for thing in gc.get_objects())

    async def scenario(served: Served) -> None:
        before = count()
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(5):
            writer.write(GOOD)
            await answer(reader)
        assert count() <= before + 2  # the last one, of which the connection asks whether it is answered
        writer.close()

    serving(socket_dir, scenario, runtime=FakeTensorRuntime(is_direct=is_direct))


@pytest.mark.parametrize("is_direct", [False, True])
def test_an_idle_connection_holds_no_buffer_of_its_last_body(socket_dir: Path, is_direct: bool) -> None:
    runtime = FakeTensorRuntime(hold=asyncio.Event(), is_direct=is_direct)

    async def scenario(served: Served) -> None:
        connections = [await asyncio.open_unix_connection(served.path) for _ in range(20)]
        tracemalloc.start()
        for _, writer in connections:  # all inside at once, so that each takes a buffer
            writer.write(LARGE)
        while tracemalloc.get_traced_memory()[0] < 20 * 2**18:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        assert runtime.hold is not None
        runtime.hold.set()
        for reader, _ in connections:
            await answer(reader)
        gc.collect()
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        for _, writer in connections:
            writer.close()
        assert held_bytes < 3 * 2**20

    serving(socket_dir, scenario, runtime=runtime)


def test_a_client_that_hangs_up_within_its_body_is_counted(socket_dir: Path) -> None:
    async def scenario(served: Served) -> None:
        _, writer = await asyncio.open_unix_connection(served.path)
        writer.write(GOOD[:-2])
        while not served.api.bodies.n_bytes:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        writer.close()
        while served.server.server_state.connections:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        assert 'outcome="hung_up",route="/v2/models/{model}/infer",status="499"} 1.0' in served.metrics
        assert served.n_long == 0

    serving(socket_dir, scenario)


class HurriedProtocol(PeerProtocol):
    whole_s = 0.001


def test_a_body_that_takes_long_goes_the_long_way(socket_dir: Path) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(2):
            writer.write(GOOD[:-2])
            before = served.n_long
            while served.n_long == before:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)
            writer.write(GOOD[-2:])
            assert (await answer(reader)).endswith(b"1234")
        writer.close()
        assert served.n_long == 2

    serving(socket_dir, scenario, protocol=HurriedProtocol)


def test_a_shutdown_closes_behind_a_request_that_has_gone_the_long_way_since(socket_dir: Path) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        writer.write(GOOD[:-2])
        while not served.api.bodies.n_bytes:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        served.server.stop(60.0)
        while not served.n_long:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        writer.write(GOOD[-2:])
        assert b"\r\nconnection: close\r\n" in await answer(reader)
        writer.close()

    serving(socket_dir, scenario, protocol=HurriedProtocol)


def test_a_client_that_hangs_up_with_requests_behind_the_running_one_is_no_error(
    socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served) -> None:
        _, writer = await asyncio.open_unix_connection(served.path)
        writer.write(request(ONE, b"1234", headers={"Cache-Control": "no-cache"}) + GOOD)
        await served.runtime.arrived.wait()
        writer.close()
        while served.server.server_state.tasks:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        assert 'outcome="hung_up",route="/v2/models/{model}/infer",status="499"} 1.0' in served.metrics

    serving(socket_dir, scenario, runtime=FakeTensorRuntime(hold=asyncio.Event()))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("first", [GOOD, request(ONE, b"1234", headers={"Cache-Control": "no-cache"})])
def test_a_hang_up_behind_requests_that_wait_ends_the_one_ahead(
    socket_dir: Path, first: bytes, is_direct: bool
) -> None:
    """The model never answers: only the hang-up can end it, and nothing is read that would tell of it."""
    runtime = FakeTensorRuntime(hold=asyncio.Event(), is_direct=is_direct)

    async def scenario(served: Served) -> None:
        _, writer = await asyncio.open_unix_connection(served.path)
        writer.write(first + GOOD + GOOD)
        await runtime.arrived.wait()
        writer.close()
        state = served.server.server_state
        while state.tasks or state.connections:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert runtime.n_closed == len(runtime.inferences) == 1
        assert 'outcome="hung_up",route="/v2/models/{model}/infer",status="499"} 1.0' in served.metrics
        reader, writer = await asyncio.open_unix_connection(served.path)
        for _ in range(2):  # reading is paused and resumed, and the connection still works
            writer.write(GOOD + GOOD)
            assert runtime.hold is not None
            runtime.hold.set()
            for _ in range(2):
                assert (await answer(reader)).endswith(b"1234")
        writer.close()

    serving(socket_dir, scenario, runtime=runtime)


@pytest.mark.parametrize("is_direct", [False, True])
def test_bodies_beyond_the_limit_of_all_are_refused(socket_dir: Path, is_direct: bool) -> None:
    runtime = FakeTensorRuntime(hold=asyncio.Event(), is_direct=is_direct)
    large = request({"inputs": [binary("image", [8_000], 8_000)]}, bytes(8_000))

    async def scenario(served: Served) -> None:
        assert runtime.hold is not None
        first = asyncio.create_task(served.ask(large))
        await runtime.arrived.wait()
        refused = await served.ask(large)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"server.max_bodies_bytes" in refused
        runtime.hold.set()
        assert (await first).startswith(b"HTTP/1.1 200 ")

    serving(socket_dir, scenario, runtime=runtime, max_body_bytes=10_000, max_bodies_bytes=12_000)


def test_bodies_stay_apart_when_the_configuration_has_been_read_again(socket_dir: Path) -> None:
    runtime = FakeTensorRuntime(hold=asyncio.Event())

    async def scenario(served: Served) -> None:
        assert runtime.hold is not None
        served.server.use(served.server.config.loaded_app, ShortWay(served.api, access_log=True))
        asked = []
        for i in range(4):
            body = bytes([i]) * 200_000
            head = {"inputs": [binary("image", [1, len(body)], len(body))], "parameters": ONE["parameters"]}
            asked.append(asyncio.create_task(served.ask(request(head, body))))
            await runtime.arrived.wait()
            runtime.arrived.clear()
        runtime.hold.set()
        for i, answered in enumerate(await asyncio.gather(*asked)):
            assert answered.endswith(bytes([i]) * 200_000)
        assert served.n_long == 0

    serving(socket_dir, scenario, runtime=runtime, max_body_bytes=300_000)


def test_heads_that_announce_much_take_little_memory(socket_dir: Path) -> None:
    announced = request(ONE, b"", headers={"Content-Length": str(4 * 2**20)})
    head = announced[: announced.index(b"\r\n\r\n") + 4]

    async def scenario(served: Served) -> None:
        writers = []
        tracemalloc.start()
        for _ in range(32):
            _, writer = await asyncio.open_unix_connection(served.path)
            writer.write(head)
            writers.append(writer)
        while served.n_long < 32 - 4:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
        tracemalloc.stop()
        for writer in writers:
            writer.close()
        while served.server.server_state.connections:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert (await served.ask(GOOD)).endswith(b"1234")
        assert served.server.server_state.short_way.n_arriving_bytes == 0  # type: ignore[attr-defined]

    serving(socket_dir, scenario, max_body_bytes=4 * 2**20)


def test_a_long_json_is_not_remembered(socket_dir: Path) -> None:
    padded = request(json.dumps(ONE).encode() + b" " * 5000, b"1234").replace(b"X-Request-Id: mine\r\n", b"")

    async def scenario(served: Served) -> None:
        for _ in range(3):
            assert (await served.ask(padded)).endswith(b"1234")
        way = served.server.server_state.short_way  # type: ignore[attr-defined]
        assert [len(head.json) for head in way._heads.values()] == [0]
        assert served.n_long == 0

    serving(socket_dir, scenario, runtime=FakeTensorRuntime(is_direct=True))


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_shutdown_waits_for_an_answer_and_closes_behind_it(socket_dir: Path, is_direct: bool) -> None:
    runtime = FakeTensorRuntime(hold=asyncio.Event(), is_direct=is_direct)

    async def scenario(served: Served) -> None:
        assert runtime.hold is not None
        asked = asyncio.create_task(served.ask(GOOD))
        await runtime.arrived.wait()
        served.server.stop(60.0)
        await asyncio.sleep(0)
        runtime.hold.set()
        assert b"\r\nconnection: close\r\n" in await asked

    serving(socket_dir, scenario, runtime=runtime)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_shutdown_that_cannot_wait_says_so(socket_dir: Path, is_direct: bool) -> None:
    runtime = FakeTensorRuntime(hold=asyncio.Event(), is_direct=is_direct)

    async def scenario(served: Served) -> None:
        asked = asyncio.create_task(served.ask(GOOD))
        await runtime.arrived.wait()
        served.server.stop(0.0)
        refused = await asked
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in refused

    serving(socket_dir, scenario, runtime=runtime)


def test_a_request_whose_worker_died_is_asked_once_more(socket_dir: Path) -> None:
    runtime = FakeTensorRuntime(outputs=WorkerLostError(model="eyes", reason="x"), is_direct=True)

    async def scenario(served: Served) -> None:
        assert (await served.ask(GOOD)).endswith(b"1234")
        assert [request.is_suspect for request in runtime.inferences] == [False, True]

    serving(socket_dir, scenario, runtime=runtime)


class ImpatientProtocol(PeerProtocol):
    send_timeout_s = 0.01


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_client_that_does_not_read_is_cut_off(socket_dir: Path, is_direct: bool) -> None:
    flood = Tensor(name="image", datatype="UINT8", shape=(8 * 2**20,), data=bytes(8 * 2**20))

    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_unix_connection(served.path)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GOOD)
        while not served.runtime.inferences or served.server.server_state.connections:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        writer.close()

    serving(
        socket_dir,
        scenario,
        runtime=FakeTensorRuntime(outputs=[flood], is_direct=is_direct),
        protocol=ImpatientProtocol,
    )
