"""`edge_rt uninstall`: take edge_rt's units away again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from edge_rt.errors import NotRootError
from edge_rt.service import installation
from edge_rt.service.system import Host


@click.command("uninstall", short_help="Stop the service and remove it.")
@click.option("--purge", is_flag=True, help="Remove models, stored answers, keys and configuration too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--root", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Remove them from this tree."
)
def command(purge: bool, dry_run: bool, root: Path | None) -> None:
    """Stop the daemon and its power helper, which gives clocks back, and remove their units.

    Pulled models, keys and configuration stay unless --purge is given.
    """
    if root is None and not dry_run and os.geteuid() != 0:
        raise NotRootError(what="removing a service", command=f"{sys.argv[0]} uninstall")
    for line in installation.uninstall(Host(root or Path("/")), purge=purge, is_dry=dry_run):
        click.echo(line)
