"""A llama-server in a process of its own, listening on a Unix socket."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import pytest

from edge_rt.api.client import no_authorities
from tests import patience
from tests.patience import PATIENCE_S
from tools import llama_server

N_CTX = 512


def program() -> Path:
    """Give the program; without one the test is skipped, or fails with --models-are-here, as in `make test`."""
    if (found := llama_server.find()) is None:
        pytest.skip("there is no llama-server; `make test-peer` compiles one")
    return found


class LlamaServer:
    """Use it in a `with`. One slot of N_CTX tokens, one thread; port: of 127.0.0.1, beside its Unix socket."""

    def __init__(self, directory: Path, model: Path, *options: str, prefix: str = "", port: int = 0) -> None:
        self._prefix = prefix
        self.socket = directory / "llama.sock"  # llama-server takes names that end so for Unix sockets
        self._log = directory / "llama.log"
        command = [
            str(program()),
            "--model",
            str(model),
            "--host",
            f"{self.socket},127.0.0.1" if port else str(self.socket),
        ]
        command += [
            "--ctx-size",
            str(N_CTX),
            "--parallel",
            "1",
            "--threads",
            "1",
            "--no-warmup",
            "--offline",
            "--metrics",
            *options,
        ]
        command += ["--api-prefix", prefix] if prefix else []
        command += ["--port", str(port)] if port else []
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        try:
            patience.until(self._is_ready)
        except AssertionError as exc:
            self.stop()
            raise AssertionError(
                f"llama-server is not ready:\n{self._log.read_text(errors='replace')[-4000:]}"
            ) from exc
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, "it has ended"
        with socket.socket(socket.AF_UNIX) as probe:  # the HTTP library leaves one open that finds nobody
            if probe.connect_ex(str(self.socket)):
                return False
        return self.get("/health").is_success

    def get(self, path: str) -> httpx2.Response:
        transport = httpx2.HTTPTransport(uds=str(self.socket), verify=no_authorities())
        with httpx2.Client(base_url="http://llama", transport=transport, timeout=PATIENCE_S) as client:
            return client.get(self._prefix + path)

    def n_predicted(self) -> int:
        """Wait until its slot works on nothing; give the tokens it has computed of answers."""
        patience.until(lambda: not self.get("/slots").json()[0]["is_processing"])
        lines = self.get("/metrics").text.splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total "))
