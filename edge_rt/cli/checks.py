"""The checks of `edge_rt doctor`: each looks at one thing and says what to do about it."""

from __future__ import annotations

import grp
import os
import pwd
import resource
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import httpx2

from edge_rt import config
from edge_rt.api.client import no_authorities
from edge_rt.backends import registry
from edge_rt.backends.base import Absent, Device
from edge_rt.backends.dispatch import dispatch
from edge_rt.backends.llama_build import Broken, Build, inspect, missing
from edge_rt.backends.native_library import isa_names, load_native
from edge_rt.catalog.store import Store
from edge_rt.cli.talk import daemon_path
from edge_rt.devices import cpu, memory, thermal
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import BackendUnavailableError, ConfigError, EdgeRtError
from edge_rt.scheduler.forms import Placement, load_message, place
from edge_rt.service.system import Host, Machine
from edge_rt.tensor_types import DeviceState
from edge_rt.worker.load import unpack
from edge_rt.worker.probe import survey

Status = Literal["ok", "warn", "fail"]

# Before edge_rt was written: a board without a clock battery that has not met a time server yet.
_OLDEST_PLAUSIBLE_S = 1_767_225_600  # 2026-01-01
_TIMEOUT_S = 2.0
_SLOW_CLOCKSOURCES = frozenset({"acpi_pm", "hpet", "jiffies"})
_POLICY = "sys/devices/system/cpu/cpufreq/policy*"
_PULL_MARGIN_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: ok, warn (works, but worse than it could) or fail (does not work)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of users; is_member: this process' user is among those it lists."""

    gid: int
    is_member: bool


def find_group(name: str) -> Group | None:
    """Look a group up in the system's database."""
    try:
        found = grp.getgrnam(name)
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None
    return Group(gid=found.gr_gid, is_member=user in found.gr_mem)


@dataclass(frozen=True, kw_only=True)
class Patient:
    """What is examined; everything outside this process' memory can be replaced."""

    config: config.Config = field(default_factory=config.Config)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: SysfsRoot = field(default_factory=SysfsRoot)
    inspect_build: Callable[[], Build | Broken] = inspect
    load_native: Callable[[], Any] = load_native
    probe_onnx: Callable[[], tuple[Device, ...] | Absent] = lambda: registry.get("onnx_cpu").probe()
    probe: Callable[[str], tuple[DeviceState, ...]] = lambda name: survey([name])[name]
    wall_clock: Callable[[], float] = time.time
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    uid: int = field(default_factory=os.getuid)
    memlock_bytes: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    machine: Machine = field(default_factory=Host)
    group_ids: Callable[[], frozenset[int]] = lambda: frozenset({os.getgid(), *os.getgroups()})
    find_group: Callable[[str], Group | None] = find_group

    @cached_property
    def build(self) -> Build | Broken:
        return self.inspect_build()

    def store(self) -> Store:
        return Store.open(self.config.catalog, self.environ)

    def socket(self) -> Path | None:
        """Give where this user's daemon would listen, None where nothing names a place."""
        return daemon_path(self.config.server, self.environ, uid=self.uid)

    def default_model(self, store: Store) -> Placement:
        """Decide how the default model would be run, as the daemon does."""
        model, settings = self.config.catalog.default_model, self.config.model(self.config.catalog.default_model)
        backend = settings.backend or self.config.engine.backend
        return place(
            model,
            None if backend == "null" else store.get(model),
            settings,
            self.config,
            features=cpu.features(self.root),
            find=store.path,
        )


