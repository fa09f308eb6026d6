"""What the kernel says of a process, and of its signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from tests.patience import PATIENCE_S, until


def stop(pid: int) -> None:
    """Stop a process and wait until all its threads have stopped: one that computes goes on for a while."""
    os.kill(pid, signal.SIGSTOP)
    until(
        lambda: all(
            p.read_text().rpartition(")")[2].split()[0] == "T" for p in Path(f"/proc/{pid}/task").glob("*/stat")
        )
    )


def send_held(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Send a signal as soon as the process lets it wait, long before it has imported what it needs."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_held(process.pid, number):
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < until_s, "it never lets the signal wait"
    process.send_signal(number)


def is_held(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process lets a signal wait."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next((line.split()[1] for line in lines if line.startswith("SigBlk:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def has_ended(process: psutil.Process) -> bool:
    """Say whether a process is gone, or waits for nothing but somebody who reads its status."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
