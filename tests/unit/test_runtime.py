from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_rt import config
from edge_rt.assembly import identities
from edge_rt.cache.key import Identity
from edge_rt.catalog.chains import Chain, Ocr
from edge_rt.catalog.manifest import Asset, Manifest, Variant
from edge_rt.config.tables import Pin
from edge_rt.devices.base import Reading, known
from edge_rt.devices.meters import Sample
from edge_rt.errors import (
    BackendLoadError,
    ConfigError,
    DeadlineError,
    EdgeRtError,
    InvalidRequestError,
    ModelFormatError,
    ModelNotFoundError,
    ModelNotPulledError,
    NotCachedError,
    QueueFullError,
    ShuttingDownError,
    UnsupportedFeatureError,
)
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.power.state import Hint
from edge_rt.power.taker import AdviceTaker
from edge_rt.power.wire import TakesAdvice
from edge_rt.power.workload import Workload
from edge_rt.runtime import Runtime
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import Tensor, TensorRequest
from edge_rt.types import Adapter, Chunk, EngineStats, GenerateRequest, ModelInfo, Origin, PinAction, PinnedPrefix
from edge_rt.worker.channel import Load
from edge_rt.worker.supervisor import ModelWorker, WorkerEvents
from tests import virtual_time
from tests.unit.worker.fake_child import INFO, LAST

LOAD_S = 2.0

MANIFEST = Manifest(
    id="tiny",
    name="Tiny",
    license="Apache-2.0",
    kind="text",
    arch="llama",
    n_ctx=2048,
    n_ctx_train=4096,
    n_params=1,
    chat_template="{{ messages }}",
    variants=(
        Variant(id="q4_1", quant="Q4_1", file="t.Q4_1.gguf", source="https://x/t", size_bytes=1, sha256="0" * 64),
        Variant(id="q4_0", quant="Q4_0", file="t.Q4_0.gguf", derived_from="q4_1"),
    ),
)


class FakeStore:
    def __init__(self, *pulled: str) -> None:
        self.pulled = set(pulled)
        self.found: tuple[Manifest, ...] = (MANIFEST,)
        self.bad: dict[str, ModelFormatError] = {}
        self.has_changed = False

    def manifests(self) -> tuple[Manifest, ...]:
        return self.found

    def left_out(self) -> dict[str, ModelFormatError]:
        return self.bad

    def refresh(self) -> bool:
        has_changed, self.has_changed = self.has_changed, False
        return has_changed

    def chains(self) -> tuple[Chain, ...]:
        return (Ocr(id="page", name="Page", detect="lines", read="reader"),)

    def path(self, manifest: Manifest, variant: Variant) -> Path | None:
        return Path("/store") / variant.file if variant.id in self.pulled else None

    def asset_path(self, manifest: Manifest, asset: Asset) -> Path | None:
        return Path("/store") / asset.file


class FakeWorker:
    """Answers "a", "!" after service_s, or never."""

    pid = 7

    def __init__(self, load: Load, events: WorkerEvents, world: World) -> None:
        self.load, self.events, self.world = load, events, world
        self.requests: list[GenerateRequest] = []
        self.n_open = 0
        self.stopped: asyncio.Event = asyncio.Event()
        self.stop_error: Callable[[], EdgeRtError] = ShuttingDownError

    def late_s(self) -> float:
        return self.world.late_s

    async def start(self) -> ModelInfo:
        await asyncio.sleep(LOAD_S)
        if self.load.model in self.world.broken:
            raise BackendLoadError(model=self.load.model, reason="broken")
        self.events.stats(EngineStats(n_threads=1))
        return INFO

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        if self.world.is_late and request.deadline_s is not None:
            raise DeadlineError(deadline_s=request.deadline_s)
        self.n_open += 1
        try:
            yield Chunk(text="a")
            try:
                async with asyncio.timeout(self.world.service_s):
                    await self.stopped.wait()
                raise self.stop_error()
            except TimeoutError:
                yield self.world.last
        finally:
            self.n_open -= 1

    async def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        return [len(text), int(special), int(add_bos)]

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        return list((request.prompt or "").encode())

    async def pins(self, tenant: str, action: PinAction, name: str, text: str) -> list[PinnedPrefix]:
        raise NotImplementedError

    async def detokenize(self, token_ids: list[int]) -> str:
        return f"{token_ids}"

    async def stop(self, error: Callable[[], EdgeRtError]) -> None:
        self.stop_error = error
        self.stopped.set()


