"""Puts edge_rt's units in place and takes them away again. Doing it twice changes nothing the second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from edge_rt.errors import InterpreterError, NoSystemdError, UnitError
from edge_rt.service import units
from edge_rt.service.interpreter import Obstacle
from edge_rt.service.system import Done, Machine

# Of a machine that is not this one: nothing newer than what all supported systems have is used there.
_OLDEST_SYSTEMD: Final = 252

_STATE: Final = tuple(
    PurePosixPath(path)
    for path in (
        "/var/lib/private/edge_rt",
        "/var/lib/edge_rt",
        "/var/cache/private/edge_rt",
        "/var/cache/edge_rt",
        "/run/private/edge_rt-powerd",
        "/run/edge_rt-powerd",
        "/run/edge_rt",
        "/etc/edge_rt",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What shall be installed.

    python     path of the interpreter that has edge_rt
    powerd     with the power helper
    starts     let the sockets be armed at once
    is_dry     only say what would be done
    """

    python: str
    powerd: bool = False
    starts: bool = True
    is_dry: bool = False


def check_interpreter(python: str, found: Sequence[Obstacle]) -> None:
    """Raise InterpreterError if there is an obstacle."""
    if found:
        problems = tuple(
            f"{one.path}: {one.why}" + (f" ({one.needed_by} leads there)" if one.needed_by != one.path else "")
            for one in found
        )
        raise InterpreterError(python=python, problems=problems)


def systemd_version(machine: Machine) -> int:
    """Ask systemd for its version. Raises NoSystemdError."""
    try:
        done = machine.run("systemctl", "--version")
    except FileNotFoundError:
        raise NoSystemdError(reason="systemctl is not on PATH") from None
    if (found := units.version(done.out.partition("\n")[0])) is None:
        raise NoSystemdError(reason=f"systemctl --version says {done.out[:60]!r}")
    return found


def install(machine: Machine, wish: Wish, *, into_tree: bool = False) -> Iterator[str]:
    """Install, giving a line for each thing that was done or needed no doing.

    into_tree  the machine is a tree of files: nothing is run, and systemd is not asked for its version

    Raises NoSystemdError, UnitError, OSError.
    """
    version = _OLDEST_SYSTEMD if into_tree else systemd_version(machine)
    if not into_tree and not machine.is_live:
        raise NoSystemdError(reason="it is installed and does not run this machine (no /run/systemd/system)")
    changed: list[PurePosixPath] = []
    for file in units.files(wish.python, systemd_version=version, powerd=wish.powerd):
        before = machine.read(file.path)
        if before == file.text:
            yield f"unchanged  {file.path}"
            continue
        changed.append(file.path)
        if wish.is_dry:
            yield f"would {'write' if before is None else 'change'}  {file.path}"
            continue
        machine.write(file.path, file.text)
        yield f"{'wrote' if before is None else 'changed'}  {file.path}"
    if into_tree:
        yield "nothing is started in a tree: enable edge_rt.socket there (systemctl --root=DIR enable edge_rt.socket)"
        return
    active = _active(machine)
    for command in _commands(wish, changed, active):
        if wish.is_dry:
            yield f"would run  {' '.join(command)}"
            continue
        _run(machine, command)
        yield f"ran  {' '.join(command)}"
    for name in active:
        if units.unit_path(name) not in changed:
            yield f"{name} runs on as it was started; after an upgrade: systemctl restart {name}"


def _active(machine: Machine) -> tuple[str, ...]:
    """List the services that run."""
    return tuple(
        name for name in (units.DAEMON, units.POWERD) if machine.run("systemctl", "is-active", name).status == 0
    )


def _commands(wish: Wish, changed: Sequence[PurePosixPath], active: Sequence[str]) -> Iterator[tuple[str, ...]]:
    yield "systemd-sysusers", str(units.SYSUSERS)
    yield "systemd-tmpfiles", "--create", str(units.TMPFILES)
    yield "systemctl", "daemon-reload"
    sockets = (units.SOCKET, units.POWERD_SOCKET) if wish.powerd else (units.SOCKET,)
    if not wish.starts:
        yield "systemctl", "enable", *sockets
        return
    yield "systemctl", "enable", "--now", *sockets
    if wish.powerd:
        yield "systemctl", "enable", "--now", units.POWERD
    for name in active:
        if units.unit_path(name) in changed:  # its clients wait meanwhile
            yield "systemctl", "restart", name


def uninstall(machine: Machine, *, purge: bool = False, is_dry: bool = False) -> Iterator[str]:
    """Stop and remove what install put there, giving a line for each thing.

    purge  also pulled models, stored answers, keys, configuration and drop-ins
    """
    there = [name for name in units.ALL_UNITS if machine.read(units.unit_path(name)) is not None]
    if there and machine.is_live:
        # Sockets first: a client's next request must not start what is being stopped.
        command = ("systemctl", "disable", "--now", *there)
        if not is_dry:
            _run(machine, command)
        yield f"{'would run' if is_dry else 'ran'}  {' '.join(command)}"
    paths = [*map(units.unit_path, units.ALL_UNITS), units.SYSUSERS, units.TMPFILES]
    if purge:
        paths += [units.unit_path(f"{name}.d") for name in units.ALL_UNITS]
        paths += _STATE
    n_removed = 0
    for path in paths:
        if is_dry:
            if machine.exists(path):
                yield f"would remove  {path}"
        elif machine.remove(path):
            n_removed += 1
            yield f"removed  {path}"
    if is_dry:
        return
    if there and machine.is_live:
        _run(machine, ("systemctl", "daemon-reload"))
        yield "ran  systemctl daemon-reload"
        machine.run("systemctl", "reset-failed", *there)  # it fails for units that have not
    if purge and machine.is_live and machine.run("getent", "group", units.GROUP).status == 0:
        _run(machine, ("groupdel", units.GROUP))
        yield f"ran  groupdel {units.GROUP}"
    if not n_removed:
        yield "nothing to remove: edge_rt is not installed as a service"


def _run(machine: Machine, command: tuple[str, ...]) -> Done:
    try:
        done = machine.run(*command)
    except FileNotFoundError:
        raise NoSystemdError(reason=f"{command[0]} is not on PATH") from None
    if done.status != 0:
        said = " ".join((done.err or done.out).split())[-400:]
        raise UnitError(command=" ".join(command), status=done.status, said=said)
    return done
