"""`edge_rt bench serve`: a load of concurrent streams on a running daemon."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import click
import httpx2

from edge_rt import config
from edge_rt.api.client import no_authorities, unreachable
from edge_rt.api.listen import socket_path
from edge_rt.api.status import rebuild
from edge_rt.bench.metering import Metering
from edge_rt.bench.serving import Driver, ServeCase, ServeResult, table
from edge_rt.cli.bench_options import Progress, counts_option, flat, refuse_stand_in
from edge_rt.power.meter import open_meter

_CONNECT_TIMEOUT_S = 5.0


@click.command("serve", short_help="Measure a running daemon with concurrent streams.")
@click.option(
    "--socket",
    "socket",
    type=click.Path(path_type=Path, readable=False),
    help="The daemon's socket. [default: server.socket_path]",
)
@click.option("-m", "--model", default="", metavar="ID", help="The model to ask. [default: the default model]")
@counts_option("-N", "--streams", default="1,4", least=1, text="Clients that ask at the same time.")
@click.option(
    "--requests",
    type=click.IntRange(1, 100_000),
    default=None,
    help="Requests a row of the table. [default: 4 a client, at least 8]",
)
@counts_option("-p", "--n-prompt", default="128", least=1, text="Prompt tokens of each request.")
@counts_option("-n", "--n-gen", default="64", least=1, text="Tokens of each answer.")
@click.option(
    "--rate",
    type=click.FloatRange(0, 10_000),
    default=0.0,
    metavar="HZ",
    help="Requests a second, arriving at random; 0 sends the next when one has ended. [default: 0]",
)
@click.option(
    "--max-draft",
    type=click.IntRange(0, 64),
    default=0,
    metavar="N",
    help="Let so many tokens be guessed in a step, by the answer's words or a draft model. [default: 0]",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(("md", "json", "jsonl")),
    default="md",
    show_default=True,
    help="Format on stdout.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 86_400),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest silence of an answer.",
)
@click.option("--no-warmup", is_flag=True, help="Do not send one request first, which loads the model.")
@click.option("--progress/--no-progress", default=None, help="Say on stderr what runs. [default: on a terminal]")
@click.pass_obj
def command(
    loaded: config.Loaded,
    socket: Path | None,
    model: str,
    streams: tuple[tuple[int, ...], ...],
    requests: int | None,
    n_prompt: tuple[tuple[int, ...], ...],
    n_gen: tuple[tuple[int, ...], ...],
    rate: float,
    max_draft: int,
    output: str,
    timeout_s: float,
    no_warmup: bool,
    progress: bool | None,
) -> None:
    """Send streaming requests to a running daemon and report what its clients see.

    Every prompt is new, so no cache answers; every answer has exactly its length. ttft counts from a request's arrival,
    waiting included. Energy is all that the meter sees (power.meter). The exit code is 1 if any request failed.
    """
    path = socket or socket_path(loaded.config.server, os.environ)
    cases = [
        ServeCase(
            model=model or loaded.config.catalog.default_model,
            n_streams=n,
            n_requests=requests or max(8, 4 * n),
            n_prompt=p,
            n_gen=g,
            rate_hz=rate,
            max_draft=max_draft,
        )
        for p in flat(n_prompt)
        for g in flat(n_gen)
        for n in flat(streams)
    ]
    line = Progress(progress)
    try:
        with Metering(open_meter(loaded.config.power, origin=loaded.origins.get("power.meter", "default"))) as metering:
            results = asyncio.run(_run(path, cases, metering, timeout_s=timeout_s, warmup=not no_warmup, line=line))
    finally:
        line.clear()
    if output == "md":
        click.echo(table(results), nl=False)
    elif output == "json":
        click.echo(json.dumps([result.record() for result in results], indent=2))
    else:
        for result in results:
            click.echo(json.dumps(result.record()))
    if any(outcome.error for result in results for outcome in result.outcomes):
        raise click.exceptions.Exit(1)


async def check_device(client: httpx2.AsyncClient, model: str) -> None:
    """Raise UnsupportedFeatureError where a simulator or emulator computes a loaded model: its seconds are no speed."""
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise rebuild(response.status_code, response.content)
    for card in response.json()["data"]:
        meta = card.get("meta") or {}
        if card["id"] in (model, model.partition(":")[0]) and "evidence" in meta:
            refuse_stand_in(meta["backend"], meta["evidence"])


async def _run(
    path: Path, cases: list[ServeCase], metering: Metering, *, timeout_s: float, warmup: bool, line: Progress
) -> list[ServeResult]:
    transport = httpx2.AsyncHTTPTransport(
        uds=str(path), verify=no_authorities(), limits=httpx2.Limits(max_connections=None)
    )
    timeout = httpx2.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None)
    async with httpx2.AsyncClient(transport=transport, base_url="http://edge_rt", timeout=timeout) as client:
        driver = Driver(client, metering=metering, announce=line.show)
        line.show(f"tokenizing on {path}")
        try:
            await driver.prepare(cases[0].model)
            await check_device(client, cases[0].model)
        except httpx2.HTTPError as exc:
            raise unreachable(str(path), exc) from exc
        if warmup:
            line.show("warm-up")
            await driver.run(ServeCase(model=cases[0].model, n_streams=1, n_requests=1, n_prompt=16, n_gen=2))
        return [await driver.run(case) for case in cases]
