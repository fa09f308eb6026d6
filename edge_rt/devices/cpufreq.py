"""The CPU's clocks: cpufreq's policies with their limits, steps and preferences.

A policy is a group of CPUs that share one clock: all of them on a Raspberry Pi, one a cluster on big.LITTLE, one a CPU
with amd-pstate. Read only; powerd's actuators write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.sysfs import SysfsRoot

PLACE = "sys/devices/system/cpu/cpufreq"
_CPU = "sys/devices/system/cpu"
_KHZ = 1e3

# What is outside was written by a broken driver: 0, or all bits set.
MIN_HZ, MAX_HZ = 1e6, 2e10

# Intel's and AMD's drivers round to about 100 MHz themselves.
_GRID_HZ = 1e8
_MAX_GRID = 32
_MAX_POINTS = 256
_MAX_CPU = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One group of CPUs with one clock, as it is now.

    name                 the kernel's: "policy0"
    path                 its directory, without a leading slash
    cpus, online_cpus    all that share the clock; those of them that run
    governors            that `governor` may become
    min_hz, max_hz       asked for and in force; firmware and the thermal framework may be below
    cur_hz               measured by some drivers, the last request of others, and behind either firmware may throttle
    floor_hz, ceiling_hz the hardware's own limits
    points_hz            ascending; empty where unknown
    is_grid              points_hz is a grid of our own, because the driver lists none and takes any value
    efficient_hz         amd-pstate's lowest clock below which less clock saves little; None elsewhere
    epp, epps            energy performance preference and its choices: the hardware's own governor follows it
    boost                whether the clock may pass its nominal value
    capacity             of one CPU relative to the machine's best, 0..1; None where the kernel does not say
    """

    name: str
    path: str
    cpus: tuple[int, ...]
    online_cpus: tuple[int, ...]
    driver: Reading[str]
    governor: Reading[str]
    governors: tuple[str, ...]
    min_hz: Reading[float]
    max_hz: Reading[float]
    cur_hz: Reading[float]
    floor_hz: Reading[float]
    ceiling_hz: Reading[float]
    points_hz: tuple[float, ...]
    is_grid: bool
    efficient_hz: float | None
    epp: Reading[str]
    epps: tuple[str, ...]
    boost: Reading[bool]
    capacity: float | None


def policies(root: SysfsRoot | None = None) -> tuple[Policy, ...]:
    """Read all policies, in the order of their first CPU; empty where platform or hypervisor sets the clock."""
    root = root or SysfsRoot()
    found = [_policy(root, path) for path in policy_paths(root)]
    capacities = {p.name: _capacity(root, p.cpus) for p in found}
    best = max((c for c in capacities.values() if c), default=0)
    return tuple(_with_capacity(p, capacities[p.name], best) for p in found)


def policy_paths(root: SysfsRoot) -> tuple[str, ...]:
    """List the policies' directories. Those of governors ("schedutil") stand beside them."""
    paths = root.paths(f"{PLACE}/policy[0-9]*")
    return tuple(path for path in paths if path.rpartition("/policy")[2].isdecimal())


def pstate(root: SysfsRoot | None = None) -> Reading[str]:
    """Tell which mode Intel's or AMD's own driver is in: "intel_pstate active".

    In active mode the governors' names mean something else: "powersave" follows the load, as EPP says.
    """
    root = root or SysfsRoot()
    for driver in ("intel_pstate", "amd_pstate"):
        status = root.name(f"{_CPU}/{driver}/status")
        if status.value is not None:
            return known(f"{driver} {status.value}", status.source)
    return unknown(f"/{_CPU}", "neither intel_pstate nor amd_pstate drives the clock")


def grid(floor_hz: float, ceiling_hz: float) -> tuple[float, ...]:
    """Make steps between two clocks, both among them: whole multiples of 100 MHz or more, at most 34 in all."""
    span_hz = ceiling_hz - floor_hz
    step_hz = _GRID_HZ * max(1, math.ceil(span_hz / (_GRID_HZ * _MAX_GRID)))
    first = math.floor(floor_hz / step_hz) + 1
    last = math.ceil(ceiling_hz / step_hz) - 1
    return tuple(sorted({floor_hz, *(n * step_hz for n in range(first, last + 1)), ceiling_hz}))


