"""What `edge_rt doctor` checks of edge_rt as a service of systemd: its units, who may connect, what may be measured."""

from __future__ import annotations

import stat
from typing import Final

from edge_rt.cli import power_setter
from edge_rt.cli.checks import Check, Look, Patient, fail, ok, warn
from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.errors import ConfigError
from edge_rt.power.meter import open_meter
from edge_rt.service import inspection
from edge_rt.service.inspection import Unit
from edge_rt.service.units import ALL_UNITS, DAEMON, GROUP, SOCKET, SOCKET_PATH

_RESTARTS_WORTH_A_WORD: Final = 3


def units(patient: Patient) -> Check | None:
    """Explain a unit that fails, with the journal's last words; None where nothing is installed."""
    name, found = "service", inspection.look(patient.machine, ALL_UNITS)
    there = {unit.name: unit for unit in found or () if unit.is_there}
    if not there:
        return None
    problems = [(unit, wrong) for unit in there.values() if (wrong := inspection.problem(unit)) is not None]
    for unit, (what, remedy) in problems:
        said = inspection.last_errors(patient.machine, unit.name)
        words = f"; it said last: {said[-1]}" if said else ""
        return fail(name, f"{unit.name}: {what}{_waiting(unit, there)}{words}", remedy)
    stale = [unit.name for unit in there.values() if unit.is_stale]
    if stale:
        return warn(name, f"{', '.join(stale)} changed since systemd read it", "systemctl daemon-reload")
    socket, daemon = there.get(SOCKET), there.get(DAEMON)
    if socket is None or daemon is None:
        return fail(name, f"only {', '.join(there)} is installed", "edge_rt install")
    if socket.state != "active":
        return fail(name, f"{SOCKET} is {socket.state}: nobody can connect", f"systemctl enable --now {SOCKET}")
    if daemon.n_restarts >= _RESTARTS_WORTH_A_WORD:
        return warn(name, f"{DAEMON} was restarted {daemon.n_restarts} times", f"journalctl --unit={DAEMON} --boot")
    return ok(name, f"{SOCKET} is open, {DAEMON} is {daemon.state}" + (f": {daemon.says}" if daemon.says else ""))


def _waiting(unit: Unit, there: dict[str, Unit]) -> str:
    socket = there.get(SOCKET)
    if unit.name == DAEMON and socket is not None and socket.state == "active":
        return "; its socket is open all the same, so clients wait for an answer that does not come"
    return ""


def access(patient: Patient) -> Check | None:
    """Say whether this user may connect to the service's socket; None where there is none, or for root."""
    name, path = "access", patient.root.path(str(SOCKET_PATH.relative_to("/")))
    try:
        status = path.stat()
    except OSError:
        return None
    if patient.uid == 0 or not stat.S_ISSOCK(status.st_mode):
        return None
    if status.st_gid in patient.group_ids() or status.st_uid == patient.uid or status.st_mode & stat.S_IWOTH:
        return ok(name, f"you may connect to {SOCKET_PATH}")
    group = patient.find_group(GROUP)
    if group is None:
        return fail(name, f"{SOCKET_PATH} is there, but no group {GROUP}", "edge_rt install makes it")
    if group.is_member:
        remedy = f"log in again, or `newgrp {GROUP}` for this shell"
        return fail(name, f"you are in group {GROUP}, but this session began before", remedy)
    remedy = f"sudo usermod --append --groups {GROUP} $USER, and log in again"
    return fail(name, f"{SOCKET_PATH} is for members of group {GROUP}", remedy)


def energy(patient: Patient) -> Check:
    """Say which meter tells what answers take, or why none does."""
    try:
        chosen = open_meter(patient.config.power, root=patient.root)
    except ConfigError as exc:
        return fail("energy", str(exc), "docs/energy.md lists what power.meter may be")
    if (meter := chosen.meter) is not None:
        meter.close()
        return ok("energy", f"answers tell what they took, by {meter.name} ({meter.boundary}, {meter.quality})")
    if "only root" in chosen.reason:
        return warn(
            "energy",
            f"{chosen.reason} (its steps tell of others' work)",
            "the power helper reads it: `edge_rt install --powerd`; docs/systemd.md lets the daemon alone read it",
        )
    return ok("energy", f"answers do not tell what they took: {chosen.reason}")


def clocks(patient: Patient) -> Check | None:
    """Say who sets the clocks: edge_rt's power helper, another manager, or both; None where nobody does."""
    found = power_setter.look(patient.config.power.socket_path, KernelFiles(str(patient.root.path(""))))
    name, others = "clocks", [rival for rival in found.rivals if rival.writes]
    if found.status is None and not patient.config.power.enabled:
        return ok(name, f"set by {', '.join(rival.name for rival in others)}") if others else None
    if others and not patient.config.power.force:
        what = f"{others[0].name} ({others[0].evidence}) sets them too, so edge_rt's power helper does not act"
        return warn(name, what, others[0].remedy)
    if found.status is None:
        return warn(name, f"power.enabled is set, but {found.reason}", "edge_rt install --powerd")
    if problem := found.status.get("stopped_by"):
        return warn(name, f"the power helper has stopped acting: {problem}", "edge_rt power status")
    slow = ", ".join(found.status.get("slow_sensors") or ())
    return ok(name, f"the power helper is {found.status.get('state')}" + (f"; slow to read: {slow}" if slow else ""))


SERVICE_CHECKS: tuple[Look, ...] = (units, access, clocks, energy)
