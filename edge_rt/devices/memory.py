"""How much memory a model may still take: MemAvailable and the headroom of every control group above us."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.cgroup import Cgroup, groups
from edge_rt.devices.sysfs import SysfsRoot

# cgroup v1 writes "no limit" as the largest page-aligned int64; anything near it is none.
_M_TRIM_THRESHOLD = -1  # of malloc.h
_M_MMAP_THRESHOLD = -3
_V1_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The tightest memory limit above this process; headroom counts page cache that can be dropped."""

    limit_bytes: int
    headroom_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: Reading[int]
    available_bytes: Reading[int]
    swap_total_bytes: Reading[int]
    swap_free_bytes: Reading[int]
    cgroup: CgroupLimit | None


def read(root: SysfsRoot | None = None) -> Memory:
    """Read the machine's memory and swap, and the tightest control group limit."""
    root = root or SysfsRoot()
    return Memory(
        total_bytes=_meminfo(root, "MemTotal"),
        available_bytes=_meminfo(root, "MemAvailable"),
        swap_total_bytes=_meminfo(root, "SwapTotal"),
        swap_free_bytes=_meminfo(root, "SwapFree"),
        cgroup=cgroup_limit(root),
    )


def available_bytes(root: SysfsRoot | None = None) -> Reading[int]:
    """Give what can be allocated without swapping or being killed: the smaller of MemAvailable and headroom.

    Swap does not count: weights that are swapped out make every token wait for the disk.
    """
    root = root or SysfsRoot()
    available, limit = _meminfo(root, "MemAvailable"), cgroup_limit(root)
    if limit is not None and (available.value is None or limit.headroom_bytes < available.value):
        return known(limit.headroom_bytes, limit.source)
    return available


def contiguous_bytes(root: SysfsRoot | None = None) -> Reading[int]:
    """Give what is free of the memory that devices without an MMU of their own can have (CMA)."""
    return _meminfo(root or SysfsRoot(), "CmaFree")


def cgroup_limit(root: SysfsRoot) -> CgroupLimit | None:
    """Find the ancestor group with the least headroom; None where none has a limit."""
    limits = [limit for group in groups(root, "memory") if (limit := _limit(root, group)) is not None]
    return min(limits, key=lambda limit: limit.headroom_bytes, default=None)


def process_rss_bytes(pid: int | str = "self", root: SysfsRoot | None = None) -> Reading[int]:
    """Read a process' resident memory, mapped files included."""
    return _kib_field(root or SysfsRoot(), f"proc/{pid}/status", "VmRSS")


def give_back() -> None:
    """Return memory that this process has freed to the system: glibc keeps much of it for good."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # other C libraries have none
        trim(0)


def keep_freed(max_bytes: int) -> None:
    """Let the C library keep up to so much freed memory for the next allocations, instead of giving it back at once.

    A request's buffers of some 100 kB are new pages of the system's each time otherwise, with a fault for each page.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # as above
        mallopt(_M_TRIM_THRESHOLD, max_bytes)
        mallopt(_M_MMAP_THRESHOLD, max_bytes // 2)


def _limit(root: SysfsRoot, group: Cgroup) -> CgroupLimit | None:
    limit_file, used_file, prefix = (
        ("memory.max", "memory.current", "")
        if group.version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    limit = root.integer(f"{group.path}/{limit_file}").value  # "max" is no number: no limit
    used = root.integer(f"{group.path}/{used_file}").value
    if limit is None or used is None or limit >= _V1_UNLIMITED:
        return None
    stat = root.text(f"{group.path}/memory.stat").value or ""
    counters = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    # Active and inactive, as MemAvailable counts them: a cache full of model files must not refuse a model.
    reclaimable = sum(int(counters.get(f"{prefix}{kind}_file", "0")) for kind in ("active", "inactive"))
    headroom = max(0, limit - max(0, used - reclaimable))
    return CgroupLimit(limit_bytes=limit, headroom_bytes=headroom, source=f"/{group.path}/{limit_file}")


def _meminfo(root: SysfsRoot, key: str) -> Reading[int]:
    return _kib_field(root, "proc/meminfo", key)


def _kib_field(root: SysfsRoot, path: str, key: str) -> Reading[int]:
    text = root.text(path)
    if text.value is None:
        return unknown(text.source, text.reason)
    for line in text.value.splitlines():
        name, _, rest = line.partition(":")
        if name == key and (number := rest.strip().removesuffix(" kB").strip()).isdigit():
            return known(int(number) * 1024, f"{text.source} {key}")
    return unknown(text.source, f"has no {key}")