def hertz(reading: Reading[float]) -> Reading[float]:
    """Pass a clock on if it can be one, 1 MHz to 20 GHz."""
    if reading.value is not None and not MIN_HZ <= reading.value <= MAX_HZ:
        return unknown(reading.source, f"tells {reading.value:g} Hz, which no clock here can be")
    return reading


def clock_list(text: str, factor: float) -> tuple[float, ...]:
    """Read clocks separated by blanks, ascending and once each; what can be none is left out."""
    values = {int(word) * factor for word in text.split()[:_MAX_POINTS] if _is_number(word)}
    return tuple(sorted(hz for hz in values if MIN_HZ <= hz <= MAX_HZ))


def _policy(root: SysfsRoot, path: str) -> Policy:
    def khz(name: str) -> Reading[float]:
        return hertz(root.scaled(f"{path}/{name}", _KHZ))

    floor, ceiling = khz("cpuinfo_min_freq"), khz("cpuinfo_max_freq")
    current = khz("scaling_cur_freq")
    efficient_hz = khz("amd_pstate_lowest_nonlinear_freq").value
    points = _listed(root, path)
    is_grid = not points and floor.value is not None and ceiling.value is not None and floor.value < ceiling.value
    if is_grid and floor.value is not None and ceiling.value is not None:
        points = grid(floor.value, ceiling.value)
        if efficient_hz is not None and floor.value < efficient_hz < ceiling.value:
            points = tuple(sorted({*points, efficient_hz}))
    return Policy(
        name=path.rpartition("/")[2],
        path=path,
        cpus=_cpus(root, f"{path}/related_cpus") or _cpus(root, f"{path}/affected_cpus"),
        online_cpus=_cpus(root, f"{path}/affected_cpus"),
        driver=root.name(f"{path}/scaling_driver"),
        governor=root.name(f"{path}/scaling_governor"),
        governors=_words(root, f"{path}/scaling_available_governors"),
        min_hz=khz("scaling_min_freq"),
        max_hz=khz("scaling_max_freq"),
        cur_hz=current if current.value is not None else khz("cpuinfo_cur_freq"),
        floor_hz=floor,
        ceiling_hz=ceiling,
        points_hz=points,
        is_grid=is_grid,
        efficient_hz=efficient_hz,
        epp=root.name(f"{path}/energy_performance_preference"),
        epps=_words(root, f"{path}/energy_performance_available_preferences"),
        boost=_boost(root, path),
        capacity=None,
    )


def _listed(root: SysfsRoot, path: str) -> tuple[float, ...]:
    text = root.text(f"{path}/scaling_available_frequencies").value or ""
    if _boost(root, path).value:
        text += " " + (root.text(f"{path}/scaling_boost_frequencies").value or "")
    return clock_list(text, _KHZ)


def _boost(root: SysfsRoot, path: str) -> Reading[bool]:
    """Read the policy's own switch, else that of all policies, else Intel's, which is the other way round."""
    for place, on in ((f"{path}/boost", 1), (f"{PLACE}/boost", 1), (f"{_CPU}/intel_pstate/no_turbo", 0)):
        flag = root.integer(place)
        if flag.value in (0, 1):
            return known(flag.value == on, flag.source)
    return unknown(f"/{path}/boost", "this driver has no switch for boost")


def _capacity(root: SysfsRoot, cpus: Iterable[int]) -> int | None:
    values = [root.integer(f"{_CPU}/cpu{cpu}/cpu_capacity").value for cpu in cpus]
    return max((v for v in values if v and v > 0), default=None)


def _with_capacity(policy: Policy, capacity: int | None, best: int) -> Policy:
    if capacity is None or not best:
        return policy
    return replace(policy, capacity=capacity / best)


def _cpus(root: SysfsRoot, path: str) -> tuple[int, ...]:
    words = (root.text(path).value or "").split()[:_MAX_CPU]
    return tuple(sorted({int(word) for word in words if _is_number(word) and int(word) < _MAX_CPU}))


def _words(root: SysfsRoot, path: str) -> tuple[str, ...]:
    words = (root.text(path).value or "").split()[:_MAX_POINTS]
    return tuple(word for word in words if re.fullmatch(r"[\w-]{1,40}", word, re.ASCII))


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= 20
