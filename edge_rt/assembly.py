"""Puts Answering together from the configuration, and tells its parts how things stand."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from edge_rt.answering import Answering, AnsweringEvents
from edge_rt.cache.answers import Answers, store_path
from edge_rt.cache.exact import CacheEvents, ExactTier
from edge_rt.cache.key import Identity
from edge_rt.cache.store import Store
from edge_rt.cache.tensor_results import TensorResults
from edge_rt.catalog.lora import same_file
from edge_rt.catalog.manifest import Manifest
from edge_rt.cloud import wire
from edge_rt.cloud.endpoint import EndpointHealth
from edge_rt.cloud.endpoints import CloudEvents, CloudModels
from edge_rt.cloud.hedge import HedgePolicy
from edge_rt.cloud.speed import Speed
from edge_rt.config import Cache, CloudEndpoint, Config, Router
from edge_rt.devices import battery, thermal
from edge_rt.regular import open_regular
from edge_rt.router.budget import DAY_S, FLAT_PRIOR, SHIPPED_PRIOR, Budget, Pace
from edge_rt.router.chooser import Chooser
from edge_rt.router.confidence import Judge
from edge_rt.router.rules import Circumstances
from edge_rt.scheduler.forms import Placement
from edge_rt.types import Chunk, GenerateRequest, Origin

if TYPE_CHECKING:
    from edge_rt.cache.meaning import Meanings
    from edge_rt.router.learner import Learner
    from edge_rt.router.scorer import Scorer

_log = logging.getLogger(__name__)

_MAX_LEDGER_BYTES: Final = 4096
_SENSOR_S: Final = 5.0  # how long a reading of the machine's state is good for


class LocalModels(Protocol):
    """This device's models; runtime.Runtime is one."""

    def generate_here(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]: ...

    def form(self, model: str) -> tuple[Placement, Manifest | None]:
        """Give in which form a model runs, and its manifest; None for one of the null back end."""
        ...


class Events(AnsweringEvents, CacheEvents, CloudEvents, Protocol):
    """Where the figures go; edge_rt.telemetry.Telemetry is one."""


def identities(
    models: LocalModels, endpoints: Mapping[str, CloudEndpoint], request: GenerateRequest
) -> tuple[Identity, ...]:
    """Tell who may answer a request, for the cache: this device's model, and the cloud's where it may leave."""
    here = () if request.route == "cloud" else (_identity(models, request),)
    if request.route == "local":
        return here
    return *here, *(
        Identity(model=request.model, endpoint=name, upstream=f"{endpoint.base_url} {endpoint.model}")
        for name, endpoint in endpoints.items()
    )


def _identity(models: LocalModels, request: GenerateRequest) -> Identity:
    placement, manifest = models.form(request.model)
    asked = {adapter.name for adapter in request.adapters}
    form = manifest.variant(placement.variant) if manifest is not None else None
    return Identity(
        model=request.model,
        variant=placement.variant,
        file_sha256=manifest.lineage(form) if manifest is not None and form is not None else "",
        backend=placement.backend,
        template=placement.chat_template or "",
        n_ctx=placement.n_ctx,
        adapters=tuple(same_file(adapter) for adapter in placement.adapters if adapter.name in asked),
    )