def ok(name: str, detail: str) -> Check:
    return Check(name=name, status="ok", detail=detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    return Check(name=name, status="warn", detail=detail, remedy=remedy)


def fail(name: str, detail: str, remedy: str) -> Check:
    return Check(name=name, status="fail", detail=detail, remedy=remedy)


def python(_patient: Patient) -> Check:
    version = f"Python {sys.version.split()[0]}"
    if sys.maxsize < 2**32:
        return warn("python", f"{version}, 32-bit", "use a 64-bit system: models over 2 GB cannot be mapped here")
    return ok("python", f"{version}, 64-bit")


def llama_build(patient: Patient) -> Check:
    name, rebuild = "llama.cpp", "rebuild it on this machine: `make venv`, or pip with CMAKE_ARGS=-DGGML_NATIVE=on"
    build = patient.build
    if isinstance(build, Broken):
        remedy = rebuild if build.crashed else "install it: `make venv`, or pip install 'edge_rt[llama]'"
        return fail(name, build.reason, remedy)
    unused = missing(build, cpu.features(patient.root))
    if unused:
        return warn(name, f"{build.version} does not use this CPU's {', '.join(unused)}", rebuild)
    return ok(name, f"{build.version}, built for this CPU: {' '.join(sorted(build.compiled))}")


def native(patient: Patient) -> Check:
    try:
        names = isa_names(patient.load_native())
    except BackendUnavailableError as exc:
        return warn("native engine", exc.reason, "without it models run on llama.cpp: `make venv` compiles it")
    if len(names) == 1:
        return ok("native engine", f"no kernels for this CPU, only {names[0]}: models run on llama.cpp")
    return ok("native engine", f"{names[-1]} kernels")


def onnx(patient: Patient) -> Check:
    devices = patient.probe_onnx()
    if isinstance(devices, Absent):
        return ok(
            "onnxruntime", f"{devices.reason}: no tensor models; pip install 'edge_rt[{devices.extra}]' brings them"
        )
    return ok("onnxruntime", devices[0].detail)


def fpga(patient: Patient) -> Check | None:
    settings = patient.config
    is_wanted = "fpga" in {settings.engine.backend, *(own.backend for own in settings.models.values())}
    if not settings.fpga.bitstream and not is_wanted:
        return None
    device = patient.probe("fpga")[0]
    if device.kind == "none":
        return fail("fpga", device.fault, "docs/fpga.md says what a board needs")
    return ok("fpga", device.detail)


def store(patient: Patient) -> Check:
    found = patient.store()
    placement = patient.default_model(found)
    is_there = placement.path is not None
    report = warn if is_there else fail  # without its model edge_rt is of no use
    there = next(p for p in (found.root, *found.root.parents) if p.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return report("store", f"{found.root}: no right to write", "pull as its owner, or set catalog.store_dir")
    # A derived form stands beside the one it was derived from.
    largest = 0 if is_there else max(v.size_bytes or 0 for v in found.get(placement.model).variants)
    free, need = patient.free_bytes(there), _PULL_MARGIN_BYTES + 2 * largest
    if free < need:
        return report(
            "store",
            f"{found.root}: {free / 1e9:.2f} GB free",
            f"free {need / 1e9:.2f} GB, or set catalog.store_dir to another disk",
        )
    return ok("store", f"{found.root}: writable, {free / 1e9:.1f} GB free")


def manifests(patient: Patient) -> Check:
    found = patient.store()
    bad = [str(error) for error in found.left_out().values()]
    n_all = len(found.manifests()) + len(found.chains())
    if bad:
        return warn("manifests", f"{len(bad)} of {n_all + len(bad)} left out: {'; '.join(bad)}", "mend or delete them")
    return ok("manifests", f"{n_all} can be used")


def model(patient: Patient) -> Check:
    found = patient.store()
    placement = patient.default_model(found)
    full_name = f"{placement.model}:{placement.variant}"
    if placement.path is None:
        return warn("model", f"{full_name} is not in the store", f"edge_rt models pull {placement.model}")
    if not placement.path:
        return ok("model", f"{placement.model} needs no file")
    found.verify(placement.model, placement.variant, progress=lambda _progress: None)
    if placement.variant_reason:
        return warn("model", f"{full_name} is sound, but {placement.variant_reason}", "see there")
    return ok("model", f"{full_name}: pulled, sha256 is right")


def socket_directory(patient: Patient) -> Check:
    path = patient.socket()
    if path is None:
        return warn(
            "socket",
            "no place for the daemon's: XDG_RUNTIME_DIR is not set",
            "name one: edge_rt serve --socket PATH, or server.socket_path; run, chat and bench need no daemon",
        )
    directory = path.parent
    if not directory.exists():
        parent = next(p for p in directory.parents if p.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return ok("socket", f"{directory} will be made by the daemon")
        return fail(
            "socket",
            f"{directory} does not exist and {parent} is not yours to write",
            "edge_rt serve --socket PATH, or set server.socket_path",
        )
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return fail("socket", f"everybody may replace the socket in {directory}", f"chmod o-w {directory}")
    if not os.access(directory, os.X_OK):
        return fail("socket", f"{directory} may not be entered", "join the group that owns it")
    return ok("socket", f"{path} in a directory of mode {stat.S_IMODE(mode):04o}")


def daemon(patient: Patient) -> Check | None:
    path = patient.socket()
    if path is None:
        return None  # the check of the socket has said so
    try:
        # A bare connect first: httpx2 leaves its socket open when a connect fails.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_TIMEOUT_S)
            probe.connect(str(path))
        with httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(path), verify=no_authorities()), timeout=_TIMEOUT_S
        ) as client:
            status = client.get("http://edge_rt/health/live").status_code
    except PermissionError:
        return fail("daemon", f"no right to use {path}", "join the socket's group; the line about it says how")
    except OSError as exc:
        return warn("daemon", f"nobody answers on {path}: {exc.strerror or exc}", "edge_rt serve")
    except httpx2.HTTPError as exc:
        return fail("daemon", f"{path} takes connections but does not answer: {exc}", "restart it; see its log")
    if status != 200:
        return fail("daemon", f"{path} answers /health/live with {status}", "see the daemon's log")
    return ok("daemon", f"answers on {path}")


def room(patient: Patient) -> Check | None:
    placement = patient.default_model(patient.store())
    available = memory.available_bytes(patient.root)
    if available.value is None:
        return ok("memory", f"unknown: {available.reason}")
    if placement.path is None:
        return ok("memory", f"{available.value / 2**20:.0f} MiB are available; the default model is not pulled yet")
    if isinstance(patient.build, Broken):
        return None  # the check of it has said so; loading it into this process might end it
    file, options = unpack(load_message(placement, patient.config, force=False))
    backend, reason = dispatch(placement.backend, file, options)
    need = backend.estimate(file, options).total_bytes
    where = f"{placement.model} on {backend.name}" + (f" (because {reason})" if reason else "")
    detail = f"{where} needs {need / 2**20:.0f} MiB, {available.value / 2**20:.0f} MiB are available"
    if need + patient.config.worker.memory_margin_bytes > available.value:
        return fail("memory", f"{detail} ({available.source})", "lower engine.n_ctx or n_parallel, or raise the limit")
    return ok("memory", detail)


def cgroup(patient: Patient) -> Check:
    quota, limit = cpu.quota_cores(patient.root), memory.cgroup_limit(patient.root)
    parts = [f"CPU quota {quota.value:g} cores"] if quota.value is not None else []
    parts += [f"memory limit {limit.limit_bytes / 2**20:.0f} MiB"] if limit else []
    detail = ", ".join(parts) or "no CPU or memory limit"
    if quota.value is not None and quota.value < 1:
        return warn("cgroup", f"{detail}: every token waits for the next period", f"raise {quota.source} to a core")
    return ok("cgroup", detail)


def swap(patient: Patient) -> Check:
    lines = (patient.root.text("proc/swaps").value or "").splitlines()[1:]
    areas = [line.split() for line in lines if len(line.split()) >= 4]
    if not areas:
        return ok("swap", "none")
    cards = [area[0] for area in areas if "mmcblk" in area[0]]
    used = sum(int(area[3]) for area in areas) * 1024
    names = ", ".join(area[0] for area in areas)
    if cards:
        return warn("swap", f"{names}: on an SD card or eMMC, slow and wearing", "use zram, or swapoff")
    if used > 2**28 and not all("zram" in area[0] for area in areas):
        return warn("swap", f"{names}: {used / 1e9:.1f} GB in use", "free memory: swapped weights stop every token")
    return ok("swap", f"{names}: {used / 1e6:.0f} MB in use")


def governor(patient: Patient) -> Check:
    found = cpu.governor(patient.root)
    if found.value is None:
        return ok("governor", found.reason)
    drivers = [patient.root.text(p).value for p in patient.root.paths(f"{_POLICY}/scaling_driver")]
    # intel_pstate and amd-pstate-epp call their normal, fully scaling mode powersave.
    modern = all(driver and "pstate" in driver for driver in drivers) and bool(drivers)
    if "powersave" in found.value and not modern:
        return warn(
            "governor", "powersave keeps the lowest clock", "choose schedutil: cpupower frequency-set -g schedutil"
        )
    return ok("governor", found.value)


def clock(patient: Patient) -> Check:
    now = patient.wall_clock()
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < _OLDEST_PLAUSIBLE_S:
        return fail("clock", f"it says {day}", "set the time (timedatectl set-ntp true): TLS refuses every certificate")
    source = patient.root.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source.value in _SLOW_CLOCKSOURCES:
        return warn(
            "clock", f"clock source {source.value} makes each look at the time slow", "see dmesg for why TSC is off"
        )
    return ok("clock", f"{day}, clock source {source.value or 'unknown'}")


def throttling(patient: Patient) -> Check:
    state = thermal.throttle(patient.root)
    if state.value is None:
        return ok("throttling", state.reason)
    if state.value.active:
        what = ", ".join(state.value.active)
        return warn("throttling", f"right now: {what}", "a stronger power supply or better cooling")
    return ok("throttling", "not now")


def locked_memory(patient: Patient) -> Check:
    limit = patient.memlock_bytes()
    words = "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit / 2**20:.0f} MiB"
    areas = (patient.root.text("proc/swaps").value or "").splitlines()[1:]
    if areas and limit != resource.RLIM_INFINITY:
        return warn(
            "locked memory",
            f"{words}: repacked weights may be swapped out",
            "LimitMEMLOCK=infinity, or do without swap",
        )
    return ok("locked memory", words)


def proxies(patient: Patient) -> Check | None:
    """Say that the environment's proxies are not used, where somebody may count on them."""
    is_remote = any(not endpoint.base_url.startswith("unix:") for endpoint in patient.config.cloud.values())
    names = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    found = [name for name in names if patient.environ.get(name)]
    if not is_remote or not found:
        return None
    return warn(
        "proxy",
        f"{', '.join(found)}: cloud endpoints are asked without a proxy, whose choice of address nobody could check",
        "let this machine reach the endpoints itself, or name a gateway in the network as base_url",
    )


Look = Callable[[Patient], Check | None]

CHECKS: tuple[Look, ...] = (
    python,
    llama_build,
    native,
    onnx,
    fpga,
    store,
    manifests,
    model,
    socket_directory,
    daemon,
    room,
    cgroup,
    swap,
    locked_memory,
    governor,
    throttling,
    clock,
    proxies,
)


def examine(patient: Patient, checks: tuple[Look, ...] = CHECKS) -> tuple[Check, ...]:
    """Run every check; one that ends in an error of ours has failed with that error's own words.

    A check that finds nothing to look at gives None and has no line.
    """
    results: list[Check] = []
    for check in checks:
        try:
            if (found := check(patient)) is not None:
                results.append(found)
        except EdgeRtError as exc:
            remedy = "edge_rt config show" if isinstance(exc, ConfigError) else ""
            results.append(fail(check.__name__.replace("_", " "), str(exc), remedy))
        except OSError as exc:
            results.append(fail(check.__name__.replace("_", " "), f"{exc.filename or ''}: {exc.strerror}", ""))
    return tuple(results)
