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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

from edge_rt import config
from edge_rt.answering import Answering
from edge_rt.assembly import LocalModels
from edge_rt.cache.tensor_results import TensorResults
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.manifest import Manifest
from edge_rt.chains import run_chain
from edge_rt.devices import cpu
from edge_rt.errors import (
    DeadlineError,
    DeadlineUnreachableError,
    NotCachedError,
    ShuttingDownError,
)
from edge_rt.guard.limits import check_media, check_request, check_tensors, check_text, check_token_ids
from edge_rt.liveness import Activity
from edge_rt.model_table import Entry, ModelTable
from edge_rt.ports import MakeWorker, ModelStore, RuntimeEvents, make_worker
from edge_rt.power.metered_worker import metered
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.power.taker import AdviceTaker, own_limits
from edge_rt.power.workload import Workload
from edge_rt.router.decide import Decision
from edge_rt.scheduler.direct import Held, OnEnd
from edge_rt.scheduler.dispatcher import Dispatcher
from edge_rt.scheduler.forms import Placement, files_key
from edge_rt.scheduler.placed_model import DispatchStatus
from edge_rt.scheduler.probes import Probes, make_probes
from edge_rt.scheduler.profile import Profile
from edge_rt.scheduler.queue import Place, Wish
from edge_rt.scheduler.residency import Residency
from edge_rt.scheduler.status import ModelStatus, activity
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorRequest
from edge_rt.types import Chunk, Energy, GenerateRequest, PinAction, PinnedPrefix, Priority
from edge_rt.worker.supervisor import ModelWorker

