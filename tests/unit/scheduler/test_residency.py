from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.errors import (
    BackendLoadError,
    EdgeRtError,
    ModelFormatError,
    ModelTooLargeError,
    ShuttingDownError,
    WorkerLostError,
)
from edge_rt.scheduler.residency import FAILED_PAUSE_S, TURN_S, Residency
from edge_rt.scheduler.slots import Slot, pick_victim
from edge_rt.types import EngineStats, ModelInfo
from edge_rt.worker.supervisor import WorkerEvents
from tests import virtual_time
from tests.null_devices import TextlessWorker
from tests.unit.worker.fake_child import INFO

LOAD_S = 1.0


@dataclass
class World:
    """What all fake workers share: memory, a diary of loads and unloads, and the failures to come."""

    memory_bytes: int = 1000
    used_bytes: int = 0
    need_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    endless: set[str] = field(default_factory=set)  # models whose load never ends
    diary: list[str] = field(default_factory=list)
    most_loaded: int = 0
    workers: list[FakeWorker] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    stand_ins: list[tuple[str, str, str]] = field(default_factory=list)
    simulated: set[str] = field(default_factory=set)  # models on a simulator

    def n_loaded(self) -> int:
        return sum(worker.holds_memory for worker in self.workers)

    # ResidencyEvents

    def engine_stats(self, model: str, stats: EngineStats) -> None: ...

    def engine_gone(self, model: str) -> None:
        self.gone.append(model)

    def worker_restarted(self, model: str) -> None:
        self.restarts.append(model)

    def stand_in_loaded(self, model: str, place: str, evidence: str) -> None:
        self.stand_ins.append((model, place, evidence))


class FakeWorker(TextlessWorker):
    pid = 1

    def __init__(self, world: World, model: str, events: WorkerEvents, force: bool) -> None:
        self.world, self.model, self.events, self.force = world, model, events, force
        self.need_bytes = world.need_bytes.get(model, 1)
        self.holds_memory = False
        self.is_stopped = False
        self.n_users = 0
        world.workers.append(self)

    async def start(self) -> ModelInfo:
        have = self.world.memory_bytes - self.world.used_bytes
        if have < self.need_bytes and not self.force:
            raise ModelTooLargeError(model=self.model, need_bytes=self.need_bytes, have_bytes=have)
        self.world.used_bytes += self.need_bytes
        self.holds_memory = True
        self.world.most_loaded = max(self.world.most_loaded, self.world.n_loaded())
        await asyncio.sleep(1e9 if self.model in self.world.endless else LOAD_S)
        if failures := self.world.failures.get(self.model):
            self.holds_memory = False
            self.world.used_bytes -= self.need_bytes
            raise failures.pop(0)
        self.world.diary.append(f"+{self.model}")
        self.events.stats(EngineStats(rss_bytes=self.need_bytes))
        return replace(INFO, evidence="simulator") if self.model in self.world.simulated else INFO

    def late_s(self) -> float:
        return 0.0

    async def stop(self, error: Callable[[], EdgeRtError]) -> None:
        assert not self.is_stopped
        self.is_stopped = True
        await asyncio.sleep(0.1)
        if self.holds_memory:
            self.holds_memory = False
            self.world.used_bytes -= self.need_bytes
            self.world.diary.append(f"-{self.model}")


def make(world: World, *models: str, max_loaded: int = 4, keep_alive_s: float = -1.0) -> Residency:
    residency = Residency(max_loaded=max_loaded, events=world)
    for model in models:

        def make_worker(events: WorkerEvents, force: bool, model: str = model) -> FakeWorker:
            return FakeWorker(world, model, events, force)

        residency.add(model, make_worker, keep_alive_s=keep_alive_s)
    return residency


async def use(residency: Residency, model: str, seconds: float = 1.0) -> None:
    async with residency.lease(model) as worker:
        assert isinstance(worker, FakeWorker)
        assert worker.model == model
        await asyncio.sleep(seconds)
        assert not worker.is_stopped, "a model was unloaded under a lease"