class Surroundings:
    """How things stand, for the router. See router.chooser.Surroundings."""

    def __init__(
        self,
        models: LocalModels,
        cloud: CloudModels,
        *,
        max_device_c: float,
        device_c: Callable[[], float | None] = lambda: thermal.peak_c().value,
        battery_share: Callable[[], float | None] = lambda: battery.charge().value,
        is_charging: Callable[[], bool] = battery.is_charging,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_device_c = max_device_c
        self._models, self._cloud, self._clock = models, cloud, clock
        self._sensors = (device_c, battery_share, is_charging)
        self._read: tuple[float | None, float | None, bool] = (None, None, False)
        self._read_at_s: float | None = None
        self._here = Speed()

    def circumstances(self, request: GenerateRequest) -> Circumstances:
        health = self._cloud.health()
        device_c, share, charging = self._sensed()
        sizes = [one.n_ctx for one in health.endpoints if one.state == "closed"]
        return Circumstances(
            cloud="up" if health.best is not None else "down" if health.endpoints else "none",
            device_n_ctx=self._models.form(request.model)[0].n_ctx,
            cloud_n_ctx=0 if 0 in sizes else max(sizes, default=0),
            prompt_tokens=wire.estimated_tokens(request),
            battery_share=share,
            is_charging=charging,
            device_c=device_c,
            max_device_c=self.max_device_c,
        )

    def pace(self, request: GenerateRequest, expected_tokens: float) -> Pace:
        del request
        best = self._cloud.health().best
        return Pace(
            expected_tokens=expected_tokens,
            local_first_s=self._here.first_byte.quantile(0.5),
            local_tokens_per_s=self._here.tokens.quantile(0.5),
            cloud_first_p50_s=None if best is None else best.first_byte_p50_s,
            cloud_first_p95_s=None if best is None else best.first_byte_p95_s,
            cloud_tokens_per_s=None if best is None else best.tokens_per_s,
        )

    def expected_cost(self, request: GenerateRequest, expected_tokens: float) -> float | None:
        best: EndpointHealth | None = self._cloud.health().best
        return None if best is None else best.cost(wire.estimated_tokens(request), round(expected_tokens))

    def take_unfinished_cost(self) -> float:
        return self._cloud.take_unfinished_cost()

    def answered(self, origin: Origin, last: Chunk) -> None:
        """Learn from an answer of this device how fast it is."""
        if not origin.endpoint and last.usage is not None and last.timings is not None:
            times = last.timings
            self._here.answered(
                first_byte_s=times.ttft_s, n_tokens=last.usage.completion_tokens, decode_s=times.decode_s
            )

    def first_text_p95_s(self, where: Literal["local", "cloud"]) -> tuple[float | None, int]:
        """Give within which time 95 of 100 answers begin there, and of how many that is known."""
        if where == "local":
            return self._here.first_byte.quantile(0.95), len(self._here.first_byte)
        best = self._cloud.health().best
        return (None, 0) if best is None else (best.first_byte_p95_s, best.n_requests - best.n_failures)

    def _sensed(self) -> tuple[float | None, float | None, bool]:
        now_s = self._clock()
        if self._read_at_s is None or now_s - self._read_at_s >= _SENSOR_S:
            device_c, share, charging = self._sensors
            self._read, self._read_at_s = (device_c(), share(), charging()), now_s
        return self._read


class Hedging:
    """When the second source is asked: once the first is later than 95 of 100 were, and for few requests."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings, self._policy = surroundings, HedgePolicy()

    def after_s(self, where: Literal["local", "cloud"]) -> float | None:
        return self._policy.after_s(*self._surroundings.first_text_p95_s(where))

    def take(self) -> bool:
        return self._policy.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What Answering needs beside models, and what must be closed in the end.

    store   of answers; None where the cache is switched off
    tensor_results  None unless outputs of tensor models are kept
    cloud   None where no endpoint is configured
    ledger  where what was spent today is kept; None: nowhere
    tier, meanings  of the store; meanings where the semantic tier is switched on
    scorer, teacher  where there is a cloud and router.scorer is on; the teacher changes the scorer by labels
    """

    store: Store | None = None
    tensor_results: TensorResults | None = None
    cloud: CloudModels | None = None
    ledger: Path | None = None
    tier: ExactTier | None = None
    meanings: Meanings | None = None
    scorer: Scorer | None = None
    teacher: Learner | None = None

    async def begin(self) -> None:
        """Read what was known before the start; requests may come meanwhile."""
        if self.meanings is not None:
            await self.meanings.rebuild()
        if self.teacher is not None:
            self.teacher.begin()

    async def hang_up(self) -> None:
        if self.teacher is not None:
            await self.teacher.close()
        if self.cloud is not None:
            await self.cloud.close()

    def close_store(self) -> None:
        """Write what is still to be written; nothing may be looked up any more."""
        if self.meanings is not None:
            self.meanings.save()
        if self.store is not None:
            self.store.close()


def open_parts(config: Config, events: Events, store_dir: Path) -> Parts:
    """Open the store of answers and make ready to ask endpoints. Raises ConfigError."""
    settings, store, tensor_results = config.cache, None, None
    if settings.enabled:
        path = store_path(settings, store_dir)
        store = Store.open(path, max_bytes=settings.max_bytes, max_value_bytes=settings.max_answer_bytes, events=events)
        tensor_results = TensorResults(settings, store, events) if settings.tensors else None
    tier = None if store is None else ExactTier(settings, store, events)
    meanings = None
    if tier is not None and settings.semantic != "off":
        meanings = _meanings(settings, tier, store_path(settings, store_dir).with_suffix(".semantic.json"))
    parts = Parts(
        store=store, tensor_results=tensor_results, ledger=store_dir / "router.json", tier=tier, meanings=meanings
    )
    return with_cloud(parts, config, events) if config.cloud else parts


def with_cloud(parts: Parts, config: Config, events: Events) -> Parts:
    """Add what asking endpoints takes. Raises ConfigError, and BackendUnavailableError without edge_rt[vectors]."""
    return replace(with_scorer(parts, config), cloud=CloudModels(config.cloud, events))


def with_scorer(parts: Parts, config: Config) -> Parts:
    """Add what judges difficulty, or take it away, as router.scorer is now. Raises BackendUnavailableError."""
    if not config.router.scorer or parts.ledger is None:
        return replace(parts, scorer=None, teacher=None)
    scorer, teacher = _scorer(parts.ledger.with_name("router.labels"))
    return replace(parts, scorer=scorer, teacher=teacher)


def _meanings(settings: Cache, tier: ExactTier, path: Path) -> Meanings:
    """Make the semantic tier. Raises BackendUnavailableError without edge_rt[vectors]."""
    from edge_rt.cache.meaning import Meanings  # numpy and vectors, where questions are compared
    from edge_rt.cache.semantic import SemanticTier
    from edge_rt.cache.threshold import ErrorController
    from edge_rt.text_vectors import TextVectors

    semantic = SemanticTier(
        TextVectors.load(),
        ErrorController(settings.max_error, settings.verify_share),
        mode=settings.semantic,
        max_entries=settings.max_semantic,
        draw=random.random,
    )
    return Meanings(tier, semantic, path)


def _scorer(labels: Path) -> tuple[Scorer, Learner]:
    """Load what judges difficulty. Raises BackendUnavailableError without edge_rt[vectors]."""
    from edge_rt.router.learner import Learner  # numpy and vectors, where there is a cloud to choose
    from edge_rt.router.scorer import Scorer

    scorer = Scorer.load()
    return scorer, Learner(scorer, labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """Answering, and those of its parts that a changed configuration changes.

    endpoints  whose stored answers may be given; changed in place
    """

    answering: Answering
    endpoints: dict[str, CloudEndpoint]
    chooser: Chooser | None = None
    surroundings: Surroundings | None = None


def assemble(config: Config, models: LocalModels, events: Events, parts: Parts) -> Assembled:
    """Build what answers.

    Raises ConfigError for a rule that cannot be, and BackendUnavailableError where an extra is missing that the
    configuration asks for.
    """
    cache, endpoints = None, dict(config.cloud)
    if parts.tier is not None:
        cache = Answers(parts.tier, partial(identities, models, endpoints), meanings=parts.meanings)
    chooser = hedging = surroundings = None
    hold_back = config.router.hold_back_tokens
    if parts.cloud is not None:
        surroundings = Surroundings(models, parts.cloud, max_device_c=config.placement.max_device_c)
        hedging = Hedging(surroundings) if config.router.hedge else None
        chooser = Chooser(
            config.router,
            surroundings,
            scorer=parts.scorer,
            judge=Judge.load() if hold_back else None,
            teacher=parts.teacher,
            budget=_budget(config.router, parts.ledger),
            spent=None if parts.ledger is None else partial(_save, parts.ledger),
        )
    answering = Answering(
        models.generate_here,
        events,
        cache=cache,
        cloud=parts.cloud,
        router=chooser,
        hedging=hedging,
        hold_back_tokens=hold_back,
    )
    return Assembled(answering=answering, endpoints=endpoints, chooser=chooser, surroundings=surroundings)


def prior(settings: Router) -> tuple[float, ...]:
    """Give what is taken for the gains of requests before any has come."""
    return tuple(SHIPPED_PRIOR if settings.scorer else FLAT_PRIOR)


def _budget(settings: Router, ledger: Path | None) -> Budget:
    """Make a budget that goes on where the last process left it. One whose file is damaged counts the day as spent, and
    says so: who can damage the file shall not be able to spend twice."""
    budget = Budget(share=settings.cloud_share, max_cost_per_day=settings.max_cost_per_day, prior=prior(settings))
    if ledger is None or (settings.max_cost_per_day == 0 and settings.max_energy_j_per_day == 0):
        return budget
    try:
        with open_regular(ledger) as file:
            state = msgspec.json.decode(file.read(_MAX_LEDGER_BYTES), type=dict[str, Any])
        problem = "" if budget.restore(state, now_s=time.monotonic()) else "it does not hold a day and what was spent"
    except FileNotFoundError:
        return budget
    except (OSError, msgspec.DecodeError) as exc:
        problem = str(exc)
    if problem:
        _log.warning("%s: %s; today's budget counts as spent. Delete the file to begin anew", ledger, problem)
        today = int(time.time() // DAY_S)
        spent = {"day": today, "spent": settings.max_cost_per_day, "spent_j": settings.max_energy_j_per_day}
        budget.restore(spent, now_s=time.monotonic())
    return budget


def _save(ledger: Path, state: dict[str, Any]) -> None:
    """Write what was spent; readers see the old file or the new one."""
    beside = ledger.with_suffix(".new")
    try:
        ledger.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(msgspec.json.encode(state))
        beside.replace(ledger)
    except OSError as exc:
        _log.warning("%s cannot be written, a restart would forget what was spent today: %s", ledger, exc.strerror)
