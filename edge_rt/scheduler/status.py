"""What the daemon says of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_rt.catalog.manifest import Manifest
from edge_rt.liveness import Activity
from edge_rt.scheduler.forms import Placement
from edge_rt.scheduler.queue import Queue
from edge_rt.scheduler.slots import Slot, State
from edge_rt.tensor_types import TensorModelInfo
from edge_rt.types import EngineStats, ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model as it stands. A tensor model may be in several workers; it is told of the best one that is loaded.

    manifest  None for a model of the null back end
    backend   the one it is loaded on; else the configured one, which may be "auto"
    n_ctx     what it is or would be loaded with
    info, tensor  what the worker reported of a language or a tensor model; None unless it is in memory
    idle_s    since its last request; None if there was none
    keep_alive_s  how long it stays in memory without one; negative: for ever
    path      of its file; None unless pulled, and "" for the null back end's
    versions  the forms of a tensor model whose files are here, each of which can be asked by name
    error     why the last load failed, "" if it did not
    """

    id: str
    manifest: Manifest | None
    backend: str
    variant: str
    n_ctx: int
    pulled: bool
    state: State
    info: ModelInfo | None
    tensor: TensorModelInfo | None
    engine: EngineStats | None
    pid: int | None
    running: int
    waiting: int
    idle_s: float | None
    error: str
    keep_alive_s: float
    path: str | None
    versions: tuple[str, ...] = ()


def describe(
    model: str,
    manifest: Manifest | None,
    placement: Placement,
    slots: Sequence[Slot],
    queue: Queue,
    now_s: float,
    *,
    versions: tuple[str, ...] = (),
) -> ModelStatus:
    """Describe a model by its slots, best first: by one that is loaded, else one on its way, else the first."""
    slot = next(
        (slot for slot in slots if slot.loaded is not None),
        next((slot for slot in slots if slot.state != "unloaded"), slots[0] if slots else None),
    )
    loaded = slot.loaded if slot is not None else None
    infos = [slot.loaded.info for slot in slots if slot.loaded is not None]
    info = next((info for info in infos if isinstance(info, ModelInfo)), None)
    used_at_s = max((slot.used_at_s for slot in slots if slot.used_at_s is not None), default=None)
    return ModelStatus(
        id=model,
        manifest=manifest,
        backend=loaded.info.backend if loaded and loaded.info else placement.backend,
        variant=loaded.info.variant if loaded and loaded.info else placement.variant,
        n_ctx=info.caps.n_ctx if info else placement.n_ctx,
        pulled=placement.path is not None,
        state=slot.state if slot is not None else "unloaded",
        info=info,
        tensor=next((info for info in infos if isinstance(info, TensorModelInfo)), None),
        engine=loaded.engine if loaded else None,
        pid=loaded.worker.pid if loaded else None,
        running=queue.n_running,
        waiting=queue.n_waiting,
        idle_s=now_s - used_at_s if used_at_s is not None and not queue.n_running else None,
        error=str(slot.failure) if slot is not None and slot.failure is not None else "",
        keep_alive_s=slot.idle_limit_s if slot is not None else 0.0,
        path=placement.path,
        versions=versions,
    )


def activity(models: Mapping[str, tuple[Sequence[Slot], Queue]], *, late_s: float) -> Activity:
    """Sum up what all models do, by their slots and queues."""
    return Activity(
        models=tuple(model for model, (slots, _) in models.items() if any(slot.loaded for slot in slots)),
        loading=tuple(
            model for model, (slots, _) in models.items() if any(slot.state in {"waiting", "loading"} for slot in slots)
        ),
        n_running=sum(queue.n_running for _, queue in models.values()),
        n_waiting=sum(queue.n_waiting for _, queue in models.values()),
        late_s=late_s,
    )