@dataclass
class World:
    workers: list[FakeWorker] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    service_s: float = 1.0
    is_late: bool = False
    last: Chunk = LAST
    late_s: float = 0.0

    def make(self, load: Load, settings: config.Worker, events: WorkerEvents) -> ModelWorker:
        worker = FakeWorker(load, events, self)
        self.workers.append(worker)
        return worker


def loaded(**flags: Any) -> config.Loaded:
    settings = {"models.null.backend": "null"} | {name.replace("__", "."): value for name, value in flags.items()}
    return config.load(environ={}, flags=settings, system_file=Path("/nonexistent/config.toml"))


def make(
    world: World,
    *pulled: str,
    telemetry: Telemetry | None = None,
    features: frozenset[str] = frozenset(),
    store: FakeStore | None = None,
    energy: EnergyMonitor | None = None,
    workload: Workload | None = None,
    taker: AdviceTaker | None = None,
    **flags: Any,
) -> Runtime:
    return Runtime(
        loaded(**flags),
        store or FakeStore(*pulled),
        telemetry or Telemetry(),
        make_worker=world.make,
        features=lambda: features,
        energy=energy,
        workload=workload,
        taker=taker,
    )


def request(model: str = "null", **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"id": "r", "model": model, "prompt": "x"} | fields)


async def answer(runtime: Runtime, model: str = "null", **fields: Any) -> list[Chunk]:
    return [chunk async for chunk in runtime.generate(request(model, **fields))]


def test_an_answer_streams_and_its_timings_begin_with_the_call() -> None:
    async def main() -> None:
        telemetry = Telemetry()
        runtime = make(World(), telemetry=telemetry)
        first, last = await answer(runtime)
        assert first == Chunk(text="a", origin=Origin(reason="no-cloud"))
        assert last.finish_reason == "stop"
        assert last.timings is not None
        assert last.timings.queue_s == pytest.approx(LOAD_S)
        assert last.timings.ttft_s == pytest.approx(LOAD_S + 0.1)
        assert last.timings.decode_s == 0.2
        text = telemetry.exposition().decode()
        assert 'edge_rt_queue_wait_seconds_sum{model="null",priority="normal"} 2.0' in text
        assert 'edge_rt_ttft_seconds_count{model="null"} 1.0' in text
        assert 'edge_rt_threads{model="null"} 1.0' in text
        assert 'edge_rt_requests_running{model="null"} 0.0' in text

    virtual_time.run(main())


class Ear:
    """powerd, as far as the runtime knows it."""

    def __init__(self) -> None:
        self.problem = ""
        self.hints: list[Hint] = []

    def send(self, hint: Hint) -> bool:
        self.hints.append(hint)
        return True

    def close(self) -> None:
        self.hints.clear()


def test_powerd_hears_of_arrival_phases_and_end() -> None:
    async def main() -> None:
        world, ear = World(), Ear()
        runtime = make(world, workload=Workload(ear, ttft_slo_s=1.0))
        await answer(runtime, prompt="x" * 400, stream=False)
        await asyncio.sleep(1)
        told = [(hint.work, hint.n_waiting, hint.n_running) for hint in ear.hints]
        # It waits while its model is loaded; the first token comes at once then.
        assert list(dict.fromkeys(told)) == [("prefill", 1, 0), ("decode", 0, 1), ("idle", 0, 0)]
        assert {hint.n_prompt_tokens for hint in ear.hints if hint.work == "prefill"} == {100}
        assert [hint.n_threads for hint in ear.hints if hint.work == "decode"][-1] == 1
        # An answer in one piece would show no phases.
        assert world.workers[0].requests[0].stream
        ear.problem = "gone"
        await answer(runtime, stream=False)
        assert not world.workers[0].requests[1].stream
        await runtime.close(0.0)
        assert ear.hints == []

    virtual_time.run(main())


def test_the_limits_hold_before_anything_is_loaded() -> None:
    async def main() -> None:
        world = World()
        runtime = make(world)
        with pytest.raises(InvalidRequestError, match="top_p"):
            await answer(runtime, sampling=type(request().sampling)(top_p=7.0))
        with pytest.raises(InvalidRequestError):
            await runtime.tokenize("null", "\ud800", special=False, add_bos=False)
        with pytest.raises(InvalidRequestError):
            await runtime.detokenize("null", [-1])
        assert world.workers == []

    virtual_time.run(main())


