"""How a real daemon starts, is overloaded, listens and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil
import pytest

from edge_rt.api import listen
from tests import patience
from tests.api.daemon import Daemon
from tests.patience import PATIENCE_S
from tests.process_signals import has_ended, is_held, send_held

# Without a cache: like requests would share one answer, and nobody would wait.
CROWDED = """
[cache]
enabled = false

[server]
drain_s = 3.0

[scheduler]
max_waiting = 4

[engine]
n_parallel = 2
"""


async def outcome(client: httpx2.AsyncClient, text: str, *, stream: bool) -> tuple[int, str, dict[str, str]]:
    """Ask once; gives the status, how it ended (done, error code or "cut") and the headers."""
    body = {"model": "null-slow", "messages": [{"role": "user", "content": text}], "temperature": 0, "stream": stream}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            raw = (await response.aread()).decode()
    except httpx2.HTTPError:
        return 0, "cut", {}
    headers = dict(response.headers)
    last = raw.rstrip().rpartition("data: ")[2] if stream and response.status_code == 200 else raw
    if last == "[DONE]":
        return 200, "done", headers
    answer = json.loads(last)
    return response.status_code, answer["error"]["code"] if "error" in answer else "done", headers


async def load(daemon: Daemon, texts: list[str], then: Callable[[], None]) -> list[tuple[int, str, dict[str, str]]]:
    async with daemon.async_client() as client:
        await outcome(client, "warm", stream=False)
        with daemon.held():
            asked = [asyncio.create_task(outcome(client, text, stream=i % 2 == 0)) for i, text in enumerate(texts)]
            await asyncio.to_thread(then)
        return await asyncio.gather(*asked)


def until(daemon: Daemon, place: str, n_requests: int) -> None:
    line_start = f'edge_rt_requests_{place}{{model="null-slow"}}'
    patience.until(lambda: daemon.metric(line_start) >= n_requests, told=lambda: daemon.log)


def finishing(daemon: Daemon) -> None:
    patience.until(lambda: "finishing running answers" in daemon.log, told=lambda: daemon.log)


def test_overload_is_refused_with_a_time_to_come_back(socket_dir: Path) -> None:
    with Daemon(socket_dir, extra=CROWDED) as daemon:
        refusals = 'edge_rt_requests_total{outcome="queue_full"'

        def all_are_refused() -> None:
            patience.until(lambda: daemon.metric(refusals) >= 6, told=lambda: daemon.log)

        outcomes = asyncio.run(load(daemon, ["x" * 20] * 12, all_are_refused))
        assert daemon.metric(refusals) == 6
    refused = [headers for status, how, headers in outcomes if (status, how) == (429, "queue_full")]
    assert len(refused) == 6
    assert [(status, how) for status, how, _ in outcomes].count((200, "done")) == 6
    assert all(1 <= int(headers["retry-after"]) <= 60 for headers in refused)


def test_sigterm_under_load_ends_with_every_answer_finished_or_refused(socket_dir: Path) -> None:
    async def load_in_order(daemon: Daemon) -> list[tuple[int, str, dict[str, str]]]:
        async with daemon.async_client() as client:
            await outcome(client, "warm", stream=False)
            # Two run, of which the first would take far longer than drain_s; four wait. The four come once the two
            # run: which of six connections a busy daemon reads first is anybody's guess.
            with daemon.held():
                asked = [asyncio.create_task(outcome(client, text, stream=True)) for text in ("x" * 3000, "x" * 10)]
                await asyncio.to_thread(until, daemon, "running", 2)
                asked += [asyncio.create_task(outcome(client, "x", stream=i % 2 == 0)) for i in range(4)]
                await asyncio.to_thread(until, daemon, "waiting", 4)
                daemon.process.terminate()
                await asyncio.to_thread(finishing, daemon)
            assert await asyncio.to_thread(daemon.process.wait, 20.0) == 0  # drain_s is 3, the first would take 60
            return await asyncio.gather(*asked)

    with Daemon(socket_dir, extra=CROWDED) as daemon:
        outcomes = asyncio.run(load_in_order(daemon))
        assert not daemon.socket.exists()
    assert {how for _, how, _ in outcomes} == {"done", "shutting_down"}
    long, short, *waiting = [how for _, how, _ in outcomes]
    assert (long, short) == ("shutting_down", "done")
    assert waiting == ["shutting_down"] * 4
    assert all(status == 503 and headers["retry-after"] for status, _, headers in outcomes[2:])
    assert "Traceback" not in daemon.log


def test_a_second_signal_does_not_wait(socket_dir: Path) -> None:
    with Daemon(socket_dir, extra=CROWDED.replace("drain_s = 3.0", "drain_s = 600.0")) as daemon:

        def terminate_twice() -> None:
            until(daemon, "waiting", 1)
            daemon.process.send_signal(signal.SIGINT)
            finishing(daemon)
            assert daemon.stop(signal.SIGINT) == 0

        outcomes = asyncio.run(load(daemon, ["x" * 3000] * 3, terminate_twice))
    assert {how for _, how, _ in outcomes} <= {"shutting_down", "cut"}
    assert not daemon.socket.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_ends_on_any_of_its_signals(socket_dir: Path, number: signal.Signals) -> None:
    with Daemon(socket_dir, extra="[server]\ndrain_s = 600.0\n") as daemon:
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
        with daemon.client() as client:  # an idle connection does not hold it up
            assert client.get("/health").status_code == 200
            assert daemon.stop(number) == 0
    assert not daemon.socket.exists()


def test_a_reload_asked_for_before_the_daemon_can_hear_is_done_later(socket_dir: Path) -> None:
    starting = Daemon(socket_dir)
    send_held(starting.process, signal.SIGHUP)
    with starting as daemon, daemon.client() as client:
        patience.until(
            lambda: client.get("/health").is_success and "nothing has changed" in daemon.log, told=lambda: daemon.log
        )
        assert not is_held(daemon.process.pid, signal.SIGHUP)
        assert daemon.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_asked_for_before_the_daemon_can_hear_is_a_clean_one(socket_dir: Path, number: signal.Signals) -> None:
    starting = Daemon(socket_dir)
    send_held(starting.process, number)
    assert starting.wait() == 0, starting.log
    assert not starting.socket.exists()


def test_a_killed_daemons_socket_is_replaced_and_a_live_ones_is_not(socket_dir: Path) -> None:
    with Daemon(socket_dir) as killed:
        killed.stop(signal.SIGKILL)
        assert killed.socket.exists()
    with Daemon(socket_dir) as live:
        second = Daemon(socket_dir)
        assert second.wait() == 78
        assert f"served by process {live.process.pid} already" in second.log
        with live.client() as client:
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize("is_stuck", [False, True], ids=["computing", "stuck"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_front_process(socket_dir: Path, number: signal.Signals, *, is_stuck: bool) -> None:
    with Daemon(socket_dir, extra="[server]\ndrain_s = 0.5\n", args=("--model", "null-slow")) as daemon:
        workers = psutil.Process(daemon.process.pid).children(recursive=True)
        assert workers
        body = {"model": "null-slow", "prompt": "x" * 3000, "stream": True}
        try:
            with daemon.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                if is_stuck:  # as deep inside a driver: it reads no message
                    for worker in workers:
                        worker.suspend()
                daemon.stop(number)
            patience.until(lambda: all(map(has_ended, workers)), told=lambda: workers)
        finally:
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()


def test_preload_and_mode_from_a_flag_and_the_environment(socket_dir: Path) -> None:
    with Daemon(socket_dir, args=("--model", "null"), environ={"EDGE_RT__SERVER__SOCKET_MODE": "0600"}) as daemon:
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
        with daemon.client() as client:
            assert client.get("/v1/models/null").json()["status"] == "loaded"


def test_systemd_activation_and_notification(socket_dir: Path) -> None:
    path = socket_dir / "activated"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, listen.bind_unix(path, mode=0o660) as inherited:
        notify.bind(str(socket_dir / "notify"))
        notify.settimeout(PATIENCE_S)
        environ = {"NOTIFY_SOCKET": str(socket_dir / "notify"), "WATCHDOG_USEC": "100000"}
        with Daemon(socket_dir, inherit=inherited, environ=environ) as daemon:
            inherited.close()
            daemon.socket = path
            with daemon.client() as client:
                assert client.get("/health").status_code == 200
            states: list[str] = []
            while states.count("WATCHDOG=1") < 2 or "STATUS=no model in memory; idle" not in states:
                states += notify.recv(500).decode().splitlines()
            assert states.count("READY=1") == 1
            assert any(state.startswith("EXTEND_TIMEOUT_USEC=") for state in states)
            assert daemon.stop() == 0
        states.clear()
        while "STOPPING=1" not in states:
            states += notify.recv(500).decode().splitlines()
        assert path.exists(), "the socket is systemd's to remove"
        assert f"listens on unix:{path}" in daemon.log


def test_tcp_asks_for_a_key(socket_dir: Path) -> None:
    keys = socket_dir / "keys"
    keys.write_text("the-right-key\n")
    with Daemon(socket_dir, args=("--tcp", "127.0.0.1:0", "--api-keys-file", str(keys))) as daemon:
        line = next(line for line in daemon.lines if "listens" in line)
        with httpx2.Client(base_url=line.rpartition(" ")[2]) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"authorization": "Bearer the-wrong-key"}).status_code == 401
            assert client.get("/v1/models", headers={"authorization": "Bearer the-right-key"}).status_code == 200
        daemon.stop()
        entries = [json.loads(line) for line in daemon.lines if line.startswith("{")]
        assert [e.get("tenant", "")[:4] for e in entries if e["logger"] == "edge_rt.access"] == ["", "", "key:"]
        assert "the-right-key" not in daemon.log


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tcp", "127.0.0.1:0"), "server.api_keys_file: is required with server.tcp_host"),
        (("--model", "no-such-model"), "no such model"),
        (("--api-keys-file", "/nowhere/keys"), "cannot be read"),
        (("--socket", "/tmp/" + "x" * 103), "108 bytes long"),
    ],
)
def test_a_bad_configuration_ends_with_78_and_leaves_no_socket(
    socket_dir: Path, args: tuple[str, ...], words: str
) -> None:
    daemon = Daemon(socket_dir, args=args)
    assert daemon.wait() == 78
    assert words in daemon.log
    assert "Traceback" not in daemon.log
    assert not daemon.socket.exists()


@pytest.mark.parametrize("key", ["grpc_socket_path", "shm_socket_path"])
def test_a_second_socket_that_cannot_be_had_ends_the_start_too(socket_dir: Path, key: str) -> None:
    if key == "grpc_socket_path":
        pytest.importorskip("grpc", reason="grpcio is not installed: edge_rt[grpc]")
    (socket_dir / "file").write_text("")
    daemon = Daemon(socket_dir, environ={f"EDGE_RT__SERVER__{key.upper()}": str(socket_dir / "file")})
    assert daemon.wait() == 78
    assert f"server.{key}: exists and is not a socket" in daemon.log
    assert "Traceback" not in daemon.log
    assert not daemon.socket.exists()


def test_second_sockets_come_and_go_with_the_daemon(socket_dir: Path) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed: edge_rt[grpc]")
    paths = {"grpc_socket_path": socket_dir / "g", "shm_socket_path": socket_dir / "m"}
    environ = {f"EDGE_RT__SERVER__{key.upper()}": str(path) for key, path in paths.items()}
    with Daemon(socket_dir, environ=environ) as daemon:
        assert [path.is_socket() for path in paths.values()] == [True, True]
        with daemon.client() as client:
            assert "memfd_shared_memory" in client.get("/v2").json()["extensions"]
        assert daemon.stop() == 0
    assert not any(path.exists() for path in paths.values())


# What only shows on the wire


def exchange(daemon: Daemon, sent: bytes) -> bytes:
    """Send bytes and read until the daemon closes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(daemon.socket))
        received = b""
        with suppress(BrokenPipeError):
            client.sendall(sent)
        with suppress(ConnectionResetError):
            while data := client.recv(65536):
                received += data
        return received


