"""What the governor may choose among: a ladder of clock settings, and what each costs. Standard library only.

A level is one setting of all clocks of the machine, so that one number says how fast it is. What a level costs comes
from `edge_rt power calibrate`, or, where nobody has calibrated, from a curve that most chips share. The latter knows no
watts: it can tell which level takes fewer joules, but not whether a cap holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edge_rt.devices.meters import Boundary, Quality
from edge_rt.power import thread_model
from edge_rt.power.calibration import CalibratedDomain, Calibration, Point
from edge_rt.power.smoothing import smoothed
from edge_rt.power.state import Domain
from edge_rt.power.thread_model import PhaseThreads, ThreadModel

# Of a chip nobody has calibrated, relative to its highest clock. The voltage falls to 0.7 of its highest as the clock
# falls to a third, and no further; a third of the chip's power does not follow the clock, most of that is off in idle.
# A decoding step waits for memory for three quarters of its time, and a waiting core takes about half of the power of a
# computing one.
_VOLTAGE_FLOOR, _VOLTAGE_SLOPE, _KNEE = 0.70, 0.45, 1 / 3
_STATIC_SHARE, _IDLE_SHARE = 0.30, 0.08
_DECODE_STALL, _DECODE_POWER = 0.75, 0.65
_PREFILL_STALL = 0.10
# How far a chip that is hotter, or another of its kind, may be above what was calibrated.
_WORST: Mapping[Quality, float] = {"measured": 1.10, "derived": 1.15, "modelled": 1.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One setting of all clocks.

    max_hz              by domain, each one of its points
    hz                  of the domain that computes
    prefill_s, decode_s per token of one request alone
    prefill_w, decode_w while so; of a chip nobody has calibrated relative to its highest
    worst_w             that it may take, doing anything
    """

    max_hz: Mapping[str, float]
    hz: float
    prefill_s: float
    decode_s: float
    prefill_w: float
    decode_w: float
    worst_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """All levels, slowest first, and what the machine takes when nothing is computed.

    lead           the domain whose clock is a level's hz
    is_calibrated  False: times and watts are relative, and no cap can be held by them
    threads        what the levels take on fewer threads; None: nobody measured it
    """

    levels: tuple[Level, ...]
    lead: str
    idle_w: float
    boundary: Boundary
    quality: Quality
    is_calibrated: bool
    threads: ThreadModel | None = None

    @property
    def top(self) -> int:
        return len(self.levels) - 1

    def share(self, hz: float) -> float:
        """Give a clock relative to the highest."""
        return min(hz / self.levels[-1].hz, 1.0)


def calibrated(domains: Sequence[Domain], calibration: Calibration) -> Model | None:
    """Build the ladder from a calibration; None where it has no point of the clock that leads.

    Its points were measured with all other clocks at their highest, so with those lowered they are on the safe side.
    """
    lead = lead_of(domains)
    found = calibration.domain(lead.name)
    points = [] if found is None else [(hz, point) for point in found.points if (hz := _nearest(lead, point.max_hz))]
    if not points:
        return None
    return _model(lead.name, calibration, [(hz, _joined(domains, lead, hz), point) for hz, point in points])


def fixed(calibration: Calibration) -> Model:
    """Build a ladder of one level, for a machine whose clocks nobody can set: its threads still can be chosen."""
    found: CalibratedDomain = max(calibration.domains, key=lambda domain: domain.points[-1].max_hz)
    point = found.points[-1]
    return _model(found.name, calibration, [(point.max_hz, {}, point)])


def _model(lead: str, calibration: Calibration, points: Sequence[tuple[float, Mapping[str, float], Point]]) -> Model:
    worst = _WORST[calibration.quality]
    clocks = [hz for hz, _, _ in points]
    prefill_w = smoothed(clocks, [point.prefill_w for _, _, point in points])
    decode_w = smoothed(clocks, [point.decode_w for _, _, point in points])
    levels = [
        Level(
            max_hz=max_hz,
            hz=hz,
            prefill_s=point.prefill_s_per_token,
            decode_s=point.decode_s_per_token,
            prefill_w=prefill_w[i],
            decode_w=decode_w[i],
            # A cap goes by what was read, where that is more.
            worst_w=max(point.prefill_w, point.decode_w, prefill_w[i], decode_w[i]) * worst,
        )
        for i, (hz, max_hz, point) in enumerate(points)
    ]
    lowest, highest = levels[0].hz * 0.999, levels[-1].hz * 1.001
    return Model(
        levels=tuple(levels),
        lead=lead,
        idle_w=calibration.idle_w,
        boundary=calibration.boundary,
        quality=calibration.quality,
        is_calibrated=True,
        threads=thread_model.fit(
            [point for point in calibration.threads if lowest <= point.max_hz <= highest],
            idle_w=calibration.idle_w,
            top_hz=levels[-1].hz,
        ),
    )


