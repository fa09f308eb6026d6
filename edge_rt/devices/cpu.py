"""What the CPU is: model, instruction sets and cores, which of them are big, and how many this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.cgroup import groups
from edge_rt.devices.sysfs import SysfsRoot, parse_cpu_list

# The kernel's name for each instruction set that matters for inference -> ours. x86 first, then Arm.
_FEATURES = {
    "ssse3": "ssse3",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "bmi2": "bmi2",
    "avx_vnni": "avx_vnni",
    "avx_vnni_int8": "avx_vnni_int8",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512vl": "avx512vl",
    "avx512_vnni": "avx512_vnni",
    "avx512_vbmi": "avx512_vbmi",
    "avx512vbmi": "avx512_vbmi",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_tile": "amx_tile",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "neon": "neon",
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
    "sme": "sme",
}

# Arm's part numbers (MIDR_EL1) of implementer 0x41, from the cores' technical reference manuals.
_ARM_PARTS = {
    0xC07: "Cortex-A7",
    0xD03: "Cortex-A53",
    0xD04: "Cortex-A35",
    0xD05: "Cortex-A55",
    0xD07: "Cortex-A57",
    0xD08: "Cortex-A72",
    0xD09: "Cortex-A73",
    0xD0A: "Cortex-A75",
    0xD0B: "Cortex-A76",
    0xD0C: "Neoverse-N1",
    0xD0D: "Cortex-A77",
    0xD40: "Neoverse-V1",
    0xD41: "Cortex-A78",
    0xD42: "Cortex-A78AE",
    0xD44: "Cortex-X1",
    0xD46: "Cortex-A510",
    0xD47: "Cortex-A710",
    0xD48: "Cortex-X2",
    0xD49: "Neoverse-N2",
    0xD4D: "Cortex-A715",
    0xD4E: "Cortex-X3",
    0xD4F: "Neoverse-V2",
    0xD80: "Cortex-A520",
    0xD81: "Cortex-A720",
    0xD82: "Cortex-X4",
}

# A core is big when it reaches this share of the best one. Capacities differ by 2 and more between clusters.
# Frequencies say less: a favoured core of a uniform CPU may clock some per cent higher, a small core a quarter lower.
_BIG_CAPACITY = 0.75
_BIG_FREQUENCY = 0.88


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One logical CPU; big is None where the kernel does not say enough."""

    id: int
    online: bool
    capacity: int | None
    max_hz: float | None
    kind: str | None
    siblings: tuple[int, ...]
    big: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All logical CPUs. big_source says what told big from small, or why nothing did."""

    cores: tuple[Core, ...]
    big_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The CPUs this process may run on.

    cpus         online and inside the affinity mask
    n_physical   distinct physical cores among them: hyper-threads share one
    pin_cpus     the big ones of cpus, hyper-threads too, where there are small ones beside them; else empty
    big_cpus     those of cpus that are big, one per physical core; all of them where nothing tells them apart
    quota_cores  the control group's CPU time per wall time, None without a quota
    compute_cpus those worth a compute thread: the big ones, as many as the quota pays for, at least one
    """

    cpus: tuple[int, ...]
    n_physical: int
    pin_cpus: tuple[int, ...]
    big_cpus: tuple[int, ...]
    quota_cores: Reading[float]
    compute_cpus: tuple[int, ...]

    def pinned(self, n_threads: int) -> tuple[int, ...]:
        """Give the CPUs that so many compute threads should keep to; empty: the kernel may put them anywhere.

        All big ones for all threads, not one for each: a thread whose core is taken from it moves to the next. More
        threads than there are big cores are meant to use the small ones too.
        """
        return self.pin_cpus if n_threads <= len(self.big_cpus) else ()


