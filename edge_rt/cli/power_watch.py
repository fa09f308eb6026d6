"""`edge_rt power watch`: the power as it changes, with temperature and clocks."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import click

from edge_rt import config
from edge_rt.cli.plot import plot
from edge_rt.cli.screen import redraw, watching
from edge_rt.devices import cpufreq, devfreq, thermal
from edge_rt.devices.base import Reading
from edge_rt.devices.meter_choice import Absent, Found, Panel, choose, find
from edge_rt.devices.meters import Meter
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.meter import extra_meters, meter_name

_MAX_VIEWS = 1000  # as many as a wide terminal shows
_HEIGHT, _MIN_WIDTH, _MARGIN = 8, 20, 14


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One look. power_w by meter is the mean since the look before; clocks are those of each domain now.

    board, soc  the meters that power.meter chose; None: nothing tells it
    """

    time_s: float
    power_w: dict[str, Reading[float]]
    board: str | None
    soc: str | None
    peak_c: Reading[float]
    throttled: tuple[str, ...]
    clock_hz: dict[str, float | None]


@click.command("watch", short_help="Plot the power as it changes.")
@watching(least_s=0.1, default_s=0.5)
@click.pass_obj
def command(above: config.Loaded | None, interval_s: float, once: bool, as_json: bool) -> None:
    """Plot the power of board and chip, until Ctrl-C. Where the output is no terminal, print a line a look.

    A dot on the ground of a plot is a reading that is not known.
    """
    loaded = above or config.load()
    root = SysfsRoot()
    settings, origin = loaded.config.power, loaded.origins.get("power.meter", "default")
    found = find(root, extra=extra_meters(settings, origin=origin, root=root))
    try:
        views = watch(
            root,
            found,
            interval_s,
            setting=meter_name(settings),
            origin=origin,
        )
        if once:
            view = next(views)
            click.echo(_json(view) if as_json else line(view))
        elif as_json or not sys.stdout.isatty():
            for view in views:
                click.echo(_json(view) if as_json else line(view))
        else:
            redraw("edge_rt power", frames(views, interval_s, found.absent))
    finally:
        found.close()


def watch(
    root: SysfsRoot,
    found: Found,
    interval_s: float,
    *,
    setting: str = "auto",
    origin: str = "default",
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[View]:
    """Give a view after each interval, for ever. A meter that was chosen stays so, though it may have gaps.

    Raises ConfigError for a meter that is not here.
    """
    panel = Panel(found)
    panel.read(clock())
    board: Meter | None = None
    soc: Meter | None = None
    while True:
        sleep(interval_s)
        panel.read(clock())
        choice = choose(panel.meters, panel.readings, setting, origin=origin)
        board, soc = board or choice.board, soc or choice.soc
        throttle = thermal.throttle(root).value
        clocks: dict[str, float | None] = {p.name: p.cur_hz.value for p in cpufreq.policies(root)}
        clocks |= {d.name: d.cur_hz.value for d in devfreq.devices(root)}
        yield View(
            time_s=wall(),
            power_w={meter.name: panel.power_w(meter.name) for meter in panel.meters},
            board=board.name if board is not None else None,
            soc=soc.name if soc is not None else None,
            peak_c=thermal.peak_c(root),
            throttled=throttle.active if throttle is not None else (),
            clock_hz=clocks,
        )


def frames(
    views: Iterator[View],
    interval_s: float,
    absent: Sequence[Absent] = (),
    n_columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
) -> Iterator[str]:
    """Draw each view below those before it: a plot for the board, one for the chip, and what belongs to them."""
    history: deque[View] = deque(maxlen=_MAX_VIEWS)
    for view in views:
        history.append(view)
        width = max(_MIN_WIDTH, n_columns() - _MARGIN)
        parts = []
        for title, name in (("board", view.board), ("soc", view.soc)):
            if name is not None:
                values = [_value(v, name) for v in history]
                now = values[-1]
                shown = f"{now:.2f} W" if now is not None else "unknown"
                lines = plot(values, width=width, height=_HEIGHT, unit="W")
                parts.append("\n".join([f"{title}: {shown} by {name}, {interval_s:g} s a column", *lines]))
        if not parts:
            reasons = [f"{name}: {reading.reason}" for name, reading in view.power_w.items() if reading.reason]
            reasons += [f"{kind.kind}: none, {kind.reason}" for kind in absent]
            parts.append("\n".join(["no meter tells the power of board or chip", *reasons]))
        parts.append(_rest(view))
        yield "\n\n".join(parts)


def line(view: View) -> str:
    """Say one view in a line."""
    meters = [(title, name) for title, name in (("board", view.board), ("soc", view.soc)) if name is not None]
    parts = [f"{title} {_shown(_value(view, name))}" for title, name in meters] or ["power unknown"]
    return "  ".join([time.strftime("%H:%M:%S", time.localtime(view.time_s)), *parts, _rest(view)])


def _rest(view: View) -> str:
    parts = [f"{view.peak_c.value:.1f} °C" if view.peak_c.value is not None else "temperature unknown"]
    known_hz = {name: hz for name, hz in view.clock_hz.items() if hz is not None}
    groups: dict[float, list[str]] = {}
    for name, hz in known_hz.items():
        groups.setdefault(round(hz / 1e7) / 100, []).append(name)
    parts += [f"{names[0]}{f' +{len(names) - 1}' if names[1:] else ''} {ghz:.2f} GHz" for ghz, names in groups.items()]
    parts += ["clocks unknown"] if not known_hz else []
    parts += [f"throttled: {', '.join(view.throttled)}"] if view.throttled else []
    return "  ".join(parts)


def _value(view: View, name: str) -> float | None:
    reading = view.power_w.get(name)
    return reading.value if reading is not None else None


def _shown(power_w: float | None) -> str:
    return f"{power_w:.2f} W" if power_w is not None else "unknown"


def _json(view: View) -> str:
    return json.dumps(asdict(view))
