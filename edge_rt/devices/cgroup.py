"""The control groups this process lives in, versions 1 and 2, from the innermost to the top."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from edge_rt.devices.sysfs import SysfsRoot


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One directory whose files limit this process. path has no leading slash, as SysfsRoot wants it."""

    version: Literal[1, 2]
    path: str


def groups(root: SysfsRoot, controller: str, pid: str = "self") -> tuple[Cgroup, ...]:
    """List the directories of a controller ("cpu", "memory") that bind a process, innermost first.

    Every ancestor's limit binds too. In a container without a cgroup namespace /proc/self/cgroup names the host's
    path while only a part of it is mounted; mountinfo's root field says which.
    """
    members = _members(root, pid)
    found: list[Cgroup] = []
    for version, mount_root, mount_point in _mounts(root, pid, controller):
        member = members.get(controller if version == 1 else "")
        if member is None:
            continue
        relative = _below(member, mount_root)
        directory = PurePosixPath(mount_point.lstrip("/"))
        found += [Cgroup(version, str(directory / part)) for part in (relative, *relative.parents)]
    return tuple(found)


def _members(root: SysfsRoot, pid: str) -> dict[str, str]:
    """Map controller to the process' group; "" stands for the version 2 hierarchy."""
    members: dict[str, str] = {}
    for line in (root.text(f"proc/{pid}/cgroup").value or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        for controller in controllers.split(","):
            members[controller] = group
    return members


def _mounts(root: SysfsRoot, pid: str, controller: str) -> list[tuple[Literal[1, 2], str, str]]:
    found: list[tuple[Literal[1, 2], str, str]] = []
    for line in (root.text(f"proc/{pid}/mountinfo").value or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            found.append((2, fields[3], fields[4]))
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            found.append((1, fields[3], fields[4]))
    return found


def _below(member: str, mount_root: str) -> PurePosixPath:
    path, top = PurePosixPath(member), PurePosixPath(mount_root)
    if ".." in path.parts or not path.is_relative_to(top):
        return PurePosixPath()
    return path.relative_to(top)