def test_unknown_and_unpulled_models_are_told_apart() -> None:
    async def main() -> None:
        world = World()
        runtime = make(world)
        for call in (answer(runtime, "nope"), runtime.load("nope"), runtime.unload("nope")):
            with pytest.raises(ModelNotFoundError, match="known models: tiny, null"):
                await call
        for call in (answer(runtime, "tiny"), runtime.load("tiny")):
            with pytest.raises(ModelNotPulledError, match="edge_rt models pull tiny"):
                await call
        assert world.workers == []
        assert not runtime.model("tiny").pulled

    virtual_time.run(main())


def test_a_model_pulled_later_is_found() -> None:
    async def main() -> None:
        world = World()
        store = FakeStore()
        runtime = Runtime(config.load(environ={}), store, Telemetry(), make_worker=world.make, features=frozenset)
        with pytest.raises(ModelNotPulledError):
            await answer(runtime, "tiny")
        store.pulled.add("q4_1")
        assert len(await answer(runtime, "tiny")) == 2

    virtual_time.run(main())


NATIVE = {"avx2", "fma", "f16c"}


@pytest.mark.parametrize(
    ("pulled", "features", "wanted", "expected"),
    [
        (("q4_1", "q4_0"), {"avx2"}, "", "q4_0"),
        (("q4_1", "q4_0"), NATIVE, "", "q4_1"),
        (("q4_0",), NATIVE, "", "q4_0"),  # the form to prefer is not here
        (("q4_1", "q4_0"), set(), "", "q4_1"),
        (("q4_1",), {"avx2"}, "", "q4_1"),  # the fastest form is not here
        (("q4_1", "q4_0"), {"avx2"}, "q4_1", "q4_1"),
        (("q4_1",), {"avx2"}, "q4_0", None),  # a form asked for by name has no substitute
    ],
)
def test_the_fastest_form_that_is_here_runs(
    pulled: tuple[str, ...], features: set[str], wanted: str, expected: str | None
) -> None:
    async def main() -> None:
        world = World()
        runtime = make(world, *pulled, features=frozenset(features), models__tiny__variant=wanted)
        if expected is None:
            with pytest.raises(ModelNotPulledError):
                await runtime.load("tiny")
            return
        await runtime.load("tiny")
        load = world.workers[0].load
        variant = MANIFEST.variant(expected)
        assert variant is not None
        assert (load.variant, load.quant, load.path) == (expected, variant.quant, f"/store/{variant.file}")

    virtual_time.run(main())


def test_what_a_model_is_loaded_with_comes_from_its_table_then_the_engine_then_the_manifest() -> None:
    async def main() -> None:
        async def load(**flags: Any) -> Load:
            world = World()
            await make(world, "q4_1", **flags).load("tiny")
            return world.workers[0].load

        plain = await load()
        assert (plain.backend, plain.n_ctx, plain.n_seq_max, plain.force) == ("auto", 2048, 8, False)
        assert plain.chat_template == "{{ messages }}"
        assert plain.memory_margin_bytes == config.Worker().memory_margin_bytes
        engine = await load(engine__n_ctx=512, engine__n_parallel=2, engine__backend="native", worker__force=True)
        assert (engine.backend, engine.n_ctx, engine.n_seq_max, engine.force) == ("native", 512, 2, True)
        own = await load(
            engine__n_ctx=512, models__tiny__n_ctx=256, models__tiny__n_parallel=3, models__tiny__backend="llama_cpu"
        )
        assert (own.backend, own.n_ctx, own.n_seq_max) == ("llama_cpu", 256, 3)

    virtual_time.run(main())


def test_force_reaches_the_worker() -> None:
    async def main() -> None:
        world = World()
        await make(world).load("null", force=True)
        assert world.workers[0].load.force

    virtual_time.run(main())


def test_the_null_back_end_needs_no_file() -> None:
    async def main() -> None:
        world = World()
        runtime = make(world, models__tiny__backend="null", models__null__variant="step_s=0.05")
        await runtime.load("null")
        await runtime.load("tiny")
        assert [(w.load.model, w.load.variant, w.load.path) for w in world.workers] == [
            ("null", "step_s=0.05", ""),
            ("tiny", "", ""),
        ]
        assert runtime.model("null").pulled

    virtual_time.run(main())


