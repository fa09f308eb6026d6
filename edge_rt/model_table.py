"""The models of one daemon: what each is loaded as, by its manifest and the configuration, and both as they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from edge_rt import config
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.manifest import Manifest
from edge_rt.chains import task_of
from edge_rt.errors import ConfigError, ModelNotFoundError, ModelNotPulledError, UnsupportedFeatureError
from edge_rt.ports import ModelStore
from edge_rt.scheduler.dispatcher import Dispatcher
from edge_rt.scheduler.drafting import place_draft
from edge_rt.scheduler.forms import Placement, load_message, pinned_texts, place
from edge_rt.scheduler.probes import Probes
from edge_rt.scheduler.profile import Profile
from edge_rt.scheduler.queue import Admission, Queue
from edge_rt.scheduler.rereading import reread
from edge_rt.scheduler.residency import Residency
from edge_rt.scheduler.slots import Slot
from edge_rt.scheduler.status import ModelStatus, describe
from edge_rt.scheduler.subjects import make_subject
from edge_rt.worker.channel import DraftLoad, Load
from edge_rt.worker.supervisor import ModelWorker, WorkerEvents

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One model. manifest is None for one of the null back end, which may be asked as a tensor model too."""

    manifest: Manifest | None
    settings: config.ModelSettings
    queue: Queue
    runs_tensors: bool

    @property
    def is_text(self) -> bool:
        """Say whether it can be loaded as a language model."""
        return self.manifest is None or self.manifest.kind != "tensor"


