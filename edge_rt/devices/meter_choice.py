"""All that measures power on this machine, and which of it is used for the board and for the chip.

Meters of one boundary are alternatives, never added; those of two boundaries are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from edge_rt.devices import board_table, hwmon, iio
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.battery import BatteryMeter
from edge_rt.devices.board_table import Board, Rail
from edge_rt.devices.hwmon import Channel, ChannelMeter
from edge_rt.devices.meters import Boundary, Meter, Quality, Sample, mean_w
from edge_rt.devices.powercap import PERMISSION, EnergyMeter
from edge_rt.devices.raspberry_pi import PmicMeter, Run, run
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError

_QUALITIES: tuple[Quality, ...] = ("measured", "derived", "modelled")

# Meters of one boundary are taken to agree within this; what is less than a quarter watt apart is noise.
_AGREE_SHARE, _AGREE_W = 0.2, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One meter that was found, and what people should know of it.

    note    what it leaves out, or a doubt; ""
    remedy  how to make it readable, where it is here and may not be read; ""
    """

    meter: Meter
    note: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A kind of meter that is not here, why, and what to do; remedy "": nothing can be done."""

    kind: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All meters, best known boundary first, and all kinds that are absent. Names are unique."""

    board: Board | None
    sources: tuple[Source, ...]
    absent: tuple[Absent, ...]

    def close(self) -> None:
        for source in self.sources:
            source.meter.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which meters are used. None: nothing tells that boundary, or none is wanted.

    used  the one that energy is accounted and power is capped by: the one that was named, else the board's, else the
          chip's; one that is modelled only where nothing else is known
    """

    board: Meter | None
    soc: Meter | None
    used: Meter | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Two meters of one boundary that tell different powers."""

    boundary: Boundary
    names: tuple[str, str]
    powers_w: tuple[float, float]

    def __str__(self) -> str:
        (a, b), (a_w, b_w) = self.names, self.powers_w
        return f"{a} tells {a_w:.2f} W and {b} tells {b_w:.2f} W for the same {self.boundary}: one of them is wrong"


def find(
    root: SysfsRoot | None = None, *, extra: Iterable[Meter] = (), call: Run = run, board: Board | None = None
) -> Found:
    """Find every meter. extra are those that the caller has opened: a USB meter, a model.

    call runs vcgencmd, and is only used on a board whose file says that its answer is a power. Raises ConfigError for a
    board file that breaks the form.
    """
    root = root or SysfsRoot()
    board = board or board_table.find(root)
    sources = [*(Source(meter=meter) for meter in extra), *_rails(root, board)]
    absent: list[Absent] = []
    if board is not None and board.pmic is not None:
        sources.append(Source(meter=PmicMeter(board.pmic.slope, board.pmic.offset_w, call), note=board.note))
    for boundary in ("board", "soc"):
        rapl = EnergyMeter(root, boundary=boundary)
        if rapl.is_here:
            sources.append(Source(meter=rapl, remedy=PERMISSION))
        elif boundary == "soc":
            absent.append(Absent(kind="rapl", reason=rapl.read(0.0).reason))
    battery = BatteryMeter(root)
    if battery.is_here:
        sources.append(Source(meter=battery))
    else:
        absent.append(Absent(kind="battery", reason=battery.read(0.0).reason))
    if not any(isinstance(source.meter, ChannelMeter) for source in sources):
        absent.append(Absent(kind="hwmon", reason="no chip below /sys/class/hwmon measures power"))
    if board is not None and board.absent:
        absent.append(Absent(kind=board.name, reason=board.absent))
    return Found(board=board, sources=_uniquely_named(sources), absent=tuple(absent))


def choose(
    meters: Sequence[Meter], readings: Mapping[str, Reading[Sample]], setting: str = "auto", *, origin: str = "default"
) -> Choice:
    """Choose by the setting power.meter: "auto", "none" or a meter's name. readings are by name, one of each meter.

    Of one boundary the best is the one that can be read; then the better quality, then the shorter interval, then the
    one that was found first. A named meter is used though it cannot be read now. Raises ConfigError for a name that no
    meter has.
    """
    if setting == "none":
        return Choice(board=None, soc=None, used=None)
    best: dict[Boundary, Meter | None] = {"board": None, "soc": None}
    for boundary in best:
        fit = [m for m in meters if m.boundary == boundary and readings[m.name].value is not None]
        best[boundary] = min(fit, key=lambda m: (_QUALITIES.index(m.quality), m.interval_s), default=None)
    if setting == "auto":
        wanted = [meter for meter in (best["board"], best["soc"]) if meter is not None]
        # A chip that is measured tells more of its answers than a board that is modelled.
        used = min(wanted, key=lambda m: m.quality == "modelled", default=None)
        return Choice(board=best["board"], soc=best["soc"], used=used)
    named = next((m for m in meters if m.name == setting), None)
    if named is None:
        names = ", ".join(m.name for m in meters) or "none"
        raise ConfigError(
            key="power.meter", problem=f"is {setting!r}, which is no meter here; there are: {names}", origin=origin
        )
    if named.boundary in best:
        best[named.boundary] = named
    return Choice(board=best["board"], soc=best["soc"], used=named)


def disagreements(powers_w: Mapping[str, float], meters: Sequence[Meter]) -> tuple[Disagreement, ...]:
    """List pairs of one boundary that are more than 20 % apart. Rails are parts and have nothing to agree with."""
    found = []
    for a, b in combinations((m for m in meters if m.boundary != "rail" and m.name in powers_w), 2):
        a_w, b_w = powers_w[a.name], powers_w[b.name]
        if a.boundary == b.boundary and abs(a_w - b_w) > max(_AGREE_W, _AGREE_SHARE * max(a_w, b_w)):
            found.append(Disagreement(boundary=a.boundary, names=(a.name, b.name), powers_w=(a_w, b_w)))
    return tuple(found)


