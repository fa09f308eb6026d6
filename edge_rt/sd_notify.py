"""One message to systemd, sd_notify(3). Standard library only: powerd sends them too."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str]) -> str:
    """Send one message; nothing happens without NOTIFY_SOCKET. Give "", or why it could not be sent.

    Never waits: a message that systemd has no room for is lost.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return ""
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect(address)
            sock.sendall(state.encode())
    except OSError as exc:
        return f"cannot notify systemd at {address}: {exc}"
    return ""


def watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
    """Tell how often systemd wants WATCHDOG=1, half of what it waits for; None if it waits for none."""
    interval_us = environ.get("WATCHDOG_USEC", "")
    if not interval_us.isdecimal() or not int(interval_us):
        return None
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(interval_us) / 2e6