class ModelTable:
    """Belongs to one event loop.

    queue_changed  hears of a model's numbers of running and waiting requests

    Raises ConfigError when the configuration names a model or a variant that does not exist.
    """

    def __init__(
        self,
        loaded: config.Loaded,
        store: ModelStore,
        residency: Residency,
        dispatcher: Dispatcher,
        *,
        make_worker: Callable[[Load, WorkerEvents], ModelWorker],
        features: frozenset[str],
        probes: Probes,
        profile: Profile,
        queue_changed: Callable[[str, int, int], None],
    ) -> None:
        self._config, self._store = loaded.config, store
        self._residency, self._dispatcher, self._make_worker = residency, dispatcher, make_worker
        self._features, self._probes, self._profile = features, probes, profile
        self._queue_changed = queue_changed
        self.entries: dict[str, Entry] = {}
        self._max_running: int | None = None  # of a language model's answers, as powerd advises
        self._has_stale = False  # a model runs by a manifest that has changed since
        self._tell_left_out()
        manifests: dict[str, Manifest | None] = {manifest.id: manifest for manifest in store.manifests()}
        self._check_names(loaded, manifests)
        manifests |= dict.fromkeys(
            model for model in self._config.unknown_models(manifests) if model not in store.left_out()
        )
        # A chain cannot hide a model, and one whose models are not in the catalog waits for them.
        self.chains = {chain.id: chain for chain in store.chains() if chain.id not in manifests}
        for model, manifest in manifests.items():
            self._check_variant(loaded, model, manifest)
            self._add(model, manifest)

    def check(self, loaded: config.Loaded) -> None:
        """Raise ConfigError where a configuration names a model or variant that is not there."""
        self._check_names(loaded, self.entries)
        for model, entry in self.entries.items():
            self._check_variant(loaded, model, entry.manifest)

    def fixed(self, settings: config.Config) -> frozenset[str]:
        """Name the tables of models whose settings count at a start only: all but those of language models."""
        return frozenset(settings.unknown_models(model for model, e in self.entries.items() if not e.runs_tensors))

    def configure(self, settings: config.Config) -> None:
        """Go by other settings, which have been checked: queues now, models when they are loaded."""
        self._config, scheduler = settings, settings.scheduler
        for model, entry in self.entries.items():
            own = settings.model(model)
            self.entries[model] = replace(entry, settings=own)
            entry.queue.limit(
                max_waiting=scheduler.max_waiting, max_waiting_per_tenant=scheduler.max_waiting_per_tenant
            )
            for slot in self.slots(model):
                self._residency.keep(slot.model, self._keep_alive_s(own))
            if entry.runs_tensors:
                self._dispatcher.keep(model, self._keep_alive_s(own))

    def entry(self, model: str) -> Entry:
        """Find a model, also one that has just come. Raises ModelNotFoundError, or why it is left out."""
        if (found := self.entries.get(model)) is None:
            self.reread()
            found = self.entries.get(model)
        if found is None:
            if model in self._store.left_out():
                raise self._store.left_out()[model]
            if model in self.chains:
                raise UnsupportedFeatureError(
                    feature=f"a request for {model} alone",
                    remedy="it is a chain of models: send it a file (docs/media.md)",
                )
            raise ModelNotFoundError(model=model, known=(*self.entries, *self.chains))
        return found

    def chain(self, name: str) -> Chain | None:
        """Find a chain, also one that has just come."""
        if name not in self.entries and name not in self.chains:
            self.reread()
        return self.chains.get(name)

    def slots(self, model: str, variant: str = "") -> list[Slot]:
        """Give a model's places in memory: one as a language model, one on each device as a tensor model."""
        entry = self.entry(model)
        text = [self._residency.slot(model)] if entry.is_text else []
        return [*text, *map(self._residency.slot, self._dispatcher.slots(model, variant) if entry.runs_tensors else ())]

    def check_pulled(self, model: str) -> None:
        """Raise ModelNotFoundError or ModelNotPulledError before any other model makes room for this one."""
        if all(slot.state == "unloaded" for slot in self.slots(model)) and self.placement(model).path is None:
            raise ModelNotPulledError(model=model)

    def check_kind(self, model: str, kind: str) -> None:
        """Raise UnsupportedFeatureError for a model of another kind; those of the null back end are of both."""
        manifest = self.entry(model).manifest
        if manifest is not None and manifest.kind != kind:
            raise UnsupportedFeatureError(
                feature=f"a request for {'text' if kind == 'text' else 'tensors'} to {model}",
                remedy=f"it is a {'language' if manifest.kind == 'text' else 'tensor'} model",
            )
        self.check_pulled(model)

    def placement(self, model: str) -> Placement:
        """Decide in which form a model runs."""
        entry = self.entry(model)
        return self._place(model, entry.manifest, entry.settings, self._config)

    def tasks(self) -> dict[str, str]:
        """Give what each model and chain does with a file, by id; those that take none are left out."""
        manifests = {model: entry.manifest for model, entry in self.entries.items()}
        tasks = {model: task_of(model, manifests, self.chains) for model in (*manifests, *self.chains)}
        return {model: task for model, task in tasks.items() if task}

    def status(self, model: str, variant: str = "") -> ModelStatus:
        """Describe one model, or one form of a tensor model. Raises ModelNotFoundError."""
        entry, placement, slots = self.entry(model), self.placement(model), self.slots(model, variant)
        now_s, manifest, path = asyncio.get_running_loop().time(), entry.manifest, self._store.path
        is_whole = manifest is not None and entry.settings.backend != "null" and placement.path is not None
        forms = manifest.variants if manifest is not None and is_whole and entry.runs_tensors else ()
        versions = tuple(form.id for form in forms if manifest is not None and path(manifest, form) is not None)
        return describe(model, manifest, placement, slots, entry.queue, now_s, versions=versions)

    def n_threads(self) -> int:
        """Count the threads that compute now, by the engines' last figures."""
        slots = [slot for model in self.entries for slot in self.slots(model)]
        return sum(slot.loaded.engine.n_threads for slot in slots if slot.loaded is not None and slot.n_leases)

    def run_at_most(self, max_running: int | None) -> None:
        """Let fewer answers of a language model be computed together than could, from now on; None ends that."""
        self._max_running = max_running
        for entry in self.entries.values():
            if entry.is_text:
                entry.queue.run_at_most(max_running)

    def reread(self) -> None:
        """Take up manifests that are new or have changed; a model that is in memory or asked keeps its own so long."""
        if not self._store.refresh() and not self._has_stale:
            return
        self._tell_left_out()
        now = {manifest.id: manifest for manifest in self._store.manifests()}
        plan = reread({model: entry.manifest for model, entry in self.entries.items()}, now, self._is_idle)
        self._has_stale = plan.is_pending
        for model in plan.gone:
            _log.info("%s is gone: its manifest is", model)
            del self.entries[model]
        for manifest in plan.taken_up:
            settings = self._config.model(manifest.id)
            if settings.variant and settings.backend != "null" and manifest.variant(settings.variant) is None:
                _log.error("the new manifest of %s is not taken up: it has no %s", manifest.id, settings.variant)
                continue
            self._add(manifest.id, manifest)
            _log.info("the manifest of %s was read", manifest.id)
        self.chains = {chain.id: chain for chain in self._store.chains() if chain.id not in self.entries}

    def _add(self, model: str, manifest: Manifest | None) -> None:
        settings, scheduler = self._config.model(model), self._config.scheduler
        is_tensor = manifest is not None and manifest.kind == "tensor"
        queue = Queue(
            Admission(
                max_running=settings.n_parallel
                or (self._config.tensor if is_tensor else self._config.engine).n_parallel,
                max_waiting=scheduler.max_waiting,
                max_waiting_per_tenant=scheduler.max_waiting_per_tenant,
                displaces=not is_tensor,
            ),
            lambda running, waiting: self._queue_changed(model, running, waiting),
        )
        entry = self.entries[model] = Entry(manifest, settings, queue, runs_tensors=manifest is None or is_tensor)
        if entry.runs_tensors:
            self._dispatcher.add(
                model,
                make_subject(model, manifest, self._config, self._store, self._probes, self._profile),
                keep_alive_s=self._keep_alive_s(settings),
                slot=model if manifest is not None else f"{model} for tensors",
            )
        if not entry.is_text:
            return
        queue.run_at_most(self._max_running)

        def make(events: WorkerEvents, force: bool) -> ModelWorker:
            placement = self.placement(model)
            if placement.variant_reason:
                _log.warning("%s", placement.variant_reason)
            message = load_message(placement, self._config, force=force)
            return self._make_worker(msgspec.structs.replace(message, draft=self._draft(model)), events)

        self._residency.add(model, make, keep_alive_s=self._keep_alive_s(settings))

    def _keep_alive_s(self, own: config.ModelSettings) -> float:
        return self._config.worker.keep_alive_s if own.keep_alive_s is None else own.keep_alive_s

    def _is_idle(self, model: str) -> bool:
        """Say whether nothing of a model is in memory, on its way, or waited for."""
        queue = self.entries[model].queue
        is_free = all(slot.state == "unloaded" and not slot.waiters for slot in self.slots(model))
        return is_free and not queue.n_running and not queue.n_waiting

    def _check_names(self, loaded: config.Loaded, known: Iterable[str]) -> None:
        names = tuple(known)
        for number, pin in enumerate(loaded.config.pin):
            model = pin.model
            if model not in names and model not in loaded.config.models and model not in self._store.left_out():
                problem = f"no such model as {model}; there are {', '.join(names)}"
                origin = config.origin_of(number, loaded.pin_places)
                raise ConfigError(key=f"pin[{number}].model", problem=problem, origin=origin)
        for model in {pin.model for pin in loaded.config.pin}:
            pinned_texts(loaded.config, model, loaded.pin_places)
        for model in loaded.config.unknown_models(names):
            if loaded.config.models[model].backend != "null" and model not in self._store.left_out():
                raise _bad_key(loaded, ("models", model), f"no such model; there are {', '.join(names)}")

    def _check_variant(self, loaded: config.Loaded, model: str, manifest: Manifest | None) -> None:
        try:
            self._place(model, manifest, loaded.config.model(model), loaded.config)
        except ModelNotFoundError as exc:
            problem = f"no such variant; there are {', '.join(exc.known)}"
            raise _bad_key(loaded, ("models", model, "variant"), problem) from exc

    def _place(
        self, model: str, manifest: Manifest | None, own: config.ModelSettings, settings: config.Config
    ) -> Placement:
        return place(
            model,
            manifest,
            own,
            settings,
            features=self._features,
            find=self._store.path,
            find_asset=self._store.asset_path,
        )

    def _draft(self, model: str) -> DraftLoad | None:
        """Find the model that drafts for one. Raises ConfigError, ModelNotFoundError and ModelNotPulledError."""
        entry, manifests = self.entry(model), {m.id: m for m in self._store.manifests()}
        return place_draft(
            model,
            entry.manifest,
            entry.settings,
            self._config,
            manifests,
            features=self._features,
            find=self._store.path,
        )

    def _tell_left_out(self) -> None:
        for error in self._store.left_out().values():
            _log.error("a manifest is left out: %s", error)


def _bad_key(loaded: config.Loaded, key: config.Key, problem: str) -> ConfigError:
    name = config.dotted(key)
    origin = next((o for k, o in loaded.origins.items() if k == name or k.startswith(f"{name}.")), "configuration")
    return ConfigError(key=name, problem=problem, origin=origin)
