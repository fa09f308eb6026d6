"""`edge_rt top`: what a running daemon is doing now, from its metrics."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.api.listen import socket_path
from edge_rt.cli.scrape import DeviceLoss, Load, ModelLoad, PlaceLoad, Scrape
from edge_rt.cli.screen import redraw, watching

_PLACE_COLUMNS = ("MODEL", "PLACE", "BREAKER", "RUN", "WAIT", "REQ/S", "JOINED", "P50", "P95", "FAILED", "RSS")
_COLUMNS = (
    "MODEL",
    "STATE",
    "RUN",
    "WAIT",
    "DECODE T/S",
    "PREFILL T/S",
    "TTFT P50",
    "THREADS",
    "KV CELLS",
    "PREFIXES",
    "RSS",
)
_ENERGY_COLUMN = "J/TOKEN"  # where there is a meter


@click.command("top", short_help="Watch what a running daemon does.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path, readable=False),
    help="The daemon's socket. [default: server.socket_path]",
)
@watching(least_s=0.2, default_s=1.0)
@click.pass_obj
def command(above: config.Loaded | None, socket: Path | None, interval_s: float, once: bool, as_json: bool) -> None:
    """Watch what a running daemon does, until Ctrl-C.

    Tokens per second are those of the last interval, prefill without what came from the prefix cache. TTFT P50 is the
    median of all answers since the daemon started, interpolated in the histogram's buckets. J/TOKEN is what a token of
    an answer has taken since then, idle power included, where a meter is (docs/energy.md). KV CELLS are those in use
    and all of the model's pool; one holds one token of a conversation that is being answered. A model that a simulator,
    an emulator or a stub computes is called that and shows no speed.

    A tensor model has a line for each of its places. JOINED is how many requests a run answered, P50 and P95 are from
    request to answer, all of the last interval; FAILED counts since the daemon started; RUN, WAIT and RSS are the whole
    model's. An accelerator that has failed has a line at the end: how often, and what the CPU computed in its place.
    """
    loaded = above or config.load()
    path = socket or socket_path(loaded.config.server, os.environ)
    with Client(path) as client:
        views = watch(client.metrics_text, interval_s)
        if once:
            click.echo(_json(next(views)) if as_json else table(next(views)))
        elif as_json:
            for view in views:
                click.echo(_json(view))
        elif sys.stdout.isatty():
            redraw(f"edge_rt on {path}", map(table, views))
        else:
            for view in views:
                click.echo(table(view) + "\n")


def watch(
    metrics_text: Callable[[], str],
    interval_s: float,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Load]:
    """Give a view after each interval, for ever. Raises DaemonUnreachableError when the daemon is gone."""
    before = Scrape.of(metrics_text(), clock())
    while True:
        sleep(interval_s)
        now = Scrape.of(metrics_text(), clock())
        yield Load.between(before, now)
        before = now


def _json(view: Load) -> str:
    return json.dumps(asdict(view))


def table(view: Load) -> str:
    """Draw the view for people."""
    front = f"daemon {_mib(view.rss_bytes)}"
    if (power := view.power) is not None:
        front += f" · {power.power_w:.2f} W of the {power.boundary}, {power.quality} ({power.source})"
    parts = [front]
    if view.models:
        parts.append(_models_table(view.models))
    if view.places:
        parts.append(_places_table(view.places))
    if view.losses:
        parts.append("\n".join(map(_loss_line, view.losses)))
    return "\n\n".join(parts) if len(parts) > 1 else f"{front}; no model has been used yet"


def _loss_line(loss: DeviceLoss) -> str:
    times = "once" if loss.n_faults == 1 else f"{loss.n_faults} times"
    now = f", {loss.n_now} of them just now" if loss.n_now else ""
    return f"{loss.model}: its accelerator has failed {times}; the CPU computed {loss.n_fallbacks} in its place{now}"


def _places_table(places: Sequence[PlaceLoad]) -> str:
    rows = [
        (
            p.model if p.running is not None else "",
            p.place + _kind(p.stand_in),
            p.breaker,
            "" if p.running is None else p.running,
            "" if p.waiting is None else p.waiting,
            "-" if p.stand_in else f"{p.requests_hz:.1f}",
            "-" if p.joined is None else f"{p.joined:.1f}",
            "-" if p.p50_s is None or p.stand_in else f"{p.p50_s * 1e3:.1f} ms",
            "-" if p.p95_s is None or p.stand_in else f"{p.p95_s * 1e3:.1f} ms",
            p.failed,
            "" if p.running is None else _mib(p.rss_bytes),
        )
        for p in places
    ]
    align = ("left", "left", "left", *["right"] * (len(_PLACE_COLUMNS) - 3))
    return tabulate(rows, _PLACE_COLUMNS, "plain", disable_numparse=True, colalign=align)


def _models_table(models: Sequence[ModelLoad]) -> str:
    has_energy = any(m.decode_j_per_token is not None for m in models)
    rows = [
        (
            m.model,
            ("loaded" if m.loaded else "unloaded")
            + _kind(m.stand_in)
            + (f", {m.restarts} restarts" if m.restarts else "")
            + (f", {m.preempted} put back" if m.preempted else "")
            + (f", {m.refused} refused" if m.refused else ""),
            m.running,
            m.waiting,
            "-" if m.stand_in else f"{m.decode_tps:.1f}",
            "-" if m.stand_in else f"{m.prefill_tps:.1f}",
            "-" if m.ttft_p50_s is None or m.stand_in else f"{m.ttft_p50_s * 1e3:.0f} ms",
            _or_dash(m.threads),
            "-" if m.kv_cells is None else f"{m.kv_cells_used} / {m.kv_cells}",
            "-" if m.prefix_bytes is None else f"{m.prefix_hits} hits, {_mib(m.prefix_bytes)}",
            _mib(m.rss_bytes),
            *(
                ["-" if m.decode_j_per_token is None or m.stand_in else f"{m.decode_j_per_token:.3g}"]
                if has_energy
                else []
            ),
        )
        for m in models
    ]
    columns = (*_COLUMNS, _ENERGY_COLUMN) if has_energy else _COLUMNS
    align = ("left", "left", *["right"] * (len(columns) - 2))
    return tabulate(rows, columns, "plain", disable_numparse=True, colalign=align)


def _kind(stand_in: str | None) -> str:
    return f" ({stand_in})" if stand_in else ""


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _mib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / 2**20:.0f} MiB"
