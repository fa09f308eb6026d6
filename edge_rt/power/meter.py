"""Which meter the energy of answers is told by: what the setting power.meter names, else the best that is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_rt.config import Power
from edge_rt.devices import meter_choice
from edge_rt.devices.meters import Meter
from edge_rt.devices.serial_meter import open_serial, parse_spec
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from edge_rt.power import calibration
from edge_rt.power.modelled import ModelledMeter
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.power.powerd_meter import PowerdMeter

MODEL = "model"  # power.meter's name for the table of `edge_rt power calibrate`


@dataclass(frozen=True, slots=True)
class Chosen:
    """The meter, or the reason why there is none.

    idle_w  as the board's table has it; None without one of the meter's boundary
    """

    meter: Meter | None
    reason: str = ""
    idle_w: float | None = None

    def monitor(self) -> EnergyMonitor | None:
        """Begin to read the meter; None without one."""
        if self.meter is None:
            return None
        monitor = EnergyMonitor(self.meter, idle_w=self.idle_w)
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
    if chosen is not None:
        return _known(chosen, table)
    told = PowerdMeter(settings.socket_path) if settings.socket_path and settings.meter == "auto" else None
    if told is not None and not told.reason:
        return _known(told, table)
    if table is not None:
        return Chosen(ModelledMeter(table, root=root), idle_w=table.idle_w)
    reasons = [f"{reading.source}: {reading.reason}" for reading in readings.values() if reading.value is None]
    reasons += [f"{absent.kind}: {absent.reason}" for absent in found.absent]
    return Chosen(None, "; ".join(dict.fromkeys(reasons)) or "no meter is here")


def extra_meters(settings: Power, *, origin: str = "default", root: SysfsRoot | None = None) -> tuple[Meter, ...]:
    """Open the meters that no search of the machine finds: the serial one that is configured, and the board's table.

    Raises ConfigError as open_meter does.
    """
    opened: list[Meter] = []
    if settings.meter.startswith("serial:"):
        serial = open_meter(settings, origin=origin).meter
        opened += [] if serial is None else [serial]
    table = calibration.read(Path(settings.model_file) if settings.model_file else calibration.DEFAULT_FILE)
    if table is not None:
        opened.append(ModelledMeter(table, root=root))
    return tuple(opened)


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
