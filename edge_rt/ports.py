"""What the runtime is given from outside: a store of models, somewhere to send figures, and how a worker is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from edge_rt import config
from edge_rt.answering import AnsweringEvents
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.manifest import Asset, Manifest, Variant
from edge_rt.chains import ChainEvents
from edge_rt.errors import ModelFormatError
from edge_rt.scheduler.placed_model import DispatchEvents
from edge_rt.scheduler.slots import ResidencyEvents
from edge_rt.types import Energy, Priority, Timings, Usage
from edge_rt.worker.channel import Load
from edge_rt.worker.spawn import spawn
from edge_rt.worker.supervisor import ModelWorker, Worker, WorkerEvents


class ModelStore(Protocol):
    """What the runtime asks of a store; edge_rt.catalog.store.Store is one."""

    def manifests(self) -> tuple[Manifest, ...]: ...

    def chains(self) -> tuple[Chain, ...]: ...

    def path(self, manifest: Manifest, variant: Variant) -> Path | None: ...

    def asset_path(self, manifest: Manifest, asset: Asset) -> Path | None: ...

    def left_out(self) -> Mapping[str, ModelFormatError]: ...

    def refresh(self) -> bool: ...


class RuntimeEvents(ResidencyEvents, DispatchEvents, ChainEvents, AnsweringEvents, Protocol):
    """Where the runtime's figures go; edge_rt.telemetry.Telemetry is one."""

    def answer_finished(self, model: str, *, usage: Usage, timings: Timings, priority: Priority = "normal") -> None: ...

    def energy_used(self, model: str, energy: Energy) -> None: ...

    def energy_aborted(self, model: str, energy: Energy) -> None: ...

    def queue_depth(self, model: str, *, running: int, waiting: int) -> None: ...


MakeWorker = Callable[[Load, config.Worker, WorkerEvents], ModelWorker]


def make_worker(load: Load, settings: config.Worker, events: WorkerEvents) -> Worker:
    return Worker(load, settings=settings, launch=spawn, events=events)
