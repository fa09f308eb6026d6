from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edge_rt.sd_notify import notify, watchdog_interval_s


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notify_sends_one_datagram(socket_dir: Path, is_abstract: bool) -> None:
    name = f"edge_rt-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}" if is_abstract else str(socket_dir / "n"))
        receiver.settimeout(10)
        assert notify("READY=1", {"NOTIFY_SOCKET": f"@{name}" if is_abstract else str(socket_dir / "n")}) == ""
        assert receiver.recv(100) == b"READY=1"


def test_notify_without_systemd_does_nothing(socket_dir: Path) -> None:
    assert notify("READY=1", {}) == ""
    assert "cannot notify" in notify("READY=1", {"NOTIFY_SOCKET": str(socket_dir / "nobody")})


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({"WATCHDOG_USEC": "5000000"}, 2.5),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_interval(environ: dict[str, str], interval_s: float | None) -> None:
    assert watchdog_interval_s(environ) == interval_s
