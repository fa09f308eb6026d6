"""A real daemon that reads its configuration again on SIGHUP, also while it answers."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from edge_rt.api import listen
from edge_rt.api.client import Client
from edge_rt.tensor_types import Tensor
from tests.api.daemon import CONFIG, Daemon
from tests.patience import PATIENCE_S

WITHOUT_CACHE = "[cache]\nenabled = false\n"
BAD = "[limits]\nmax_stop = 'many'\n"
ASKED: dict[str, Any] = {"model": "null", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def status(daemon: Daemon, **fields: Any) -> int:
    with daemon.client() as client:
        return client.post("/v1/chat/completions", json=ASKED | fields).status_code


def test_limits_and_scheduler_change_without_a_restart(socket_dir: Path) -> None:
    with Daemon(socket_dir, extra="[limits]\nmax_stop = 2\n") as daemon:
        stop = ["a", "b", "c"]
        assert status(daemon, stop=stop) == 400
        daemon.reload("[limits]\nmax_stop = 4\n", until="configuration: changed: limits.max_stop")
        assert status(daemon, stop=stop) == 200
        daemon.reload("[limits]\nmax_prompt_bytes = 3\n", until="configuration: changed: limits.max_prompt_bytes")
        assert status(daemon) == 400
        daemon.reload("[scheduler]\nmax_waiting = 9\n", until="scheduler.max_waiting")
        assert status(daemon) == 200


def test_a_bad_file_is_not_used_and_the_daemon_says_so(socket_dir: Path) -> None:
    with Daemon(socket_dir, extra="[limits]\nmax_stop = 2\n") as daemon:
        daemon.reload(BAD, until="the new configuration is not used")
        assert "limits.max_stop: Expected `int`" in daemon.log
        assert status(daemon, stop=["a", "b", "c"]) == 400
        daemon.reload("[models.nobody]\nn_ctx = 5\n", until="no such model")
        daemon.reload("[server]\napi_keys_file = '/nowhere'\n", until="cannot be read")
        assert status(daemon) == 200
        daemon.reload("[limits]\nmax_stop = 4\n", until="configuration: changed: limits.max_stop")
        assert status(daemon, stop=["a", "b", "c"]) == 200
        assert "Traceback" not in daemon.log


def test_what_needs_a_restart_is_named_and_stays(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        daemon.reload(
            "[tensor]\nmax_streams = 9\n[placement]\nprofile_file = 'p'\npolicy = 'energy'\n",
            until="need a restart and stay as they were",
        )
        assert "placement.profile_file, tensor.max_streams" in daemon.log
        assert "configuration: changed: placement.policy" in daemon.log


def test_the_log_level_changes(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        assert "/health" not in daemon.log
        daemon.reload("[log]\nlevel = 'debug'\n", until="GET /health")


def test_keys_change_for_connections_that_are_open(socket_dir: Path) -> None:
    keys = socket_dir / "keys"
    keys.write_text("old-key\n")
    with Daemon(socket_dir, args=("--tcp", "127.0.0.1:0", "--api-keys-file", str(keys))) as daemon:
        base = next(line for line in daemon.lines if "listens" in line).rpartition(" ")[2]
        with httpx2.Client(base_url=base) as client:

            def asked(key: str) -> int:
                return client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

            assert (asked("old-key"), asked("new-key")) == (200, 401)
            keys.write_text("new-key\n")
            daemon.reload("", until="keys were read again")
            assert (asked("old-key"), asked("new-key")) == (401, 200)


def test_limits_change_for_tensors_over_http_and_grpc(socket_dir: Path) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed: edge_rt[grpc]")
    triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    extra = f"[server]\ngrpc_socket_path = '{socket_dir / 'g'}'\n"
    x = triton.InferInput("x", [4, 4], "FP32")
    x.set_data_from_numpy(np.zeros((4, 4), np.float32))
    binary = Tensor(name="x", datatype="FP32", shape=(4, 4), data=bytes(64))
    with Daemon(socket_dir, extra=f"{extra}[limits]\nmax_tensor_bytes = 63\n") as daemon:
        over_grpc = triton.InferenceServerClient(f"unix:{socket_dir / 'g'}")
        with closing(over_grpc), Client(daemon.socket) as over_http:

            def problems() -> list[str]:
                found = []
                for ask in (lambda: over_grpc.infer("null", [x]), lambda: over_http.infer("null", {"x": binary})):
                    try:
                        ask()
                    except Exception as exc:  # noqa: BLE001  of two libraries
                        found.append(str(exc))
                return found

            assert ["limits.max_tensor_bytes" in problem for problem in problems()] == [True, True]
            daemon.reload(f"{extra}[limits]\nmax_tensor_bytes = 64\n", until="changed: limits.max_tensor_bytes")
            assert [problems() for _ in range(3)] == [[], [], []]


def test_no_request_is_lost_while_it_reloads_again_and_again(socket_dir: Path) -> None:
    """Streams and whole answers, longer and shorter than a reload, while good and bad files take turns."""

    async def ask(client: httpx2.AsyncClient, i: int) -> tuple[int, bool]:
        body = ASKED | {
            "model": "null-slow" if i % 2 else "null",
            "messages": [{"role": "user", "content": f"{i} " + "x" * (i % 40)}],
            "stream": i % 3 == 0,
        }
        answer = await client.post("/v1/chat/completions", json=body)
        whole = answer.text.rstrip().endswith("[DONE]") if body["stream"] else "choices" in answer.json()
        return answer.status_code, whole

    async def load(daemon: Daemon, warm: threading.Event, done: threading.Event) -> None:
        async with daemon.async_client() as client:
            await asyncio.gather(ask(client, 0), ask(client, 1))
            warm.set()
            i = 2
            while not done.is_set():
                outcomes.extend(await asyncio.gather(*(ask(client, i + j) for j in range(12))))
                i += 12

    outcomes: list[tuple[int, bool]] = []

    with Daemon(socket_dir, extra=WITHOUT_CACHE) as daemon:
        warm, done = threading.Event(), threading.Event()
        asking = threading.Thread(target=lambda: asyncio.run(load(daemon, warm, done)))
        asking.start()
        assert warm.wait(PATIENCE_S), daemon.log
        n_reloads = 0
        # Until answers of three rounds met reloads: which of the two is faster is the machine's own matter.
        while n_reloads < 10 or (len(outcomes) < 36 and asking.is_alive()):
            n_reloads += 1
            daemon.reload(f"{WITHOUT_CACHE}[limits]\nmax_stop = {n_reloads}\n", until="changed: limits.max_stop")
            daemon.reload(WITHOUT_CACHE + BAD, until="the new configuration is not used")
        done.set()
        asking.join()
        assert len(outcomes) >= 36
        assert set(outcomes) == {(200, True)}
        assert "Traceback" not in daemon.log


def test_an_endpoint_is_added_changed_and_taken_away(socket_dir: Path) -> None:
    def cloud(path: Path, **settings: Any) -> str:
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        return "\n".join(
            ["[router]\nscorer = false\n[cloud.peer]", f'base_url = "unix:{path}"', 'model = "null"', *lines]
        )

    other = socket_dir / "other"
    other.mkdir()
    with Daemon(other) as peer, Daemon(socket_dir) as daemon:
        assert status(daemon, route="cloud") == 403
        daemon.reload(cloud(peer.socket), until="router.scorer")
        with daemon.client() as client:
            answer = client.post("/v1/chat/completions", json=ASKED | {"route": "cloud"})
            assert answer.json()["origin"]["endpoint"] == "peer"
            daemon.reload(cloud(peer.socket, price_in=1e6), until="cloud.peer.price_in")
            other_question = {"messages": [{"role": "user", "content": "something else"}], "route": "cloud"}
            answer = client.post("/v1/chat/completions", json=ASKED | other_question)
            assert answer.json()["origin"]["cost"] > 0
        daemon.reload("[router]\nscorer = false\n", until="cloud.peer.base_url")
        assert status(daemon, messages=[{"role": "user", "content": "a third"}], route="cloud") in {403, 503}
        assert "Traceback" not in daemon.log


def test_the_judge_of_difficulty_comes_and_goes(socket_dir: Path) -> None:
    pytest.importorskip("wordllama", reason="the word vectors are not installed: edge_rt[vectors]")

    def cloud(path: Path, *, scorer: bool) -> str:
        return f'[router]\nscorer = {str(scorer).lower()}\n[cloud.peer]\nbase_url = "unix:{path}"\nmodel = "null"\n'

    other = socket_dir / "other"
    other.mkdir()
    question = {"messages": [{"role": "user", "content": "Prove that there are infinitely many primes."}]}
    with (
        Daemon(other) as peer,
        Daemon(socket_dir, extra=cloud(peer.socket, scorer=False)) as daemon,
        daemon.client() as client,
    ):

        def is_judged() -> bool:
            return "judged" in client.post("/v1/route/explain", json=question).text

        found = [is_judged()]
        for scorer in (True, False, True):
            daemon.reload(cloud(peer.socket, scorer=scorer), until="configuration: changed: router.scorer")
            found.append(is_judged())
        assert found == [False, True, False, True]
        assert "Traceback" not in daemon.log


def test_keys_that_systemd_holds_are_named_at_a_reload(socket_dir: Path) -> None:
    held = socket_dir / "held"
    held.mkdir()
    (held / "key_peer").write_text("secret")
    extra = '[router]\nscorer = false\n[cloud.peer]\nbase_url = "https://a.example/v1"\nmodel = "m"\n'
    extra += 'api_key_file = "credential:key_peer"\n'
    with Daemon(socket_dir, extra=extra, environ={"CREDENTIALS_DIRECTORY": str(held)}) as daemon:
        daemon.reload(extra, until="keys of cloud.peer are credentials")
        assert "a new one needs a restart" in daemon.log


def test_systemd_hears_of_each_reload(socket_dir: Path) -> None:
    path = socket_dir / "activated"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, listen.bind_unix(path, mode=0o660) as inherited:
        notify.bind(str(socket_dir / "notify"))
        notify.settimeout(PATIENCE_S)

        def heard(until: str) -> str:
            states: list[str] = []
            while not any(until in state for state in states):
                states.append(notify.recv(2000).decode())
            return "\n".join(states)

        with Daemon(socket_dir, inherit=inherited, environ={"NOTIFY_SOCKET": str(socket_dir / "notify")}) as daemon:
            inherited.close()
            daemon.socket = path
            heard("STATUS=no model in memory; idle")
            daemon.reload(BAD, until="the new configuration is not used")
            states = heard("the new configuration is not used")
            began, ended = states.index("RELOADING=1\nMONOTONIC_USEC="), states.rindex("READY=1")
            assert began < ended < states.index("STATUS=no model in memory; idle; the new configuration is not used")
            daemon.reload("", until="nothing has changed")
            assert heard("STATUS=").endswith("STATUS=no model in memory; idle")


def test_a_terminal_that_hangs_up_ends_the_daemon(socket_dir: Path) -> None:
    (socket_dir / "config.toml").write_text(CONFIG.format(store_dir=socket_dir / "store"))
    command = [sys.executable, "-m", "edge_rt", "--config", str(socket_dir / "config.toml"), "serve"]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run by nohup
        os.execv(sys.executable, [*command, "--socket", str(socket_dir / "s")])
    try:
        said = b""
        while b"listens" not in said:
            said += os.read(terminal, 4096)
        os.kill(pid, signal.SIGHUP)
        assert os.waitpid(pid, 0)[1] == 0
        assert not (socket_dir / "s").exists()
    finally:
        os.close(terminal)


def test_nohup_keeps_it_and_lets_it_reload(socket_dir: Path) -> None:
    """A daemon whose SIGHUP was ignored when it began does not end by one; tests have no terminal to lose either."""
    script = "import signal, sys, os; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    (socket_dir / "config.toml").write_text(CONFIG.format(store_dir=socket_dir / "store"))
    command = [sys.executable, "-m", "edge_rt", "--config", str(socket_dir / "config.toml"), "serve"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command, "--socket", str(socket_dir / "s")], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = iter(process.stderr)
    assert any("listens" in line for line in lines)
    process.send_signal(signal.SIGHUP)
    assert any("nothing has changed" in line for line in lines)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    process.stderr.close()
