"""The files that make edge_rt a service, as they are for one interpreter and one version of systemd. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath
from typing import Final

DAEMON: Final = "edge_rt.service"
SOCKET: Final = "edge_rt.socket"
POWERD: Final = "edge_rt-powerd.service"
POWERD_SOCKET: Final = "edge_rt-powerd.socket"
ALL_UNITS: Final = (SOCKET, DAEMON, POWERD_SOCKET, POWERD)
GROUP: Final = "edge_rt"
SOCKET_PATH: Final = PurePosixPath("/run/edge_rt/edge_rt.sock")

_UNIT_DIR: Final = PurePosixPath("/etc/systemd/system")
SYSUSERS: Final = PurePosixPath("/etc/sysusers.d/edge_rt.conf")
TMPFILES: Final = PurePosixPath("/etc/tmpfiles.d/edge_rt.conf")
_NOTIFY_RELOAD_SINCE: Final = 253
_RESTART_STEPS_SINCE: Final = 254


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFile:
    """One file and where it belongs."""

    path: PurePosixPath
    text: str


def shipped(name: str) -> str:
    """Read a file of the package's systemd directory."""
    return resources.files("edge_rt").joinpath("systemd", name).read_text(encoding="utf-8")


def unit_path(name: str) -> PurePosixPath:
    return _UNIT_DIR / name


def files(
    python: str, *, systemd_version: int, powerd: bool, read: Callable[[str], str] = shipped
) -> tuple[UnitFile, ...]:
    """Give all files, in the order in which they are written.

    python  path of the interpreter that has edge_rt
    powerd  with the power helper's units
    """
    values = {"PYTHON": quoted(python), "TYPE": service_type(systemd_version), **restarts(systemd_version)}
    units = ALL_UNITS if powerd else (SOCKET, DAEMON)
    return (
        UnitFile(path=SYSUSERS, text=read("sysusers.conf")),
        UnitFile(path=TMPFILES, text=read("tmpfiles.conf")),
        *(UnitFile(path=unit_path(name), text=filled(read(name), values)) for name in units),
    )


def service_type(systemd_version: int) -> str:
    """Choose how a reload is asked for: by systemd itself where it can wait for its end."""
    if systemd_version >= _NOTIFY_RELOAD_SINCE:
        return "Type=notify-reload"
    return "Type=notify\nExecReload=/bin/kill -HUP $MAINPID"


def restarts(systemd_version: int) -> dict[str, str]:
    """Choose how one that fails again and again is started: ever more seldom, where systemd can; else not any more.

    The first time at once, for clients wait.
    """
    if systemd_version >= _RESTART_STEPS_SINCE:
        return {
            "START_LIMIT": "StartLimitIntervalSec=0",
            "RESTART": "RestartSec=0\nRestartSteps=8\nRestartMaxDelaySec=30s",
        }
    return {"START_LIMIT": "StartLimitIntervalSec=60\nStartLimitBurst=10", "RESTART": "RestartSec=0"}


def filled(text: str, values: dict[str, str]) -> str:
    """Replace @NAME@ by its value."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def quoted(path: str) -> str:
    """Write a path as the first word of ExecStart=: there % begins a specifier, and blanks end a word."""
    path = path.replace("%", "%%")
    if not any(char in path for char in " \t\"'\\;"):
        return path
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def version(first_line: str) -> int | None:
    """Read systemd's version from what `systemctl --version` says first: `systemd 252 (252.38-1)`."""
    words = first_line.split()
    if len(words) < 2 or words[0] != "systemd":
        return None
    digits = words[1].partition(".")[0].partition("~")[0]
    return int(digits) if digits.isdecimal() else None
