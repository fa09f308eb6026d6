"""The installed units under real systemd: how they start, are watched, run out of memory, are confined, and end.

A container with systemd as PID 1, see systemd_container. The null model answers; a token of it takes a step.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edge_rt.api.client import no_authorities
from tests.system.systemd_container import PYTHON, Container, fill_memory, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SERVICE, SOCKET = "edge_rt.service", "edge_rt.socket"
SOCKET_PATH = "/run/edge_rt/edge_rt.sock"
WATCHDOG_S = 3.0
CONFIG = """
[catalog]
default_model = "null"

[cache]
enabled = false

[engine]
max_draft = 0

[worker]
step_timeout_s = 2.0
memory_margin_bytes = 0

[models.null]
backend = "null"

[models.slow]
backend = "null"
variant = "step_s=0.02"
"""
# A shorter watchdog than the shipped one, so that the tests take less time.
DROP_IN = f"[Service]\nWatchdogSec={WATCHDOG_S:g}\n"


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    with Container.boot(comes_first=True) as booted:
        booted.write("/etc/edge_rt/config.toml", CONFIG)
        booted.write("/var/lib/edge_rt/models/old/file", "pulled before there was a service")
        done = booted.run(PYTHON, "-m", "edge_rt", "install")
        assert "ran  systemctl enable --now edge_rt.socket" in done.stdout
        booted.write(f"/etc/systemd/system/{SERVICE}.d/test.conf", DROP_IN)
        booted.run("systemctl", "daemon-reload")
        yield booted


@pytest.fixture
def machine(container: Container) -> Iterator[Container]:
    """The container with the socket open and no daemon yet."""
    container.run("systemctl", "stop", SOCKET, SERVICE)  # with the socket goes who still waits on it
    container.run("systemctl", "reset-failed")
    container.run("systemctl", "start", SOCKET)
    yield container
    container.run("systemctl", "stop", SOCKET, SERVICE)


def client(machine: Container, *, timeout_s: float = 60.0) -> httpx2.Client:
    transport = httpx2.HTTPTransport(uds=str(machine.live(SOCKET_PATH)), verify=no_authorities())
    return httpx2.Client(base_url="http://edge_rt", transport=transport, timeout=timeout_s)


def ask(machine: Container, text: str = "hello", *, model: str = "null", max_tokens: int = 2000) -> tuple[int, str]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    with client(machine) as asked:
        answer = asked.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.text


def is_active(machine: Container) -> bool:
    return machine.run("systemctl", "is-active", SERVICE, check=False).stdout.strip() == "active"


def workers(machine: Container) -> list[int]:
    """List the outer numbers of the daemon's workers."""
    parent = machine.pid(SERVICE)
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            if f"PPid:\t{parent}\n" in text and b"edge_rt.worker.main" in status.with_name("cmdline").read_bytes():
                found.append(int(status.parent.name))
        except OSError:
            continue
    return found


# Start


def test_the_first_start_takes_over_what_root_has_pulled(machine: Container) -> None:
    machine.run("systemctl", "start", SERVICE)
    taken = machine.live("/var/lib/private/edge_rt/models/old/file")
    assert taken.stat().st_uid >= 61184
    assert machine.live("/var/lib/edge_rt").is_symlink()


def test_the_first_client_starts_the_daemon_and_is_answered(machine: Container) -> None:
    assert not is_active(machine)
    assert machine.live(SOCKET_PATH).stat().st_mode & 0o777 == 0o660
    assert ask(machine)[0] == 200
    assert is_active(machine)
    machine.until("its status", lambda: machine.show(SERVICE, "StatusText") == "null in memory; idle")


def test_it_says_ready_after_preloaded_models(machine: Container) -> None:
    machine.write(
        f"/run/systemd/system/{SERVICE}.d/preload.conf", "[Service]\nEnvironment=EDGE_RT__MODELS__NULL__PRELOAD=1\n"
    )
    machine.run("systemctl", "daemon-reload")
    try:
        machine.run("systemctl", "start", SERVICE)  # returns when it is ready
        with client(machine) as asked:
            assert asked.get("/v1/models/null").json()["status"] == "loaded"
    finally:
        machine.live(f"/run/systemd/system/{SERVICE}.d/preload.conf").unlink()
        machine.run("systemctl", "daemon-reload")


