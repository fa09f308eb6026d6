"""`edge_rt bench` of tensor models: every form on every device, and the profile that the placement goes by."""

from __future__ import annotations

import asyncio
import csv
import io
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
from tabulate import tabulate

from edge_rt import config
from edge_rt.bench.tensors import Job, Row, measure_apart
from edge_rt.catalog.manifest import Manifest
from edge_rt.catalog.store import Store
from edge_rt.cli.bench_options import Progress, refuse_stand_in
from edge_rt.devices import cpu
from edge_rt.errors import BackendError, InvalidRequestError, ModelNotPulledError
from edge_rt.scheduler.placement import Candidate, Ranking
from edge_rt.scheduler.probes import Probes
from edge_rt.scheduler.profile import Entry, Profile, file_key, profile_path, save, versions_now
from edge_rt.scheduler.subjects import CatalogSubject, ScriptedSubject, make_subject
from edge_rt.worker.probe import probe

# What computes in a back end, so that a profile knows when it has been replaced.
_PACKAGES = {"onnx_cpu": ("onnxruntime",)}


def is_tensor_model(name: str, settings: config.Config) -> bool:
    """Tell a tensor model of the catalog from all else."""
    model_id = name.partition(":")[0]
    return any(m.id == model_id and m.kind == "tensor" for m in Store.open(settings.catalog).manifests())


def run(
    names: Sequence[str],
    settings: config.Config,
    *,
    backend: str,
    batch_sizes: tuple[int, ...],
    n_runs: int,
    output: str,
    save_profile: bool,
    force: bool,
    line: Progress,
) -> None:
    """Measure models, print the results and save them where asked. Raises ModelNotPulledError and StoreError."""
    if backend:
        for device in asyncio.run(probe(backend)):
            refuse_stand_in(backend, device.evidence)
    store = Store.open(settings.catalog)
    path = profile_path(settings.placement, store.root)
    rows: list[dict[str, Any]] = []
    entries: list[Entry] = []
    for name in names:
        model_id, _, variant = name.partition(":")
        manifest = store.get(model_id)
        own = settings.model(model_id)
        own = msgspec.structs.replace(own, backend=backend or own.backend, variant=variant or own.variant)
        here = msgspec.structs.replace(settings, models={**settings.models, model_id: own})
        probes = Probes()
        subject = make_subject(model_id, manifest, here, store, probes, Profile(None))
        ranking = asyncio.run(ranked(subject, probes))
        if not ranking.ranked and not any(store.path(manifest, v) for v in manifest.variants):
            raise ModelNotPulledError(model=model_id)
        for refused in ranking.refused:
            click.echo(f"edge_rt bench: {model_id} {refused.what} is left out: {refused.reason}", err=True)
        for candidate in (row.candidate for row in ranking.ranked):
            if not backend:  # the configuration or a variant has named it
                for device in asyncio.run(probe(candidate.backend)):
                    refuse_stand_in(candidate.backend, device.evidence)
            line.show(f"{model_id}: {candidate}")
            load = subject.load(candidate, force=force)
            sizes = batch_sizes or tuple(sorted({1, load.tensor.max_batch if load.tensor is not None else 1}))
            try:
                measured = measure_apart(Job(load=load, batch_sizes=sizes, n_runs=n_runs, power=settings.power))
            except (BackendError, InvalidRequestError) as exc:
                line.clear()
                click.echo(f"edge_rt bench: {model_id} {candidate} cannot be measured: {exc}", err=True)
                continue
            rows += ({"model": model_id, **msgspec.to_builtins(row)} for row in measured)
            entries += _entries(store, manifest, candidate, measured)
    line.clear()
    click.echo(_text(rows, output), nl=False)
    if save_profile and entries:
        save(path, entries)
        click.echo(f"edge_rt bench: {len(entries)} candidates saved to {path}", err=True)


async def ranked(subject: CatalogSubject | ScriptedSubject, probes: Probes) -> Ranking:
    """Probe the devices and order a model's candidates."""
    try:
        await subject.ready()
        return subject.rank(lambda _: None)
    finally:
        await probes.close()


def _entries(store: Store, manifest: Manifest, candidate: Candidate, rows: Sequence[Row]) -> list[Entry]:
    """Keep what one request by itself takes."""
    variant = manifest.variant(candidate.variant)
    assert variant is not None
    return [
        Entry(
            model=manifest.id,
            variant=variant.id,
            file=file_key(variant, store.path(manifest, variant)),
            backend=candidate.backend,
            device=candidate.device,
            cpu=cpu.model().value or "",
            versions=versions_now(("edge_rt", *_PACKAGES.get(candidate.backend, ()))),
            measured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            n_runs=row.n_runs,
            latency_s=row.latency_p50_s,
            latency_p95_s=row.latency_p95_s,
            energy_j=row.energy_j,
            energy_reason=row.energy_reason[:200],
            memory_bytes=row.rss_bytes,
        )
        for row in rows
        if row.batch_size == 1
    ]


def _text(rows: Sequence[dict[str, Any]], output: str) -> str:
    if output == "json":
        return msgspec.json.format(msgspec.json.encode(rows)).decode() + "\n"
    if output == "jsonl":
        return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)
    if output == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    return _table(rows) if rows else ""


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["model", "variant", "back end", "batch", "ms p50", "ms p95", "inferences/s", "RSS", "J/inference"]
    body = [
        [
            row["model"],
            row["variant"],
            f"{row['backend']}:{row['device']}",
            row["batch_size"],
            f"{row['latency_p50_s'] * 1e3:.3f}",
            f"{row['latency_p95_s'] * 1e3:.3f}",
            f"{row['per_s']:.1f}",
            f"{row['rss_bytes'] / 2**20:.0f} MiB" if row["rss_bytes"] is not None else "-",
            f"{row['energy_j']:.4g}" if row["energy_j"] is not None else "not measured",
        ]
        for row in rows
    ]
    align = ("left", "left", "left", *("right",) * 6)
    text = tabulate(body, head, tablefmt="github", colalign=align, disable_numparse=True)
    reasons = dict.fromkeys(row["energy_reason"] for row in rows if row["energy_reason"])
    notes = "".join(f"J/inference: {reason}\n" for reason in reasons)
    return f"{text}\n\n{notes}cpu: {cpu.model().value or platform.machine()}\n"
