"""Other programs that set clocks: found by their processes and their files, so that two of them do not fight.

Only what writes to the same files counts as a conflict; what merely reacts to heat is told of. Reads /proc and /run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from edge_rt.devices.kernel_files import DryFiles, KernelFiles

_MAX_PROCESSES: Final = 100_000


@dataclass(frozen=True, slots=True)
class Rival:
    """Another power manager. writes: it sets limits that powerd sets too; else it only deserves to be known."""

    name: str
    evidence: str
    writes: bool
    remedy: str


def _stop(unit: str) -> str:
    return f"`systemctl disable --now {unit}`, or power.force = true"


# comm, cut to 15 characters as the kernel does → name, whether it writes, remedy
_BY_COMM: Final = {
    "power-profiles-": ("power-profiles-daemon", True, _stop("power-profiles-daemon")),
    "tuned": ("tuned", True, _stop("tuned")),
    "auto-cpufreq": ("auto-cpufreq", True, _stop("auto-cpufreq")),
    "cpufreqd": ("cpufreqd", True, _stop("cpufreqd")),
    "system76-power": ("system76-power", True, _stop("com.system76.PowerDaemon")),
    "watt": ("watt", True, _stop("watt")),
    "thermald": ("thermald", False, "none: it acts when the chip is hot; power.max_c should lie below its trip points"),
}
# In the command line of an interpreter whose comm says nothing.
_BY_COMMAND: Final = ("auto-cpufreq", "tuned", "throttled")
_INTERPRETERS: Final = ("python", "perl", "sh", "bash")
# Programs that set limits at a power event and leave no process behind.
_BY_FILE: Final = {
    "run/tlp": ("TLP", _stop("tlp")),
    "run/laptop-mode-tools/enabled": ("laptop-mode-tools", _stop("laptop-mode")),
}


def rivals(files: KernelFiles | DryFiles) -> tuple[Rival, ...]:
    """Find other power managers, each once, those that write first."""
    found: dict[str, Rival] = {}
    for name, evidence, writes, remedy in (*_processes(files), *_files(files)):
        found.setdefault(name, Rival(name, evidence, writes, remedy))
    return tuple(sorted(found.values(), key=lambda rival: (not rival.writes, rival.name)))


def _processes(files: KernelFiles | DryFiles) -> list[tuple[str, str, bool, str]]:
    try:
        pids = [name for name in files.names("proc") if name.isdecimal()]
    except OSError:
        return []
    found = []
    for pid in pids[:_MAX_PROCESSES]:
        if pid == str(os.getpid()):
            continue
        try:
            comm = files.read(f"proc/{pid}/comm")
        except OSError:  # it has ended
            continue
        if comm in _BY_COMM:
            name, writes, remedy = _BY_COMM[comm]
            found.append((name, f"process {pid}", writes, remedy))
        elif comm.startswith(_INTERPRETERS) and (name := _by_command(files, pid)):
            _, writes, remedy = _BY_COMM.get(name, (name, True, _stop(name)))
            found.append((name, f"process {pid}", writes, remedy))
    return found


def _by_command(files: KernelFiles | DryFiles, pid: str) -> str:
    """Name the program that an interpreter runs: the script's own name, not a word of its arguments."""
    try:
        words = files.read(f"proc/{pid}/cmdline").split("\0")
    except OSError:
        return ""
    scripts = [word.rpartition("/")[2] for word in words[1:] if not word.startswith("-")]
    script = scripts[0].removesuffix(".py") if scripts else ""
    return script if script in _BY_COMMAND else ""


def _files(files: KernelFiles | DryFiles) -> list[tuple[str, str, bool, str]]:
    found = []
    for path, (name, remedy) in _BY_FILE.items():
        try:
            if files.exists(path):
                found.append((name, f"/{path}", True, remedy))
        except OSError:
            continue
    return found
