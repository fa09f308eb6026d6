"""Whether a service of systemd could run this interpreter: its user is a new one, and the unit hides homes from it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# ProtectHome=yes and PrivateTmp=yes in the units; a service sees nothing or something else there.
_HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108  named, not used
_MAX_LINKS: Final = 40
_PACKAGE: Final = Path(__file__).resolve().parents[1] / "__init__.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A path that the service could not use, and why; needed_by: what leads to it."""

    path: Path
    why: str
    needed_by: Path


def needed_paths() -> tuple[Path, ...]:
    """List what the interpreter needs to run edge_rt: itself, its libraries, and the directories of its packages."""
    found = [Path(sys.executable), Path(sys.prefix), Path(sys.base_prefix), _PACKAGE]
    found += [Path(entry) for entry in sys.path if entry]
    found += _own_library()
    return tuple(dict.fromkeys(path for path in found if os.path.lexists(path)))


def _own_library() -> list[Path]:
    """Find libpython, which a Python built with --enable-shared has somewhere else."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    mapped = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/libpython" in line)
    return [Path(path) for path in mapped]


def hops(path: Path) -> Iterator[Path]:
    """Give each place on the way to a path, links and what they lead to among them."""
    todo, done = [path], 0
    while todo and done < _MAX_LINKS:
        whole = Path(os.path.normpath(todo.pop(0)))
        for place in (*reversed(whole.parents), whole):
            yield place
            if place.is_symlink():
                done += 1
                todo.append(place.parent / place.readlink() / whole.relative_to(place))
                break


def obstacles(
    paths: Iterable[Path], *, stat_of: Callable[[Path], os.stat_result] = os.stat, root_only: bool = False
) -> tuple[Obstacle, ...]:
    """Find what keeps another user from the paths, once each.

    root_only  also what somebody else than root may change: it shall run as root
    """
    found: dict[Path, Obstacle] = {}
    for path in paths:
        for place in hops(path):
            try:
                why = _problem(place, stat_of(place), root_only=root_only)
            except OSError as exc:
                why = str(exc.strerror)
            if why and place not in found:
                found[place] = Obstacle(path=place, why=why, needed_by=path)
                break
    return tuple(found.values())


def _problem(place: Path, status: os.stat_result, *, root_only: bool) -> str:
    if str(place) in _HIDDEN:
        return "services do not see it"
    mode = status.st_mode
    if stat.S_ISDIR(mode) and not mode & stat.S_IXOTH:
        return f"only its owner and group may enter it (mode {stat.S_IMODE(mode):04o})"
    if not stat.S_ISDIR(mode) and not mode & stat.S_IROTH:
        return f"only its owner and group may read it (mode {stat.S_IMODE(mode):04o})"
    if root_only and status.st_uid != 0:
        return f"it belongs to uid {status.st_uid}, who would become root by changing it"
    if root_only and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return "everybody may change it, and would become root so"
    return ""
