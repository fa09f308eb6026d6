"""`edge_rt doctor`: check this machine and this installation, one line each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from edge_rt import config
from edge_rt.cli.checks import CHECKS, Check, Patient, examine, fail
from edge_rt.cli.npu_checks import NPU_CHECKS
from edge_rt.cli.service_checks import SERVICE_CHECKS
from edge_rt.errors import ConfigError

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor", short_help="Check this machine and this installation.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Check with this configuration file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array of name, status, detail and remedy.")
@click.pass_obj
def command(above: config.Loaded | None, file: Path | None, as_json: bool) -> None:
    """Check what edge_rt needs and what makes it slow; each line is ok, warn or fail, with the remedy below.

    The exit code is 1 if anything failed.
    """
    results: list[Check] = []
    try:
        settings = (config.load(file) if file is not None or above is None else above).config
    except ConfigError as exc:
        results.append(fail("config", str(exc), "correct it; the checks below use the defaults"))
        settings = config.Config()
    # The service first: a later check that connects to its socket would start it.
    with config.named(file):
        results += examine(Patient(config=settings), (*SERVICE_CHECKS, *CHECKS, *NPU_CHECKS))
    click.echo(json.dumps([asdict(check) for check in results], indent=2) if as_json else text(results))
    if any(check.status == "fail" for check in results):
        raise click.exceptions.Exit(1)


def text(results: list[Check]) -> str:
    """Draw the results for people; colour goes when stdout is no terminal."""
    width = max(len(check.name) for check in results)
    lines: list[str] = []
    for check in results:
        status = click.style(f"{check.status:4}", fg=_COLOURS[check.status])
        lines.append(f"{status}  {check.name:{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"{'':{width + 8}}→ {check.remedy}")
    return "\n".join(lines)
