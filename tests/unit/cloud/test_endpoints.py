"""Several endpoints, and the time after one has failed. Waiting takes no time: the loop's clock jumps."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from edge_rt.cloud.endpoints import CloudModels
from edge_rt.config import CloudEndpoint
from edge_rt.errors import (
    CircuitOpenError,
    CloudAnswerError,
    CloudError,
    CloudRejectedError,
    CloudTimeoutError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
)
from edge_rt.types import Chunk, GenerateRequest, Message, Usage
from tests import recorded_cloud as recorded
from tests import virtual_time
from tests.recorded_cloud import RecordedCloud, Reply, Script, says, slowly, status

T = TypeVar("T")
DOWN = status(500)


class Events:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.n: Counter[str] = Counter()
        self.cost = 0.0
        self.states: list[str] = []

    def cloud_answered(self, endpoint: str, *, usage: Usage, cost: float, first_byte_s: float) -> None:
        self.n[f"{endpoint} answered"] += 1
        self.cost += cost

    def cloud_failed(self, endpoint: str, code: str) -> None:
        self.n[f"{endpoint} {code}"] += 1

    def cloud_retried(self, endpoint: str) -> None:
        self.n[f"{endpoint} retried"] += 1

    def cloud_state(self, endpoint: str, state: str) -> None:
        self.states.append(state)


class Rig:
    """Endpoints a, b, … with their servers."""

    def __init__(self, models: CloudModels, clouds: dict[str, RecordedCloud], events: Events) -> None:
        self.models, self.clouds, self.events = models, clouds, events

    def __getitem__(self, name: str) -> RecordedCloud:
        return self.clouds[name]

    async def ask(self, **fields: Any) -> str:
        due_in_s = fields.pop("due_in_s", None)
        due_at_s = None if due_in_s is None else now() + due_in_s
        return text([chunk async for chunk in self.models.generate(chat(**fields), due_at_s=due_at_s)])

    async def fails(self, **fields: Any) -> CloudError:
        with pytest.raises(CloudError) as caught:
            await self.ask(**fields)
        return caught.value

    def state(self, name: str = "a") -> str:
        return next(one.state for one in self.models.health().endpoints if one.name == name)


def now() -> float:
    return asyncio.get_running_loop().time()


def chat(content: str = "Hello?", **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="1", model="m", messages=(Message(role="user", content=content),), **fields)


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def with_endpoints(
    test: Callable[[Rig], Awaitable[T]], scripts: dict[str, Script], settings: dict[str, dict[str, Any]] | None = None
) -> T:
    """Run a test on servers of these scripts; endpoints are asked in the order of their names."""

    async def main() -> T:
        async with AsyncExitStack() as stack:
            clouds = {name: await stack.enter_async_context(RecordedCloud(one)) for name, one in scripts.items()}
            endpoints = {name: cloud.endpoint(**(settings or {}).get(name, {})) for name, cloud in clouds.items()}
            events = Events()
            models = CloudModels(endpoints, events, chance=lambda: 1.0)
            stack.push_async_callback(models.close)
            return await test(Rig(models, clouds, events))

    return virtual_time.run(main())


def test_the_first_chunk_says_where_it_comes_from_and_the_last_what_it_cost() -> None:
    async def test(rig: Rig) -> None:
        chunks = [chunk async for chunk in rig.models.generate(chat(), reason="hard")]
        first, last = chunks[0].origin, chunks[-1].origin
        assert first is not None
        assert (first.endpoint, first.reason, first.cost) == ("a", "hard", None)
        assert last is not None
        assert last.cost == pytest.approx(1e-6 * (1000 * 2.0 + 500 * 10.0))
        assert rig.events.cost == last.cost

    prices = {"a": {"price_in": 2.0, "price_out": 10.0}}
    with_endpoints(test, {"a": says("x", usage=(1000, 500))}, prices)


def test_priority_decides_and_not_the_name() -> None:
    async def test(rig: Rig) -> None:
        assert await rig.ask() == "from b"

    with_endpoints(test, {"a": says("from a"), "b": says("from b")}, {"a": {"priority": 2}, "b": {"priority": 1}})


@pytest.mark.parametrize(
    "script",
    [
        DOWN,
        status(429),
        status(401),
        status(400),
        recorded.cut_after(),
        recorded.pieces("data: {x\n\n"),
        recorded.hangs,
    ],
)
def test_another_endpoint_makes_up_for_what_fails_before_the_first_text(script: Script) -> None:
    async def test(rig: Rig) -> None:
        assert await rig.ask() == "from b"
        assert len(rig["a"].requests) == 1

    with_endpoints(test, {"a": script, "b": says("from b")})


def test_an_endpoint_that_is_not_there_is_passed_over() -> None:
    async def main() -> None:
        async with RecordedCloud(says("x")) as gone:
            nobody = gone.endpoint(priority=-1)
        async with RecordedCloud(says("from b")) as cloud:
            models = CloudModels({"a": nobody, "b": cloud.endpoint()}, Events())
            assert text([chunk async for chunk in models.generate(chat())]) == "from b"
            await models.close()

    virtual_time.run(main())


def test_nothing_makes_up_for_what_breaks_after_the_first_text() -> None:
    async def test(rig: Rig) -> None:
        seen: list[Chunk] = []
        with pytest.raises(CloudAnswerError):
            await collect(rig, seen)
        assert text(seen) == "half"
        assert len(rig["a"].requests) == 1
        assert rig["b"].requests == []

    with_endpoints(test, {"a": recorded.cut_after("half"), "b": says("from b")})


async def collect(rig: Rig, seen: list[Chunk]) -> None:
    async for chunk in rig.models.generate(chat()):
        seen.append(chunk)  # noqa: PERF401 - extend would lose it all


# Retries.


def test_a_failure_that_may_pass_is_tried_again_with_the_same_idempotency_key() -> None:
    async def test(rig: Rig) -> None:
        rig["a"].then(DOWN, recorded.cut_after(), says("third"))
        began_s = now()
        assert await rig.ask() == "third"
        assert now() - began_s == pytest.approx(0.2 + 0.4, abs=0.05)  # jitter drawn at its longest
        assert len({asked.headers["idempotency-key"] for asked in rig["a"].requests}) == 1
        assert rig.events.n["a retried"] == 2
        await rig.ask()
        assert len({asked.headers["idempotency-key"] for asked in rig["a"].requests}) == 2

    with_endpoints(test, {"a": DOWN}, {"a": {"max_failures": 9}})


@pytest.mark.parametrize("script", [status(400), status(401), status(404), status(422), recorded.hangs])
def test_a_failure_that_will_not_pass_is_not_tried_again(script: Script) -> None:
    async def test(rig: Rig) -> None:
        await rig.fails()
        assert len(rig["a"].requests) == 1

    with_endpoints(test, {"a": script})


def test_one_request_counts_as_one_failure_however_often_it_is_tried() -> None:
    async def test(rig: Rig) -> None:
        rig["a"].then(DOWN, DOWN, DOWN, says("well"))
        await rig.fails()
        assert len(rig["a"].requests) == 3
        assert await rig.ask() == "well"

    with_endpoints(test, {"a": DOWN}, {"a": {"max_failures": 2}})


def test_a_filtered_request_says_nothing_of_the_endpoint() -> None:
    async def filtered(reply: Reply) -> None:
        await reply.head()
        await reply.finish("content_filter")
        await reply.done()

    async def test(rig: Rig) -> None:
        for _ in range(4):
            await rig.fails()
        assert len(rig["a"].requests) == 4  # none is tried again
        rig["a"].then(says("well"))
        assert await rig.ask() == "well"

    with_endpoints(test, {"a": filtered}, {"a": {"max_failures": 1}})


def test_retries_are_a_share_of_requests() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(200):
            await rig.fails()
        assert len(rig["a"].requests) <= 200 * 1.13 + 4

    with_endpoints(test, {"a": DOWN}, {"a": {"max_failures": 10_000}})


def test_no_share_is_no_retry() -> None:
    async def test(rig: Rig) -> None:
        await rig.fails()
        assert len(rig["a"].requests) == 1

    with_endpoints(test, {"a": DOWN}, {"a": {"retry_share": 0.0}})


def test_a_short_retry_after_is_waited_for() -> None:
    async def test(rig: Rig) -> None:
        rig["a"].then(status(429, headers={"retry-after": "2"}), says("later"))
        began_s = now()
        assert await rig.ask() == "later"
        assert 2.0 <= now() - began_s < 2.5

    with_endpoints(test, {"a": DOWN})


def test_a_long_retry_after_is_obeyed_by_all_requests_and_waited_for_by_none() -> None:
    async def test(rig: Rig) -> None:
        rig["a"].then(status(429, headers={"retry-after": "30"}), says("later"))
        began_s = now()
        error = await rig.fails()
        assert isinstance(error, CloudRejectedError)
        assert error.retry_after_s == 30.0
        assert rig.state() == "resting"
        error = await rig.fails()
        assert isinstance(error, CircuitOpenError)
        assert error.retry_after_s == pytest.approx(30.0, abs=0.1)
        assert now() - began_s < 0.1
        assert len(rig["a"].requests) == 1
        await asyncio.sleep(30.0)
        assert await rig.ask() == "later"

    with_endpoints(test, {"a": DOWN})


def test_an_absurd_retry_after_ends() -> None:
    async def test(rig: Rig) -> None:
        rig["a"].then(status(503, headers={"retry-after": "999999999"}), says("later"))
        await rig.fails()
        await asyncio.sleep(601.0)
        assert await rig.ask() == "later"

    with_endpoints(test, {"a": DOWN})


def test_a_retry_that_would_come_after_the_deadline_is_not_made() -> None:
    async def test(rig: Rig) -> None:
        began_s = now()
        await rig.fails(due_in_s=0.1)
        assert now() - began_s < 0.1
        assert len(rig["a"].requests) == 1

    with_endpoints(test, {"a": DOWN})


def test_a_deadline_is_not_the_endpoint_s_fault() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(5):
            with pytest.raises(DeadlineError):
                await rig.ask(due_in_s=1.0)
        assert rig.state() == "closed"
        with pytest.raises(DeadlineError):
            await rig.ask(due_in_s=18.0)  # slow by its own setting, deadline or not
        assert rig.models.health().endpoints[0].n_failures == 1

    with_endpoints(test, {"a": recorded.hangs})


# Breakers.


def test_after_some_failures_nobody_waits_any_more() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            assert isinstance(await rig.fails(), CloudTimeoutError)
        began_s = now()
        error = await rig.fails()
        assert isinstance(error, CircuitOpenError)
        assert 0 < error.retry_after_s <= 5.0
        assert now() == began_s
        assert rig.models.health().best is None

    with_endpoints(test, {"a": recorded.hangs})


def test_an_endpoint_that_works_again_is_found_out_beside_the_requests() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            await rig.fails()
        rig["a"].then(recorded.late(2.0, says("x")))
        await asyncio.sleep(5.1)
        began_s = now()
        assert isinstance(await rig.fails(), CircuitOpenError)  # it asks nothing itself, and begins the probe
        assert now() == began_s
        assert isinstance(await rig.fails(), CircuitOpenError)
        await asyncio.sleep(2.1)
        assert rig.state() == "closed"
        probe = rig["a"].requests[-1].body
        assert (probe["max_tokens"], probe["messages"]) == (1, [{"role": "user", "content": "Hi"}])
        rig["a"].then(says("back"))
        assert await rig.ask() == "back"

    with_endpoints(test, {"a": recorded.hangs})


def test_looking_at_the_health_begins_the_probe_too() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            await rig.fails()
        rig["a"].then(says("x"))
        await asyncio.sleep(5.1)
        assert rig.state() == "half_open"
        await asyncio.sleep(0.1)
        assert rig.state() == "closed"

    with_endpoints(test, {"a": recorded.hangs})


def test_a_probe_that_fails_doubles_the_pause() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            await rig.fails()
        n_asked = len(rig["a"].requests)
        rig["a"].then(DOWN)
        await asyncio.sleep(5.1)
        rig.models.health()
        await asyncio.sleep(6.0)
        assert rig.state() == "open"
        assert len(rig["a"].requests) == n_asked + 1
        await asyncio.sleep(5.0)
        assert rig.state() == "half_open"

    with_endpoints(test, {"a": recorded.hangs})


def test_no_request_waits_for_an_endpoint_that_may_work_again() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            assert await rig.ask() == "from b"
        for _ in range(40):
            began_s = now()
            assert await rig.ask(route="cloud") == "from b"
            assert now() - began_s < 0.1
            await asyncio.sleep(1.0)
        assert 4 <= len(rig["a"].requests) <= 9  # three requests and some probes

    with_endpoints(test, {"a": recorded.hangs, "b": says("from b")})


def test_slow_first_bytes_open_the_breaker_though_the_answers_are_good() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            assert await rig.ask() == "late"
        assert rig.state() == "open"

    with_endpoints(test, {"a": recorded.late(16.0, says("late"))})


@pytest.mark.parametrize(
    ("script", "opens"), [(status(400), False), (status(422), False), (status(401), True), (status(302, ""), True)]
)
def test_only_what_speaks_against_the_endpoint_counts(script: Script, opens: bool) -> None:
    async def test(rig: Rig) -> None:
        for _ in range(4):
            await rig.fails()
        assert rig.state() == ("open" if opens else "closed")

    with_endpoints(test, {"a": script})


def test_a_client_that_leaves_says_nothing_of_the_endpoint() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(5):
            async with aclosing(rig.models.generate(chat())) as answer:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(answer), 1.0)
        assert rig.state() == "closed"
        await asyncio.sleep(0.1)
        assert rig["a"].n_hung_up == 5

    with_endpoints(test, {"a": recorded.hangs})


def test_a_good_answer_forgives_failures() -> None:
    async def test(rig: Rig) -> None:
        rig["a"].then(DOWN, DOWN, says("x"), DOWN, DOWN, says("x"))
        for script in ("fails", "fails", "works", "fails", "fails", "works"):
            await (rig.ask() if script == "works" else rig.fails())
        assert rig.state() == "closed"

    with_endpoints(test, {"a": DOWN}, {"a": {"retry_share": 0.0}})


def test_many_at_once_share_an_outage() -> None:
    async def test(rig: Rig) -> None:
        errors = await asyncio.gather(*(rig.fails() for _ in range(20)))
        assert {type(error) for error in errors} == {CloudTimeoutError}
        assert rig.state() == "open"

    with_endpoints(test, {"a": recorded.hangs})


# What is measured, and what does not fit.


def test_speeds_are_measured_on_answers() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(4):
            await rig.ask()
        health = rig.models.health().best
        assert health is not None
        assert health.first_byte_p50_s == pytest.approx(1.0, abs=0.05)
        assert health.first_byte_p95_s == pytest.approx(1.0, abs=0.05)
        assert health.tokens_per_s == pytest.approx(2.0, abs=0.05)
        assert health.cost(1_000_000, 0) == 3.0

    script = recorded.late(1.0, recorded.slowly(0.5, "a", "b", "c"))
    with_endpoints(test, {"a": script}, {"a": {"price_in": 3.0}})


@pytest.mark.parametrize(
    ("script", "n_tokens"), [(says("x", usage=(12, 1)), (12, 1)), (recorded.cut_after("x"), (10, 1))]
)
def test_a_probe_costs_what_the_endpoint_counts_or_some_ten_tokens(script: Script, n_tokens: tuple[int, int]) -> None:
    async def test(rig: Rig) -> None:
        for _ in range(3):
            await rig.fails()
        rig["a"].then(script)
        await asyncio.sleep(5.1)
        rig.models.health()
        await asyncio.sleep(0.5)
        assert rig.state() == "closed"
        assert rig.models.take_unfinished_cost() == pytest.approx(1e-6 * (n_tokens[0] * 2.0 + n_tokens[1] * 10.0))

    with_endpoints(test, {"a": recorded.hangs}, {"a": {"price_in": 2.0, "price_out": 10.0}})


def test_an_answer_without_an_end_has_cost_something_too() -> None:
    async def test(rig: Rig) -> None:
        async with aclosing(rig.models.generate(chat("x" * 4000))) as answer:
            await anext(answer)
        assert rig.models.take_unfinished_cost() == pytest.approx(1e-6 * (1001 * 2.0 + 10.0))
        assert rig.models.take_unfinished_cost() == 0.0
        rig["a"].then(recorded.cut_after("a", "b"))
        with pytest.raises(CloudAnswerError):
            await rig.ask()
        assert rig.models.take_unfinished_cost() > 0
        rig["a"].then(says("x"))
        await rig.ask()
        assert rig.models.take_unfinished_cost() == 0.0

    script = recorded.never_ends(pause_s=1.0)
    with_endpoints(test, {"a": script}, {"a": {"price_in": 2.0, "price_out": 10.0}})


def test_a_prompt_goes_to_an_endpoint_that_holds_it() -> None:
    async def test(rig: Rig) -> None:
        assert await rig.ask(content="x" * 4000) == "from b"
        with pytest.raises(ContextLengthError):
            await rig.ask(content="x" * 40_000)

    with_endpoints(test, {"a": says("from a"), "b": says("from b")}, {"a": {"n_ctx": 500}, "b": {"n_ctx": 5000}})


def test_no_endpoint_is_an_open_circuit() -> None:
    async def main() -> None:
        models = CloudModels({}, Events())
        with pytest.raises(CircuitOpenError):
            await anext(models.generate(chat()))
        assert models.health().best is None

    virtual_time.run(main())


def test_memory_is_protected_where_there_is_a_key_and_only_there(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret")
    file.chmod(0o600)
    calls: list[int] = []

    async def main() -> None:
        for settings in ({}, {"api_key_file": str(file)}):
            endpoint = CloudEndpoint(base_url="unix:/nonexistent", model="m", **settings)
            events = Events()
            models = CloudModels({"a": endpoint}, events, protect=lambda: calls.append(1))
            assert events.states == ["closed"]
            await models.close()

    virtual_time.run(main())
    assert calls == [1]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_nothing_is_left_behind(seed: int) -> None:
    """Requests of all ends at once, clients that leave at any moment; then everything works and no task is left."""
    chance = random.Random(seed)
    scripts = [
        says("good"),
        recorded.late(3.0, says("late")),
        recorded.slowly(1.0, "a", "b", "c"),
        recorded.hangs,
        DOWN,
        status(429, headers={"retry-after": "1"}),
        status(503, headers={"retry-after": "9"}),
        recorded.cut_after("half"),
        recorded.cut_after(),
        recorded.never_ends(pause_s=0.5),
        recorded.pieces("data: {\n\n"),
        recorded.bytes_only("SSH-2.0-x\r\n"),
    ]

    async def request(rig: Rig) -> None:
        await asyncio.sleep(chance.uniform(0, 60))
        answer = rig.models.generate(chat(), due_at_s=now() + chance.choice([1.0, 10.0, 100.0]))
        try:
            async with asyncio.timeout(chance.choice([0.5, 5.0, 50.0])), aclosing(answer):
                async for _ in answer:
                    if chance.random() < 0.05:
                        break
        except (CloudError, DeadlineError, TimeoutError):
            pass

    async def test(rig: Rig) -> None:
        before = asyncio.all_tasks()
        for cloud in rig.clouds.values():
            cloud.then(*(chance.choice(scripts) for _ in range(200)), says("good"))
        await asyncio.gather(*(request(rig) for _ in range(100)))
        for cloud in rig.clouds.values():
            cloud.then(says("good"))
        for _ in range(2):  # a pause at its longest, and the probe after it
            await asyncio.sleep(30.0)
            rig.models.health()
        await asyncio.sleep(1.0)
        assert {one.state for one in rig.models.health().endpoints} == {"closed"}
        assert await rig.ask() == "good"
        pools = [endpoint.upstream._pool for endpoint in rig.models._endpoints]
        assert all(connection.is_idle() for pool in pools for connection in pool.connections)
        await rig.models.close()
        serving = {task for cloud in rig.clouds.values() for task in cloud._tasks}
        assert asyncio.all_tasks() - before - serving == set()

    with_endpoints(test, {"a": DOWN, "b": DOWN})


def test_an_endpoint_that_leaves_ends_what_it_has_begun_and_one_that_stays_keeps_its_record() -> None:
    async def test(rig: Rig) -> None:
        asking = asyncio.create_task(rig.ask())
        await asyncio.sleep(1.5)  # the first words are here
        commit = rig.models.prepare({"b": rig["b"].endpoint(priority=1)})
        assert [one.name for one in rig.models.health().endpoints] == ["a", "b"]
        commit()
        assert [one.name for one in rig.models.health().endpoints] == ["b"]
        assert await rig.ask() == "b"
        assert await asking == "a slow answer"
        n_requests = [one.n_requests for one in rig.models.health().endpoints]
        rig.models.prepare({"b": rig["b"].endpoint(priority=1)})()
        assert [one.n_requests for one in rig.models.health().endpoints] == n_requests == [1]
        rig.models.prepare({"b": rig["b"].endpoint(priority=1, price_in=9.0)})()
        assert [one.n_requests for one in rig.models.health().endpoints] == [0]

    with_endpoints(test, {"a": slowly(1.0, "a ", "slow ", "answer"), "b": says("b")})


def test_without_endpoints_nothing_is_asked_and_no_error_is_another() -> None:
    async def test(rig: Rig) -> None:
        rig.models.prepare({})()
        assert isinstance(await rig.fails(), CircuitOpenError)
        assert rig.models.health().best is None

    with_endpoints(test, {"a": says("a")})


def test_a_key_that_was_replaced_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first-key-of-all")
    key.chmod(0o600)

    async def test(rig: Rig) -> None:
        endpoints = {"a": rig["a"].endpoint(api_key_file=str(key))}
        rig.models.prepare(endpoints)()
        await rig.ask()
        key.write_text("two keys are one too many")
        with pytest.raises(ConfigError, match="must hold one key"):
            rig.models.prepare(endpoints)
        await rig.ask()  # with the last good one
        key.write_text("second-key-of-all")
        await rig.ask()
        rig.models.prepare(endpoints)()
        await rig.ask()
        sent = [asked.headers["authorization"] for asked in rig["a"].requests]
        assert sent == ["Bearer first-key-of-all"] * 2 + ["Bearer second-key-of-all"] * 2

    with_endpoints(test, {"a": says("a")})
