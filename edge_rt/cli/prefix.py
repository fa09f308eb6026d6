"""`edge_rt prefix`: which beginnings of prompts stay computed, through the daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from tabulate import tabulate

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.api.listen import socket_path
from edge_rt.errors import InvalidRequestError
from edge_rt.regular import read_regular

_TIMEOUT_S = 240.0  # the model may have to be loaded


@click.group("prefix", short_help="Let beginnings of prompts stay computed.")
@click.option("--socket", type=click.Path(path_type=Path), help="The daemon's socket. [default: the configured one]")
@click.option("--model", default="", help="Of this model. [default: the configured one]")
@click.pass_context
def command(ctx: click.Context, socket: Path | None, model: str) -> None:
    """Pin system prompts, so that chats with them begin at once, also after a restart; docs/scheduling.md says how.

    The daemon loads the model for it. Where users are isolated, each sees the own pins and those of the configuration.
    """
    loaded = ctx.obj or config.load()
    path = socket or socket_path(loaded.config.server, os.environ)
    ctx.obj = (ctx.with_resource(Client(path, timeout_s=_TIMEOUT_S)), model or loaded.config.catalog.default_model)


_Above = tuple[Client, str]


@command.command("list", short_help="List pinned prefixes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def listing(above: _Above, as_json: bool) -> None:
    """List what is pinned, how long it is, and whether it is computed and on disk."""
    client, model = above
    _show(client.pins(model), as_json=as_json)


@command.command("pin", short_help="Pin a system prompt.")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def pin(above: _Above, name: str, file: Path, as_json: bool) -> None:
    """Let the system prompt in FILE (- for standard input) stay, under NAME; one of that name no longer does."""
    client, model = above
    _show(client.pin(model, name, _read(file)), as_json=as_json)


@command.command("drop", short_help="Unpin a prefix.")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def drop(above: _Above, name: str, as_json: bool) -> None:
    """Let what is pinned as NAME go when its turn comes, and remove it from the disk."""
    client, model = above
    _show(client.unpin(model, name), as_json=as_json)


def _read(file: Path) -> str:
    max_bytes = config.Limits().max_prompt_bytes
    try:
        raw = sys.stdin.buffer.read(max_bytes + 1) if str(file) == "-" else read_regular(file, max_bytes)
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(param="file", problem=f"{file} cannot be read: {exc}") from exc


def _show(pins: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode({"pinned": pins}).decode())
    elif not pins:
        click.echo("nothing is pinned")
    else:
        rows = [
            (pin["name"], pin["n_tokens"], "yes" if pin["is_kept"] else "not yet", "yes" if pin["is_on_disk"] else "no")
            for pin in pins
        ]
        click.echo(tabulate(rows, headers=("name", "tokens", "computed", "on disk"), tablefmt="plain"))
        for pin in pins:
            if pin["problem"]:
                click.echo(f"{pin['name']}: {pin['problem']}", err=True)
