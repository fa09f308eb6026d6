"""`edge_rt install`: make edge_rt a service of systemd."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from edge_rt.errors import NotRootError
from edge_rt.service import installation, interpreter
from edge_rt.service.installation import Wish
from edge_rt.service.system import Host
from edge_rt.service.units import GROUP, SOCKET_PATH


@click.command("install", short_help="Make edge_rt a service of systemd.")
@click.option("--powerd", is_flag=True, help="Install the power helper too, which reads meters and sets clocks.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--no-start", is_flag=True, help="Enable the socket, but do not open it before the next boot.")
@click.option(
    "--root",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Write the units into this tree, a system's root to be, and start nothing.",
)
@click.option("--python", metavar="PATH", help="The interpreter that has edge_rt in that tree; with --root.")
def command(powerd: bool, dry_run: bool, no_start: bool, root: Path | None, python: str | None) -> None:
    """Write the units of a daemon that starts with its first client, as a user of its own, and open its socket.

    Needs root, systemd 250 or newer, and an edge_rt that all users may read: one in a home directory is refused, with
    the remedy. Says what it does, a line each; what is in place already is left alone, and `edge_rt uninstall` takes
    the rest away again. Models are pulled as before (`sudo edge_rt models pull`), and the configuration is
    /etc/edge_rt/config.toml. `edge_rt status` and `edge_rt doctor` tell how it does.

    \b
      sudo /usr/bin/python3 -m venv /opt/edge_rt
      sudo /opt/edge_rt/bin/pip install 'edge_rt[llama]'
      sudo /opt/edge_rt/bin/edge_rt install
      sudo usermod --append --groups edge_rt $USER
    """
    if root is None and not dry_run and os.geteuid() != 0:
        raise NotRootError(what="installing a service", command=f"{sys.argv[0]} install")
    if (root is None) != (python is None):
        raise click.UsageError("--root and --python belong together: a tree has an interpreter of its own.")
    if python is not None and not Path(python).is_absolute():
        # systemd would look for it elsewhere, and a unit without a command is none.
        raise click.BadParameter(
            f"must be a path from the tree's root on, as /opt/edge_rt/bin/python; got {python!r}", param_hint="--python"
        )
    found = () if python is not None else interpreter.obstacles(interpreter.needed_paths(), root_only=powerd)
    if dry_run:  # show the rest too
        for one in found:
            click.echo(f"in the way  {one.path}: {one.why}, and {one.needed_by} is needed", err=True)
        if found:
            click.echo("            → `/usr/bin/python3 -m venv /opt/edge_rt`, and install edge_rt there", err=True)
    else:
        installation.check_interpreter(sys.executable, found)
    wish = Wish(python=python or sys.executable, powerd=powerd, starts=not no_start, is_dry=dry_run)
    for line in installation.install(Host(root or Path("/")), wish, into_tree=root is not None):
        click.echo(line)
    if root is None and not dry_run:
        click.echo(_next_steps(os.environ, starts=not no_start))


def _next_steps(environ: Mapping[str, str], *, starts: bool) -> str:
    user = environ.get("SUDO_USER", "USER")
    first = f"clients are served on {SOCKET_PATH}" if starts else f"from the next boot on, {SOCKET_PATH} is served"
    return (
        f"{first}; members of group {GROUP} may connect:\n"
        f"  usermod --append --groups {GROUP} {user}    (counts from the next login on)\n"
        "  edge_rt status"
    )
