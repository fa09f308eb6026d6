"""A real powerd, as a child process on a tree of plain files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_rt.power.client import HintSender, ask
from edge_rt.power.state import Hint
from tests import patience
from tests.patience import PATIENCE_S
from tests.unit.power.tree import MAX, limits


class Process:
    """A real powerd on a tree of plain files. Belongs to one test."""

    def __init__(self, root: Path, *arguments: str, **power: Any) -> None:
        self.root = root
        self.config, self.snapshot, self.socket = root / "c.toml", root / "run/snapshot", str(root / "p")
        self.set(**power)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(root / "n"))
        self._notify.settimeout(PATIENCE_S)
        self._sender = HintSender(self.socket)
        self.log = (root / "log").open("wb")
        command = [sys.executable, "-m", "edge_rt.power.powerd", "--root", str(root), "--snapshot", str(self.snapshot)]
        self.process = subprocess.Popen(
            [*command, "--config", str(self.config), *arguments],
            env={**os.environ, "NOTIFY_SOCKET": str(root / "n"), "WATCHDOG_USEC": "200000"},
            stderr=self.log,
        )

    def set(self, **power: Any) -> None:
        values = {"socket_path": self.socket, "enabled": True} | power
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        self.config.write_text("\n".join(["[power]", *lines, ""]))

    def heard(self, word: str) -> str:
        """Wait for a message to systemd that has the word in it."""
        while word not in (message := self._notify.recv(4096).decode()):
            pass
        return message

    def status(self) -> dict[str, Any]:
        return dict(ask(self.socket, "status", timeout_s=PATIENCE_S))

    def lower(self) -> None:
        """Say that it decodes, which takes no high clock, until the policy has lowered one."""
        before = limits(self.root)[MAX]

        def has_lowered() -> bool:
            self._sender.send(Hint(work="decode", n_running=1, tpot_s=0.01, sent_s=time.monotonic()))
            self.status()  # is told between two steps, so that the limits are those of a whole one
            return bool(limits(self.root)[MAX] != before)

        patience.until(has_lowered, every_s=patience.POWERD_S)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def said(self) -> str:
        return (self.root / "log").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._notify.close()
        self._sender.close()
        self.log.close()


@contextmanager
def started(root: Path, *arguments: str, **power: Any) -> Iterator[Process]:
    process = Process(root, *arguments, **power)
    try:
        yield process
    finally:
        process.close()