def test_status_and_doctor_tell_of_it(machine: Container) -> None:
    ask(machine)
    status = machine.run(PYTHON, "-m", "edge_rt", "status").stdout
    assert "edge_rt.service: active (running)" in status
    assert "in memory: null" in status
    found = json.loads(machine.run(PYTHON, "-m", "edge_rt", "doctor", "--json", check=False).stdout)
    service = next(check for check in found if check["name"] == "service")
    assert service["status"] == "ok", service


def test_only_members_of_the_group_may_connect_and_others_hear_how(machine: Container) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534")
    gid = machine.run("getent", "group", "edge_rt").stdout.split(":")[2]
    edge_rt = (PYTHON, "-m", "edge_rt")
    refused = machine.run(*nobody, "--clear-groups", *edge_rt, "status", check=False)
    assert refused.returncode == 1
    assert "no right to use it; join the group" in refused.stdout
    found = json.loads(machine.run(*nobody, "--clear-groups", *edge_rt, "doctor", "--json", check=False).stdout)
    access = next(check for check in found if check["name"] == "access")
    assert (access["status"], "usermod --append --groups edge_rt" in access["remedy"]) == ("fail", True)
    asked = machine.run(*nobody, f"--groups={gid}", *edge_rt, "status")
    assert "daemon: answers on /run/edge_rt/edge_rt.sock" in asked.stdout
    for command in ("install", "uninstall"):
        refused = machine.run(*nobody, "--clear-groups", *edge_rt, command, check=False)
        assert (refused.returncode, "takes root: `sudo" in refused.stderr) == (1, True)


def test_log_lines_have_their_priority(machine: Container) -> None:
    ask(machine)
    os.kill(workers(machine)[0], signal.SIGKILL)
    machine.until("an error in the journal", lambda: "is lost" in errors_of(machine))
    lines = machine.run("journalctl", f"--unit={SERVICE}", "--output=json", "--no-pager").stdout.splitlines()
    lost = [entry for entry in map(json.loads, lines) if "is lost" in str(entry["MESSAGE"])]
    assert {entry["PRIORITY"] for entry in lost} == {"3"}
    assert not any(str(entry["MESSAGE"]).startswith("<") for entry in map(json.loads, lines))


def errors_of(machine: Container) -> str:
    return machine.run("journalctl", f"--unit={SERVICE}", "--priority=err", "--output=cat", "--no-pager").stdout


# What goes wrong


def test_after_sigkill_it_is_back_and_clients_that_wait_are_served(machine: Container) -> None:
    ask(machine)
    before = machine.pid(SERVICE)
    with ThreadPoolExecutor(8) as pool:
        os.kill(before, signal.SIGKILL)
        machine.until("the end", lambda: not Path(f"/proc/{before}").exists())
        answers = list(pool.map(lambda i: ask(machine, f"question {i}")[0], range(8)))
    assert answers == [200] * 8
    assert machine.show(SERVICE, "NRestarts") == "1"
    assert machine.pid(SERVICE) not in (0, before)


def test_a_stopped_daemon_is_noticed_by_the_watchdog(machine: Container) -> None:
    ask(machine)
    before = machine.pid(SERVICE)
    os.kill(before, signal.SIGSTOP)
    machine.until("the watchdog", lambda: not Path(f"/proc/{before}").exists())
    assert ask(machine)[0] == 200
    assert "Watchdog timeout" in machine.journal(SERVICE)


def test_a_worker_stuck_in_a_step_is_noticed_and_the_request_answered(machine: Container) -> None:
    ask(machine, model="slow")
    (stuck,) = workers(machine)
    os.kill(stuck, signal.SIGSTOP)
    assert ask(machine, model="slow")[0] == 200
    assert "killed: no progress" in machine.journal(SERVICE)
    assert machine.show(SERVICE, "NRestarts") == "0"
    assert not Path(f"/proc/{stuck}").exists()


def test_a_worker_that_runs_out_of_memory_does_not_end_the_daemon(machine: Container) -> None:
    machine.write(f"/run/systemd/system/{SERVICE}.d/memory.conf", "[Service]\nMemoryMax=256M\n")
    machine.run("systemctl", "daemon-reload")
    try:
        ask(machine)
        daemon, (worker,) = machine.pid(SERVICE), workers(machine)
        machine.run(PYTHON, "-c", fill_memory(worker, n_mib=90), check=False)  # it may be taken too, after the worker
        machine.until("the kernel", lambda: not Path(f"/proc/{worker}").exists())
        assert ask(machine)[0] == 200
        assert machine.pid(SERVICE) == daemon
        assert machine.show(SERVICE, "NRestarts") == "0"
    finally:
        machine.live(f"/run/systemd/system/{SERVICE}.d/memory.conf").unlink()
        machine.run("systemctl", "daemon-reload")