class Panel:
    """Reads all meters together, again and again, and tells the mean power of each since its last reading.

    Two meters that disagree are logged once, until they agree again.
    """

    def __init__(self, found: Found) -> None:
        self._meters = tuple(source.meter for source in found.sources)
        self._before: dict[str, tuple[float, Sample]] = {}
        self._told: frozenset[tuple[str, str]] = frozenset()
        self.readings: dict[str, Reading[Sample]] = {}
        self.powers_w: dict[str, float] = {}
        self.disagreements: tuple[Disagreement, ...] = ()

    @property
    def meters(self) -> tuple[Meter, ...]:
        return self._meters

    def power_w(self, name: str) -> Reading[float]:
        """Give one meter's mean power since its last reading, or why it is not known."""
        reading = self.readings[name]
        if (power_w := self.powers_w.get(name)) is not None:
            return known(power_w, reading.source)
        return unknown(reading.source, reading.reason or "its counter has not moved between two readings yet")

    def read(self, now_s: float) -> None:
        """Read every meter at now_s. A counter tells no power at its first reading."""
        self.powers_w = {}
        for meter in self._meters:
            reading = self.readings[meter.name] = meter.read(now_s)
            before = self._before.pop(meter.name, None)
            if reading.value is None:
                continue
            # A counter's value may be old: powerd's are of its last look, a second ago when nobody works.
            at_s = now_s - reading.value.age_s
            self._before[meter.name] = (at_s, reading.value)
            power_w = mean_w(before[1], reading.value, at_s - before[0]) if before else reading.value.power_w
            if power_w is not None:
                self.powers_w[meter.name] = power_w
        self.disagreements = disagreements(self.powers_w, self._meters)
        pairs = frozenset(pair.names for pair in self.disagreements)
        for pair in self.disagreements:
            if pair.names not in self._told:
                import logging  # a megabyte, which powerd does without

                logging.getLogger(__name__).warning("%s", pair)
        self._told = pairs


class SumMeter:
    """Several rails added up: the board's file says that together they are the whole of something."""

    quality: Quality = "derived"

    def __init__(self, parts: Sequence[ChannelMeter], boundary: Boundary, name: str) -> None:
        self._parts = tuple(parts)
        self.name = name
        self.boundary: Boundary = boundary
        self.interval_s = max(part.interval_s for part in parts)

    def read(self, now_s: float) -> Reading[Sample]:
        """Add up all parts; unknown as soon as one of them is."""
        total_w, age_s = 0.0, 0.0
        for part in self._parts:
            reading = part.read(now_s)
            if reading.value is None or reading.value.power_w is None:
                return unknown(reading.source, f"{part.name}: {reading.reason}")
            total_w, age_s = total_w + reading.value.power_w, max(age_s, reading.value.age_s)
        if total_w == 0:
            return unknown(self.name, f"tells 0 W for a {self.boundary} that runs")
        return known(Sample(power_w=total_w, age_s=age_s), self.name)

    def close(self) -> None: ...


def _rails(root: SysfsRoot, board: Board | None) -> list[Source]:
    """Make meters of the chips' channels; the board's file makes totals of them where it knows the rails."""
    channels = (*hwmon.channels(root), *iio.channels(root))
    by_rail: dict[str, Channel] = {}
    plain: list[Channel] = []
    for channel in channels:
        rail = _rail_of(channel, board.rails) if board is not None else None
        if rail is None or rail.name in by_rail:
            plain.append(channel)
        else:
            by_rail[rail.name] = replace(channel.checked(root, rail.shunt_ohm), label=rail.name)
    sources: list[Source] = []
    totals: set[str] = set()
    for boundary, names in (("board", board.board if board else ()), ("soc", board.soc if board else ())):
        if not names or not all(name in by_rail for name in names):
            continue
        wanted: Boundary = "board" if boundary == "board" else "soc"
        note = board.note if board is not None and wanted == "board" else ""
        parts = [ChannelMeter(root, by_rail[name]) for name in names]
        if len(parts) == 1:
            meter: Meter = ChannelMeter(root, by_rail[names[0]], wanted)
            totals.add(names[0])
        else:
            meter = SumMeter(parts, wanted, f"{by_rail[names[0]].chip} {' + '.join(names)}")
        sources.append(Source(meter=meter, note=note or by_rail[names[0]].note))
    for channel in (*(c for name, c in by_rail.items() if name not in totals), *plain):
        is_whole = channel.chip == "power_meter"
        sources.append(Source(meter=ChannelMeter(root, channel, "board" if is_whole else "rail"), note=channel.note))
    return sources


def _rail_of(channel: Channel, rails: Sequence[Rail]) -> Rail | None:
    """Find the rail that a channel is: by its label; where it has none, by chip, address and number."""
    for rail in rails:
        if rail.chip and rail.chip != channel.chip:
            continue
        is_there = bool(rail.device) and (rail.device, rail.number) == (channel.device, channel.number)
        if channel.label == rail.name or (not channel.label and is_there):
            return rail
    return None


def _uniquely_named(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Refuse nothing and rename what would be the second of its name: two chips of one kind without labels."""
    seen: dict[str, int] = {}
    for source in sources:
        name = source.meter.name
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1 and isinstance(source.meter, ChannelMeter | SumMeter):
            source.meter.name = f"{name} #{seen[name]}"
    return tuple(sources)
