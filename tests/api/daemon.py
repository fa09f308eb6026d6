"""A real daemon in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import psutil

from edge_rt.api.client import no_authorities
from tests import patience
from tests.patience import PATIENCE_S

CONFIG = """
[catalog]
default_model = "null"
store_dir = "{store_dir}"

[models.null]
backend = "null"

[models.null-slow]
backend = "null"
variant = "step_s=0.02"

[models.null-lora]
backend = "null"

[models.null-lora.adapters.poems]
file = "unread"
"""

# A token is a step, so that an answer can be made to take as long as a test needs.
_STEADY = {"EDGE_RT__ENGINE__MAX_DRAFT": "0"}

_ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_FDS"], os.environ["LISTEN_PID"] = "1", str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""


class Daemon:
    """`edge_rt serve` as a child process; use it in a `with`."""

    def __init__(
        self,
        directory: Path,
        *,
        extra: str = "",
        args: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        inherit: socket.socket | None = None,
    ) -> None:
        self.socket = directory / "s"
        self._config, self._base = directory / "config.toml", CONFIG.format(store_dir=directory / "store")
        config = self._config
        config.write_text(self._base + extra)
        command = [sys.executable, "-m", "edge_rt", "serve", "--config", str(config), "--log-format", "json"]
        fds: tuple[int, ...] = ()
        if inherit is None:
            command += ["--socket", str(self.socket), *args]
        else:  # as systemd does it: descriptor 3, and the pid it is meant for
            fds = (inherit.fileno(),)
            command = [sys.executable, "-c", _ACTIVATE, str(fds[0]), *command, *args]
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            start_new_session=True,  # without a terminal, whose end SIGHUP would mean
            env={**{k: v for k, v in os.environ.items() if not k.startswith("EDGE_RT")}, **_STEADY, **(environ or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if "edge_rt listens" in line:
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Self:
        self._ready.wait(PATIENCE_S)
        if "edge_rt listens" not in self.log:
            self.stop()  # or another test, which meets what is left of it, would be blamed
            raise AssertionError(self.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> int:
        """Send a signal and wait for the end; gives the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._end()
        return status

    def reload(self, extra: str, *, until: str) -> None:
        """Change the configuration, send SIGHUP, and go on asking until the log has these words once more."""
        n_before = self.log.count(until)
        self._config.write_text(self._base + extra)
        self.process.send_signal(signal.SIGHUP)
        with self.client() as client:
            patience.until(
                lambda: client.get("/health").is_success and self.log.count(until) > n_before, told=lambda: self.log
            )

    def wait(self) -> int:
        """Wait for a daemon that is expected to end by itself."""
        status = self.process.wait(PATIENCE_S)
        self._end()
        return status

    def _end(self) -> None:
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def client(self) -> httpx2.Client:
        transport = httpx2.HTTPTransport(uds=str(self.socket), verify=no_authorities())
        return httpx2.Client(base_url="http://edge_rt", transport=transport, timeout=60.0)

    def async_client(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None)
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket), verify=no_authorities(), limits=limits)
        return httpx2.AsyncClient(base_url="http://edge_rt", transport=transport, timeout=60.0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep its workers from going on, so that nothing ends before the test has seen it."""
        workers = psutil.Process(self.process.pid).children()
        for worker in workers:
            worker.suspend()
        try:
            yield
        finally:
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()

    @property
    def worker(self) -> psutil.Process:
        """The process of the only model that is loaded."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def metric(self, line_start: str) -> float:
        """Read one sample of /metrics by how its line starts."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(line_start)), 0.0)

    @property
    def rss_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss
