"""`edge_rt devices`: what this machine has for inference, and why each other back end is absent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import click
from tabulate import tabulate

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, BackendProbe, Device
from edge_rt.cli import power_survey
from edge_rt.cli.power_survey import spans, value
from edge_rt.devices import cpu, memory
from edge_rt.devices.base import Reading
from edge_rt.devices.meter_choice import find
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.tensor_types import DeviceState
from edge_rt.worker.probe import survey as ask_children


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything the command shows."""

    cpu_model: Reading[str]
    board: Reading[str]
    features: tuple[str, ...]
    topology: cpu.Topology
    usable: cpu.Usable
    pressure: Reading[float]
    memory: memory.Memory
    available_bytes: Reading[int]
    clocks: power_survey.Clocks
    heat: power_survey.Heat
    power: power_survey.Power
    backends: tuple[BackendProbe, ...]


def survey(root: SysfsRoot, backends: tuple[BackendProbe, ...]) -> Survey:
    """Read the machine below root."""
    return Survey(
        cpu_model=cpu.model(root),
        board=cpu.board(root),
        features=tuple(sorted(cpu.features(root))),
        topology=cpu.topology(root),
        usable=cpu.usable(root),
        pressure=cpu.pressure(root),
        memory=memory.read(root),
        available_bytes=memory.available_bytes(root),
        clocks=power_survey.clocks(root),
        heat=power_survey.heat(root),
        power=power_survey.power(find(root)),
        backends=backends,
    )


@click.command("devices", short_help="Show cores, instruction sets, memory, limits and back ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; unknown values are null with a reason.")
def command(as_json: bool) -> None:
    """Show what this machine has for inference: cores, instruction sets, memory, limits, sensors and back ends.

    A core is big when it is as fast as the fastest kind; compute threads go there first. Whatever cannot be read is
    shown with the reason.
    """
    found = survey(SysfsRoot(), probe_all())
    click.echo(json.dumps(asdict(found), indent=2) if as_json else text(found))


def probe_all() -> tuple[BackendProbe, ...]:
    """Ask every back end for its devices; those of vendors in processes of their own, which may crash or hang."""
    vendors = ask_children([name for name in registry.names() if name not in registry.OWN])
    return tuple(_told(name, vendors[name]) if name in vendors else registry.probe(name) for name in registry.names())


def _told(name: str, states: Sequence[DeviceState]) -> BackendProbe:
    """Put what a process of its own told of a back end in the words of one that was asked here."""
    if states[0].kind == "none":
        return BackendProbe(
            name=name, absent=Absent(reason=states[0].fault.removeprefix(f"back end {name} is not available: "))
        )
    devices = tuple(
        Device(
            id=state.id,
            kind=state.kind,
            detail=state.detail,
            evidence=state.evidence,
            reference=state.reference,
            free_bytes=state.free_bytes,
            temp_c=state.temp_c,
            fault=state.fault,
        )
        for state in states
    )
    return BackendProbe(name=name, devices=devices)


def text(found: Survey) -> str:
    """Draw the survey for people."""
    rows = [("cpu", value(found.cpu_model)), ("board", value(found.board))]
    rows += [("features", " ".join(found.features) or "unknown: /proc/cpuinfo names none")]
    rows += [("cores", line) for line in _cores(found.topology)]
    rows += [("threads", _threads(found.usable))]
    rows += [("clocks", line) for line in power_survey.clock_lines(found.clocks)]
    rows += [("pressure", value(found.pressure, lambda p: f"{p:.0%} of the last 10 s some task waited for a CPU"))]
    rows += [("memory", line) for line in _memory(found)]
    rows += [("heat", line) for line in power_survey.heat_lines(found.heat)]
    rows += [("power", line.strip()) for line in power_survey.meter_lines(found.power)]
    rows += [("back end", line) for line in _backends(found.backends)]
    shown = [("" if i and rows[i - 1][0] == name else name, line) for i, (name, line) in enumerate(rows)]
    return tabulate(shown, tablefmt="plain", disable_numparse=True)


def _cores(topology: cpu.Topology) -> Iterator[str]:
    n_online = sum(core.online for core in topology.cores)
    yield (
        f"{n_online} of {len(topology.cores)} online; big by {topology.big_source}"
        if any(core.big is not None for core in topology.cores)
        else f"{n_online} of {len(topology.cores)} online; big or small is {topology.big_source}"
    )
    alike: dict[str, list[int]] = {}
    for core in topology.cores:
        parts = [{True: "big", False: "small", None: "big or small unknown"}[core.big]]
        parts += [core.kind] if core.kind else []
        parts += [f"capacity {core.capacity}"] if core.capacity else []
        parts += [f"{core.max_hz / 1e9:.2f} GHz"] if core.max_hz else []
        parts += ["hyper-thread"] if len(core.siblings) > 1 else []
        parts += [] if core.online else ["offline"]
        alike.setdefault(", ".join(parts), []).append(core.id)
    for words, ids in alike.items():
        yield f"cpu {spans(tuple(ids))}: {words}"


def _threads(usable: cpu.Usable) -> str:
    quota = usable.quota_cores
    limit = f"CPU quota {quota.value:g} cores ({quota.source})" if quota.value is not None else "no CPU quota"
    return f"{len(usable.compute_cpus)} to start with, on cpu {spans(usable.compute_cpus)}; {limit}"


def _memory(found: Survey) -> Iterator[str]:
    total, available = found.memory.total_bytes, found.available_bytes
    yield f"{value(total, _gb)} in all, {value(available, _gb)} available ({available.source})"
    if (limit := found.memory.cgroup) is not None:
        yield f"control group limit {_gb(limit.limit_bytes)}, {_gb(limit.headroom_bytes)} of it free ({limit.source})"
    swap = found.memory.swap_total_bytes
    yield "no swap" if swap.value == 0 else f"swap {value(swap, _gb)}"


def _backends(probes: Sequence[BackendProbe]) -> Iterator[str]:
    for probe in probes:
        for device in probe.devices:
            evidence = f" ({device.evidence})" if device.simulated else ""
            fault = f"; it cannot be used: {device.fault}" if device.fault else ""
            yield f"{probe.name}: device {device.id}{evidence}, {device.detail}{fault}"
        if probe.absent is not None:
            extra = f"; pip install 'edge_rt[{probe.absent.extra}]'" if probe.absent.extra else ""
            yield f"{probe.name}: absent, {probe.absent.reason}{extra}"


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
