"""`edge_rt placement MODEL`: on which device each form of a model would run, in which order, and why."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from tabulate import tabulate

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.api.listen import socket_path
from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.devices import cpu
from edge_rt.errors import BackendError, EdgeRtError, ModelNotFoundError, UnsupportedFeatureError
from edge_rt.scheduler.forms import load_message, place
from edge_rt.scheduler.placement import PolicyName, Ranked, Ranking, Refused
from edge_rt.scheduler.probes import Probes, make_probes
from edge_rt.scheduler.profile import Profile, profile_path
from edge_rt.scheduler.subjects import CatalogSubject, ScriptedSubject, make_subject

_TIMEOUT_S = 5.0


@click.command("placement", short_help="Explain on which device a model runs.")
@click.argument("model", metavar="MODEL")
@click.option("--policy", type=click.Choice(get_args(PolicyName)), help="Weigh by this. [default: the configured one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="The daemon's socket. [default: where the configuration puts it]",
)
@click.pass_obj
def command(
    above: config.Loaded | None, model: str, policy: PolicyName | None, as_json: bool, socket: Path | None
) -> None:
    """Show where MODEL (ID[:VARIANT]) runs on this machine: its candidates, best first, and those refused, and why.

    A candidate is a form of the model on a device. What `edge_rt bench --save-profile` has measured counts; the rest is
    guessed and says so. Beside a running daemon each one's breaker and queue are shown as they stand.

    Language models are dispatched by the file: the first back end that takes it runs it.
    """
    loaded = above or config.load()
    name, _, variant = model.partition(":")
    settings = _pinned(loaded.config, name, variant, policy)
    store = Store.open(settings.catalog)
    if settings.model(name).backend == "null":
        manifest = next((m for m in store.manifests() if m.id == name), None)
    else:
        manifest = _manifest(store, name)
    if manifest is not None and manifest.kind == "text":
        ranking = _text_ranking(manifest, settings, store)
    else:
        profile = Profile(profile_path(settings.placement, store.root))
        probes = make_probes(settings.placement)
        ranking = asyncio.run(_ranked(make_subject(name, manifest, settings, store, probes, profile), probes))
        for problem in profile.problems:
            click.echo(f"edge_rt placement: {problem}", err=True)
    live = _live(socket or socket_path(loaded.config.server, os.environ), name)
    click.echo(_json(name, ranking, live) if as_json else _text(name, ranking, live))


def _pinned(settings: config.Config, name: str, variant: str, policy: PolicyName | None) -> config.Config:
    own = settings.model(name)
    models = {**settings.models, name: msgspec.structs.replace(own, variant=variant or own.variant)}
    placement = msgspec.structs.replace(settings.placement, policy=policy or settings.placement.policy)
    return msgspec.structs.replace(settings, models=models, placement=placement)


def _manifest(store: Store, name: str) -> Manifest:
    for chain in store.chains():
        if chain.id == name:
            remedy = f"ask for one of its models: {', '.join(chain.parts)}"
            raise UnsupportedFeatureError(feature=f"one place for {name}, a chain of models,", remedy=remedy)
    return store.get(name)


async def _ranked(subject: CatalogSubject | ScriptedSubject, probes: Probes) -> Ranking:
    try:
        await subject.ready()
        return subject.rank(lambda _: None)
    finally:
        await probes.close()


def _text_ranking(manifest: Manifest, settings: config.Config, store: Store) -> Ranking:
    """Say of each form which back end its file is dispatched to; the one that would be picked stands first."""
    own, features = settings.model(manifest.id), cpu.features()
    if own.variant and manifest.variant(own.variant) is None:
        raise ModelNotFoundError(
            model=f"{manifest.id}:{own.variant}", known=tuple(f"{manifest.id}:{v.id}" for v in manifest.variants)
        )
    best = pick_variant(manifest, features, own.variant, backend=own.backend or settings.engine.backend)
    rows: list[Ranked] = []
    refused: list[Refused] = []
    for variant in (best, *(v for v in manifest.variants if v is not best)):
        if own.variant and variant is not best:
            refused.append(Refused(what=variant.id, reason=f"the configuration names {best.id}"))
            continue
        found = _dispatched(manifest, variant, settings, store, features)
        if isinstance(found, Ranked):
            rows.append(found)
        else:
            refused.append(found)
    return Ranking(policy=settings.placement.policy, ranked=tuple(rows), refused=tuple(refused))


def _dispatched(
    manifest: Manifest, variant: Variant, settings: config.Config, store: Store, features: frozenset[str]
) -> Ranked | Refused:
    from edge_rt.backends.dispatch import dispatch  # numpy and llama.cpp, which tensor models do not need
    from edge_rt.scheduler.placement import Candidate
    from edge_rt.worker.load import unpack

    own = msgspec.structs.replace(settings.model(manifest.id), variant=variant.id)
    placement = place(manifest.id, manifest, own, settings, features=features, find=store.path)
    if placement.path is None:
        return Refused(what=variant.id, reason=f"not pulled; edge_rt models pull {manifest.id}:{variant.id}")
    file, options = unpack(load_message(placement, settings, force=True))
    try:
        backend, reason = dispatch(placement.backend, file, options)
        memory_bytes = backend.estimate(file, options).total_bytes
    except BackendError as exc:
        return Refused(what=variant.id, reason=str(exc))
    return Ranked(
        candidate=Candidate(variant=variant.id, quant=variant.quant, backend=backend.name, device="cpu", kind="cpu"),
        latency_s=0.0,
        energy_j=0.0,
        memory_bytes=memory_bytes,
        is_measured=False,
        is_profiled=False,
        has_energy=False,
        tier=0,
        reason="dispatched by its file" + (f", because {reason}" if reason else ""),
    )


def _live(path: Path, model: str) -> dict[str, dict[str, Any]]:
    """Ask a running daemon for the model's places, by candidate; nothing where none answers or it has none."""
    if not path.exists():
        return {}
    try:
        with Client(path, timeout_s=_TIMEOUT_S) as client:
            return {place["candidate"]: place for place in client.placement(model)["places"]}
    except EdgeRtError:
        return {}


