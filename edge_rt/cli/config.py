"""`edge_rt config`: show the settings and where each comes from, check a file."""

from __future__ import annotations

import json
from pathlib import Path

import click
from tabulate import tabulate

from edge_rt import config
from edge_rt.catalog.store import Store
from edge_rt.runtime import Runtime
from edge_rt.telemetry import Telemetry


@click.group("config", short_help="Show settings and their origin, check a file.")
def command() -> None:
    """Show the settings in force, or check a configuration file.

    Later ones win: default, file (--config, $EDGE_RT_CONFIG or /etc/edge_rt/config.toml), environment
    (EDGE_RT__ENGINE__N_THREADS=2), flag.
    """


@command.command("show")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Read this file instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array of key, value and origin.")
@click.option("--changed", is_flag=True, help="Only keys that are not at their default.")
@click.pass_obj
def show(above: config.Loaded | None, file: Path | None, as_json: bool, changed: bool) -> None:
    """Print every key with its value and where the value comes from."""
    loaded = config.load(file) if file is not None or above is None else above
    settings = [s for s in loaded.settings() if not changed or s.origin != "default"]
    if as_json:
        click.echo(json.dumps([{"key": s.key, "value": s.value, "origin": s.origin} for s in settings], indent=2))
        return
    rows = [(s.key, json.dumps(s.value, ensure_ascii=False), s.origin) for s in settings]
    click.echo(tabulate(rows, ("KEY", "VALUE", "ORIGIN"), "plain", disable_numparse=True))


@command.command("check", short_help="Check one configuration file.")
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Check FILE alone, without the environment: exit code 0 if it is sound, 78 with the key and the reason if not.

    The models and variants that it names must be in the catalog; whether they have been pulled is not looked at.
    """
    loaded = config.load(file, environ={})
    Runtime(loaded, Store.open(loaded.config.catalog), Telemetry())  # what the daemon would refuse
    n_keys = len(loaded.origins)
    click.echo(f"{file}: ok, {n_keys} key{'' if n_keys == 1 else 's'} set")