def features(root: SysfsRoot | None = None) -> frozenset[str]:
    """Name the instruction sets every core has; empty where /proc/cpuinfo cannot be read or names none."""
    sets = [
        frozenset(_FEATURES[word] for word in block.get(key, "").lower().split() if word in _FEATURES)
        for block in _cpuinfo(root or SysfsRoot())
        for key in ("flags", "Features")
        if key in block
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def model(root: SysfsRoot | None = None) -> Reading[str]:
    """Name the CPU: x86's own string, or Arm's cores counted by type ("4x Cortex-A55 + 4x Cortex-A76")."""
    blocks = list(_cpuinfo(root or SysfsRoot()))
    if names := [block["model name"] for block in blocks if block.get("model name")]:
        return known(names[0], "/proc/cpuinfo model name")
    counts: dict[str, int] = {}
    for name in filter(None, map(_arm_name, blocks)):
        counts[name] = counts.get(name, 0) + 1
    if counts:
        return known(" + ".join(f"{n}x {name}" for name, n in counts.items()), "/proc/cpuinfo CPU part")
    return unknown("/proc/cpuinfo", "names no CPU model")


def board(root: SysfsRoot | None = None) -> Reading[str]:
    """Name the board: the device tree's model on Arm, DMI's product on a PC."""
    root = root or SysfsRoot()
    tree = root.name("proc/device-tree/model")
    return tree if tree.value else root.name("sys/class/dmi/id/product_name")


def topology(root: SysfsRoot | None = None) -> Topology:
    """List the logical CPUs and decide which are big."""
    root = root or SysfsRoot()
    online = _cpu_set(root, "sys/devices/system/cpu/online")
    ids = _cpu_ids(root)
    kinds = _core_kinds(root)
    capacities = {i: root.integer(f"sys/devices/system/cpu/cpu{i}/cpu_capacity").value for i in ids}
    max_hz = {i: root.scaled(f"sys/devices/system/cpu/cpu{i}/cpufreq/cpuinfo_max_freq", 1e3).value for i in ids}
    big, source = _big(ids, kinds, capacities, max_hz)
    cores = tuple(
        Core(
            id=i,
            online=online is None or i in online,
            capacity=capacities[i],
            max_hz=max_hz[i],
            kind=kinds.get(i),
            siblings=_siblings(root, i),
            big=big.get(i),
        )
        for i in ids
    )
    return Topology(cores=cores, big_source=source)


def usable(root: SysfsRoot | None = None, affinity: Callable[[], set[int]] = lambda: os.sched_getaffinity(0)) -> Usable:
    """Work out which CPUs make sense for compute threads: affinity, online cores, hyper-threads and quota."""
    root = root or SysfsRoot()
    allowed = affinity()
    cores = {core.id: core for core in topology(root).cores if core.online and core.id in allowed}
    cpus = tuple(sorted(cores or allowed))
    physical = [i for i in cpus if i not in cores or i == min(set(cores[i].siblings) & set(cpus), default=i)]
    all_big = tuple(i for i in cpus if i in cores and cores[i].big)
    big = tuple(i for i in physical if i in cores and cores[i].big) or tuple(physical)
    quota = quota_cores(root)
    n_compute = len(big)
    if quota.value is not None:
        # Down, not up: llama.cpp's threads wait for each other, and the one the quota stops stops them all.
        n_compute = max(1, min(n_compute, math.floor(quota.value + 1e-9)))
    return Usable(
        cpus=cpus,
        n_physical=len(physical),
        pin_cpus=all_big if len(all_big) < len(cpus) else (),
        big_cpus=big,
        quota_cores=quota,
        compute_cpus=big[:n_compute],
    )


def usable_cores(root: SysfsRoot | None = None) -> tuple[int, ...]:
    """List the CPUs worth a compute thread; how many there are is a good thread count to start with."""
    return usable(root).compute_cpus


def prefer_big_cores() -> None:
    """Keep this process' future threads off the small cores: one there holds up all others at each barrier."""
    cpus = usable().cpus
    cores = {core.id: core for core in topology().cores}
    big = {i for i in cpus if i not in cores or cores[i].big is not False}
    if big and len(big) < len(cpus):
        os.sched_setaffinity(0, big)


def quota_cores(root: SysfsRoot | None = None) -> Reading[float]:
    """Give the tightest control group CPU quota in cores (1.5 is 150 ms of CPU time per 100 ms)."""
    root = root or SysfsRoot()
    found: list[Reading[float]] = []
    for group in groups(root, "cpu"):
        if group.version == 2:
            text = root.text(f"{group.path}/cpu.max")
            quota, _, period = (text.value or "max").partition(" ")
        else:
            text = root.text(f"{group.path}/cpu.cfs_quota_us")
            quota, period = text.value or "-1", root.text(f"{group.path}/cpu.cfs_period_us").value or ""
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            found.append(known(int(quota) / int(period), text.source))
    return min(found, key=lambda r: r.value or 0.0, default=unknown("cgroup cpu", "no quota is set"))


def governor(root: SysfsRoot | None = None) -> Reading[str]:
    """Name the cpufreq governors in use, joined by '/' where policies differ."""
    root = root or SysfsRoot()
    names = [root.name(path) for path in root.paths("sys/devices/system/cpu/cpufreq/policy[0-9]*/scaling_governor")]
    values = dict.fromkeys(name.value for name in names if name.value)
    if not values:
        return unknown(
            "/sys/devices/system/cpu/cpufreq", "no cpufreq policy: the platform or hypervisor sets the clock"
        )
    return known("/".join(values), names[0].source)


def pressure(root: SysfsRoot | None = None) -> Reading[float]:
    """Give the share of the last 10 s in which some runnable task waited for a CPU, 0..1 (PSI)."""
    text = (root or SysfsRoot()).text("proc/pressure/cpu")
    for word in (text.value or "").split():
        if word.startswith("avg10="):
            return known(float(word.removeprefix("avg10=")) / 100, text.source)
    return unknown(text.source, text.reason or "has no avg10")


def _big(
    ids: tuple[int, ...], kinds: dict[int, str], capacities: dict[int, int | None], max_hz: dict[int, float | None]
) -> tuple[dict[int, bool], str]:
    """Decide which CPUs are big by the best evidence there is: core type, then capacity, then frequency."""
    if set(kinds.values()) == {"core", "atom"}:
        return {i: kinds.get(i) == "core" for i in ids}, "/sys/devices/cpu_core/cpus"
    for values, share, source in (
        (capacities, _BIG_CAPACITY, "cpu_capacity"),
        (max_hz, _BIG_FREQUENCY, "cpufreq/cpuinfo_max_freq"),
    ):
        numbers = {i: float(value) for i, value in values.items() if value}
        if ids and len(numbers) == len(ids):
            best = max(numbers.values())
            return {i: number >= share * best for i, number in numbers.items()}, source
    return {}, "unknown: the kernel gives neither core types nor capacities nor maximum frequencies of all cores"


def _core_kinds(root: SysfsRoot) -> dict[int, str]:
    kinds: dict[int, str] = {}
    for kind in ("core", "atom"):
        for i in _cpu_set(root, f"sys/devices/cpu_{kind}/cpus") or ():
            kinds[i] = kind
    if not kinds:
        for block in _cpuinfo(root):
            if block["processor"].isdigit() and (name := _arm_name(block)):
                kinds[int(block["processor"])] = name
    return kinds


def _siblings(root: SysfsRoot, cpu: int) -> tuple[int, ...]:
    return _cpu_set(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,)


def _cpu_ids(root: SysfsRoot) -> tuple[int, ...]:
    names = (path.rpartition("/cpu")[2] for path in root.paths("sys/devices/system/cpu/cpu[0-9]*"))
    if ids := tuple(int(name) for name in names if name.isdigit()):
        return ids
    # Without sysfs /proc/cpuinfo still counts the online ones.
    return tuple(int(block["processor"]) for block in _cpuinfo(root) if block.get("processor", "").isdigit())


def _cpu_set(root: SysfsRoot, path: str) -> tuple[int, ...] | None:
    text = root.text(path).value
    try:
        return parse_cpu_list(text) if text else None
    except ValueError:
        return None


def _cpuinfo(root: SysfsRoot) -> Iterator[dict[str, str]]:
    """Yield /proc/cpuinfo's blocks that describe a processor."""
    for block in (root.text("proc/cpuinfo").value or "").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        if "processor" in fields:
            yield fields


def _arm_name(block: dict[str, str]) -> str | None:
    try:
        implementer, part = int(block["CPU implementer"], 0), int(block["CPU part"], 0)
    except (KeyError, ValueError):
        return None
    name = _ARM_PARTS.get(part) if implementer == 0x41 else None
    return name or f"implementer {implementer:#x} part {part:#x}"