def test_many_requests_share_one_load() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a")
        await asyncio.gather(*(use(residency, "a") for _ in range(5)))
        await use(residency, "a")
        assert world.diary == ["+a"]
        assert residency.slot("a").state == "ready"

    virtual_time.run(main())


def test_what_computes_in_a_devices_place_is_told() -> None:
    async def main() -> None:
        world = World(simulated={"b"})
        residency = make(world, "a", "b")
        await use(residency, "a")
        await use(residency, "b")
        assert world.stand_ins == [("b", f"{INFO.variant} on {INFO.backend}:{INFO.device}", "simulator")]
        # A device that was lost when it was loaded, and is one no longer.
        worker = next(worker for worker in world.workers if worker.model == "a")
        worker.events.described(back := replace(INFO, evidence="emulated"))
        loaded = residency.slot("a").loaded
        assert loaded is not None
        assert loaded.info == back
        assert [evidence for _, _, evidence in world.stand_ins] == ["simulator", "emulated"]

    virtual_time.run(main())


def test_an_idle_model_is_unloaded_after_keep_alive_and_loaded_again_on_use() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", keep_alive_s=300.0)
        await use(residency, "a")
        await asyncio.sleep(298.0)
        await use(residency, "a")  # counts from the last use
        await asyncio.sleep(299.0)
        assert residency.slot("a").state == "ready"
        await asyncio.sleep(1.5)
        assert residency.slot("a").state == "unloaded"
        assert world.used_bytes == 0
        assert world.gone == ["a"]
        await use(residency, "a")
        assert world.diary == ["+a", "-a", "+a"]

    virtual_time.run(main())


def test_keep_alive_does_not_run_while_a_request_does() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", keep_alive_s=10.0)
        await asyncio.gather(use(residency, "a", 1.0), use(residency, "a", 50.0))
        assert world.diary == ["+a"]
        await asyncio.sleep(11.0)
        assert world.diary == ["+a", "-a"]

    virtual_time.run(main())


def test_keep_alive_of_zero_unloads_at_once_and_below_zero_never() -> None:
    async def main() -> None:
        world = World()
        at_once, never = make(world, "a", keep_alive_s=0.0), make(world, "b", keep_alive_s=-1.0)
        await use(at_once, "a")
        await use(never, "b")
        await asyncio.sleep(1e6)
        assert world.diary == ["+a", "-a", "+b"]

    virtual_time.run(main())


def test_a_load_nobody_waits_for_any_more_is_kept_alive_like_any_other() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", keep_alive_s=10.0)
        gone = asyncio.create_task(use(residency, "a"))
        await asyncio.sleep(LOAD_S / 2)
        gone.cancel()
        await asyncio.sleep(LOAD_S)
        assert residency.slot("a").state == "ready"
        await asyncio.sleep(11.0)
        assert residency.slot("a").state == "unloaded"

    virtual_time.run(main())


def test_the_idle_model_that_is_used_least_makes_room() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", "b", "c", max_loaded=2)
        for model in ("a", "b", "a", "b", "a", "a"):
            await use(residency, model)
        await asyncio.sleep(20.0)
        await use(residency, "c")
        assert world.diary == ["+a", "+b", "-b", "+c"]
        assert world.most_loaded == 2

    virtual_time.run(main())


def load_s(
    pick: Callable[[list[Slot], float], Slot | None], asked: list[tuple[float, str]], loads: dict[str, float], room: int
) -> float:
    """Play requests that come one at a time, and give the seconds that loading took in all."""
    slots = {model: Slot(model, lambda *_: None, -1.0) for model in loads}  # type: ignore[arg-type, return-value]
    spent_s = 0.0
    for now_s, model in asked:
        slot = slots[model]
        if slot.state == "unloaded":
            if sum(s.state == "ready" for s in slots.values()) >= room:
                victim = pick(list(slots.values()), now_s)
                assert victim is not None
                victim.state, victim.loaded = "unloaded", None
            slot.state, slot.load_s = "ready", loads[model]
            slot.loaded = SimpleNamespace(n_leases=0, loaded_at_s=now_s)  # type: ignore[assignment]
            spent_s += loads[model]
        slot.uses.add(now_s, load_s=slot.load_s)
        slot.used_at_s = now_s
    return spent_s


