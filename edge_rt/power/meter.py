"""Which meter the energy of answers is told by: what the setting power.meter names, else the best that is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_rt.config import Power
from edge_rt.devices import meter_choice
from edge_rt.devices.base import Reading, unknown
from edge_rt.devices.idle import LoadShare
from edge_rt.devices.meters import Boundary, Meter, Quality, Sample
from edge_rt.devices.serial_meter import open_serial, parse_spec
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from edge_rt.power import calibration
from edge_rt.power.modelled import ModelledMeter
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.power.powerd_meter import PowerdMeter, powerd_name

_LOOK_S = 10.0

MODEL = "model"  # power.meter's name for the table of `edge_rt power calibrate`


@dataclass(frozen=True, slots=True)
class Chosen:
    """The meter, or the reason why there is none.

    idle_w      as the board's table has it; None without one of the meter's boundary
    may_come    powerd is not up yet, or may read what this process may not
    """

    meter: Meter | None
    reason: str = ""
    idle_w: float | None = None
    may_come: bool = False

    def monitor(self) -> EnergyMonitor | None:
        """Begin to read the meter; None without one."""
        if self.meter is None:
            return None
        monitor = EnergyMonitor(self.meter, idle_w=self.idle_w, load=LoadShare())
        monitor.start()
        return monitor


def open_meter(
    settings: Power,
    *,
    origin: str = "default",
    root: SysfsRoot | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Chosen:
    """Choose and open a meter; the others are closed. Where none can be read powerd's is used, then a model.

    origin  where power.meter comes from. Raises ConfigError for a meter that is not one, a damaged table, and a serial
    meter whose library is missing.
    """
    if settings.meter == "none":
        return Chosen(None, "power.meter is none")
    table = calibration.read(Path(settings.model_file) if settings.model_file else calibration.DEFAULT_FILE)
    if settings.meter == MODEL:
        if table is None:
            raise _wrong("is model, and there is no table: make one with `edge_rt power calibrate`", origin)
        return Chosen(ModelledMeter(table, root=root), idle_w=table.idle_w)
    if settings.meter.startswith("serial:"):
        try:
            return _known(open_serial(settings.meter), table)
        except (ValueError, ImportError) as exc:
            raise _wrong(str(exc), origin) from exc
    found = meter_choice.find(root)
    meters = [source.meter for source in found.sources]
    readings = {meter.name: meter.read(clock()) for meter in meters}
    chosen: Meter | None = None
    try:
        chosen = meter_choice.choose(meters, readings, settings.meter, origin=origin).used
    finally:
        for meter in meters:
            if meter is not chosen:
                meter.close()
    is_readable = chosen is not None and readings[chosen.name].value is not None
    if not is_readable and settings.socket_path:
        told = PowerdMeter(settings.socket_path)
        if not told.reason and (chosen is None or told.name == powerd_name(chosen.name)):
            if chosen is not None:
                chosen.close()
            return _known(told, table)
    if chosen is not None:
        return _known(chosen, table)
    if table is not None:
        return Chosen(ModelledMeter(table, root=root), idle_w=table.idle_w)
    reasons = [f"{reading.source}: {reading.reason}" for reading in readings.values() if reading.value is None]
    reasons += [f"{absent.kind}: {absent.reason}" for absent in found.absent]
    may_come = any("only root" in reason for reason in reasons) or Path(settings.socket_path or "/").is_socket()
    return Chosen(None, "; ".join(dict.fromkeys(reasons)) or "no meter is here", may_come=may_come)


class LateMeter:
    """A Meter that is looked for now and then until it is there: powerd may start after the daemon."""

    def __init__(self, find: Callable[[], Chosen], reason: str) -> None:
        self._find, self._reason = find, reason
        self._meter: Meter | None = None
        self._due_s: float | None = None
        self.name, self.interval_s = "no meter yet", _LOOK_S / 10
        self.boundary: Boundary = "board"
        self.quality: Quality = "measured"

    def read(self, now_s: float) -> Reading[Sample]:
        """Read the meter, once it is found; looking for it takes some ms."""
        if self._meter is None and (self._due_s is None or now_s >= self._due_s):
            self._due_s = now_s + _LOOK_S
            chosen = self._find()
            self._meter, self._reason = chosen.meter, chosen.reason
        if (meter := self._meter) is None:
            return unknown(self.name, self._reason)
        self.name, self.boundary, self.quality = meter.name, meter.boundary, meter.quality
        self.interval_s = meter.interval_s
        return meter.read(now_s)

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()


def extra_meters(settings: Power, *, origin: str = "default", root: SysfsRoot | None = None) -> tuple[Meter, ...]:
    """Open the meters that no search of the machine finds: the serial one that is configured, powerd's where this
    process cannot read the same, and the board's table.

    Raises ConfigError as open_meter does.
    """
    opened: list[Meter] = []
    if settings.meter.startswith("serial:"):
        serial = open_meter(settings, origin=origin).meter
        opened += [] if serial is None else [serial]
    if settings.socket_path and not (told := PowerdMeter(settings.socket_path)).reason:
        opened += [] if _reads_itself(told.name, root) else [told]
    table = calibration.read(Path(settings.model_file) if settings.model_file else calibration.DEFAULT_FILE)
    if table is not None:
        opened.append(ModelledMeter(table, root=root))
    return tuple(opened)


def _reads_itself(name: str, root: SysfsRoot | None) -> bool:
    """Tell whether powerd's meter of this name can be read here too: it is one meter then, and not two that differ."""
    found = meter_choice.find(root)
    try:
        meters = [source.meter for source in found.sources if powerd_name(source.meter.name) == name]
        return any(meter.read(time.monotonic()).value is not None for meter in meters)
    finally:
        found.close()


def meter_name(settings: Power) -> str:
    """Give power.meter as meter_choice.choose takes it: the names of extra_meters for what stands for them."""
    if settings.meter.startswith("serial:"):
        try:
            return str(parse_spec(settings.meter))
        except ValueError:
            return settings.meter
    if settings.meter == MODEL:
        table = calibration.read(Path(settings.model_file) if settings.model_file else calibration.DEFAULT_FILE)
        return settings.meter if table is None else ModelledMeter(table).name
    return settings.meter


def _known(meter: Meter, table: calibration.Calibration | None) -> Chosen:
    fits = table is not None and table.boundary == meter.boundary
    return Chosen(meter, idle_w=table.idle_w if table is not None and fits else None)


def _wrong(problem: str, origin: str) -> ConfigError:
    return ConfigError(key="power.meter", problem=problem, origin=origin)
