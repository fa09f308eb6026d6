"""What `edge_rt power` and `edge_rt devices` say of meters, clocks, heat and battery: the facts and their lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_rt.devices import battery, cpufreq, devfreq, thermal
from edge_rt.devices.base import Reading
from edge_rt.devices.meter_choice import Absent, Choice, Found, Panel, Source, choose
from edge_rt.devices.meters import Boundary, Meter, Quality
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError

# What an unreadable kernel file says (sysfs.py): only then is the remedy for permissions one.
_NOT_PERMITTED = "only root may read it"

_NO_METER = (
    "nothing tells a power here: put a USB meter between plug and board (power.meter = serial:PORT:KIND), or let "
    "`edge_rt power calibrate` make a table of what the board takes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterState:
    """One meter and what it reads.

    used_for        "board", "soc" and "energy" (and the cap), as far as it is chosen
    disagrees_with  meters of the same boundary that tell more than 20 % more or less: one of them is wrong
    """

    name: str
    boundary: Boundary
    quality: Quality
    interval_s: float
    power_w: Reading[float]
    energy_j: float | None
    age_s: float | None
    used_for: tuple[str, ...]
    disagrees_with: tuple[str, ...]
    note: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """The meters' part of it. problem: why the configured meter cannot be chosen; ""."""

    board_file: str | None
    meters: tuple[MeterState, ...]
    absent: tuple[Absent, ...]
    disagreements: tuple[str, ...]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Every clock domain."""

    policies: tuple[cpufreq.Policy, ...]
    devices: tuple[devfreq.Device, ...]
    pstate: Reading[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Temperatures and what slows the chip down."""

    temperatures: tuple[thermal.Temperature, ...]
    peak_c: Reading[float]
    throttle: Reading[thermal.Throttle]


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """The system's batteries. on_mains: None where there is no battery."""

    charge: Reading[float]
    on_mains: bool | None


def power(
    found: Found,
    setting: str = "auto",
    *,
    origin: str = "default",
    interval_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Power:
    """Read all meters, a second time after interval_s if that is not 0: counters tell a power only then."""
    panel = Panel(found)
    panel.read(clock())
    if interval_s > 0 and found.sources:
        sleep(interval_s)
        panel.read(clock())
    choice, problem = Choice(board=None, soc=None, used=None), ""
    try:
        choice = choose(panel.meters, panel.readings, setting, origin=origin)
    except ConfigError as exc:
        problem = str(exc)
    return Power(
        board_file=found.board.name if found.board is not None else None,
        meters=tuple(_state(source, panel, choice) for source in found.sources),
        absent=found.absent,
        disagreements=tuple(map(str, panel.disagreements)),
        problem=problem,
    )


def clocks(root: SysfsRoot) -> Clocks:
    return Clocks(policies=cpufreq.policies(root), devices=devfreq.devices(root), pstate=cpufreq.pstate(root))


def heat(root: SysfsRoot, throttle: Callable[[], Reading[thermal.Throttle]] | None = None) -> Heat:
    """Read temperatures and signs of throttling; throttle asks the firmware, where that knows better than sysfs."""
    told = throttle() if throttle is not None else None
    return Heat(
        temperatures=thermal.temperatures(root),
        peak_c=thermal.peak_c(root),
        throttle=told if told is not None and told.value is not None else thermal.throttle(root),
    )


def charge(root: SysfsRoot) -> Battery:
    share = battery.charge(root)
    return Battery(charge=share, on_mains=battery.is_charging(root) if share.value is not None else None)


def meter_lines(found: Power) -> Iterator[str]:
    """One line for each meter, each absence and each doubt."""
    for meter in found.meters:
        used = f", used for {' and '.join(meter.used_for)}" if meter.used_for else ""
        how_often = f"every {meter.interval_s:g} s"
        doubt = f", disagrees with {' and '.join(meter.disagrees_with)}" if meter.disagrees_with else ""
        yield f"{meter.name}: {_watts(meter)} ({meter.boundary}, {meter.quality}, {how_often}{used}{doubt})"
        if meter.remedy:
            yield f"    {meter.remedy}"
        if meter.note:
            yield f"    {meter.note}"
    yield from (f"{kind.kind}: none, {kind.reason}{'; ' + kind.remedy if kind.remedy else ''}" for kind in found.absent)
    yield from (f"doubt: {words}" for words in found.disagreements)
    if found.problem:
        yield f"problem: {found.problem}"
    elif not any(meter.power_w.value is not None or meter.energy_j is not None for meter in found.meters):
        yield _NO_METER


def clock_lines(found: Clocks) -> Iterator[str]:
    """One line for each group of policies that are alike, and one for each other clock."""
    if not found.policies:
        yield "cpu: unknown, no cpufreq policy: the platform or hypervisor sets the clock"
    alike: dict[str, list[cpufreq.Policy]] = {}
    for policy in found.policies:
        alike.setdefault(_policy(policy), []).append(policy)
    for words, policies in alike.items():
        every = [policy.name for policy in policies]
        names = ", ".join(every) if len(every) < 4 else f"{every[0]} … {every[-1]}"
        cpus = tuple(sorted(cpu for p in policies for cpu in p.cpus))
        now = [p.cur_hz.value for p in policies if p.cur_hz.value is not None]
        at = f"now {_span(min(now), max(now))}" if now else f"now unknown: {policies[0].cur_hz.reason}"
        yield f"{names}, cpu {spans(cpus)}: {at}, {words}"
    if found.pstate.value is not None:
        yield f"driver {found.pstate.value}"
    for device in found.devices:
        at = _ghz(device.cur_hz.value) if device.cur_hz.value is not None else f"unknown: {device.cur_hz.reason}"
        limits = _limits((device.min_hz, device.max_hz), device.points_hz[:1] + device.points_hz[-1:])
        busy = f", busy {device.load.value:.0%}" if device.load.value is not None else ""
        yield f"{device.name} ({device.kind}): now {at}{limits}{_governor(device.governor)}{busy}"


def heat_lines(found: Heat) -> Iterator[str]:
    if not found.temperatures:
        yield value(found.peak_c)
    for sensor in found.temperatures:
        limit = f", slows down at {sensor.limit_c:.0f} °C" if sensor.limit_c is not None else ""
        yield f"{sensor.name} {sensor.value_c:.1f} °C{limit}"
    state = found.throttle
    if state.value is None:
        yield f"throttling {value(state)}"
        return
    count = f", {state.value.events} events since boot" if state.value.events is not None else ""
    past = f"; since boot: {', '.join(state.value.past)}" if state.value.past else ""
    yield f"throttling now: {', '.join(state.value.active) or 'no'}{count}{past}"


def battery_lines(found: Battery) -> Iterator[str]:
    where = {True: ", on mains", False: ", discharging or idle", None: ""}[found.on_mains]
    yield f"{value(found.charge, lambda share: f'{share:.0%}')}{where}"


def value(reading: Reading[Any], show: Callable[[Any], str] = str) -> str:
    return show(reading.value) if reading.value is not None else f"unknown: {reading.reason}"


def spans(ids: tuple[int, ...]) -> str:
    """Write ids in the kernel's list form."""
    found: list[list[int]] = []
    for i in ids:
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in found)


