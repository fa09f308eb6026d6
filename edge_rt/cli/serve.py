"""`edge_rt serve`: the daemon in the foreground."""

from __future__ import annotations

import faulthandler
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from edge_rt import config, daemon


@click.command("serve", short_help="Serve models over a Unix socket.")
@click.option(
    "--config",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read this file instead of $EDGE_RT_CONFIG or /etc/edge_rt/config.toml.",
)
@click.option("--socket", metavar="PATH", help="Listen on this Unix socket. [default: server.socket_path]")
@click.option(
    "--model",
    "models",
    metavar="ID[:VARIANT]",
    multiple=True,
    help="Load this model at once, not on its first use; may be repeated.",
)
@click.option("--tcp", metavar="HOST:PORT", help="Listen on TCP too; needs --api-keys-file.")
@click.option("--api-keys-file", metavar="FILE", help="The keys that open the TCP port, one a line.")
@click.option("--offline", is_flag=True, default=None, help="Never fetch anything.")
@click.option("--force", is_flag=True, default=None, help="Load models also where the memory looks too small.")
@click.option(
    "--log-level", type=click.Choice(("debug", "info", "warning", "error")), help="What to log. [default: info]"
)
@click.option("--log-format", type=click.Choice(("text", "json")), help="How to write it to stderr. [default: text]")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path | None,
    socket: str | None,
    models: tuple[str, ...],
    tcp: str | None,
    api_keys_file: str | None,
    offline: bool | None,
    force: bool | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Serve models over a Unix socket, in the foreground, until SIGTERM or Ctrl-C.

    SIGHUP lets it read its configuration again (docs/systemd.md says what can change without a restart).

    It speaks OpenAI's, Ollama's and Anthropic's protocols (docs/clients.md).

    Models are loaded on their first use and unloaded when idle; they must have been pulled (`edge_rt models pull`). A
    second Ctrl-C does not wait for running answers. Options win over the configuration (`edge_rt config show`).

    \b
      edge_rt serve
      edge_rt serve --socket ./edge_rt.sock --model smollm2-135m-instruct
    """
    flags: dict[str, Any] = {
        "server.socket_path": socket,
        "server.api_keys_file": api_keys_file,
        "catalog.offline": offline,
        "worker.force": force,
        "log.level": log_level,
        "log.format": log_format,
    }
    if tcp is not None:
        flags["server.tcp_host"], flags["server.tcp_port"] = _host_and_port(tcp)
    for name in models:
        model, _, variant = name.partition(":")
        flags[config.dotted(("models", model, "preload"))] = True
        flags[config.dotted(("models", model, "variant"))] = variant or None
    given = ctx.find_root().params.get("file") if file is None else file

    def read() -> config.Loaded:
        return config.load(given, flags=flags)

    if os.environ.get("NOTIFY_SOCKET"):  # systemd ends one that hangs by SIGABRT: then the log shows where it hung
        faulthandler.enable()
    with config.named(given):
        daemon.run(read(), ready=_announce, read=read)


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise click.BadParameter(f"{text!r} is not HOST:PORT, such as 127.0.0.1:8970", param_hint="--tcp")
    return host.strip("[]"), int(port)


def _announce(listening: daemon.Listening) -> None:
    places = [f"unix:{listening.path}"] if listening.path is not None else []
    if listening.tcp is not None:
        host, port = listening.tcp
        places.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    click.echo(f"edge_rt listens on {' and '.join(places) or 'an inherited socket'}", err=True)
    if sys.stderr.isatty() and listening.path is not None:
        body = '{"messages": [{"role": "user", "content": "Say hello."}]}'
        path = shlex.quote(str(listening.path))
        click.echo(f"Try it:\n  curl --unix-socket {path} http://edge_rt/v1/chat/completions -d '{body}'", err=True)
