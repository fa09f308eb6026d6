"""`edge_rt route explain`: where a request would be answered, and why."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from edge_rt import config
from edge_rt.answering import Answering
from edge_rt.api.client import Client
from edge_rt.api.listen import socket_path
from edge_rt.assembly import LocalModels, Parts, assemble
from edge_rt.catalog.store import Store
from edge_rt.cloud.endpoints import CloudModels
from edge_rt.errors import DaemonUnreachableError
from edge_rt.router.rules import REASONS
from edge_rt.runtime import Runtime
from edge_rt.telemetry import Telemetry
from edge_rt.types import GenerateRequest, Message, Route

_TIMEOUT_S = 10.0
_NO_DAEMON = "no daemon answers: this is what one would decide that has just been started"


@click.group("route", short_help="Explain who answers a request, device or cloud.")
def command() -> None:
    """See where requests go: to this device's models or to a cloud endpoint ([cloud.NAME] in the configuration).

    Every answer says so itself, in the headers x-edge-route and x-edge-route-reason; `edge_rt top` and /metrics count
    decisions by reason. docs/router.md tells how it is decided.
    """


@command.command(short_help="Explain one decision without answering.")
@click.argument("text")
@click.option("-m", "--model", help="The model that is asked. [default: the configured one]")
@click.option("--system", help="A system message before TEXT.")
@click.option("--route", type=click.Choice(["auto", "local", "cloud"]), help="What the request itself asks for.")
@click.option("--deadline", "deadline_s", type=click.FloatRange(min=0, min_open=True), help="Seconds it may take.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--socket", type=click.Path(path_type=Path), help="The daemon's socket. [default: the configured one]")
@click.pass_obj
def explain(
    above: config.Loaded | None,
    text: str,
    model: str | None,
    system: str | None,
    route: Route | None,
    deadline_s: float | None,
    as_json: bool,
    socket: Path | None,
) -> None:
    """Explain where a request with TEXT ("-": standard input) would be answered, without answering it.

    A running daemon tells how things stand now: which endpoints work, what is left of the day's budget, how hot the
    device is. Nothing leaves this machine.
    """
    loaded = above or config.load()
    text = sys.stdin.read() if text == "-" else text
    messages = [Message(role="user", content=text)]
    if system:
        messages.insert(0, Message(role="system", content=system))
    request = GenerateRequest(
        id="explain",
        model=model or loaded.config.catalog.default_model,
        messages=tuple(messages),
        route=route or "auto",
        deadline_s=deadline_s,
        tenant=f"uid:{os.getuid()}",
    )
    try:
        with Client(socket or socket_path(loaded.config.server, os.environ), timeout_s=_TIMEOUT_S) as client:
            told = client.explain(_body(request))
    except DaemonUnreachableError:
        if socket is not None:
            raise
        click.echo(f"edge_rt route: {_NO_DAEMON}", err=True)
        told = asyncio.run(_alone(loaded, request))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    for line in told["lines"]:
        click.echo(line)


def _body(request: GenerateRequest) -> dict[str, Any]:
    assert request.messages is not None
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    body = {"model": request.model, "messages": messages, "route": request.route, "deadline_s": request.deadline_s}
    return {name: value for name, value in body.items() if value is not None}


async def _alone(loaded: config.Loaded, request: GenerateRequest) -> dict[str, Any]:
    """Decide in this process. No model is loaded and no endpoint is asked."""
    telemetry, settings = Telemetry(), loaded.config
    cloud = CloudModels(settings.cloud, telemetry) if settings.cloud else None

    def answer_by(models: LocalModels) -> Answering:
        return assemble(settings, models, telemetry, Parts(cloud=cloud)).answering

    runtime = Runtime(loaded, Store.open(settings.catalog), telemetry, answer_by=answer_by)
    try:
        decision = runtime.explain(request)
    finally:
        if cloud is not None:
            await cloud.close()
    why = REASONS[decision.reason]
    return {"where": decision.where, "reason": decision.reason, "why": why, "lines": list(decision.lines)}
