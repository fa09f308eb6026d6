"""How soon the service answers: over a socket nobody listens behind yet, after SIGKILL, and after it hangs.

Real systemd in a container (tests/system/systemd_container.py), the units as `edge_rt install` writes them, the null
model. Times are a client's: from its connect, or from the signal, to the first byte of an answer. Bars: first answer
1.5 s, back after SIGKILL 1 s, after SIGSTOP WatchdogSec + 1 s; the power helper's limits 1 s after its SIGKILL, on a
modelled board. The container comes first: what else the machine does gets the rest of the CPU. Takes root and
systemd-nspawn.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import harness
import httpx2

from edge_rt.power.client import HintSender
from edge_rt.power.state import Hint
from tests.plants import fuse_board
from tests.plants.fuse_board import FuseBoard
from tests.system.systemd_container import PYTHON, Container, why_not

_SERVICE, _SOCKET = "edge_rt.service", "edge_rt.socket"
_POWERD = "edge_rt-powerd.service"
_WATCHDOG_S = 10.0  # as shipped
_QUICK_WATCHDOG_S = 3.0
_CPUFREQ = "sys/devices/system/cpu/cpufreq"
_LIMIT, _HIGHEST = f"{_CPUFREQ}/policy0/scaling_max_freq", f"{_CPUFREQ}/policy0/cpuinfo_max_freq"
_CONFIG = """
[catalog]
default_model = "null"

[models.null]
backend = "null"

[power]
enabled = true
"""
_BOARD = f"""
[Service]
ExecStart=
ExecStart={PYTHON} -P -m edge_rt.power.powerd --root /vsys
ExecStopPost=
ExecStopPost=+{PYTHON} -P -m edge_rt.power.restore --root /vsys
ReadWritePaths=/vsys/{_CPUFREQ}
"""


def asked(container: Container, path: str = "/v1/chat/completions") -> None:
    """Ask and wait for the answer; a connection that ends before it is made again, as a client would."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    transport = httpx2.HTTPTransport(uds=str(container.live("/run/edge_rt/edge_rt.sock")))
    with httpx2.Client(base_url="http://edge_rt", transport=transport, timeout=60.0) as client:
        answer = client.post(path, json=body) if path.startswith("/v1") else client.get(path)
    answer.raise_for_status()


def first_answer_s(container: Container) -> float:
    container.run("systemctl", "stop", _SERVICE)
    begun_s = time.monotonic()
    asked(container)
    return time.monotonic() - begun_s


def back_s(container: Container, number: signal.Signals) -> float:
    """End the daemon by a signal; give the time until a client that comes then has heard of a new one."""
    container.run("systemctl", "reset-failed", _SERVICE)
    pid = container.pid(_SERVICE)
    begun_s = time.monotonic()
    os.kill(pid, number)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.005)
    asked(container, "/health/live")
    return time.monotonic() - begun_s


def restored_s(container: Container, board: FuseBoard) -> float:
    """Kill the power helper while it holds a clock down; give the time until the clock's own limit is back."""
    container.run("systemctl", "reset-failed", _POWERD)
    pid, is_over = container.pid(_POWERD), threading.Event()

    def work() -> None:
        """Tell it, as the daemon does, that tokens are decoded."""
        sender = HintSender(str(container.live("/run/edge_rt/power.sock")))
        while not is_over.wait(0.05):
            sender.send(Hint(work="decode", n_running=1, tpot_s=0.02, sent_s=time.monotonic()))
        sender.close()

    working = threading.Thread(target=work, daemon=True)
    working.start()
    while board.read(_LIMIT) == board.read(_HIGHEST):
        time.sleep(0.005)
    begun_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    if board.read(_LIMIT) == board.read(_HIGHEST):
        raise RuntimeError("the limit was back before anything could have brought it back")
    while board.read(_LIMIT) != board.read(_HIGHEST):
        time.sleep(0.002)
    took_s = time.monotonic() - begun_s
    is_over.set()
    working.join()
    container.until("a new power helper", lambda: container.pid(_POWERD) not in (0, pid))
    return took_s


def main() -> None:
    arguments = harness.parse(__doc__)
    if reason := why_not() or fuse_board.why_not():
        sys.exit(f"cannot measure: {reason}")
    watchdog_s = _QUICK_WATCHDOG_S if arguments.quick else _WATCHDOG_S
    n, n_hangs = arguments.pairs(9, quick=3), arguments.pairs(3, quick=1)
    with (
        tempfile.TemporaryDirectory(prefix="ert-") as folder,
        FuseBoard("pi_5", Path(folder, "root")) as board,
        Container.boot(binds=(f"{board.root}:/vsys",), comes_first=True) as container,
    ):
        container.write("/etc/edge_rt/config.toml", _CONFIG)
        container.write(f"/etc/systemd/system/{_POWERD}.d/board.conf", _BOARD)
        container.write(f"/etc/systemd/system/{_SERVICE}.d/bench.conf", f"[Service]\nWatchdogSec={watchdog_s:g}\n")
        container.run(PYTHON, "-m", "edge_rt", "install", "--powerd")
        first_answer_s(container)
        figures = [
            harness.Figure(
                name="first answer over an activated socket",
                unit="s",
                samples=tuple(first_answer_s(container) for _ in range(n)),
                at_most=1.5,
            ),
            harness.Figure(
                name="back after SIGKILL",
                unit="s",
                samples=tuple(back_s(container, signal.SIGKILL) for _ in range(n)),
                at_most=1.0,
            ),
            harness.Figure(
                name=f"back after SIGSTOP, WatchdogSec={watchdog_s:g}",
                unit="s",
                samples=tuple(back_s(container, signal.SIGSTOP) for _ in range(n_hangs)),
                at_most=watchdog_s + 1.0,
            ),
            harness.Figure(
                name="limits back after the power helper's SIGKILL (modelled board)",
                unit="s",
                samples=tuple(restored_s(container, board) for _ in range(n)),
                at_most=1.0,
            ),
        ]
    harness.finish(arguments, figures=figures)


if __name__ == "__main__":
    main()