def test_a_wrong_configuration_is_not_tried_again_and_doctor_explains_it(machine: Container) -> None:
    machine.write("/etc/edge_rt/config.toml", CONFIG + "\n[server]\ndrain = 1\n")
    try:
        machine.run("systemctl", "start", SERVICE, check=False)
        assert machine.show(SERVICE, "ExecMainStatus") == "78"
        assert machine.show(SERVICE, "NRestarts") == "0"
        found = json.loads(machine.run(PYTHON, "-m", "edge_rt", "doctor", "--json", check=False).stdout)
        service = next(check for check in found if check["name"] == "service")
        assert service["status"] == "fail"
        assert "its configuration is wrong" in service["detail"]
        assert "server.drain" in service["detail"]
    finally:
        machine.write("/etc/edge_rt/config.toml", CONFIG)


# What it may not

PROBE = """
import errno, json, os, socket, sys
def tried(do):
    try: do()
    except OSError as exc: return errno.errorcode[exc.errno]
    return "done"
def write(path): return lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
import ctypes, mmap
def executable():
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
print(json.dumps({
    "uid": os.getuid() >= 61184,
    "etc": tried(write("/etc/x")), "usr": tried(write("/usr/x")), "sys": tried(write("/sys/kernel/mm/ksm/run")),
    "proc": tried(write("/proc/sys/vm/swappiness")), "run": tried(write("/run/edge_rt/x")),
    "key": tried(lambda: os.listdir("/etc/edge_rt/keys")), "root": tried(lambda: os.listdir("/root")),
    "home": tried(lambda: os.listdir("/home")), "fuse": tried(lambda: os.open("/dev/fuse", os.O_RDWR)),
    "packet": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "netlink": tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "wx": tried(executable), "chroot": tried(lambda: os.chroot("/")),
    "null": tried(write("/dev/null")),
    "state": tried(write(os.environ["STATE_DIRECTORY"] + "/x")),
    "cache": tried(write(os.environ["CACHE_DIRECTORY"] + "/x")),
    "runtime": tried(write(os.environ["RUNTIME_DIRECTORY"] + "/x")),
    "credential": sorted(os.listdir(os.environ["CREDENTIALS_DIRECTORY"])),
}))
"""


def test_what_is_not_needed_is_denied(machine: Container) -> None:
    machine.write("/etc/edge_rt/keys/example", "secret\n", mode=0o600)
    machine.write("/opt/probe.py", PROBE)
    drop_in = f"/run/systemd/system/{SERVICE}.d/probe.conf"
    machine.write(drop_in, f"[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart={PYTHON} /opt/probe.py\n")
    machine.run("systemctl", "daemon-reload")
    try:
        machine.run("systemctl", "start", SERVICE, check=False)
        assert machine.show(SERVICE, "Result") == "success", machine.journal(SERVICE)
        found: dict[str, Any] = json.loads(
            next(x for x in machine.journal(SERVICE).splitlines() if x.startswith('{"uid'))
        )
    finally:
        machine.live(drop_in).unlink()
        machine.run("systemctl", "daemon-reload")
        machine.live("/etc/edge_rt/keys/example").unlink()
    assert found.pop("uid"), "a user of its own"
    assert found.pop("credential") == ["key_example"]
    allowed = {"null", "state", "cache", "runtime"}
    assert {name for name, how in found.items() if how == "done"} == allowed, found
    assert {found[name] for name in ("etc", "usr", "sys", "proc", "run")} <= {"EROFS", "EACCES"}


