"""A kernel in memory, with the ways of the real one: it clamps silently, holds down for heat, and fails as told.

The rules are those measured on acpi-cpufreq: a write out of range has no error, an upper limit below the lower one
pulls the lower one down for as long, an offline policy answers EBUSY, a removed one ENOENT.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

from edge_rt.power.state import Domain

CPUFREQ = "sys/devices/system/cpu/cpufreq"
POINTS_KHZ = (600_000, 1_000_000, 1_500_000, 2_000_000, 2_400_000)
BOOT = "0f0e0d0c-0b0a-4908-8706-050403020100"


def domain(name: str = "policy0", points_khz: tuple[int, ...] = POINTS_KHZ, n_cpus: int = 4) -> Domain:
    return Domain(name=name, kind="cpu", points_hz=tuple(khz * 1e3 for khz in points_khz), n_cpus=n_cpus)


@dataclass
class Policy:
    """One cpufreq policy: what was asked for, not what is in force."""

    max_khz: int = 2_400_000
    min_khz: int = 600_000
    epp: str = "balance_performance"
    governor: str = "schedutil"
    driver: str = "acpi-cpufreq"
    floor_khz: int = 600_000
    ceiling_khz: int = 2_400_000
    is_online: bool = True

    def clamp(self, khz: int) -> int:
        return min(max(khz, self.floor_khz), self.ceiling_khz)


@dataclass
class FakeKernel:
    """KernelFiles without files. faults: (path, "read" or "write") → errno; others: plain files."""

    policies: dict[str, Policy] = field(default_factory=lambda: {"policy0": Policy()})
    others: dict[str, str] = field(default_factory=dict)
    faults: dict[tuple[str, str], int] = field(default_factory=dict)
    thermal_khz: int | None = None
    writes: list[tuple[str, str]] = field(default_factory=list)
    n_reads: int = 0

    def __post_init__(self) -> None:
        self.others.setdefault("proc/sys/kernel/random/boot_id", BOOT)

    def read(self, path: str) -> str:
        self.n_reads += 1
        self._fail(path, "read")
        return self._value(path)

    def watch(self, path: str) -> str:
        return self.read(path)

    def write(self, path: str, text: str) -> None:
        self._fail(path, "write")
        before = self._value(path)
        self.writes.append((path, text))
        policy, leaf = self._policy(path)
        if policy is None:
            self.others[path] = text
        elif leaf in {"scaling_max_freq", "scaling_min_freq"}:
            if not text.isdecimal():
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if leaf == "scaling_max_freq":
                policy.max_khz = policy.clamp(int(text))
            else:
                policy.min_khz = policy.clamp(int(text))
        elif leaf == "energy_performance_preference":
            if policy.governor == "performance" and text != "performance":
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            policy.epp = text
        else:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), f"{path} holds {before}")

    def names(self, folder: str) -> list[str]:
        self._fail(folder, "read")
        if folder == CPUFREQ:
            return sorted(self.policies)
        prefix = f"{folder}/"
        found = {path[len(prefix) :].split("/")[0] for path in self.others if path.startswith(prefix)}
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return sorted(found)

    def exists(self, path: str) -> bool:
        if path.startswith(f"{CPUFREQ}/policy"):
            return path[len(CPUFREQ) + 1 :].partition("/")[0] in self.policies
        return any(known == path or known.startswith(f"{path}/") for known in self.others)

    def forget(self, path: str) -> None: ...

    def close(self) -> None: ...

    def heat(self, khz: int | None) -> None:
        """Let the thermal framework hold clocks at khz, or let go of them."""
        self.thermal_khz = khz
        self.others["sys/class/thermal/cooling_device0/type"] = "cpufreq-cpu0"
        self.others["sys/class/thermal/cooling_device0/cur_state"] = "0" if khz is None else "2"

    def limits(self) -> dict[str, tuple[str, str, str]]:
        """What a user sees of each policy: upper limit, lower limit, preference."""
        leaves = ("scaling_max_freq", "scaling_min_freq", "energy_performance_preference")
        return {
            name: (lambda found: (found[0], found[1], found[2]))(
                [self._value(f"{CPUFREQ}/{name}/{leaf}") for leaf in leaves]
            )
            for name in self.policies
        }

    def _value(self, path: str) -> str:
        policy, leaf = self._policy(path)
        if policy is None:
            if path not in self.others:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return self.others[path]
        ceiling_khz = min(policy.max_khz, policy.ceiling_khz, self.thermal_khz or policy.ceiling_khz)
        values = {
            "scaling_max_freq": str(ceiling_khz),
            "scaling_min_freq": str(min(policy.min_khz, ceiling_khz)),
            "scaling_driver": policy.driver,
            "scaling_governor": policy.governor,
            "cpuinfo_max_freq": str(policy.ceiling_khz),
            "energy_performance_preference": "performance" if policy.governor == "performance" else policy.epp,
            "energy_performance_available_preferences": "default performance balance_performance balance_power power",
        }
        if leaf not in values:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return values[leaf]

    def _policy(self, path: str) -> tuple[Policy | None, str]:
        if not path.startswith(f"{CPUFREQ}/policy"):
            return None, ""
        name, _, leaf = path[len(CPUFREQ) + 1 :].partition("/")
        if name not in self.policies:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not self.policies[name].is_online:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return self.policies[name], leaf

    def _fail(self, path: str, doing: str) -> None:
        if number := self.faults.get((path, doing)):
            raise OSError(number, os.strerror(number), path)