_log = logging.getLogger(__name__)


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
        taker: AdviceTaker | None = None,
    ) -> None:
        self._config = loaded.config
        self._telemetry = telemetry
        if energy is not None:
            make_worker = metered(make_worker, energy, telemetry.energy_used, self._aborted)
        self._residency = Residency(max_loaded=self._config.worker.max_loaded, events=telemetry)
        self._probes = probes or make_probes(self._config.placement)
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
        self._models = ModelTable(
            loaded,
            store,
            self._residency,
            self._dispatcher,
            make_worker=lambda load, events: make_worker(load, self._config.worker, events),
            features=features(),  # read once: they do not change, and every request asks
            probes=self._probes,
            profile=profile or Profile(None),
            queue_changed=self._queue_changed,
        )
        self._workload.n_threads = self._models.n_threads
        self._taker = taker
        if taker is not None:
            taker.run_at_most = self._models.run_at_most
        self._state = "new"

    def check(self, loaded: config.Loaded) -> None:
        """Raise ConfigError where a configuration names a model or variant that is not there."""
        self._models.check(loaded)

    def fixed_models(self, settings: config.Config) -> frozenset[str]:
        """Name the tables of models whose settings count at a start only: all but those of language models."""
        return self._models.fixed(settings)

    def configure(self, settings: config.Config, answering: Answering) -> None:
        """Go by other settings, and another Answering, from the next request on; models by theirs when they are loaded.

        What has begun goes on as it began. The settings have been checked, and change nothing of fixed_models.
        """
        self._config, self.answering = settings, answering
        self._residency.limit(settings.worker.max_loaded)
        self._probes.configure(settings.placement)
        self._dispatcher.configure(settings.placement)
        self._workload.ttft_slo_s = settings.power.ttft_slo_s
        if self._taker is not None:
            self._taker.limits = own_limits(settings)
        self._models.configure(settings)

    def _aborted(self, model: str, energy: Energy) -> None:
        """Count what was spent on an answer without an end; that of a text is the budget's too, as its end would be."""
        self._telemetry.energy_aborted(model, energy)
        if (entry := self._models.entries.get(model)) is not None and not entry.runs_tensors:
            self.answering.aborted(energy)

    async def start(self) -> None:
        """Load the models that the configuration preloads; one that fails is logged and tried again on use."""
        preload = [model for model, entry in self._models.entries.items() if entry.settings.preload]
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
        self._models.check_kind(request.model, "text")
        async with aclosing(self.answering.generate(request)) as answer:
            async for chunk in answer:
                yield chunk

    async def generate_here(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Answer with a model of this device."""
        submitted_at_s = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            progress = stack.enter_context(self._workload.answer(request))
            place, worker = await stack.enter_async_context(self._admitted(request))
            progress.begin()
            waited_s = asyncio.get_running_loop().time() - submitted_at_s
            asked, deadline_s = request, request.deadline_s
            if self._workload.is_heard:
                # For powerd: an answer in one piece would be one long prefill, and a kept prefix no work at all.
                asked = replace(asked, stream=True, tells_start=True)
            if deadline_s is not None:
                asked = replace(asked, deadline_s=max(deadline_s - waited_s, 0.001))
            try:
                async with aclosing(worker.generate(asked)) as answer:
                    async for chunk in answer:
                        if chunk.is_start and chunk.usage is not None:
                            progress.found(chunk.usage.prompt_tokens - chunk.usage.cached_tokens)
                            continue
                        # The prompt's own logprobs are no part of the answer: the prefill goes on.
                        progress.came(len(chunk.token_ids) or int(not chunk.prompt_logprobs))
                        if chunk.finish_reason and (usage := chunk.usage) is not None:
                            place.work = usage.total_tokens - usage.cached_tokens
                            if request.beams is not None:  # those that were not among the best were computed, too
                                place.work *= request.beams.n_beams / request.beams.n_best
                        yield self._finished(request, chunk, waited_s) if chunk.finish_reason else chunk
            except DeadlineError as exc:
                # The engine knows what was left of it, the caller what it was.
                raise DeadlineError(deadline_s=deadline_s or exc.deadline_s) from exc
            except DeadlineUnreachableError as exc:
                needed_s = round(exc.needed_s + waited_s, 3)
                raise DeadlineUnreachableError(needed_s=needed_s, deadline_s=deadline_s or exc.deadline_s) from exc

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        """Run a tensor model, or give stored outputs. Raises as generate does, and for inputs that do not fit."""
        check_tensors(request, self._config.limits)
        entry = self._models.entry(request.model)
        if not (entry.runs_tensors and self._dispatcher.is_in_memory(request.model)):
            self._models.check_kind(request.model, "tensor")
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
        entry = self._models.entries.get(request.model)
        if entry is None or not entry.runs_tensors or request.only_if_cached or self._tensor_results is not None:
            return None
        if (place := self._dispatcher.direct_place(request)) is None:
            return None
        if not is_checked:
            check_tensors(request, self._config.limits)
        if (ticket := entry.queue.enter_now(request.tenant)) is None:
            return None
        held = Held(entry.queue, ticket, on_end)
        return held.begin(partial(self._dispatcher.begin_direct, place, request))

    async def _infer(self, entry: Entry, request: TensorRequest) -> TensorAnswer:
        limit_s = self._limit_s(request)
        due_at_s = asyncio.get_running_loop().time() + limit_s
        async with entry.queue.place(Wish(request.tenant), limit_s):
            return await self._dispatcher.infer(request, due_at_s)

    async def look(self, request: MediaRequest) -> MediaAnswer:
        """Run a tensor model's pipeline, or a chain, on a file.

        Raises as infer does, and UnsupportedFeatureError for a model without a pipeline.
        """
        check_media(request)
        if (chain := self._models.chain(request.model)) is not None:
            return await run_chain(chain, request, self._look, self._telemetry)
        return await self._look(request)

    async def _look(self, request: MediaRequest) -> MediaAnswer:
        self._models.check_kind(request.model, "tensor")
        async with self._queued(request) as due_at_s:
            answer = await self._dispatcher.look(request, due_at_s)
        if answer.stage:  # a model that may stop early
            self._telemetry.chain_answered(request.model, answer.stage)
        return answer

    def explain(self, request: GenerateRequest) -> Decision:
        """Tell where a request would be answered now, and why. Raises as generate does for one that is refused."""
        check_request(request, self._config.limits)
        self._models.check_kind(request.model, "text")
        return self.answering.explain(request)

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        """Learn from what a user says of an answer. Raises InvalidRequestError for one that is not remembered."""
        self.answering.feedback(request_id, tenant, is_good=is_good)

    async def placement(self, model: str) -> DispatchStatus:
        """Tell where a tensor model's requests go, and why. Raises as infer does."""
        self._models.check_kind(model, "tensor")
        return await self._dispatcher.status(model)

    async def tokenize(self, model: str, text: str, *, special: bool, add_bos: bool) -> list[int]:
        self._models.check_kind(model, "text")
        check_text("content", text, self._config.limits.max_prompt_bytes)
        async with self._residency.lease(model) as worker:
            return await worker.tokenize(text, special=special, add_bos=add_bos)

    async def count_prompt(self, request: GenerateRequest) -> int:
        """Count the tokens of a request's prompt, as its model would read it. Raises as generate does."""
        check_request(request, self._config.limits)
        self._models.check_kind(request.model, "text")
        async with self._residency.lease(request.model) as worker:
            return len(await worker.prompt_ids(request))

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._models.check_kind(model, "text")
        check_token_ids("tokens", token_ids, self._config.limits)
        async with self._residency.lease(model) as worker:
            return await worker.detokenize(list(token_ids))

    async def pins(
        self,
        model: str,
        tenant: str,
        *,
        action: PinAction = "list",
        name: str = "",
        text: str = "",
    ) -> list[PinnedPrefix]:
        """List the beginnings of prompts that stay, after one was pinned or unpinned. Raises InvalidRequestError."""
        self._models.check_kind(model, "text")
        check_text("system", text, self._config.limits.max_prompt_bytes)
        async with self._residency.lease(model) as worker:
            return await worker.pins(tenant, action, name, text)

    def form(self, model: str) -> tuple[Placement, Manifest | None]:
        """Give in which form a model runs, and its manifest; None for one of the null back end."""
        return self._models.placement(model), self._models.entry(model).manifest

    def tasks(self) -> dict[str, str]:
        """Give what each model and chain does with a file, by id; those that take none are left out."""
        return self._models.tasks()

    def chains(self) -> tuple[Chain, ...]:
        """Give the chains all of whose models are in the catalog."""
        tasks = self.tasks()
        return tuple(chain for chain in self._models.chains.values() if chain.id in tasks)

    def models(self) -> tuple[ModelStatus, ...]:
        """Describe all models, by the manifests as they are now."""
        self._models.reread()
        return tuple(self._models.status(model) for model in self._models.entries)

    def model(self, model: str, variant: str = "") -> ModelStatus:
        """Describe one model, or one form of a tensor model. Raises ModelNotFoundError."""
        return self._models.status(model, variant)

    def by_priority(self) -> Iterator[tuple[str, Priority, int, int]]:
        """Tell how many requests run and wait, by model and priority."""
        for model, entry in self._models.entries.items():
            for priority, (running, waiting) in entry.queue.by_priority().items():
                yield model, priority, running, waiting

    def activity(self) -> Activity:
        """Tell what is in memory, how much is to do, and whether work goes on."""
        return activity(
            {model: (self._models.slots(model), entry.queue) for model, entry in self._models.entries.items()},
            late_s=self._residency.late_s(),
        )

    async def load(self, model: str, *, force: bool = False, tensors: bool = False, variant: str = "") -> None:
        """Load a model now, a tensor model where it is best.

        force    also if the memory looks too small
        tensors  as a tensor model, where it can be either; refused for a language model
        variant  the form of a tensor model, "" the one that is placed best
        """
        if tensors:
            self._models.check_kind(model, "tensor")
        self._models.check_pulled(model)
        if tensors or not self._models.entry(model).is_text:
            await self._dispatcher.load(model, force=force, variant=variant)
        else:
            await self._residency.load(model, force=force)

    async def unload(self, model: str) -> None:
        """Let a model's running requests finish, then free its memory."""
        entry = self._models.entry(model)
        if entry.is_text:
            await self._residency.unload(model)
        if entry.runs_tensors:
            await self._dispatcher.unload(model)

    def keep(self, model: str, keep_alive_s: float) -> None:
        """Keep a model that is in memory for another idle time, until it leaves; negative: for ever."""
        for slot in self._models.slots(model):
            self._residency.keep_for(slot.model, keep_alive_s)

    async def close(self, drain_s: float) -> None:
        """Refuse what is new or waits, let what runs go on for drain_s, then cut it off and end every worker."""
        self._state = "closing"
        for entry in self._models.entries.values():
            entry.queue.close(ShuttingDownError)
        self._workload.close()
        await self._probes.close()
        await asyncio.gather(self.answering.close(drain_s), self._residency.close(drain_s))

    # A request's way.

    @asynccontextmanager
    async def _queued(self, request: MediaRequest) -> AsyncIterator[float]:
        """Hold a place among the model's running requests; give when a worker must have been found."""
        limit_s = self._limit_s(request)
        due_at_s = asyncio.get_running_loop().time() + limit_s
        async with self._models.entries[request.model].queue.place(Wish(request.tenant), limit_s):
            yield due_at_s

    def _limit_s(self, request: GenerateRequest | TensorRequest | MediaRequest) -> float:
        """Give how long a request may wait for a place and a worker."""
        timeout_s = self._config.scheduler.queue_timeout_s
        return timeout_s if request.deadline_s is None else min(request.deadline_s, timeout_s)

    @asynccontextmanager
    async def _admitted(self, request: GenerateRequest) -> AsyncIterator[tuple[Place, ModelWorker]]:
        """Hold a place among the model's running requests, and the model itself."""
        asked_at_s = asyncio.get_running_loop().time()
        limit_s = self._limit_s(request)
        due_at_s = asked_at_s + limit_s
        queue = self._models.entries[request.model].queue
        wish = Wish(request.tenant, request.priority, request.deadline_s, request.n_rows)
        async with AsyncExitStack() as stack:
            place = await stack.enter_async_context(queue.place(wish, limit_s))
            try:
                async with asyncio.timeout_at(due_at_s):
                    worker = await stack.enter_async_context(self._residency.lease(request.model))
            except TimeoutError:
                raise DeadlineError(deadline_s=due_at_s - asked_at_s) from None
            yield place, worker

    def _finished(self, request: GenerateRequest, chunk: Chunk, waited_s: float) -> Chunk:
        if chunk.usage is None or chunk.timings is None:
            return chunk
        timings = replace(
            chunk.timings, queue_s=chunk.timings.queue_s + waited_s, ttft_s=chunk.timings.ttft_s + waited_s
        )
        self._telemetry.answer_finished(request.model, usage=chunk.usage, timings=timings, priority=request.priority)
        return replace(chunk, timings=timings)

    def _queue_changed(self, model: str, running: int, waiting: int) -> None:
        self._telemetry.queue_depth(model, running=running, waiting=waiting)
        self._workload.queue_changed(model, running=running, waiting=waiting)
