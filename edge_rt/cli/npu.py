"""`edge_rt npu`: the vendors' packages for NPUs, each in an environment of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec
from tabulate import tabulate

from edge_rt.backends.npu import environments, installing
from edge_rt.backends.npu.stacks import STACKS, Stack, stack
from edge_rt.cli import npu_compile, npu_sscma, npu_vela

_ASK_ABOVE_BYTES: Final = 10**9


@click.group("npu", short_help="Install vendors' packages for NPUs apart from edge_rt's.")
def command() -> None:
    """Install what vendors give for their NPUs, and remove it.

    Some of it holds versions of numpy, onnx and others that edge_rt cannot live with. So each vendor's packages get an
    environment of their own, and edge_rt runs them there, as other processes. docs/npu.md tells more.
    """


command.add_command(npu_compile.command)
command.add_command(npu_sscma.command)
command.add_command(npu_vela.command)


@command.command("setup", short_help="Install a vendor's packages.")
@click.argument("vendor")
@click.option("--dir", "where", type=click.Path(file_okay=False, path_type=Path), help="Make it below this folder.")
@click.option("--anew", is_flag=True, help="Make it again where it is there already.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, however much it is.")
def setup(vendor: str, where: Path | None, anew: bool, yes: bool) -> None:
    """Make the environment of VENDOR's packages, pinned, with pip or uv; what is there already is left as it is.

    It is used only when all of it is there and has been imported; what an interrupted run leaves is cleared away. Root
    makes it for the whole machine, in /var/lib/edge_rt/npu, others for themselves, in ~/.local/share/edge_rt/npu.
    """
    wanted = stack(vendor)
    found = environments.find(wanted)
    if found is not None and found.is_current and not anew:
        click.echo(f"{wanted.name} is there: {found.folder}, {_size(found.record.size_bytes)}")
        return
    root = where or environments.usual_dir()
    click.echo(
        f"{wanted.name}: {_size(wanted.installed_bytes)} on the disk in {root}, "
        f"{_size(wanted.download_bytes)} to fetch; apart because {wanted.why}",
        err=True,
    )
    if wanted.installed_bytes > _ASK_ABOVE_BYTES and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("it takes more than 1 GB: agree with --yes")
        click.confirm("Install it?", abort=True, err=True)
    made = installing.set_up(wanted, _report(wanted), where=where, is_anew=anew)
    click.echo(f"{wanted.name} is ready: {made.folder}, {_size(made.record.size_bytes)}")


@command.command("list", short_help="Show what there is, and what is installed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def listed(as_json: bool) -> None:
    """Show the vendors that have an environment, where it is and whether it is what this edge_rt wants."""
    rows = [_row(wanted) for wanted in STACKS.values()]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"environments": rows})).decode())
        return
    head = ["VENDOR", "STATE", "SIZE", "PACKAGE", "WHERE"]
    shown = [[row.vendor, row.state, _size(row.size_bytes), row.package, row.folder or "-"] for row in rows]
    click.echo(tabulate(shown, head, tablefmt="plain", disable_numparse=True))


@command.command("remove", short_help="Remove a vendor's packages.")
@click.argument("vendor")
def remove(vendor: str) -> None:
    """Remove the environment of VENDOR's packages; models that were compiled with them stay."""
    wanted = stack(vendor)
    freed_bytes = environments.remove(wanted)
    click.echo(f"removed {_size(freed_bytes)}" if freed_bytes else f"{wanted.name} is not installed for this user")


def _report(wanted: Stack) -> Callable[[str], None]:
    return lambda what: click.echo(f"{wanted.name}: {what}", err=True)


@dataclass(frozen=True, slots=True)
class _Row:
    vendor: str
    state: str
    package: str
    folder: str | None
    size_bytes: int
    why: str


def _row(wanted: Stack) -> _Row:
    found = environments.find(wanted)
    return _Row(
        vendor=wanted.name,
        state="absent" if found is None else "ready" if found.is_current else "out of date",
        package=wanted.packages[0],
        folder=None if found is None else os.fspath(found.folder),
        size_bytes=wanted.installed_bytes if found is None else found.record.size_bytes,
        why=wanted.why,
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 10**9 else f"{n_bytes / 1e6:.0f} MB"