def test_a_table_for_a_model_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(ConfigError) as caught:
        make(World(), models__typo__n_ctx=512)
    assert caught.value.key == "models.typo"
    assert "tiny" in caught.value.problem
    assert caught.value.origin == "flag"


def test_a_variant_that_does_not_exist_stops_the_start() -> None:
    with pytest.raises(ConfigError) as caught:
        make(World(), models__tiny__variant="q9")
    assert (caught.value.key, caught.value.origin) == ("models.tiny.variant", "flag")
    assert "tiny:q4_1, tiny:q4_0" in caught.value.problem
    make(World(), models__tiny__variant="q4_0")
    make(World(), models__tiny__variant="step_s=1", models__tiny__backend="null")


def test_requests_over_n_parallel_wait_and_over_max_waiting_are_refused() -> None:
    async def main() -> None:
        world = World()
        runtime = make(world, engine__n_parallel=2, scheduler__max_waiting=1)
        tasks = [asyncio.create_task(answer(runtime)) for _ in range(4)]
        await asyncio.sleep(LOAD_S + 0.5)
        assert world.workers[0].n_open == 2
        status = runtime.model("null")
        assert (status.running, status.waiting) == (2, 1)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, QueueFullError) for result in results] == [False, False, False, True]
        assert len(world.workers[0].requests) == 3

    virtual_time.run(main())


def test_a_deadline_that_passes_in_the_engine_is_told_as_it_was_given() -> None:
    async def main() -> None:
        with pytest.raises(DeadlineError) as caught:
            await answer(make(World(is_late=True)), deadline_s=30.0)
        assert caught.value.deadline_s == 30.0

    virtual_time.run(main())


