"""What powerd tells of itself, so that it fits into one message."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from edge_rt.power.governor import Governor
from edge_rt.power.sensing import Sensing
from edge_rt.power.settings import Settings
from edge_rt.power.state import Limits

_MAX_DOMAINS: Final = 16
_MAX_FAULTS: Final = 4
_MAX_TEXT: Final = 300


def report(
    governor: Governor, limits: Limits, run_cap_w: float, rivals: Sequence[str], settings: Settings, now_s: float
) -> dict[str, Any]:
    """Tell state, decision and readings; unknown values are null. At most some 3.5 kB as JSON."""
    seen, decision = governor.observation, governor.decision
    power = seen.power if seen is not None else None
    hint = seen.hint if seen is not None else None
    in_force = governor.actuators.max_hz()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    knobs = governor.actuators.knobs
    return {
        "state": governor.state,
        "stopped_by": governor.stopped_by[:_MAX_TEXT],
        "is_postponed": governor.applied.is_postponed,
        "reason": decision.reason[:40],
        "clocks": {
            name: {"wanted_hz": decision.max_hz.get(name), "in_force_hz": hz}
            for name, hz in list(in_force.items())[:_MAX_DOMAINS]
        },
        "n_clocks": len(in_force),
        "advice": asdict(governor.advice),
        "n_at_work": governor.n_at_work,
        "takes_advice": hint is not None and hint.max_threads > 0,
        "work": hint.work if hint is not None else None,
        "n_running": hint.n_running if hint is not None else None,
        "n_waiting": hint.n_waiting if hint is not None else None,
        "meter": settings.meter if governor.sensing.power is None else governor.sensing.power.meter.name[:80],
        "power_w": _plain(power.power_w) if power is not None else None,
        "power_age_s": round(power.age_s, 3) if power is not None and power.power_w is not None else None,
        "boundary": power.boundary if power is not None else None,
        "quality": power.quality if power is not None else None,
        "temperature_c": _plain(seen.temperature_c) if seen is not None else None,
        "throttled": seen.throttled if seen is not None else None,
        "slow_sensors": governor.sensing.slow(now_s),
        "is_on_battery": seen.is_on_battery if seen is not None else None,
        "max_w": limits.max_w,
        "run_cap_w": run_cap_w,
        "max_c": limits.max_c,
        "rivals": list(rivals)[:8],
        "faults": [str(fault)[:200] for fault in governor.applied.faults[:_MAX_FAULTS]],
        "n_faults": len(governor.applied.faults),
        "n_writes": sum(knob.n_writes for knob in knobs),
        "n_clamped": sum(knob.n_clamped for knob in knobs),
        "n_steps": governor.n_steps,
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "pid": os.getpid(),
        "now_s": round(now_s, 3),
    }


def power_report(sensing: Sensing, reason: str) -> dict[str, Any]:
    """Tell what the meter has counted since powerd began: a meter of its own for whoever may not read the sensors.

    energy_j over covered_s; as of at_s of the monotonic clock. Without a meter its name is null, for reason.
    """
    if sensing.power is None:
        return {"meter": None, "reason": reason[:_MAX_TEXT]}
    meter, log = sensing.power.meter, sensing.power.log
    return {
        "meter": meter.name[:80],
        "boundary": meter.boundary,
        "quality": meter.quality,
        "interval_s": meter.interval_s,
        "power_w": log.last_w,
        "energy_j": round(log.total_j, 6),
        "covered_s": round(log.covered_s, 6),
        "at_s": round(log.last_s, 6) if log.last_s is not None else None,
        "reason": log.reason[:_MAX_TEXT],
    }


def _plain(value: float | None) -> float | None:
    """Give a number that JSON can hold."""
    return value if value is not None and abs(value) < 1e12 else None
