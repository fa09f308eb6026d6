"""Sets upper clocks one after the other while a board is calibrated, and puts the user's own back.

It writes as powerd does, with the same snapshot: should this process be killed, powerd's next start or
`python -m edge_rt.power.restore` gives the machine back.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.actuators import Actuators
from edge_rt.power.domains import domains
from edge_rt.power.ownership import ClocksTakenError, take
from edge_rt.power.snapshot import DEFAULT_FILE, BadSnapshotError, Snapshot, boot_id
from edge_rt.power.state import Decision

_CPUFREQ: Final = "sys/devices/system/cpu/cpufreq"
_SLACK: Final = 0.001  # drivers round
_TRIES: Final = 30  # the actuators limit how often a file is written
_PAUSE_S: Final = 0.1


class ClockSweep:
    """The CPU clocks that may be set. problem says why none may; "" if they may be."""

    def __init__(
        self,
        root: str = "/",
        *,
        snapshot_file: str = DEFAULT_FILE,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        files = KernelFiles(root)
        found = [domain for domain in domains(SysfsRoot(Path(root))) if domain.kind == "cpu"]
        snapshot = Snapshot(snapshot_file, boot_id(files))
        self._now, self._sleep = now, sleep
        self._lock_fd = -1
        self.problem = _problem(root, [domain.name for domain in found], snapshot) or self._own(snapshot)
        self._actuators = Actuators(files, found if not self.problem else [], snapshot)
        self._actuators.look(now())
        self.points_hz = {domain.name: domain.points_hz for domain in found} if not self.problem else {}

    def set(self, domain: str, max_hz: float) -> None:
        """Set one domain's upper clock, and the others' to their highest. Raises OSError where that does not hold."""
        wanted = {name: points[-1] for name, points in self.points_hz.items()} | {domain: max_hz}
        fault = ""
        for _ in range(_TRIES):
            self._actuators.look(self._now())
            applied = self._actuators.apply(Decision(max_hz=wanted, reason="calibrate"), self._now())
            fault = str(applied.faults[0]) if applied.faults else ""
            in_force = self._actuators.max_hz()
            if all(math.isclose(in_force.get(name, 0.0), hz, rel_tol=_SLACK) for name, hz in wanted.items()):
                return
            self._sleep(_PAUSE_S)
        raise OSError(None, fault or f"{domain} does not take {max_hz / 1e6:.0f} MHz", domain)

    def restore(self) -> list[str]:
        """Put all back, and set no more; name what is not back. Raises OSError if the snapshot cannot be changed."""
        try:
            return [f"/{one.value.path}" for one in self._actuators.restore(self._sleep) if not one.is_done]
        finally:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def _own(self, snapshot: Snapshot) -> str:
        try:
            self._lock_fd = take(snapshot.file)
        except (ClocksTakenError, OSError) as exc:
            return str(exc)
        return ""


def _problem(root: str, names: list[str], snapshot: Snapshot) -> str:
    if not names:
        return "this machine lets nobody set a clock"
    for name in names:
        if not os.access(Path(root, _CPUFREQ, name, "scaling_max_freq"), os.W_OK):
            return f"only root may set the clock of {name}"
    try:
        is_held = snapshot.load()
    except BadSnapshotError as exc:
        return f"{snapshot.file} {exc}"
    if is_held:
        return "powerd holds the clocks: stop it first, or run `python -m edge_rt.power.restore`"
    return ""
