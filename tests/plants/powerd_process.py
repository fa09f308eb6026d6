"""powerd as a process of its own on a mounted board, and the hints that a daemon would send it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge_rt.errors import DaemonLostError, DaemonUnreachableError
from edge_rt.power.client import HintSender, ask
from edge_rt.power.state import Hint, Work
from tests import patience
from tests.patience import PATIENCE_S

_ROOT = Path(__file__).resolve().parent.parent.parent
_HINT_S = 0.05


class Powerd:
    """`python -m edge_rt.power.powerd` with a root and settings of its own; use it in a `with`, which ends it.

    directory  for socket, snapshot and settings; its name must be short
    settings   of [power], besides those that a test needs
    """

    def __init__(self, root: Path, directory: Path, **settings: Any) -> None:
        self.root, self.snapshot, self.socket = root, directory / "snapshot", directory / "p"
        config = directory / "powerd.toml"
        values = {"enabled": True, "socket_path": str(self.socket), "socket_group": "", **settings}
        lines = [f"{name} = {_toml(value)}\n" for name, value in values.items()]
        config.write_text("[power]\n" + "".join(lines), encoding="utf-8")
        self._log = directory / "powerd.log"
        self._command = [sys.executable, "-m", "edge_rt.power.powerd", "--config", str(config), *self._where()]
        self._work: Work | None = None
        self._is_over = threading.Event()
        self._hints = threading.Thread(target=self._send_hints, daemon=True)
        self.process: subprocess.Popen[bytes] | None = None

    def _where(self) -> list[str]:
        return ["--root", str(self.root), "--snapshot", str(self.snapshot)]

    def __enter__(self) -> Self:
        self.start()
        self._hints.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._hints.join()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        """Start it, for the first time or again, and wait until it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log, cwd=_ROOT)
        self.until(lambda status: status["n_steps"] > 0)

    def work(self, work: Work | None) -> None:
        """Say from now on what a daemon computes; None: say nothing."""
        self._work = work

    def status(self) -> Mapping[str, Any]:
        return ask(str(self.socket), "status", timeout_s=PATIENCE_S)

    def until(self, holds: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """Ask for the status until something holds of it."""
        last: list[Mapping[str, Any]] = [{}]

        def look() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"powerd ended with {self.process.returncode}:\n{self.log}"
            try:
                last[0] = self.status()
            except (DaemonLostError, DaemonUnreachableError):
                return False  # it has not begun to listen
            return holds(last[0])

        patience.until(look, told=lambda: f"{dict(last[0])}\n{self.log}", every_s=patience.POWERD_S)
        return last[0]

    def steps(self, n: int = 10) -> Mapping[str, Any]:
        """Let it look and decide n more times."""
        first = self.status()["n_steps"]
        return self.until(lambda status: status["n_steps"] >= first + n)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; gives the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def restore(self) -> int:
        """Do what systemd does once powerd has ended; gives the exit status."""
        command = [sys.executable, "-m", "edge_rt.power.restore", *self._where()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_ROOT, timeout=PATIENCE_S)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(done.stderr)
        return done.returncode

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _send_hints(self) -> None:
        sender = HintSender(str(self.socket))
        while not self._is_over.wait(_HINT_S):
            work = self._work
            if work is not None:
                sender.send(_hint(work, time.monotonic()))
        sender.close()


def _hint(work: Work, now_s: float) -> Hint:
    """A prompt that is late, which takes the highest clock there is; tokens that come early, which take a lower one."""
    if work == "prefill":
        return Hint(work=work, n_running=1, n_waiting=1, n_prompt_tokens=100, ttft_left_s=-1.0, sent_s=now_s)
    return Hint(work=work, n_running=int(work == "decode"), tpot_s=0.05 if work == "decode" else None, sent_s=now_s)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(_toml(one) for one in value)}]" if isinstance(value, list | tuple) else str(value)