def least_recently_used(slots: list[Slot], now_s: float) -> Slot:
    return min((s for s in slots if s.state == "ready"), key=lambda s: s.used_at_s or 0.0)


def in_turn(rng: random.Random) -> list[str]:
    return ["a", "b", "c", "d", "e"] * 80


def by_popularity(rng: random.Random) -> list[str]:
    return rng.choices("abcdefgh", weights=[1 / n for n in range(1, 9)], k=400)


def in_phases(rng: random.Random) -> list[str]:
    return [model for phase in ("abcd", "efgh", "bdfh") for model in rng.choices(phase, k=130)]


@pytest.mark.parametrize("pause_s", [2.0, 15.0])
@pytest.mark.parametrize(("asked", "at_most"), [(in_turn, 0.3), (by_popularity, 0.8), (in_phases, 1.25)])
def test_less_time_goes_by_loading_than_if_the_least_recently_used_made_room(
    asked: Callable[[random.Random], list[str]], at_most: float, pause_s: float
) -> None:
    ours = theirs = 0.0
    for seed in range(10):
        rng = random.Random(seed)
        loads = {model: rng.choice([0.5, 1.0, 4.0]) for model in "abcdefgh"}
        requests = [(at * pause_s, model) for at, model in enumerate(asked(rng))]
        ours += load_s(pick_victim, requests, loads, 4)
        theirs += load_s(least_recently_used, requests, loads, 4)
    assert ours <= theirs * at_most, f"{ours:.0f} s against {theirs:.0f} s"


def test_a_load_that_does_not_end_does_not_hold_up_other_models() -> None:
    async def main() -> None:
        world = World(endless={"a"})
        residency = make(world, "a", "b", "c", "d", max_loaded=2)
        stuck = asyncio.create_task(use(residency, "a"))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await use(residency, "b")
        assert loop.time() - begun_s == pytest.approx(TURN_S + LOAD_S + 1.0)
        await use(residency, "c")
        await asyncio.gather(use(residency, "d"), use(residency, "b"))
        assert loop.time() - begun_s < TURN_S + 10.0, "once is enough"
        assert world.most_loaded <= 2
        assert not stuck.done()
        await residency.close(0.0)
        assert isinstance((await asyncio.gather(stuck, return_exceptions=True))[0], ShuttingDownError)
        assert all(worker.is_stopped for worker in world.workers)

    virtual_time.run(main())


def test_a_busy_model_drains_before_it_is_swapped_out() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World()
        residency = make(world, "a", "b", max_loaded=1)
        long = asyncio.create_task(use(residency, "a", 30.0))
        await asyncio.sleep(LOAD_S + 1)
        swap = asyncio.create_task(use(residency, "b"))
        await asyncio.sleep(1)
        assert residency.slot("a").state == "draining"
        await long
        ended_at_s = loop.time()
        await swap
        assert world.diary == ["+a", "-a", "+b"]
        assert world.most_loaded == 1
        assert loop.time() - ended_at_s == pytest.approx(0.1 + LOAD_S + 1.0)

    virtual_time.run(main())


def test_a_draining_model_takes_no_new_requests_so_the_other_gets_its_turn() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", "b", max_loaded=1)
        log: list[str] = []

        async def stream_of_requests(n: int) -> None:
            for i in range(n):
                await use(residency, "a", 5.0)
                log.append(f"a{i}")

        # Two overlapping clients: without draining, a would never be idle.
        first = asyncio.create_task(stream_of_requests(6))
        await asyncio.sleep(2.5)
        second = asyncio.create_task(stream_of_requests(6))
        await asyncio.sleep(2.5)
        await use(residency, "b")
        log.append("b")
        await asyncio.gather(first, second)
        assert log.index("b") <= 3
        assert world.diary == ["+a", "-a", "+b", "-b", "+a"]

    virtual_time.run(main())