def test_broken_http(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        assert exchange(daemon, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert exchange(daemon, b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000) == b""
        assert exchange(daemon, b"GET /" + b"y" * 200_000) == b""
        body = b'{"content":"hello"}'
        post = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        assert b'"tokens":[104' in exchange(daemon, post % (len(body), body))
        assert b"not valid JSON" in exchange(daemon, post % (5, body))
        chunked = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        assert b'"tokens":[104' in exchange(daemon, chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        endless = chunked + b"10000\r\n" + b"x" * 65536 + (b"\r\n10000\r\n" + b"x" * 65536) * 100
        assert exchange(daemon, endless).startswith(b"HTTP/1.1 413 ")
        assert daemon.metric("edge_rt_process_resident_memory_bytes") < 60 * 2**20
        assert "Traceback" not in daemon.log


def test_a_client_that_does_not_read_is_cut_off_when_the_daemon_ends(socket_dir: Path) -> None:
    with Daemon(socket_dir, extra="[server]\ndrain_s = 0.5\n") as daemon, socket.socket(socket.AF_UNIX) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(str(daemon.socket))
        body = b'{"prompt":"x","max_tokens":4000,"stream":true,"logprobs":20,"ignore_eos":true}'
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert client.recv(10).startswith(b"HTTP/1.1 2")
        assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