def _json(model: str, ranking: Ranking, live: dict[str, dict[str, Any]]) -> str:
    candidates = [
        asdict(row) | {"place": row.candidate.place, "live": live.get(str(row.candidate))} for row in ranking.ranked
    ]
    body = {
        "model": model,
        "policy": ranking.policy,
        "candidates": candidates,
        "refused": [asdict(row) for row in ranking.refused],
    }
    return msgspec.json.format(msgspec.json.encode(body)).decode()


def _text(model: str, ranking: Ranking, live: dict[str, dict[str, Any]]) -> str:
    head = ["", "VARIANT", "PLACE", "MS", "J", "MIB", *(["BREAKER", "QUEUE", "ANSWERED"] if live else []), "WHY"]
    rows = [
        [
            number,
            row.candidate.variant,
            row.candidate.place,
            _number(row.latency_s * 1e3, guessed=not row.is_measured),
            _number(row.energy_j, guessed=not row.has_energy),
            f"{row.memory_bytes / 2**20:.0f}",
            *(_live_cells(live.get(str(row.candidate))) if live else ()),
            row.reason,
        ]
        for number, row in enumerate(ranking.ranked, 1)
    ]
    parts = [f"{model}, policy {ranking.policy}"]
    parts.append(tabulate(rows, head, tablefmt="plain", disable_numparse=True) if rows else "nothing here runs it")
    if ranking.refused:
        refused = [(row.what, row.reason) for row in ranking.refused]
        parts.append("refused\n" + tabulate(refused, tablefmt="plain", disable_numparse=True))
    return "\n\n".join(parts)


def _number(value: float, *, guessed: bool) -> str:
    """Write a figure; a guess has a ~ before it, and none at all is -."""
    return f"{'~' if guessed else ''}{value:.3g}" if value else "-"


def _live_cells(place: dict[str, Any] | None) -> tuple[str, str, str]:
    if place is None:
        return "-", "-", "-"
    state = f"{place['state']}, {place['retry_in_s']:.0f} s" if place["retry_in_s"] else place["state"]
    return state, str(place["queue"]), str(place["n_answered"])