@pytest.mark.parametrize("deadline_s", [0.5, 2.5], ids=["loading", "queued"])
def test_a_deadline_holds_while_a_model_loads_and_while_others_run(deadline_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        runtime = make(World(service_s=9.0), engine__n_parallel=1)
        other = asyncio.create_task(answer(runtime))
        if deadline_s > 1:
            await asyncio.sleep(LOAD_S)
        began_at_s = loop.time()
        with pytest.raises(DeadlineError) as caught:
            await answer(runtime, deadline_s=deadline_s)
        assert loop.time() - began_at_s == pytest.approx(deadline_s)
        assert caught.value.deadline_s == deadline_s
        assert len(await other) == 2

    virtual_time.run(main())


def test_the_queue_has_a_time_out_of_its_own_and_the_engine_gets_what_is_left() -> None:
    async def main() -> None:
        world = World()
        runtime = make(world, scheduler__queue_timeout_s=1.0)
        with pytest.raises(DeadlineError):
            await answer(runtime)
        await asyncio.sleep(LOAD_S)
        await answer(runtime, deadline_s=30.0)
        await answer(runtime)
        assert [r.deadline_s for r in world.workers[0].requests] == [30.0, None]
        late = World()
        await answer(make(late), deadline_s=30.0)
        assert late.workers[0].requests[0].deadline_s == pytest.approx(30.0 - LOAD_S)

    virtual_time.run(main())


def test_closing_the_iterator_frees_everything_at_once() -> None:
    async def main() -> None:
        world = World(service_s=99.0)
        runtime = make(world)
        async with aclosing(runtime.generate(request())) as chunks:
            await anext(chunks)
            assert (world.workers[0].n_open, runtime.model("null").running) == (1, 1)
        assert (world.workers[0].n_open, runtime.model("null").running) == (0, 0)

    virtual_time.run(main())


def test_a_client_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    async def main() -> None:
        world = World(service_s=99.0)
        runtime = make(world, engine__n_parallel=1)
        running = asyncio.create_task(answer(runtime))
        waiting = asyncio.create_task(answer(runtime))
        await asyncio.sleep(LOAD_S + 1)
        for task in (waiting, running):
            task.cancel()
            await asyncio.wait([task])
        status = runtime.model("null")
        assert (status.running, status.waiting, world.workers[0].n_open) == (0, 0, 0)
        assert len(world.workers[0].requests) == 1

    virtual_time.run(main())


def test_a_status_tells_state_and_failure() -> None:
    async def main() -> None:
        world = World(broken={"null"})
        runtime = make(world, "q4_1")
        assert [status.id for status in runtime.models()] == ["tiny", "null"]
        with pytest.raises(BackendLoadError):
            await runtime.load("null")
        status = runtime.model("null")
        assert (status.state, status.info, status.error) == ("unloaded", None, "cannot load null: broken")
        assert status.idle_s is None
        await answer(runtime, "tiny")
        await asyncio.sleep(3.0)
        status = runtime.model("tiny")
        assert (status.state, status.info, status.pid, status.error) == ("ready", INFO, 7, "")
        assert status.idle_s == pytest.approx(3.0)
        assert status.engine == EngineStats(n_threads=1)

    virtual_time.run(main())


def test_a_models_own_keep_alive_wins() -> None:
    async def main() -> None:
        runtime = make(World(), "q4_1", worker__keep_alive_s=100.0, models__tiny__keep_alive_s=5.0)
        await runtime.load("tiny")
        await runtime.load("null")
        await asyncio.sleep(6.0)
        assert [status.state for status in runtime.models()] == ["unloaded", "ready"]

    virtual_time.run(main())


def test_activity_sums_up_models_and_queues_and_tells_of_a_supervision_that_fails() -> None:
    async def main() -> None:
        world = World(service_s=100.0)
        runtime = make(world)
        asking = asyncio.create_task(answer(runtime))
        await asyncio.sleep(LOAD_S / 2)
        now = runtime.activity()
        assert (now.models, now.loading, now.n_running, now.n_waiting) == ((), ("null",), 1, 0)
        await asyncio.sleep(LOAD_S)
        world.late_s = 7.0
        now = runtime.activity()
        assert (now.models, now.loading, now.n_running, now.late_s) == (("null",), (), 1, 7.0)
        asking.cancel()
        await asyncio.wait([asking])
        await runtime.close(0.0)
        assert runtime.activity().models == ()

    virtual_time.run(main())


def test_other_settings_hold_from_the_next_request_and_the_next_load_on() -> None:
    async def main() -> None:
        world = World(service_s=1000.0)
        runtime = make(world, "q4_1", models__tiny__n_ctx=512)
        running = asyncio.create_task(answer(runtime, "tiny"))
        await asyncio.sleep(LOAD_S + 1)
        other = loaded(models__tiny__n_ctx=1024, worker__keep_alive_s=5.0, limits__max_stop=1)
        runtime.check(other)
        runtime.configure(other.config, runtime.answering)
        with pytest.raises(InvalidRequestError, match="stop"):
            await answer(runtime, "tiny", stop=("a", "b"))
        assert world.workers[0].load.n_ctx == 512
        await asyncio.sleep(1000)
        assert (await running)[-1].finish_reason == "stop"
        await asyncio.sleep(6.0)
        assert runtime.model("tiny").state == "unloaded"
        world.service_s = 1.0
        await answer(runtime, "tiny")
        assert world.workers[1].load.n_ctx == 1024

    virtual_time.run(main())


def test_advice_is_taken_within_the_settings_that_hold_now() -> None:
    async def main() -> None:
        taker = AdviceTaker(TakesAdvice(max_threads=2, max_batch=4))
        runtime = make(World(), taker=taker)
        runtime.configure(loaded(engine__n_threads=3, engine__n_parallel=5).config, runtime.answering)
        assert taker.limits == TakesAdvice(max_threads=3, max_batch=5)

    virtual_time.run(main())


def test_settings_of_models_that_are_not_there_are_found_before_they_are_used() -> None:
    async def main() -> None:
        runtime = make(World())
        with pytest.raises(ConfigError, match="no such model"):
            runtime.check(loaded(models__nobody__n_ctx=5))
        pinned = replace(
            loaded(), config=config.Config(pin=(Pin(model="nobody", system="x"),)), pin_places=("c, line 3",)
        )
        with pytest.raises(ConfigError, match=r"pin\[0\]\.model: no such model as nobody.*from c, line 3"):
            runtime.check(pinned)
        with pytest.raises(ConfigError, match="no such variant; there are tiny:q4_1, tiny:q4_0"):
            runtime.check(loaded(models__tiny__variant="q9"))
        runtime.check(loaded(models__new__backend="null"))
        assert runtime.fixed_models(loaded(models__new__backend="null", models__tiny__n_ctx=5).config) == {
            "null",
            "new",
        }

    virtual_time.run(main())


def test_start_preloads_and_survives_a_model_that_fails() -> None:
    async def main() -> None:
        world = World(broken={"null"})
        runtime = make(world, "q4_1", models__null__preload=True, models__tiny__preload=True)
        assert not runtime.ready()
        await runtime.start()
        assert runtime.ready()
        assert [status.state for status in runtime.models()] == ["ready", "unloaded"]

    virtual_time.run(main())


def test_preloading_a_model_that_is_not_pulled_is_survived_too() -> None:
    async def main() -> None:
        runtime = make(World(), models__tiny__preload=True)
        await runtime.start()
        assert runtime.ready()

    virtual_time.run(main())


def test_close_refuses_what_waits_finishes_what_runs_and_cuts_off_the_rest() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World(service_s=3.0)
        runtime = make(world, engine__n_parallel=1)
        await runtime.start()
        finishes = asyncio.create_task(answer(runtime))
        waits = asyncio.create_task(answer(runtime))
        await asyncio.sleep(LOAD_S + 1)
        closing = asyncio.create_task(runtime.close(4.0))
        await asyncio.sleep(0.1)
        assert not runtime.ready()
        with pytest.raises(ShuttingDownError):
            await answer(runtime)
        with pytest.raises(ShuttingDownError):
            await waits
        assert len(await finishes) == 2
        await closing

        runtime = make(World(service_s=99.0))
        cut_off = asyncio.create_task(answer(runtime))
        await asyncio.sleep(LOAD_S + 1)
        began_at_s = loop.time()
        await runtime.close(4.0)
        with pytest.raises(ShuttingDownError):
            await cut_off
        assert loop.time() - began_at_s < 5.0

    virtual_time.run(main())


def test_tokenize_and_detokenize_load_the_model() -> None:
    async def main() -> None:
        runtime = make(World())
        assert await runtime.tokenize("null", "abc", special=True, add_bos=False) == [3, 1, 0]
        assert await runtime.detokenize("null", (1, 2)) == "[1, 2]"
        assert await runtime.count_prompt(request()) == len((request().prompt or "").encode())

    virtual_time.run(main())


def test_a_chain_asked_as_if_it_were_one_model_is_told_from_a_model_that_is_not_there() -> None:
    async def main() -> None:
        runtime = make(World())
        with pytest.raises(UnsupportedFeatureError, match="it is a chain of models: send it a file"):
            runtime.model("page")
        with pytest.raises(ModelNotFoundError, match="null, page"):
            runtime.model("none")

    virtual_time.run(main())


def test_manifests_are_read_again_and_what_runs_keeps_its_own() -> None:
    async def main() -> None:
        store = FakeStore("q4_1", "q4_0")
        runtime = make(World(), store=store)
        await runtime.load("tiny")
        newer = msgspec.structs.replace(MANIFEST, n_ctx=1024)
        store.found, store.has_changed = (newer, msgspec.structs.replace(MANIFEST, id="other")), True
        assert (await answer(runtime, "other"))[-1].finish_reason  # unknown until it is asked for
        assert {m.id: m.manifest for m in runtime.models()}["tiny"] == MANIFEST
        await runtime.unload("tiny")
        assert {m.id: m.manifest for m in runtime.models()}["tiny"] == newer
        await runtime.unload("other")
        store.found, store.has_changed = (newer,), True
        assert {m.id for m in runtime.models()} == {"null", "tiny"}
        with pytest.raises(ModelNotFoundError):
            runtime.model("other")
        await runtime.close(0)

    virtual_time.run(main())


def test_a_model_whose_manifest_is_bad_says_so_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = FakeStore("q4_1", "q4_0")
        store.bad["mine"] = ModelFormatError(path="mine.toml", field="n_ctx", problem="is missing")
        runtime = make(World(), store=store, models__mine__n_ctx=64)
        assert "mine.toml: n_ctx: is missing" in caplog.text
        assert (await answer(runtime))[-1].finish_reason
        with pytest.raises(ModelFormatError, match="n_ctx"):
            await answer(runtime, "mine")
        store.bad, store.found, store.has_changed = {}, (MANIFEST, msgspec.structs.replace(MANIFEST, id="mine")), True
        assert (await answer(runtime, "mine"))[-1].finish_reason
        assert runtime.model("mine").n_ctx == 64
        await runtime.close(0)

    virtual_time.run(main())


def test_who_may_answer_is_told_by_the_route_with_the_models_file_form_and_context() -> None:
    clouds = {"far": config.CloudEndpoint(base_url="https://example.org/v1", model="big")}
    runtime = make(World(), "q4_0")
    here, far = identities(runtime, clouds, request("tiny"))
    assert here == Identity(
        model="tiny",
        variant="q4_0",
        file_sha256="0" * 64,
        backend="auto",
        template="{{ messages }}",
        n_ctx=2048,
    )
    assert far == Identity(model="tiny", endpoint="far", upstream="https://example.org/v1 big")
    assert identities(runtime, clouds, request("tiny", route="local")) == (here,)
    assert identities(runtime, clouds, request("tiny", route="cloud")) == (far,)
    assert identities(make(World()), {}, request()) == (Identity(model="null", backend="null", n_ctx=4096),)


def test_who_answers_with_an_adapter_is_told_by_its_file(tmp_path: Path) -> None:
    poems = tmp_path / "poems.gguf"
    poems.write_bytes(b"one")
    here = Asset(id="lyrics", file="lyrics.gguf", source="shipped:x", size_bytes=1, sha256="0" * 64)
    store = FakeStore("q4_0")
    store.found = (msgspec.structs.replace(MANIFEST, adapters=(here,)),)
    runtime = make(World(), store=store, models__tiny__adapters={"poems": {"file": str(poems)}})
    asked = replace(request("tiny"), adapters=(Adapter(name="poems"),))
    plain, first = (identities(runtime, {}, each)[0] for each in (request("tiny"), asked))
    assert (plain.adapters, first.adapters[0][:2]) == ((), ("poems", 3))
    poems.write_bytes(b"other")
    assert identities(runtime, {}, asked)[0] != first
    shipped = replace(asked, adapters=(Adapter(name="lyrics"),))
    assert [name for name, *_ in identities(runtime, {}, shipped)[0].adapters] == ["lyrics"]


def test_only_if_cached_asks_no_tensor_model_where_nothing_is_stored() -> None:
    async def main() -> None:
        tensor = Tensor(name="x", datatype="UINT8", shape=(1,), data=b"x")
        asked = TensorRequest(id="r", model="null", inputs=(tensor,), only_if_cached=True)
        with pytest.raises(NotCachedError):
            await make(World()).infer(asked)

    virtual_time.run(main())


class SteadyMeter:
    """Draws as many watts as the world's workers have open answers, and two more."""

    name, interval_s = "steady", 0.05
    boundary, quality = "board", "measured"

    def __init__(self, world: World) -> None:
        self.world = world

    def read(self, now_s: float) -> Reading[Sample]:
        n_open = sum(worker.n_open for worker in self.world.workers)
        return known(Sample(power_w=2.0 + n_open), "steady")

    def close(self) -> None: ...


def test_an_answer_says_what_it_took_and_a_cancelled_one_leaves_nothing_open() -> None:
    async def main() -> None:
        world, telemetry = World(service_s=2.0), Telemetry()
        meter: Any = SteadyMeter(world)
        monitor = EnergyMonitor(meter, idle_w=2.0, clock=asyncio.get_running_loop().time)
        runtime = make(world, telemetry=telemetry, energy=monitor)
        world.last = replace(
            LAST, timings=replace(LAST.timings, prefill_s=0.5, decode_s=1.5, prefill_engine_s=0.5, decode_engine_s=1.5)
        )

        async def read() -> None:
            for _ in range(1000):  # no thread is woken here
                await asyncio.sleep(min(monitor.tick(), 0.05))

        reading = asyncio.create_task(read())
        await asyncio.sleep(5.0)
        last = (await answer(runtime))[-1]
        assert last.usage is not None
        energy = last.usage.energy
        assert energy is not None
        assert energy.total_j == pytest.approx(6.0, rel=0.05)
        assert energy.above_idle_j == pytest.approx(2.0, rel=0.1)
        assert energy.source == "steady"
        async with aclosing(runtime.generate(request())) as cut:
            await anext(cut)
        assert not monitor._account.is_busy
        reading.cancel()
        assert 'edge_rt_energy_joules_total{model="null",phase="decode"} 4.' in telemetry.exposition().decode()

    virtual_time.run(main())


def test_without_a_meter_an_answer_says_nothing_of_energy() -> None:
    async def main() -> None:
        last = (await answer(make(World())))[-1]
        assert last.usage is not None
        assert last.usage.energy is None

    virtual_time.run(main())
