"""The daemon's core: a request is checked, admitted, given its model's worker, and its answer streamed back.

No inference happens in this process, and nothing here imports numpy or a back end.

The null back end answers without weights. A model of it exists where the configuration names one:

    [models.null]
    backend = "null"

    [models.null-slow]
    backend = "null"
    variant = "step_s=0.05"   # seconds a step takes; see backends/null.py
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from edge_rt import config
from edge_rt.answering import Answering
from edge_rt.assembly import LocalModels
from edge_rt.cache.tensor_results import TensorResults
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.manifest import Manifest
from edge_rt.chains import run_chain, task_of
from edge_rt.devices import cpu
from edge_rt.errors import (
    ConfigError,
    DeadlineError,
    ModelNotFoundError,
    ModelNotPulledError,
    NotCachedError,
    ShuttingDownError,
    UnsupportedFeatureError,
)
from edge_rt.guard.limits import check_media, check_request, check_tensors, check_text, check_token_ids
from edge_rt.liveness import Activity
from edge_rt.ports import MakeWorker, ModelStore, RuntimeEvents, make_worker
from edge_rt.power.metered_worker import metered
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.power.workload import Workload
from edge_rt.router.decide import Decision
from edge_rt.scheduler.direct import Held, OnEnd
from edge_rt.scheduler.dispatcher import Dispatcher
from edge_rt.scheduler.forms import Placement, files_key, load_message, place
from edge_rt.scheduler.placed_model import DispatchStatus
from edge_rt.scheduler.probes import Probes, make_probes
from edge_rt.scheduler.profile import Profile
from edge_rt.scheduler.queue import Admission, Queue
from edge_rt.scheduler.rereading import reread
from edge_rt.scheduler.residency import ModelWorker, Residency, Slot
from edge_rt.scheduler.status import ModelStatus, activity, describe
from edge_rt.scheduler.subjects import make_subject
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorRequest
from edge_rt.types import Chunk, GenerateRequest
from edge_rt.worker.supervisor import WorkerEvents

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    manifest: Manifest | None
    settings: config.ModelSettings
    queue: Queue
    runs_tensors: bool


class Runtime:
    """All models of one daemon. Belongs to one event loop.

    Raises ConfigError when the configuration names a model or a variant that does not exist.
    """

    def __init__(
        self,
        loaded: config.Loaded,
        store: ModelStore,
        telemetry: RuntimeEvents,
        *,
        make_worker: MakeWorker = make_worker,
        features: Callable[[], frozenset[str]] = cpu.features,
        profile: Profile | None = None,
        probes: Probes | None = None,
        answer_by: Callable[[LocalModels], Answering] | None = None,
        tensor_results: TensorResults | None = None,
        energy: EnergyMonitor | None = None,
        workload: Workload | None = None,
    ) -> None:
        self._config = loaded.config
        self._store = store
        self._telemetry = telemetry
        if energy is not None:
            make_worker = metered(make_worker, energy, telemetry.energy_used)
        self._make_worker = make_worker
        self._features = features()  # read once: they do not change, and every request asks
        self._residency = Residency(max_loaded=self._config.worker.max_loaded, events=telemetry)
        self._profile, self._probes = profile or Profile(None), probes or make_probes(self._config.placement)
        self._dispatcher = Dispatcher(
            self._config.placement,
            self._residency,
            telemetry,
            lambda load, events: make_worker(load, self._config.worker, events),
            max_streams=self._config.tensor.max_streams,
        )
        self._probes.listen(self._dispatcher.replan)
        self.answering = answer_by(self) if answer_by is not None else Answering(self.generate_here, telemetry)
        self._tensor_results = tensor_results
        self._workload = workload or Workload(None, ttft_slo_s=self._config.power.ttft_slo_s)
        self._workload.n_threads = self._n_threads
        self._entries: dict[str, _Entry] = {}
        self._state = "new"
        manifests: dict[str, Manifest | None] = {manifest.id: manifest for manifest in store.manifests()}
        self._has_stale = False  # a model runs by a manifest that has changed since
        _tell_left_out(store)
        for model in self._config.unknown_models(manifests):
            if model in store.left_out():
                continue
            if self._config.models[model].backend != "null":
                raise _bad_key(loaded, ("models", model), f"no such model; there are {', '.join(manifests)}")
            manifests[model] = None
        # A chain cannot hide a model, and one whose models are not in the catalog waits for them.
        self._chains = {chain.id: chain for chain in store.chains() if chain.id not in manifests}
        for model, manifest in manifests.items():
            self._check_variant(loaded, model, manifest)
            self._add(model, manifest)

    def check(self, loaded: config.Loaded) -> None:
        """Raise ConfigError where a configuration names a model or variant that is not there."""
        for model in loaded.config.unknown_models(self._entries):
            if loaded.config.models[model].backend != "null" and model not in self._store.left_out():
                raise _bad_key(loaded, ("models", model), f"no such model; there are {', '.join(self._entries)}")
        for model, entry in self._entries.items():
            self._check_variant(loaded, model, entry.manifest)

    def fixed_models(self, settings: config.Config) -> frozenset[str]:
        """Name the tables of models whose settings count at a start only: all but those of language models."""
        free = [model for model, entry in self._entries.items() if not entry.runs_tensors]
        return frozenset(settings.unknown_models(free))

    def configure(self, settings: config.Config, answering: Answering) -> None:
        """Go by other settings, and another Answering, from the next request on; models by theirs when they are loaded.

        What has begun goes on as it began. The settings have been checked, and change nothing of fixed_models.
        """
        self._config, self.answering = settings, answering
        self._residency.limit(settings.worker.max_loaded)
        self._workload.ttft_slo_s = settings.power.ttft_slo_s
        scheduler = settings.scheduler
        for model, entry in self._entries.items():
            own = settings.model(model)
            self._entries[model] = replace(entry, settings=own)
            entry.queue.limit(
                max_waiting=scheduler.max_waiting, max_waiting_per_tenant=scheduler.max_waiting_per_tenant
            )
            keep_alive_s = settings.worker.keep_alive_s if own.keep_alive_s is None else own.keep_alive_s
            for slot in self._slots(model):
                self._residency.keep(slot.model, keep_alive_s)
            if entry.runs_tensors:
                self._dispatcher.keep(model, keep_alive_s)

    async def start(self) -> None:
        """Load the models that the configuration preloads; one that fails is logged and tried again on use."""
        preload = [model for model, entry in self._entries.items() if entry.settings.preload]
        await asyncio.gather(*map(self.load, preload), return_exceptions=True)
        if self._state == "new":
            self._state = "ready"

    def ready(self) -> bool:
        """Say whether requests are taken: start is through and close has not begun."""
        return self._state == "ready"

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer, from wherever it is best had. Closing the iterator early stops the work within one token.

        Raises InvalidRequestError, ModelNotFoundError, ModelNotPulledError, CapacityError, what loading the model and
        the engine raise, and CacheError and CloudError. The last chunk's timings begin with this call: they count the
        wait for a place and for the model.
        """
        check_request(request, self._config.limits)
        self._check_kind(request.model, "text")
        async with aclosing(self.answering.generate(request)) as answer:
            async for chunk in answer:
                yield chunk

    async def generate_here(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Answer with a model of this device."""
        submitted_at_s = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            progress = stack.enter_context(self._workload.answer(request))
            worker = await stack.enter_async_context(self._admitted(request))
            progress.begin()
            waited_s = asyncio.get_running_loop().time() - submitted_at_s
            asked, deadline_s = request, request.deadline_s
            if self._workload.is_heard and not request.stream:
                asked = replace(asked, stream=True)  # for powerd: an answer in one piece would be one long prefill
            if deadline_s is not None:
                asked = replace(asked, deadline_s=max(deadline_s - waited_s, 0.001))
            try:
                async with aclosing(worker.generate(asked)) as answer:
                    async for chunk in answer:
                        progress.came(max(1, len(chunk.token_ids)))
                        yield self._finished(request.model, chunk, waited_s) if chunk.finish_reason else chunk
            except DeadlineError as exc:
                # The engine knows what was left of it, the caller what it was.
                raise DeadlineError(deadline_s=deadline_s or exc.deadline_s) from exc

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        """Run a tensor model, or give stored outputs. Raises as generate does, and for inputs that do not fit."""
        check_tensors(request, self._config.limits)
        entry = self._entry(request.model)
        if not (entry.runs_tensors and self._dispatcher.is_in_memory(request.model)):
            self._check_kind(request.model, "tensor")
        if self._tensor_results is not None:
            files = files_key(entry.manifest, entry.settings)
            return await self._tensor_results.infer(request, files, partial(self._infer, entry, request))
        if request.only_if_cached:
            raise NotCachedError
        return await self._infer(entry, request)

    def infer_now(
        self, request: TensorRequest, on_end: OnEnd, *, is_checked: bool = False
    ) -> Callable[[], None] | None:
        """Run a tensor model without a task, where nothing has to be waited for; give what drops the request.

        on_end      hears the answer or the error, or the request that must be given to infer
        is_checked  one that differs in its elements only was taken before
        None: infer must be asked. Raises InvalidRequestError for inputs that do not fit.
        """
        entry = self._entries.get(request.model)
        if entry is None or not entry.runs_tensors or request.only_if_cached or self._tensor_results is not None:
            return None
        if (place := self._dispatcher.direct_place(request)) is None:
            return None
        if not is_checked:
            check_tensors(request, self._config.limits)
        if (ticket := entry.queue.enter_now(request.tenant)) is None:
            return None
        held = Held(request.model, entry.queue, ticket, self._energy.computing(request.model), self._telemetry, on_end)
        return held.begin(partial(self._dispatcher.begin_direct, place, request))

    async def _infer(self, entry: _Entry, request: TensorRequest) -> TensorAnswer:
        limit_s = self._limit_s(request)
        due_at_s = asyncio.get_running_loop().time() + limit_s
        async with entry.queue.place(request.tenant, limit_s):
            return await self._dispatcher.infer(request, due_at_s)

    async def look(self, request: MediaRequest) -> MediaAnswer:
        """Run a tensor model's pipeline, or a chain, on a file.

        Raises as infer does, and UnsupportedFeatureError for a model without a pipeline.
        """
        check_media(request)
        if request.model not in self._entries and request.model not in self._chains:
            self._reread()
        if (chain := self._chains.get(request.model)) is not None:
            return await run_chain(chain, request, self._look, self._telemetry)
        return await self._look(request)

    async def _look(self, request: MediaRequest) -> MediaAnswer:
        self._check_kind(request.model, "tensor")
        async with self._queued(request) as due_at_s:
            answer = await self._dispatcher.look(request, due_at_s)
        if answer.stage:  # a model that may stop early
            self._telemetry.chain_answered(request.model, answer.stage)
        return answer

    def explain(self, request: GenerateRequest) -> Decision:
        """Tell where a request would be answered now, and why. Raises as generate does for one that is refused."""
        check_request(request, self._config.limits)
        self._check_kind(request.model, "text")
        return self.answering.explain(request)

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        """Learn from what a user says of an answer. Raises InvalidRequestError for one that is not remembered."""
        self.answering.feedback(request_id, tenant, is_good=is_good)

    async def placement(self, model: str) -> DispatchStatus:
        """Tell where a tensor model's requests go, and why. Raises as infer does."""
        self._check_kind(model, "tensor")
        return await self._dispatcher.status(model)

    async def tokenize(self, model: str, text: str, *, special: bool, add_bos: bool) -> list[int]:
        self._check_kind(model, "text")
        check_text("content", text, self._config.limits.max_prompt_bytes)
        async with self._residency.lease(model) as worker:
            return await worker.tokenize(text, special=special, add_bos=add_bos)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._check_kind(model, "text")
        check_token_ids("tokens", token_ids, self._config.limits)
        async with self._residency.lease(model) as worker:
            return await worker.detokenize(list(token_ids))

    def tasks(self) -> dict[str, str]:
        """Give what each model and chain does with a file, by id; those that take none are left out."""
        manifests = {model: entry.manifest for model, entry in self._entries.items()}
        tasks = {model: task_of(model, manifests, self._chains) for model in (*manifests, *self._chains)}
        return {model: task for model, task in tasks.items() if task}

    def chains(self) -> tuple[Chain, ...]:
        """Give the chains all of whose models are in the catalog."""
        tasks = self.tasks()
        return tuple(chain for chain in self._chains.values() if chain.id in tasks)

    def models(self) -> tuple[ModelStatus, ...]:
        """Describe all models, by the manifests as they are now."""
        self._reread()
        return tuple(self.model(model) for model in self._entries)

    def model(self, model: str, variant: str = "") -> ModelStatus:
        """Describe one model, or one form of a tensor model. Raises ModelNotFoundError."""
        entry, placement, slots = self._entry(model), self._placement(model), self._slots(model, variant)
        now_s, manifest, path = asyncio.get_running_loop().time(), entry.manifest, self._store.path
        is_whole = manifest is not None and entry.settings.backend != "null" and placement.path is not None
        forms = manifest.variants if manifest is not None and is_whole and entry.runs_tensors else ()
        versions = tuple(form.id for form in forms if manifest is not None and path(manifest, form) is not None)
        return describe(model, manifest, placement, slots, entry.queue, now_s, versions=versions)

    def activity(self) -> Activity:
        """Tell what is in memory, how much is to do, and whether work goes on."""
        return activity(
            {model: (self._slots(model), entry.queue) for model, entry in self._entries.items()},
            late_s=self._residency.late_s(),
        )

    async def load(self, model: str, *, force: bool = False, tensors: bool = False, variant: str = "") -> None:
        """Load a model now, a tensor model where it is best.

        force    also if the memory looks too small
        tensors  as a tensor model, where it can be either; refused for a language model
        variant  the form of a tensor model, "" the one that is placed best
        """
        if tensors:
            self._check_kind(model, "tensor")
        self._check_pulled(model)
        if tensors or _is_tensor(self._entry(model).manifest):
            await self._dispatcher.load(model, force=force, variant=variant)
        else:
            await self._residency.load(model, force=force)

    async def unload(self, model: str) -> None:
        """Let a model's running requests finish, then free its memory."""
        entry = self._entry(model)
        if not _is_tensor(entry.manifest):
            await self._residency.unload(model)
        if entry.runs_tensors:
            await self._dispatcher.unload(model)

    async def close(self, drain_s: float) -> None:
        """Refuse what is new or waits, let what runs go on for drain_s, then cut it off and end every worker."""
        self._state = "closing"
        for entry in self._entries.values():
            entry.queue.close(ShuttingDownError)
        self._workload.close()
        await self._probes.close()
        await asyncio.gather(self.answering.close(drain_s), self._residency.close(drain_s))

    # A request's way.

    @asynccontextmanager
    async def _queued(self, request: GenerateRequest | MediaRequest) -> AsyncIterator[float]:
        """Hold a place among the model's running requests; give when a worker must have been found."""
        limit_s = self._limit_s(request)
        due_at_s = asyncio.get_running_loop().time() + limit_s
        async with self._entries[request.model].queue.place(request.tenant, limit_s):
            yield due_at_s

    def _limit_s(self, request: GenerateRequest | TensorRequest | MediaRequest) -> float:
        """Give how long a request may wait for a place and a worker."""
        timeout_s = self._config.scheduler.queue_timeout_s
        return timeout_s if request.deadline_s is None else min(request.deadline_s, timeout_s)

    @asynccontextmanager
    async def _admitted(self, request: GenerateRequest) -> AsyncIterator[ModelWorker]:
        """Hold a place among the model's running requests, and the model itself."""
        asked_at_s = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            due_at_s = await stack.enter_async_context(self._queued(request))
            try:
                async with asyncio.timeout_at(due_at_s):
                    worker = await stack.enter_async_context(self._residency.lease(request.model))
            except TimeoutError:
                raise DeadlineError(deadline_s=due_at_s - asked_at_s) from None
            yield worker

    def _finished(self, model: str, chunk: Chunk, waited_s: float) -> Chunk:
        if chunk.usage is None or chunk.timings is None:
            return chunk
        timings = replace(
            chunk.timings, queue_s=chunk.timings.queue_s + waited_s, ttft_s=chunk.timings.ttft_s + waited_s
        )
        self._telemetry.answer_finished(model, usage=chunk.usage, timings=timings)
        return replace(chunk, timings=timings)

    def _queue_changed(self, model: str, running: int, waiting: int) -> None:
        self._telemetry.queue_depth(model, running=running, waiting=waiting)
        self._workload.queue_changed(model, running=running, waiting=waiting)

    def _n_threads(self) -> int:
        """Count the threads that compute now, by the engines' last figures."""
        slots = [slot for model in self._entries for slot in self._slots(model)]
        return sum(slot.loaded.engine.n_threads for slot in slots if slot.loaded is not None and slot.n_leases)

    # What a model is loaded as.

    def _add(self, model: str, manifest: Manifest | None) -> None:
        settings, scheduler = self._config.model(model), self._config.scheduler
        queue = Queue(
            Admission(
                max_running=settings.n_parallel
                or (self._config.tensor if _is_tensor(manifest) else self._config.engine).n_parallel,
                max_waiting=scheduler.max_waiting,
                max_waiting_per_tenant=scheduler.max_waiting_per_tenant,
            ),
            lambda running, waiting: self._queue_changed(model, running, waiting),
        )
        runs_tensors = manifest is None or manifest.kind == "tensor"
        self._entries[model] = _Entry(manifest, settings, queue, runs_tensors)
        keep_alive_s = self._config.worker.keep_alive_s if settings.keep_alive_s is None else settings.keep_alive_s

        if runs_tensors:
            slot = model if manifest is not None else f"{model} for tensors"
            self._dispatcher.add(
                model,
                make_subject(model, manifest, self._config, self._store, self._probes, self._profile),
                keep_alive_s=keep_alive_s,
                slot=slot,
            )
        if _is_tensor(manifest):
            return

        def make(events: WorkerEvents, force: bool) -> ModelWorker:
            placement = self._placement(model)
            if placement.variant_reason:
                _log.warning("%s", placement.variant_reason)
            load = load_message(placement, self._config, force=force)
            return self._make_worker(load, self._config.worker, events)

        self._residency.add(model, make, keep_alive_s=keep_alive_s)

    def _reread(self) -> None:
        """Take up manifests that are new or have changed; a model that is in memory or asked keeps its own so long."""
        if not self._store.refresh() and not self._has_stale:
            return
        _tell_left_out(self._store)
        now = {manifest.id: manifest for manifest in self._store.manifests()}
        plan = reread({model: entry.manifest for model, entry in self._entries.items()}, now, self._is_idle)
        self._has_stale = plan.is_pending
        for model in plan.gone:
            _log.info("%s is gone: its manifest is", model)
            del self._entries[model]
        for manifest in plan.taken_up:
            settings = self._config.model(manifest.id)
            if settings.variant and settings.backend != "null" and manifest.variant(settings.variant) is None:
                _log.error("the new manifest of %s is not taken up: it has no %s", manifest.id, settings.variant)
                continue
            self._add(manifest.id, manifest)
            _log.info("the manifest of %s was read", manifest.id)
        self._chains = {chain.id: chain for chain in self._store.chains() if chain.id not in self._entries}

    def _is_idle(self, model: str) -> bool:
        """Say whether nothing of a model is in memory, on its way, or waited for."""
        queue = self._entries[model].queue
        is_free = all(slot.state == "unloaded" and not slot.waiters for slot in self._slots(model))
        return is_free and not queue.n_running and not queue.n_waiting

    def _entry(self, model: str) -> _Entry:
        if (entry := self._entries.get(model)) is None:
            self._reread()
            entry = self._entries.get(model)
        if entry is None:
            if model in self._store.left_out():
                raise self._store.left_out()[model]
            if model in self._chains:
                raise UnsupportedFeatureError(
                    feature=f"a request for {model} alone",
                    remedy="it is a chain of models: send it a file (docs/media.md)",
                )
            raise ModelNotFoundError(model=model, known=(*self._entries, *self._chains))
        return entry

    def _slots(self, model: str, variant: str = "") -> list[Slot]:
        """Give a model's places in memory: one as a language model, one on each device as a tensor model."""
        entry = self._entry(model)
        text = [] if _is_tensor(entry.manifest) else [self._residency.slot(model)]
        return [*text, *map(self._residency.slot, self._dispatcher.slots(model, variant) if entry.runs_tensors else ())]

    def _check_pulled(self, model: str) -> None:
        """Raise ModelNotFoundError or ModelNotPulledError before any other model makes room for this one."""
        if all(slot.state == "unloaded" for slot in self._slots(model)) and self._placement(model).path is None:
            raise ModelNotPulledError(model=model)

    def _check_kind(self, model: str, kind: str) -> None:
        """Raise UnsupportedFeatureError for a model of another kind; those of the null back end are of both."""
        manifest = self._entry(model).manifest
        if manifest is not None and manifest.kind != kind:
            raise UnsupportedFeatureError(
                feature=f"a request for {'text' if kind == 'text' else 'tensors'} to {model}",
                remedy=f"it is a {'language' if manifest.kind == 'text' else 'tensor'} model",
            )
        self._check_pulled(model)

    def form(self, model: str) -> tuple[Placement, Manifest | None]:
        """Give in which form a model runs, and its manifest; None for one of the null back end."""
        return self._placement(model), self._entry(model).manifest

    def _check_variant(self, loaded: config.Loaded, model: str, manifest: Manifest | None) -> None:
        try:
            self._place(model, manifest, loaded.config.model(model), loaded.config)
        except ModelNotFoundError as exc:
            problem = f"no such variant; there are {', '.join(exc.known)}"
            raise _bad_key(loaded, ("models", model, "variant"), problem) from exc

    def _placement(self, model: str) -> Placement:
        entry = self._entry(model)
        return self._place(model, entry.manifest, entry.settings, self._config)

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


def _tell_left_out(store: ModelStore) -> None:
    for error in store.left_out().values():
        _log.error("a manifest is left out: %s", error)


def _is_tensor(manifest: Manifest | None) -> bool:
    return manifest is not None and manifest.kind == "tensor"


def _bad_key(loaded: config.Loaded, key: config.Key, problem: str) -> ConfigError:
    name = config.dotted(key)
    origin = next((o for k, o in loaded.origins.items() if k == name or k.startswith(f"{name}.")), "configuration")
    return ConfigError(key=name, problem=problem, origin=origin)