@pytest.mark.model
@pytest.mark.parametrize("backend", ["native", "llama_cpu", "onnx_cpu"])
def test_real_models_run_with_what_is_left_to_them(machine: Container, model_store: Path, backend: str) -> None:
    """Each back end below all restrictions; the state directory is the service's, so packed weights are kept there."""
    name = "minilm-l6" if backend == "onnx_cpu" else model_store.parent.name
    source, state = model_store.parents[1] / name, machine.live("/var/lib/edge_rt/models") / name
    if not source.is_dir():
        pytest.skip(f"{name} is not in the store; `edge_rt models pull {name}` fetches it")
    machine.run("mkdir", "--parents", f"/var/lib/edge_rt/models/{name}")
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".packed", ".graph", ".lock")):
            shutil.copyfile(file, state / file.name)
    machine.run(PYTHON, "-m", "edge_rt", "models", "list")  # by root, who gives it to the service
    assert {file.stat().st_uid >= 61184 for file in state.iterdir()} == {True}
    machine.write("/etc/edge_rt/config.toml", f'{CONFIG}\n[models.{name}]\nbackend = "{backend}"\n')
    try:
        if backend == "onnx_cpu":
            with client(machine) as asked:
                answer = asked.post("/v1/embeddings", json={"model": name, "input": "bearing runs hot"})
            assert len(answer.json()["data"][0]["embedding"]) == 384
        else:
            status, text = ask(machine, "What is gravity?", model=name, max_tokens=8)
            assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 8), text
        with client(machine) as asked:
            assert asked.get(f"/v1/models/{name}").json()["meta"]["backend"] == backend
        if backend == "native":
            assert list(state.glob(".*.packed")), machine.journal(SERVICE)
    finally:
        machine.write("/etc/edge_rt/config.toml", CONFIG)


# Ends


def test_a_stop_lets_running_answers_end(machine: Container) -> None:
    ask(machine, model="slow")
    answers: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(machine, "x" * 60, model="slow")))
    asking.start()
    with client(machine) as asked:
        machine.until("a running answer", lambda: 'running{model="slow"} 1.0' in asked.get("/metrics").text)
    machine.run("systemctl", "stop", SERVICE)
    asking.join()
    assert [status for status, _ in answers] == [200]
    assert machine.show(SERVICE, "Result") == "success"
    assert machine.live(SOCKET_PATH).exists()


def test_clients_that_come_during_a_restart_wait_and_are_served(machine: Container) -> None:
    ask(machine)
    done = threading.Event()
    statuses: list[int] = []

    def keep_asking() -> None:
        while not done.is_set():
            statuses.append(ask(machine)[0])

    threads = [threading.Thread(target=keep_asking) for _ in range(2)]
    for thread in threads:
        thread.start()
    machine.run("systemctl", "restart", SERVICE)
    machine.run("systemctl", "restart", SERVICE)
    done.set()
    for thread in threads:
        thread.join()
    # What was on its way when the end began hears 503 with Retry-After; nobody is cut off or refused a connection.
    assert set(statuses) <= {200, 503}
    assert statuses[-1] == 200


def test_a_reload_changes_limits_and_drops_nothing_and_a_bad_file_is_in_the_status(machine: Container) -> None:
    ask(machine, model="slow")
    with ThreadPoolExecutor(1) as pool, client(machine) as asked:
        running = pool.submit(ask, machine, "x" * 60, model="slow")
        machine.until("a running answer", lambda: 'running{model="slow"} 1.0' in asked.get("/metrics").text)
        pid = machine.pid(SERVICE)
        try:
            machine.write("/etc/edge_rt/config.toml", CONFIG + "\n[limits]\nmax_prompt_bytes = 20\n")
            machine.run("systemctl", "reload", SERVICE)
            machine.until("the new limit", lambda: ask(machine, "x" * 30)[0] == 400)
            machine.write("/etc/edge_rt/config.toml", CONFIG + "\n[limits]\nmax_prompt_bytes = 'many'\n")
            machine.run("systemctl", "reload", SERVICE)
            machine.until("its status", lambda: "configuration is not used" in machine.show(SERVICE, "StatusText"))
        finally:
            machine.write("/etc/edge_rt/config.toml", CONFIG)
        assert running.result()[0] == 200
    assert machine.pid(SERVICE) == pid
    assert is_active(machine)


def test_uninstall_leaves_nothing_of_it(container: Container) -> None:
    """Last: the others need the units."""
    container.run("systemctl", "start", SOCKET)
    ask(container)
    lines = container.run(PYTHON, "-m", "edge_rt", "uninstall", "--purge").stdout.splitlines()
    assert "removed  /etc/systemd/system/edge_rt.service" in lines
    assert container.show(SERVICE, "LoadState") == "not-found"
    for path in (SOCKET_PATH, "/var/lib/private/edge_rt", "/etc/edge_rt"):
        assert not os.path.lexists(container.live(path)), path
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(FileNotFoundError):
        probe.connect(str(container.live(SOCKET_PATH)))