def _state(source: Source, panel: Panel, choice: Choice) -> MeterState:
    meter, reading = source.meter, panel.readings[source.meter.name]
    sample = reading.value
    uses: Mapping[str, Meter | None] = {"board": choice.board, "soc": choice.soc, "energy": choice.used}
    return MeterState(
        name=meter.name,
        boundary=meter.boundary,
        quality=meter.quality,
        interval_s=meter.interval_s,
        power_w=panel.power_w(meter.name),
        energy_j=sample.energy_j if sample is not None else None,
        age_s=sample.age_s if sample is not None else None,
        disagrees_with=tuple(
            name
            for pair in panel.disagreements
            if meter.name in pair.names
            for name in pair.names
            if name != meter.name
        ),
        used_for=tuple(use for use, chosen in uses.items() if chosen is meter),
        note=source.note,
        remedy=source.remedy if _NOT_PERMITTED in reading.reason else "",
    )


def _watts(meter: MeterState) -> str:
    if meter.power_w.value is not None:
        return f"{meter.power_w.value:.2f} W"
    return "counts energy" if meter.energy_j is not None else value(meter.power_w)


def _policy(policy: cpufreq.Policy) -> str:
    """Say what of a policy stays: what policies of one kind have in common."""
    steps = f", {len(policy.points_hz)} steps" if policy.points_hz and not policy.is_grid else ""
    epp = f", EPP {policy.epp.value}" if policy.epp.value is not None else ""
    boost = {True: ", boost on", False: ", boost off", None: ""}[policy.boost.value]
    offline = "" if policy.online_cpus == policy.cpus else f", online {spans(policy.online_cpus) or 'none'}"
    driver = f", {policy.driver.value}" if policy.driver.value else ""
    ends = [hz for hz in (policy.floor_hz.value, policy.ceiling_hz.value) if hz is not None]
    limits = _limits((policy.min_hz, policy.max_hz), ends)
    return f"{limits}{steps}{_governor(policy.governor)}{epp}{boost}{driver}{offline}".removeprefix(", ")


def _governor(reading: Reading[str]) -> str:
    return f", {reading.value}" if reading.value is not None else ", governor unknown"


def _limits(asked: tuple[Reading[float], Reading[float]], hardware_hz: Sequence[float]) -> str:
    """Say between which clocks it may move: the hardware's two, or fewer where somebody holds it."""
    low, high = asked[0].value, asked[1].value
    if low is None or high is None:
        return ", limits unknown"
    if len(hardware_hz) < 2 or (low, high) == tuple(hardware_hz):
        return f", {_span(low, high)}"
    return f", held to {_span(low, high)} of {_span(hardware_hz[0], hardware_hz[1])}"


def _span(low: float, high: float) -> str:
    return _ghz(low) if low == high else f"{low / 1e9:.2f}–{_ghz(high)}"


def _ghz(hz: float) -> str:
    return f"{hz / 1e9:.2f} GHz"