def test_two_clients_of_two_models_take_turns() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", "b", max_loaded=1)
        log: list[str] = []

        async def client(model: str) -> None:
            for _ in range(5):
                await use(residency, model)
                log.append(model)

        await asyncio.gather(client("a"), client("b"))
        assert sorted(log) == ["a"] * 5 + ["b"] * 5
        assert all(log[i : i + 3] not in (["a"] * 3, ["b"] * 3) for i in range(7)), log
        # Every load served at least one request: no model is moved out before its turn.
        assert sum(entry.startswith("+") for entry in world.diary) <= 10
        assert world.most_loaded == 1

    virtual_time.run(main())


def test_loading_one_model_does_not_hold_up_another_that_is_loaded() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World()
        residency = make(world, "a", "b")
        await use(residency, "a")
        loading = asyncio.create_task(use(residency, "b"))
        await asyncio.sleep(LOAD_S / 4)
        began_at_s = loop.time()
        await use(residency, "a", LOAD_S / 4)
        assert loop.time() - began_at_s == pytest.approx(LOAD_S / 4)
        assert residency.slot("b").state == "loading"
        await loading

    virtual_time.run(main())


def test_models_load_one_at_a_time_so_that_each_sees_the_memory_that_is_left() -> None:
    async def main() -> None:
        world = World(memory_bytes=100, need_bytes={"a": 60, "b": 60})
        residency = make(world, "a", "b")
        await asyncio.gather(use(residency, "a", 5.0), use(residency, "b"))
        assert world.diary == ["+a", "-a", "+b"]

    virtual_time.run(main())


def test_a_client_that_leaves_before_there_is_room_moves_nobody_out() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", "b", max_loaded=1)
        long = asyncio.create_task(use(residency, "a", 30.0))
        await asyncio.sleep(LOAD_S + 1)
        gone = asyncio.create_task(use(residency, "b"))
        await asyncio.sleep(1)
        held_up = asyncio.create_task(use(residency, "a", 1.0))
        await asyncio.sleep(1)
        assert not held_up.done()
        gone.cancel()
        await held_up  # a is open again, although the long request still runs
        assert not long.done()
        await long
        assert world.diary == ["+a"]
        assert residency.slot("b").state == "unloaded"

    virtual_time.run(main())


def test_a_lease_given_in_the_moment_of_cancellation_is_returned() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", keep_alive_s=5.0)

        async def first() -> None:
            async with residency.lease("a"):
                assert residency.slot("a").n_leases == 2  # the other has its lease, and has not run yet
                gone.cancel()

        holder = asyncio.create_task(first())
        await asyncio.sleep(0)
        gone = asyncio.create_task(use(residency, "a"))
        await asyncio.wait([holder, gone])
        holder.result()
        assert gone.cancelled()
        assert residency.slot("a").n_leases == 0
        await asyncio.sleep(6.0)
        assert residency.slot("a").state == "unloaded"

    virtual_time.run(main())


