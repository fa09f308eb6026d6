"""The power helper's unit under real systemd, on a modelled board: what it may write, and that limits always come back.

The board is a FUSE file system outside the container (tests/plants), seen as /vsys inside: no real clock changes.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_rt.power.client import HintSender
from edge_rt.power.state import Hint
from tests.plants import fuse_board
from tests.plants.fuse_board import FuseBoard
from tests.system.systemd_container import PYTHON, Container, fill_memory, why_not

_REASON = why_not() or fuse_board.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_REASON), reason=_REASON)]

SERVICE = "edge_rt-powerd.service"
CPUFREQ = "sys/devices/system/cpu/cpufreq"
LIMIT = f"{CPUFREQ}/policy0/scaling_max_freq"
CONFIG = "[power]\nenabled = true\n"
DROP_IN = f"""
[Service]
ExecStart=
ExecStart={PYTHON} -P -m edge_rt.power.powerd --root /vsys
ExecStopPost=
ExecStopPost=+{PYTHON} -P -m edge_rt.power.restore --root /vsys
ReadWritePaths=/vsys/{CPUFREQ}
WatchdogSec=2
"""


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuseBoard]:
    with FuseBoard("pi_5", tmp_path_factory.mktemp("board") / "root") as mounted:
        yield mounted


@pytest.fixture(scope="module")
def container(board: FuseBoard) -> Iterator[Container]:
    with Container.boot(binds=(f"{board.root}:/vsys",), comes_first=True) as booted:
        booted.write("/etc/edge_rt/config.toml", CONFIG)
        done = booted.run(PYTHON, "-m", "edge_rt", "install", "--powerd", "--no-start")
        assert "wrote  /etc/systemd/system/edge_rt-powerd.service" in done.stdout
        booted.write(f"/etc/systemd/system/{SERVICE}.d/board.conf", DROP_IN)
        booted.run("systemctl", "daemon-reload")
        yield booted


class Daemon:
    """Tells powerd, as the inference daemon does, that it decodes."""

    def __init__(self, machine: Container) -> None:
        self._sender = HintSender(str(machine.live("/run/edge_rt/power.sock")))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._sender.close()

    def _send(self) -> None:
        while not self._is_over.wait(0.05):
            self._sender.send(Hint(work="decode", n_running=1, tpot_s=0.02, sent_s=time.monotonic()))


@pytest.fixture
def machine(container: Container, board: FuseBoard) -> Iterator[Container]:
    """The container with powerd running and the board's clock held below its own limit."""
    container.run("systemctl", "reset-failed")
    container.run("systemctl", "start", SERVICE)
    daemon = Daemon(container)
    container.until("a lower limit", lambda: is_lower(board))
    yield container
    daemon.stop()
    container.run("systemctl", "stop", SERVICE)


def is_lower(board: FuseBoard) -> bool:
    return int(board.read(LIMIT)) < int(board.read(f"{CPUFREQ}/policy0/cpuinfo_max_freq"))


def was_put_back(machine: Container, n_times: int) -> bool:
    return machine.journal(SERVICE).count("is back") >= n_times


def test_it_is_not_root_and_sets_the_clock(machine: Container, board: FuseBoard) -> None:
    fields = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{machine.pid(SERVICE)}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert int(fields["Uid"].split()[0]) >= 61184
    assert int(fields["CapEff"], 16) == 1 << 1, "CAP_DAC_OVERRIDE and nothing else"
    assert int(fields["NoNewPrivs"]) == 1
    assert is_lower(board)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_limits_are_back_after_it_was_killed_or_hangs(
    machine: Container, board: FuseBoard, number: signal.Signals
) -> None:
    before, n_before = machine.pid(SERVICE), machine.journal(SERVICE).count("is back")
    os.kill(before, number)
    machine.until("the end", lambda: not Path(f"/proc/{before}").exists())
    machine.until("the restoring", lambda: was_put_back(machine, n_before + 1))
    machine.until("a new one", lambda: machine.pid(SERVICE) not in (0, before))
    machine.until("work as before", lambda: is_lower(board))


