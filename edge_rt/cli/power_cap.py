"""`edge_rt power cap`: hold the power below so many watts until powerd ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edge_rt import config
from edge_rt.errors import ConfigError
from edge_rt.power.client import ask
from edge_rt.power.wire import MAX_CAP_W


class Watts(click.ParamType[float]):
    """A number of watts, or "off"."""

    name = "watts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if value == "off":
            return 0.0
        try:
            watts = float(value)
        except ValueError:
            watts = -1.0
        if not 0.0 < watts <= MAX_CAP_W:
            self.fail(f"{value!r} is neither a number of watts up to {MAX_CAP_W:g} nor off", param, ctx)
        return watts


@click.command("cap", short_help="Cap the power until powerd ends.")
@click.argument("max_w", metavar="WATTS|off", type=Watts())
@click.option("--socket", type=click.Path(path_type=Path), help="powerd's socket. [default: power.socket_path]")
@click.pass_obj
def command(above: config.Loaded | None, max_w: float, socket: Path | None) -> None:
    """Hold the power below WATTS, of what power.meter measures, until powerd ends or `off`.

    power.max_w holds beside it: the lower one counts. Only root and members of power.cap_group may.
    """
    loaded = above or config.load()
    path = str(socket or loaded.config.power.socket_path)
    if not path:
        origin = loaded.origins.get("power.socket_path", "default")
        raise ConfigError(key="power.socket_path", problem="is empty: nobody is to be told", origin=origin)
    ask(path, "cap", max_w=max_w)
    status = ask(path, "status")
    cap = f"capped at {status['max_w']:g} W" if status.get("max_w") else "not capped"
    click.echo(f"{cap}; {_acting(status)}")


def _acting(status: Mapping[str, Any]) -> str:
    """Say whether anything comes of a cap: a powerd that does not act keeps none."""
    if status.get("stopped_by"):
        return f"powerd sets nothing: {status['stopped_by']}"
    if status.get("state") == "dry-run":
        return "powerd sets nothing before power.enabled is true"
    return "powerd acts" if status.get("n_clocks") else "powerd finds no clock to set"
