"""The parts of powerd that depend on this machine and its settings: the meter and the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edge_rt.devices import cpufreq, meter_choice
from edge_rt.devices.meters import Meter
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from edge_rt.power.domains import domains
from edge_rt.power.governor import safe
from edge_rt.power.settings import Settings
from edge_rt.power.state import Decision, Domain, Limits, Observation

Say = Callable[[int, str, str], None]


def groups(root: SysfsRoot) -> dict[str, tuple[int, ...]]:
    """Give the CPUs that run of each cpufreq policy."""
    return {found.name: found.online_cpus for found in cpufreq.policies(root) if found.online_cpus}


def settable(root: SysfsRoot, actuators: Sequence[str]) -> tuple[Domain, ...]:
    """List the clocks that power.actuators lets powerd set."""
    return tuple(one for one in domains(root) if ("cpufreq" if one.kind == "cpu" else "devfreq") in actuators)


def make_meter(settings: Settings, root: SysfsRoot, say: Say) -> Meter | None:
    """Choose the meter that caps are held by, by power.meter; None without one, which is said.

    Meters on a serial line need a library, which this process does without: the daemon reads them.
    """
    if settings.meter == "none":
        return None
    setting = settings.meter
    if setting.startswith("serial:"):
        say(5, "meter serial", f"{setting} is the inference daemon's; clocks go by what the kernel measures")
        setting = "auto"
    try:
        found = meter_choice.find(root)
        meters = [source.meter for source in found.sources]
        # A counter tells its first value here, and energy from the second one on: both count as readable.
        chosen = meter_choice.choose(meters, {meter.name: meter.read(0.0) for meter in meters}, setting).used
    except ConfigError as exc:
        say(3, "meter", f"no power is measured: {exc}")
        return None
    for meter in meters:
        if meter is not chosen:
            meter.close()
    if chosen is None:
        say(6, "meter", "nothing measures power here: a cap is held by the calibration alone")
    return chosen


class Table:
    """A clock for each phase: the highest for prompts, a safe one below it for decoding, the lowest without work."""

    def __init__(self) -> None:
        self._domains: Sequence[Domain] = ()

    def domains_changed(self, domains: Sequence[Domain]) -> None:
        self._domains = domains

    def decide(self, observation: Observation, limits: Limits) -> Decision:
        """Choose by the phase alone; under a cap or in heat no more than the safe clock."""
        hint = observation.hint
        work = hint.work if hint is not None else "idle"
        is_hot = observation.throttled or (observation.temperature_c or 0.0) >= limits.max_c
        if work == "decode" or (work == "prefill" and (is_hot or limits.max_w > 0)):
            return replace(safe(self._domains), reason=work)
        at = -1 if work == "prefill" else 0
        return Decision(max_hz={one.name: one.points_hz[at] for one in self._domains}, reason=work)


def make_policy(settings: Settings, say: Say) -> Table:  # noqa: ARG001
    """Begin with a table."""
    return Table()