def test_status_and_doctor_tell_of_it(machine: Container) -> None:
    lines = machine.run(PYTHON, "-m", "edge_rt", "status", check=False).stdout.splitlines()
    assert any(line.startswith("edge_rt-powerd.service: active (running)") for line in lines)
    assert any(line.startswith("power: acting, ") for line in lines), lines
    found = json.loads(machine.run(PYTHON, "-m", "edge_rt", "doctor", "--json", check=False).stdout)
    clocks = next(check for check in found if check["name"] == "clocks")
    # A board of FUSE on a machine that has much to do may be slow to read.
    assert (clocks["status"], clocks["detail"].partition(";")[0]) == ("ok", "the power helper is acting")


def test_the_limits_are_back_after_a_stop(machine: Container, board: FuseBoard) -> None:
    machine.run("systemctl", "stop", SERVICE)
    assert not is_lower(board)
    assert machine.show(SERVICE, "Result") == "success"


def test_the_limits_are_back_after_the_kernel_took_it(container: Container, board: FuseBoard) -> None:
    """Out of memory, with a score that makes the kernel take powerd first; its own makes it one of the last."""
    drop_in = f"/run/systemd/system/{SERVICE}.d/score.conf"
    container.write(drop_in, "[Service]\nOOMScoreAdjust=900\n")
    container.run("systemctl", "daemon-reload")
    container.run("systemctl", "start", SERVICE)
    daemon = Daemon(container)
    try:
        container.until("a lower limit", lambda: is_lower(board))
        before, n_before = container.pid(SERVICE), container.journal(SERVICE).count("is back")
        container.run(PYTHON, "-c", fill_memory(before, n_mib=20), check=False)
        container.until("the kernel", lambda: not Path(f"/proc/{before}").exists())
        container.until("the restoring", lambda: was_put_back(container, n_before + 1))
        assert "status=9/KILL" in container.journal(SERVICE)
    finally:
        daemon.stop()
        container.run("systemctl", "stop", SERVICE)
        container.live(drop_in).unlink()
        container.run("systemctl", "daemon-reload")


PROBE = """
import errno, json, os, socket
def tried(do):
    try: do()
    except OSError as exc: return errno.errorcode[exc.errno]
    return "done"
def write(path): return lambda: os.close(os.open(path, os.O_WRONLY))
print(json.dumps({
    "limit": tried(write("/vsys/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq")),
    "online": tried(write("/vsys/sys/devices/system/cpu/cpu1/online")),
    "passwd": tried(write("/etc/passwd")), "boot": tried(write("/etc/machine-id")),
    "kernel": tried(write("/proc/sys/vm/swappiness")), "net": tried(lambda: socket.socket(socket.AF_INET)),
    "seen": [open("/etc/shadow").read(), os.listdir("/etc/edge_rt/keys"), os.listdir("/root"), os.listdir("/home")],
    "setuid": tried(lambda: os.setuid(0)), "chown": tried(lambda: os.chown("/run", 0, 0)),
}))
"""


def told(container: Container) -> str:
    """What the probe has found, "" where the journal does not have it yet."""
    lines = container.journal(SERVICE).splitlines()
    return next((line for line in lines if line.startswith('{"limit')), "")


def test_it_may_write_clocks_and_nothing_else(container: Container) -> None:
    container.write("/opt/probe.py", PROBE)
    container.write("/etc/edge_rt/keys/example", "secret")
    drop_in = f"/run/systemd/system/{SERVICE}.d/probe.conf"
    container.write(drop_in, f"[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart={PYTHON} /opt/probe.py\n")
    container.run("systemctl", "daemon-reload")
    try:
        container.run("systemctl", "start", SERVICE)
        container.until("the journal has its line", lambda: told(container))  # which it writes a little later
        line = told(container)
    finally:
        container.live(drop_in).unlink()
        container.run("systemctl", "daemon-reload")
    found = json.loads(line)
    assert found.pop("limit") == "done"
    assert found.pop("seen") == ["", [], [], []], "the capability opens what stands in their place, which is empty"
    assert {name for name, how in found.items() if how == "done"} == set(), found
