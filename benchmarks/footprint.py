"""What the daemon costs while it does nothing, and how soon it and the demo are there.

Bars: the front process at most 60 MiB resident after it has served, at most 0.5 % of a core idle, READY at most 1.5 s
after the start without a model, and `make demo` at most 20 s once everything is installed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.devices import memory
from edge_rt.same_package import command
from edge_rt.types import Message

_ROOT = Path(__file__).resolve().parent.parent
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@contextmanager
def daemon(*arguments: str, **environ: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, float]]:
    """Start a daemon; yields it, its socket, and the seconds until its READY=1 (sd_notify(3)).

    Raises RuntimeError with its last words if it has ended by itself.
    """
    with (
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryDirectory(prefix="ert-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
    ):
        notify.bind(f"{folder}/notify")
        notify.settimeout(60.0)
        path = Path(folder) / "api.sock"
        begun_s = time.perf_counter()
        process = subprocess.Popen(
            command("edge_rt", "serve", "--socket", str(path), "--log-level", "error", *arguments),
            env={**os.environ, **environ, "NOTIFY_SOCKET": f"{folder}/notify"},
            stderr=said,
        )
        try:
            while b"READY=1" not in notify.recv(4096):
                pass
            yield process, path, time.perf_counter() - begun_s
        finally:
            if (status := process.poll()) is not None:
                said.seek(0)
                raise RuntimeError(f"the daemon has ended by itself, status {status}: {said.read()[-4000:].decode()}")
            process.terminate()
            process.wait()


def ready_s() -> float:
    with daemon() as (_, _, seconds):
        return seconds


def cpu_s(pid: int) -> float:
    """Read a process' CPU time, /proc/PID/stat columns 14 and 15 (proc_pid_stat(5))."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) * _TICK_S


def served(n_requests: int, idle_s: float) -> tuple[float, float]:
    """Serve some answers, then wait; give the front process' MiB and its idle share of a core in per cent."""
    model = config.load().config.catalog.default_model
    with daemon("--model", model) as (process, path, _), Client(path) as client:
        for i in range(n_requests):
            question = Message(role="user", content=f"Count from {i}.")
            for _ in client.chat([question], max_tokens=8, model=model):
                pass
        time.sleep(2.0)  # the last figures of the worker come in
        before_s = cpu_s(process.pid)
        time.sleep(idle_s)
        share = 100 * (cpu_s(process.pid) - before_s) / idle_s
        return (memory.process_rss_bytes(process.pid).value or 0) / 2**20, share


def demo_s() -> float:
    begun_s = time.perf_counter()
    subprocess.run(["make", "-s", "demo"], cwd=_ROOT, check=True, capture_output=True)
    return time.perf_counter() - begun_s


def main() -> None:
    arguments = harness.parse(__doc__)
    n_runs = arguments.pairs(7, quick=3)
    ready = tuple(ready_s() for _ in range(n_runs))
    rss_mib, idle_percent = served(10 if arguments.quick else 50, 5.0 if arguments.quick else 30.0)
    demo_s()  # the first time may install
    demos = tuple(demo_s() for _ in range(1 if arguments.quick else 3))
    harness.finish(
        arguments,
        figures=[
            harness.Figure(name="READY without a model", unit="s", samples=ready, at_most=1.5),
            harness.Figure(name="front process after serving", unit="MiB", samples=(rss_mib,), at_most=60.0),
            harness.Figure(name="front process idle", unit="% of a core", samples=(idle_percent,), at_most=0.5),
            harness.Figure(name="make demo, again", unit="s", samples=demos, at_most=20.0),
        ],
    )


if __name__ == "__main__":
    main()
