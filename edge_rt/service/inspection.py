"""What systemd says of edge_rt's units, and what to make of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edge_rt.service.system import Machine

_PROPERTIES: Final = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,Result,MainPID,ExecMainStatus,ExecMainCode,NRestarts,StatusText,"
    "MemoryCurrent,NeedDaemonReload"
)
_N_LINES: Final = 3
_EXIT_CONFIG: Final = 78
_UNKNOWN_SIZE: Final = 2**64 - 1  # systemd's "not set"
# Of exec failures before the program began, see systemd.exec(5).
_BEFORE_START: Final = {
    203: "its program cannot be run: was the Python environment removed or moved?",
    216: "its group does not exist: `edge_rt install` makes it",
    217: "its user cannot be made",
    226: "its file system view cannot be made: a path in a drop-in does not exist",
    243: "its credentials cannot be read: see LoadCredential= and /etc/edge_rt/keys",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit as systemd sees it.

    state       such as active, inactive, failed, activating
    result      why it is not active: success, exit-code, signal, watchdog, oom-kill, start-limit-hit, …
    exit_status of its main process, when that has ended
    says        the daemon's own line
    """

    name: str
    is_there: bool
    state: str
    sub_state: str
    is_enabled: bool
    result: str
    pid: int | None
    exit_status: int | None
    n_restarts: int
    says: str
    memory_bytes: int | None
    is_stale: bool = False


def parse(text: str) -> tuple[Unit, ...]:
    """Read what `systemctl show` prints: a block of NAME=VALUE lines for each unit."""
    blocks = [dict(_pair(line) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")]
    return tuple(_unit(block) for block in blocks if block.get("Id"))


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name, value


def _unit(block: Mapping[str, str]) -> Unit:
    def number(name: str) -> int | None:
        value = block.get(name, "")
        return int(value) if value.isdecimal() else None

    memory_bytes = number("MemoryCurrent")
    return Unit(
        name=block["Id"],
        is_there=block.get("LoadState") == "loaded",
        state=block.get("ActiveState", "unknown"),
        sub_state=block.get("SubState", ""),
        is_enabled=block.get("UnitFileState") == "enabled",
        result=block.get("Result", ""),
        pid=number("MainPID") or None,
        exit_status=number("ExecMainStatus") if block.get("ExecMainCode") in {"1", "exited"} else None,
        n_restarts=number("NRestarts") or 0,
        says=block.get("StatusText", ""),
        memory_bytes=None if memory_bytes == _UNKNOWN_SIZE else memory_bytes,
        is_stale=block.get("NeedDaemonReload") == "yes",
    )


def look(machine: Machine, names: tuple[str, ...]) -> tuple[Unit, ...] | None:
    """Ask systemd for units; None where it does not run this machine."""
    if not machine.is_live:
        return None
    try:
        done = machine.run("systemctl", "show", f"--property={_PROPERTIES}", *names)
    except FileNotFoundError:
        return None
    return parse(done.out) if done.status == 0 else None


def last_errors(machine: Machine, name: str, *, n_lines: int = _N_LINES) -> tuple[str, ...]:
    """Give a unit's last lines of priority error, newest last; () where the journal tells nothing to this user."""
    try:
        done = machine.run(
            "journalctl",
            f"_SYSTEMD_UNIT={name}",  # what it said itself; --unit= would add what systemd says of it
            "--priority=err",
            f"--lines={n_lines}",
            "--output=json",
            "--quiet",
            "--boot",
        )
    except FileNotFoundError:
        return ()
    return tuple(text for line in done.out.splitlines() if (text := _message(line)))


def _message(line: str) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        return ""
    message = entry.get("MESSAGE") if isinstance(entry, dict) else None
    if isinstance(message, list):  # bytes that are no text
        message = bytes(byte for byte in message if isinstance(byte, int) and 0 <= byte < 256).decode(errors="replace")
    return " ".join(message.split()) if isinstance(message, str) else ""


def problem(unit: Unit) -> tuple[str, str] | None:
    """Say what is wrong with a unit and what to do; None if nothing is."""
    if not unit.is_there:
        return None
    if unit.state != "failed" and unit.result in {"", "success"}:
        return None
    if unit.state not in {"failed", "activating", "inactive"}:
        return None
    journal = f"journalctl --unit={unit.name} --boot"
    if unit.exit_status == _EXIT_CONFIG:
        return "its configuration is wrong", f"{journal}; mend the file, then `systemctl restart {unit.name}`"
    if unit.exit_status in _BEFORE_START and unit.result == "exit-code":
        return _BEFORE_START[unit.exit_status], journal
    again = f"`systemctl reset-failed {unit.name}`, then `systemctl restart {unit.name}`"
    words = {
        "exit-code": (f"it ended with status {unit.exit_status}", journal),
        "signal": ("a signal ended it", journal),
        "core-dump": ("it crashed", journal),
        "watchdog": ("it did not answer the watchdog: it hung, or the machine was too busy for it", journal),
        "oom-kill": (
            "the kernel ended it for want of memory",
            "a smaller model or n_ctx, fewer in worker.max_loaded, or a higher MemoryMax=",
        ),
        "timeout": ("it was not ready, or did not end, in time", journal),
        "resources": ("systemd could not get what it needs for it", journal),
        "start-limit-hit": ("it failed too often in a row and is not tried any more", f"{journal}; {again}"),
        "service-start-limit-hit": ("its service failed too often in a row, so it was closed", again),
        "trigger-limit-hit": ("its service ended at once again and again, so it was closed", again),
    }
    what, remedy = words.get(unit.result, (f"result {unit.result}", journal))
    return what, remedy
