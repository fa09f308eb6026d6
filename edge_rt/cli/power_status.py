"""`edge_rt power status`: every meter, clock and temperature now, and why what is unknown is so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import click

from edge_rt import config
from edge_rt.cli import power_setter, power_survey
from edge_rt.devices import cpu, raspberry_pi
from edge_rt.devices.base import Reading
from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.devices.meter_choice import find
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.meter import extra_meters, meter_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """All that the command shows."""

    board: Reading[str]
    power: power_survey.Power
    clocks: power_survey.Clocks
    heat: power_survey.Heat
    battery: power_survey.Battery
    powerd: power_setter.Setter


@click.command("status", short_help="Show every meter, clock and temperature now.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time over which power is taken.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; unknown values are null with a reason.")
@click.pass_obj
def command(above: config.Loaded | None, interval_s: float, as_json: bool) -> None:
    """Show every meter, every clock with its limits, temperatures, throttling, the battery, and who sets clocks.

    A meter's boundary says what it sees: the board, the chip (soc), or one rail. Its quality is "measured", "derived"
    (a sum or a fit of what was measured) or "modelled". `used for` names what power.meter has chosen; energy is
    accounted and power is capped by that which says "energy".
    """
    status = take(SysfsRoot(), above or config.load(), interval_s)
    click.echo(json.dumps(asdict(status), indent=2) if as_json else text(status))


def take(
    root: SysfsRoot,
    loaded: config.Loaded,
    interval_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    files: KernelFiles | None = None,
) -> Status:
    """Read everything. Raises ConfigError for a board file that breaks the form."""
    settings, origin = loaded.config.power, loaded.origins.get("power.meter", "default")
    found = find(root, extra=extra_meters(settings, origin=origin, root=root))
    on_pi = found.board is not None and any(name.startswith("raspberrypi,") for name in found.board.compatible)
    try:
        return Status(
            board=cpu.board(root),
            power=power_survey.power(
                found,
                meter_name(settings),
                origin=origin,
                interval_s=interval_s,
                clock=clock,
                sleep=sleep,
            ),
            clocks=power_survey.clocks(root),
            heat=power_survey.heat(root, raspberry_pi.throttle if on_pi else None),
            battery=power_survey.charge(root),
            powerd=power_setter.look(settings.socket_path, files or KernelFiles()),
        )
    finally:
        found.close()


def text(status: Status) -> str:
    """Draw it for people."""
    table = f" (board file: {status.power.board_file})" if status.power.board_file else " (no board file)"
    parts: tuple[tuple[str, Iterable[str]], ...] = (
        ("board", [power_survey.value(status.board) + table]),
        ("power", power_survey.meter_lines(status.power)),
        ("clocks", power_survey.clock_lines(status.clocks)),
        ("heat", power_survey.heat_lines(status.heat)),
        ("battery", power_survey.battery_lines(status.battery)),
        ("powerd", power_setter.lines(status.powerd)),
    )
    return "\n".join(f"{name if i == 0 else '':9} {line}" for name, lines in parts for i, line in enumerate(lines))
