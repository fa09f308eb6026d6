"""What becomes of the models when the manifests have changed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_rt.catalog.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Rereading:
    """taken_up: new and changed manifests; gone: models without one now; is_pending: others wait until idle."""

    taken_up: tuple[Manifest, ...]
    gone: tuple[str, ...]
    is_pending: bool


def reread(
    before: Mapping[str, Manifest | None], now: Mapping[str, Manifest], is_idle: Callable[[str], bool]
) -> Rereading:
    """Say what may change now. before: the models that are known; None are those that never had a manifest and stay.

    is_idle  nothing of a model is in memory and nobody waits for it: what runs keeps its form
    """
    known = {model for model, manifest in before.items() if manifest is not None}
    changed = {model for model in known if now.get(model) != before[model]}
    busy = {model for model in changed if not is_idle(model)}
    new = {model for model in now if model not in before}
    return Rereading(
        taken_up=tuple(now[model] for model in sorted(new | (changed - busy)) if model in now),
        gone=tuple(sorted(model for model in changed - busy if model not in now)),
        is_pending=bool(busy),
    )
