"""The parts of powerd that depend on this machine and its settings: the meter, and the policy with its calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from edge_rt.devices import cpufreq, meter_choice
from edge_rt.devices.meters import Meter
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from edge_rt.power import calibration, levels, policy
from edge_rt.power.domains import domains
from edge_rt.power.learning import Memory
from edge_rt.power.settings import Settings
from edge_rt.power.state import Decision, Domain, Limits, Observation

Say = Callable[[int, str, str], None]

_WITHOUT: Final = "speeds are learned as they come, and a cap is held by the meter alone"


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
    if settings.meter in ("none", "model"):  # what a table tells of power the policy knows better
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


class Chooser:
    """The policy with its model of this machine and what it has learned. Belongs to one thread."""

    def __init__(self, calibrated: calibration.Calibration | None, say: Say) -> None:
        self._calibrated, self._say = calibrated, say
        self._model: levels.Model | None = None
        self._memory = Memory()

    def domains_changed(self, domains: Sequence[Domain]) -> None:
        """Build the ladder of clocks anew; what was learned is forgotten, for it was learned of other clocks."""
        self._model, self._memory = self._built(domains), Memory()

    def decide(self, observation: Observation, limits: Limits) -> Decision:
        if self._model is None:
            return Decision(max_hz={}, reason="no CPU clock can be set")
        decision, self._memory = policy.decide(observation, limits, self._model, self._memory)
        return decision

    def _built(self, domains: Sequence[Domain]) -> levels.Model | None:
        known = self._calibrated
        if all(domain.kind != "cpu" for domain in domains):
            # Without a clock to set there are the threads, where a calibration knows them.
            return levels.fixed(known) if known is not None and known.threads else None
        model = levels.calibrated(domains, known) if known is not None else None
        if model is not None:
            return model
        if known is not None:
            self._say(4, "calibration", f"the calibration of {known.board} has no clock of this machine; {_WITHOUT}")
        return levels.generic(domains)


def make_policy(settings: Settings, say: Say) -> Chooser:
    """Read the calibration, if there is one, and begin. A file that is wrong is said, and done without."""
    path = Path(settings.model_file) if settings.model_file else calibration.DEFAULT_FILE
    found = None
    try:
        found = calibration.read(path)
    except ConfigError as exc:
        say(3, "calibration", f"{exc}; {_WITHOUT}")
    else:
        if found is None:
            say(6, "calibration", f"there is no {path}: {_WITHOUT}. `edge_rt power calibrate` makes one")
    return Chooser(found, say)