def test_a_failed_load_is_told_to_all_and_remembered_for_a_while() -> None:
    async def main() -> None:
        world = World(failures={"a": [ModelFormatError(path="f", field="magic", problem="bad")]})
        residency = make(world, "a")
        results = await asyncio.gather(*(use(residency, "a") for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [ModelFormatError] * 3
        assert len({id(result) for result in results}) == 3
        with pytest.raises(ModelFormatError):
            await use(residency, "a")
        assert len(world.workers) == 1
        await asyncio.sleep(FAILED_PAUSE_S)
        await use(residency, "a")
        assert world.diary == ["+a"]
        assert residency.slot("a").failure is None

    virtual_time.run(main())


def test_an_explicit_load_does_not_heed_an_earlier_failure() -> None:
    async def main() -> None:
        world = World(failures={"a": [BackendLoadError(model="a", reason="no")]})
        residency = make(world, "a")
        with pytest.raises(BackendLoadError):
            await residency.load("a")
        await residency.load("a")
        assert world.diary == ["+a"]

    virtual_time.run(main())


def test_an_unforeseen_failure_of_a_load_is_typed_and_leaves_nobody_waiting() -> None:
    async def main() -> None:
        world = World(failures={"a": [RuntimeError("oops")]})
        residency = make(world, "a")
        with pytest.raises(BackendLoadError, match="RuntimeError: oops"):
            await use(residency, "a")

    virtual_time.run(main())


def test_other_models_are_unloaded_when_memory_asks_for_it() -> None:
    async def main() -> None:
        world = World(memory_bytes=100, need_bytes={"a": 40, "b": 40, "c": 70})
        residency = make(world, "a", "b", "c")
        await use(residency, "a")
        await use(residency, "b")
        await use(residency, "c")
        assert world.diary == ["+a", "+b", "-a", "-b", "+c"]

    virtual_time.run(main())


def test_memory_waits_for_a_busy_model_to_finish() -> None:
    async def main() -> None:
        world = World(memory_bytes=100, need_bytes={"a": 60, "b": 60})
        residency = make(world, "a", "b")
        long = asyncio.create_task(use(residency, "a", 30.0))
        await asyncio.sleep(2 * LOAD_S)
        await use(residency, "b")
        assert long.done()
        assert world.diary == ["+a", "-a", "+b"]

    virtual_time.run(main())


def test_a_model_that_could_never_fit_moves_nobody_out() -> None:
    async def main() -> None:
        world = World(memory_bytes=100, need_bytes={"a": 40, "giant": 200})
        residency = make(world, "a", "giant")
        await use(residency, "a")
        with pytest.raises(ModelTooLargeError) as caught:
            await use(residency, "giant")
        assert (caught.value.need_bytes, caught.value.have_bytes) == (200, 60)
        assert world.diary == ["+a"]
        await residency.load("giant", force=True)
        assert world.diary == ["+a", "+giant"]

    virtual_time.run(main())


def test_force_ends_with_the_load_it_was_given_for() -> None:
    async def main() -> None:
        world = World(memory_bytes=100, need_bytes={"giant": 200})
        residency = make(world, "giant")
        await residency.load("giant", force=True)
        await residency.unload("giant")
        with pytest.raises(ModelTooLargeError):
            await residency.load("giant")

    virtual_time.run(main())


def test_unload_waits_for_running_requests_and_is_gone_on_return() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a")
        running = asyncio.create_task(use(residency, "a", 10.0))
        await asyncio.sleep(2 * LOAD_S)
        await residency.unload("a")
        assert running.done()
        assert world.used_bytes == 0
        await residency.unload("a")  # nothing to do
        assert world.diary == ["+a", "-a"]

    virtual_time.run(main())


def test_requests_that_wait_out_an_unload_load_the_model_again() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a")
        running = asyncio.create_task(use(residency, "a", 10.0))
        await asyncio.sleep(2 * LOAD_S)
        unloading = asyncio.create_task(residency.unload("a"))
        await asyncio.sleep(1)
        await use(residency, "a")
        await asyncio.gather(running, unloading)
        assert world.diary == ["+a", "-a", "+a"]

    virtual_time.run(main())


def test_a_worker_that_gave_up_is_replaced_by_the_next_request_after_a_pause() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a")
        await use(residency, "a")
        world.workers[0].events.down(WorkerLostError(model="a", reason="crash loop"))
        assert residency.slot("a").state == "unloaded"
        with pytest.raises(WorkerLostError, match="crash loop"):
            await use(residency, "a")
        await asyncio.sleep(FAILED_PAUSE_S)
        await use(residency, "a")
        assert len(world.workers) == 2
        world.workers[0].events.down(WorkerLostError(model="a", reason="late news of the old one"))
        assert residency.slot("a").state == "ready"

    virtual_time.run(main())


def test_a_lease_on_a_worker_that_gave_up_does_not_count_for_its_successor() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", keep_alive_s=5.0)
        async with residency.lease("a"):
            world.workers[0].events.down(WorkerLostError(model="a", reason="gone"))
            await asyncio.sleep(FAILED_PAUSE_S)
            await use(residency, "a")
            assert residency.slot("a").n_leases == 0
            used_at_s = residency.slot("a").used_at_s
            await asyncio.sleep(1.0)
        assert residency.slot("a").n_leases == 0
        assert residency.slot("a").used_at_s == used_at_s
        await asyncio.sleep(4.5)
        assert residency.slot("a").state == "unloaded"

    virtual_time.run(main())


def test_restarts_are_reported() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a")
        await use(residency, "a")
        world.workers[0].events.restarting("SIGKILL")
        assert world.restarts == ["a"]

    virtual_time.run(main())


def test_close_lets_running_requests_finish_and_frees_all_memory() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World()
        residency = make(world, "a", "b")
        await use(residency, "b")
        running = asyncio.create_task(use(residency, "a", 5.0))
        await asyncio.sleep(2 * LOAD_S)
        began_at_s = loop.time()
        await residency.close(60.0)
        await running
        assert loop.time() - began_at_s < 6.0
        assert sorted(world.diary) == ["+a", "+b", "-a", "-b"]
        assert world.used_bytes == 0
        with pytest.raises(ShuttingDownError):
            await use(residency, "a")

    virtual_time.run(main())


def test_close_cuts_off_what_runs_too_long_and_what_still_loads() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        world = World()
        residency = make(world, "a", "b", "c", max_loaded=2)
        cut_off = asyncio.create_task(hang(residency, "a"))
        await asyncio.sleep(2 * LOAD_S)
        waiting = [asyncio.create_task(use(residency, model)) for model in ("b", "c")]
        await asyncio.sleep(LOAD_S / 2)
        began_at_s = loop.time()
        await residency.close(4.0)
        assert loop.time() - began_at_s < 4.5
        assert world.used_bytes == 0
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ShuttingDownError] * 2
        cut_off.cancel()

    async def hang(residency: Residency, model: str) -> None:
        async with residency.lease(model):
            await asyncio.sleep(1e6)

    virtual_time.run(main())


MODELS = ("a", "b", "c")
SECONDS = st.floats(0.0, 8.0)


@settings(max_examples=150, deadline=None)
@given(
    max_loaded=st.integers(1, 3),
    keep_alive_s=st.sampled_from([-1.0, 0.0, 1.5]),
    memory_bytes=st.sampled_from([60, 100, 1000]),
    requests=st.lists(st.tuples(SECONDS, st.sampled_from(MODELS), SECONDS, st.none() | SECONDS), max_size=14),
    failing=st.lists(st.sampled_from(MODELS), max_size=3),
    unloads=st.lists(st.tuples(SECONDS, st.sampled_from(MODELS)), max_size=3),
    gives_up_at_s=st.none() | SECONDS,
)
def test_no_request_is_lost_and_no_limit_broken_whatever_comes_together(
    max_loaded: int,
    keep_alive_s: float,
    memory_bytes: int,
    requests: list[tuple[float, str, float, float | None]],
    failing: list[str],
    unloads: list[tuple[float, str]],
    gives_up_at_s: float | None,
) -> None:
    """requests: (when it comes, its model, how long it runs, when its client leaves)."""

    async def main() -> None:
        world = World(memory_bytes=memory_bytes, need_bytes=dict.fromkeys(MODELS, 50))
        world.failures = {model: [BackendLoadError(model=model, reason="no")] for model in failing}
        residency = make(world, *MODELS, max_loaded=max_loaded, keep_alive_s=keep_alive_s)

        async def later(at_s: float, call: Callable[[], Awaitable[None]]) -> None:
            await asyncio.sleep(at_s)
            await call()

        async def client(at_s: float, model: str, seconds: float, leaves_after_s: float | None) -> None:
            await asyncio.sleep(at_s)
            try:
                async with asyncio.timeout(leaves_after_s):
                    await use(residency, model, seconds)
            except TimeoutError:
                assert leaves_after_s is not None
            except (BackendLoadError, WorkerLostError):
                assert failing or gives_up_at_s is not None

        async def give_up() -> None:
            for slot in (residency.slot(model) for model in MODELS):
                if slot.loaded is not None and isinstance(slot.loaded.worker, FakeWorker):
                    worker = slot.loaded.worker
                    if worker.holds_memory and slot.state in {"ready", "draining"}:
                        worker.holds_memory = False
                        world.used_bytes -= worker.need_bytes
                    slot.loaded.down(WorkerLostError(model=slot.model, reason="crash loop"))

        async with asyncio.timeout(500.0):
            await asyncio.gather(
                *(client(*row) for row in requests),
                *(later(at_s, partial(residency.unload, model)) for at_s, model in unloads),
                *([later(gives_up_at_s, give_up)] if gives_up_at_s is not None else []),
            )
        assert world.most_loaded <= max_loaded
        assert world.used_bytes <= memory_bytes
        assert all(residency.slot(model).n_leases == 0 for model in MODELS)
        assert all(not residency.slot(model).waiters for model in MODELS)
        async with asyncio.timeout(10.0):
            await residency.close(0.0)
        assert world.used_bytes == 0
        assert {residency.slot(model).state for model in MODELS} == {"unloaded"}

    virtual_time.run(main())


def test_another_idle_time_begins_anew_and_holds_for_what_is_in_memory() -> None:
    async def main() -> None:
        residency = make(World(), "a", keep_alive_s=300.0)
        await use(residency, "a")
        await asyncio.sleep(100.0)
        residency.keep("a", 10.0)
        await asyncio.sleep(9.0)
        assert residency.slot("a").state == "ready"
        await asyncio.sleep(2.0)
        assert residency.slot("a").state == "unloaded"
        residency.keep("a", -1.0)
        await use(residency, "a")
        await asyncio.sleep(1000.0)
        assert residency.slot("a").state == "ready"

    virtual_time.run(main())


def test_a_lower_number_of_models_holds_from_the_next_load_on() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a", "b", "c", max_loaded=2)
        await use(residency, "a")
        await use(residency, "b")
        residency.limit(1)
        assert world.diary == ["+a", "+b"]
        await use(residency, "c")
        assert [residency.slot(model).state for model in "abc"] == ["unloaded", "unloaded", "ready"]

    virtual_time.run(main())


def test_a_request_may_ask_for_another_idle_time_which_lasts_while_the_model_is_in_memory() -> None:
    async def main() -> None:
        residency = make(World(), "a", keep_alive_s=5.0)
        residency.keep_for("a", 100.0)  # of what is not in memory it says nothing
        async with residency.lease("a"):
            residency.keep_for("a", -1.0)
            await asyncio.sleep(10.0)
        await asyncio.sleep(1000.0)
        assert residency.slot("a").state == "ready"
        residency.keep_for("a", 0.0)
        await asyncio.sleep(1.0)
        assert residency.slot("a").state == "unloaded"
        await use(residency, "a")
        assert residency.slot("a").idle_limit_s == 5.0
        await asyncio.sleep(4.0)
        residency.keep_for("a", 3.0)  # begins anew
        await asyncio.sleep(2.9)
        assert residency.slot("a").state == "ready"
        await asyncio.sleep(0.5)
        assert residency.slot("a").state == "unloaded"

    virtual_time.run(main())


def test_an_unload_that_is_cancelled_lets_those_in_who_wait() -> None:
    async def main() -> None:
        world = World()
        residency = make(world, "a")
        first = asyncio.create_task(use(residency, "a", 10.0))
        await asyncio.sleep(LOAD_S + 1.0)
        leaving = asyncio.create_task(residency.unload("a"))
        await asyncio.sleep(1.0)
        late = asyncio.create_task(use(residency, "a"))
        await asyncio.sleep(1.0)
        leaving.cancel()
        await asyncio.wait_for(late, 2.0)
        assert not first.done()
        await first
        assert world.diary == ["+a"]
        assert residency.slot("a").state == "ready"

    virtual_time.run(main())