def on_threads(model: Model, n_prefill: int, n_decode: int) -> Model:
    """Give what the same levels take on so many threads; worst_w stays that of all of them.

    A cap must hold until the daemon has taken up the advice, and when it does not.
    """
    table = model.threads
    if table is None or (n_prefill >= table.n_most and n_decode >= table.n_most):
        return model
    levels = []
    for level in model.levels:
        x = model.share(level.hz)
        prefill, decode = table.prefill, table.decode
        levels.append(
            replace(
                level,
                prefill_s=level.prefill_s * prefill.seconds(x, n_prefill) / prefill.seconds(x, table.n_most),
                decode_s=level.decode_s * decode.seconds(x, n_decode) / decode.seconds(x, table.n_most),
                prefill_w=_on(model, level.prefill_w, prefill, level.hz, n_prefill),
                decode_w=_on(model, level.decode_w, decode, level.hz, n_decode),
            )
        )
    return replace(model, levels=tuple(levels))


def _on(model: Model, whole_w: float, phase: PhaseThreads, hz: float, n_threads: int) -> float:
    """Give the power on n_threads of what takes whole_w on all; the same where nobody measured it."""
    if model.threads is None or not phase.shares:
        return whole_w
    return model.idle_w + (whole_w - model.idle_w) * phase.power_share(hz, n_threads, model.threads.n_most)


def generic(domains: Sequence[Domain], *, boundary: Boundary = "soc") -> Model:
    """Build a ladder for a chip that nobody has calibrated; a second per token is that of the highest clock."""
    lead = lead_of(domains)
    levels = []
    for hz in lead.points_hz:
        x = hz / lead.points_hz[-1]
        voltage = (_VOLTAGE_FLOOR + _VOLTAGE_SLOPE * max(0.0, x - _KNEE)) / (
            _VOLTAGE_FLOOR + _VOLTAGE_SLOPE * (1 - _KNEE)
        )
        static, dynamic = _STATIC_SHARE * voltage**2, (1 - _STATIC_SHARE) * voltage**2 * x
        levels.append(
            Level(
                max_hz=_joined(domains, lead, hz),
                hz=hz,
                prefill_s=_PREFILL_STALL + (1 - _PREFILL_STALL) / x,
                decode_s=_DECODE_STALL + (1 - _DECODE_STALL) / x,
                prefill_w=static + dynamic,
                decode_w=static + dynamic * _DECODE_POWER,
                worst_w=static + dynamic,
            )
        )
    return Model(
        levels=tuple(levels),
        lead=lead.name,
        idle_w=_IDLE_SHARE,
        boundary=boundary,
        quality="modelled",
        is_calibrated=False,
    )


def lead_of(domains: Sequence[Domain]) -> Domain:
    """Choose the clock that the ladder follows: that of the strongest CPUs, of several the most CPUs."""
    cpus = [domain for domain in domains if domain.kind == "cpu" and domain.points_hz]
    if not cpus:
        raise ValueError("no CPU clock can be set")
    return max(cpus, key=lambda domain: (domain.capacity, domain.n_cpus, domain.points_hz[-1]))


def _nearest(domain: Domain, hz: float) -> float | None:
    """Find the domain's point that a calibrated clock means: drivers round some."""
    nearest = min(domain.points_hz, key=lambda point: abs(point - hz))
    return nearest if abs(nearest - hz) <= 0.001 * hz else None


def _joined(domains: Sequence[Domain], lead: Domain, hz: float) -> dict[str, float]:
    """Set the other CPU clocks to the same share of their range; what is no CPU is left at its highest.

    Accelerators and memory that are held low slow everything down for little: they need a calibration of their own.
    """
    share = hz / lead.points_hz[-1]
    return {
        domain.name: hz
        if domain is lead
        else next(
            (point for point in domain.points_hz if domain.kind == "cpu" and point >= share * domain.points_hz[-1]),
            domain.points_hz[-1],
        )
        for domain in domains
        if domain.points_hz
    }
