"""Tensor models as the dispatcher sees them: one of the catalog, and one that plays scripts on null devices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from edge_rt.catalog.manifest import Asset, Manifest, Variant
from edge_rt.config import Config, ModelSettings, Placement
from edge_rt.errors import BackendLoadError
from edge_rt.scheduler.forms import form_reason, load_message, place
from edge_rt.scheduler.placement import Candidate, Measured, Policy, Ranking, backends_of, rank, rank_scripts
from edge_rt.scheduler.probes import Probes
from edge_rt.scheduler.profile import Profile, file_key
from edge_rt.worker.channel import Load

_log = logging.getLogger(__name__)


class Finder(Protocol):
    """The part of a store that says what is here; edge_rt.catalog.store.Store is one."""

    def path(self, manifest: Manifest, variant: Variant) -> Path | None: ...

    def asset_path(self, manifest: Manifest, asset: Asset) -> Path | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSubject:
    """A model with a manifest."""

    manifest: Manifest
    settings: ModelSettings
    config: Config
    store: Finder
    probes: Probes
    profile: Profile
    policy: Policy

    @property
    def backends(self) -> tuple[str, ...]:
        """List every back end that a form of it may run on."""
        return tuple(dict.fromkeys(b for v in self.manifest.variants for b in backends_of(v, self.policy)))

    async def ready(self) -> None:
        await self.probes.ensure(self.backends)

    def rank(self, shown_s: Callable[[Candidate], float | None]) -> Ranking:
        self.profile.refresh()
        notes: dict[str, str] = {}

        def measured(candidate: Candidate) -> Measured | None:
            variant = self.manifest.variant(candidate.variant)
            assert variant is not None
            known, notes[str(candidate)] = self.profile.measured(
                self.manifest.id,
                candidate.variant,
                candidate.backend,
                candidate.device,
                file=file_key(variant, self.store.path(self.manifest, variant)),
            )
            if (latency_s := shown_s(candidate)) is None:
                return known
            return replace(known, latency_s=latency_s) if known else Measured(latency_s=latency_s, is_profiled=False)

        ranking = rank(
            self.manifest.id,
            self.manifest.variants,
            self.probes.states(self.backends),
            self.policy,
            pulled={v.id for v in self.manifest.variants if self.store.path(self.manifest, v) is not None},
            measured=measured,
        )
        told = (
            replace(row, reason=f"{row.reason}; {note}") if (note := notes.get(str(row.candidate))) else row
            for row in ranking.ranked
        )
        return replace(ranking, ranked=tuple(told))

    def load(self, candidate: Candidate, *, force: bool) -> Load:
        """Write what the worker of a candidate needs to know. Raises ModelNotPulledError."""
        self._tell_form(candidate)
        placement = place(
            self.manifest.id,
            self.manifest,
            msgspec.structs.replace(self.settings, variant=candidate.variant, backend=candidate.backend),
            self.config,
            features=frozenset(),
            find=self.store.path,
            find_asset=self.store.asset_path,
        )
        return msgspec.structs.replace(load_message(placement, self.config, force=force), device=candidate.device)

    def placed_by(self, settings: Placement) -> CatalogSubject:
        return replace(self, policy=_placed_by(self.policy, settings))

    def pinned(self, variant: str) -> CatalogSubject:
        settings = msgspec.structs.replace(self.settings, variant=variant)
        return replace(self, settings=settings, policy=replace(self.policy, variant=variant))

    def _tell_form(self, candidate: Candidate) -> None:
        """Log where the form that the manifest prefers is not here and no setting names another."""
        best, chosen = self.manifest.variants[0], self.manifest.variant(candidate.variant)
        if chosen is None or self.settings.variant or self.store.path(self.manifest, best) is not None:
            return
        if reason := form_reason(self.manifest, best, chosen):
            _log.warning("%s", reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedSubject:
    """A model of the null back end: its variant has a script (backends/null_tensor.py) for each device, split by "|".

    The first device stands for the CPU: its answers count as right.
    """

    model: str
    manifest: Manifest | None
    settings: ModelSettings
    config: Config
    policy: Policy

    async def ready(self) -> None: ...

    def placed_by(self, settings: Placement) -> ScriptedSubject:
        return replace(self, policy=_placed_by(self.policy, settings))

    def pinned(self, variant: str) -> ScriptedSubject:  # noqa: ARG002  its scripts are its only form
        return self

    def rank(self, shown_s: Callable[[Candidate], float | None]) -> Ranking:
        scripts = tuple(script.strip() for script in self.settings.variant.split("|"))
        try:
            return rank_scripts(scripts, self.policy.name, shown_s)
        except ValueError as exc:
            raise BackendLoadError(model=self.model, reason=f"its script cannot be read: {exc}") from exc

    def load(self, candidate: Candidate, *, force: bool) -> Load:
        placement = place(
            self.model,
            self.manifest,
            msgspec.structs.replace(self.settings, variant=candidate.variant, backend="null"),
            self.config,
            features=frozenset(),
            find=lambda *_: None,
            as_tensor=True,
        )
        return msgspec.structs.replace(load_message(placement, self.config, force=force), device=candidate.device)


def _placed_by(policy: Policy, settings: Placement) -> Policy:
    return replace(policy, name=settings.policy, max_device_c=settings.max_device_c, cool_by_c=settings.cool_by_c)


def make_subject(
    model: str, manifest: Manifest | None, config: Config, store: Finder, probes: Probes, profile: Profile
) -> CatalogSubject | ScriptedSubject:
    """Describe a configured tensor model to the dispatcher."""
    settings = config.model(model)
    policy = _placed_by(Policy(variant=settings.variant, backend=settings.backend), config.placement)
    if manifest is None or settings.backend == "null":
        return ScriptedSubject(model=model, manifest=manifest, settings=settings, config=config, policy=policy)
    return CatalogSubject(
        manifest=manifest,
        settings=settings,
        config=config,
        store=store,
        probes=probes,
        profile=profile,
        policy=policy,
    )
