"""The driver against small ASGI daemons; tests/system drives the real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from edge_rt.bench.serving import Driver, ServeCase, ServeResult, table
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.errors import ModelNotFoundError
from tests.fakes import FakeClock

Answer = Callable[[dict[str, Any], int], Response]


class FakeDaemon:
    """Answers /tokenize with ten ids and every completion by `answer`, and keeps the bodies."""

    def __init__(self, clock: FakeClock, answer: Answer | None = None) -> None:
        self.clock, self.answer = clock, answer or self.whole
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.app = Starlette(
            routes=[
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _tokenize(self, request: Request) -> Response:
        if (await request.json())["model"] == "nope":
            details = {"model": "nope", "known": ["m"]}
            error = {"message": "no", "type": "x", "param": "model", "code": "model_not_found", "details": details}
            return JSONResponse({"error": error}, status_code=404)
        return JSONResponse({"tokens": list(range(100, 110))})

    async def _complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.clock.advance(0.5)
        return self.answer(self.bodies[-1], len(self.bodies))

    def events(self, body: dict[str, Any], *, finish: bool = True) -> list[dict[str, Any]]:
        n = body["max_tokens"]
        chunks = [{"choices": [{"text": "x", "finish_reason": None}]} for _ in range(n)]
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": n,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        timings = {"draft_n": 2 * n, "draft_n_accepted": n} if body["speculative.n_max"] else {}
        if finish:
            chunks += [
                {"choices": [{"text": "", "finish_reason": "length"}]},
                {"choices": [], "usage": usage, "timings": timings},
            ]
        return chunks

    def whole(self, body: dict[str, Any], _number: int) -> Response:
        return self.stream(self.events(body))

    @staticmethod
    def stream(events: list[dict[str, Any]]) -> Response:
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return StreamingResponse(iter([text]), media_type="text/event-stream")


class FakeMetering:
    def __init__(self, spent_j: Reading[float] | None) -> None:
        self._spent_j = spent_j or unknown("/sys/class/powercap", "no counter")

    def mark(self) -> float:
        return 7.0

    def joules_since(self, mark: float) -> Reading[float]:
        assert mark == 7.0
        return self._spent_j


def _drive(
    daemon: FakeDaemon,
    case: ServeCase,
    energy: Reading[float] | None = None,
) -> ServeResult:
    async def run() -> ServeResult:
        transport = httpx2.ASGITransport(app=daemon.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://edge_rt") as client:
            driver = Driver(client, metering=FakeMetering(energy), clock=daemon.clock)
            await driver.prepare(case.model)
            return await driver.run(case)

    return asyncio.run(run())


def _case(**changes: Any) -> ServeCase:
    return ServeCase(**({"model": "m", "n_streams": 1, "n_requests": 4, "n_prompt": 6, "n_gen": 3} | changes))


def test_requests_are_greedy_streams_of_exact_length_with_new_prompts(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock)
    record = _drive(daemon, _case()).record()
    body = daemon.bodies[0]
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert body["speculative.n_max"] == 0
    assert body["max_tokens"] == 3
    assert all(len(b["prompt"]) == 6 and set(b["prompt"]) <= set(range(100, 110)) for b in daemon.bodies)
    assert len({tuple(b["prompt"]) for b in daemon.bodies}) == 4
    assert (record["n_done"], record["n_errors"]) == (4, 0)
    assert (record["prompt_tokens"], record["cached_tokens"], record["completion_tokens"]) == (24, 4, 12)
    assert record["elapsed_s"] == 2.0
    assert record["completion_tps"] == 6.0
    assert record["prompt_tps"] == 10.0
    assert record["requests_per_s"] == 2.0
    assert record["latency_p50_s"] == 0.5
    assert record["ttft_p99_s"] == 0.5


def test_no_more_than_n_streams_run_at_once(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock)
    record = _drive(daemon, _case(n_streams=3, n_requests=10)).record()
    assert record["n_done"] == 10
    assert daemon.most_running == 3


def test_with_a_rate_a_waiting_requests_latency_counts_its_wait(clock: FakeClock) -> None:
    """One client, answers of 0.5 s, arrivals practically at once: the second waits for the first, and so on."""
    record = _drive(FakeDaemon(clock), _case(rate_hz=10_000.0, n_requests=3)).record()
    assert record["latency_p50_s"] == pytest.approx(1.0, abs=0.01)
    assert record["latency_p99_s"] == pytest.approx(1.5, abs=0.02)


def test_a_refusal_is_counted_by_its_code(clock: FakeClock) -> None:
    def answer(body: dict[str, Any], number: int) -> Response:
        if number % 2:
            error = {"message": "busy", "type": "rate_limit_error", "param": None, "code": "queue_full"}
            error |= {"details": {"waiting": 1, "limit": 1, "retry_after_s": 1.0}}
            return JSONResponse({"error": error}, status_code=429)
        return daemon.whole(body, number)

    daemon = FakeDaemon(clock, answer)
    record = _drive(daemon, _case()).record()
    assert (record["n_done"], record["n_errors"]) == (2, 2)
    assert record["errors"] == {"queue_full": 2}


def test_an_error_in_the_stream_and_a_stream_that_just_ends_are_errors(clock: FakeClock) -> None:
    def answer(body: dict[str, Any], number: int) -> Response:
        events = daemon.events(body, finish=False)
        if number == 1:
            error = {"message": "x", "code": "worker_lost", "details": {"model": "m", "reason": "SIGKILL"}}
            events.append({"error": error})
        return daemon.stream(events)

    daemon = FakeDaemon(clock, answer)
    record = _drive(daemon, _case(n_requests=2)).record()
    assert record["errors"] == {"worker_lost": 1, "answer ended early": 1}
    assert record["completion_tokens"] == 0
    assert record["ttft_p50_s"] is None
    assert record["joules_per_token"] is None


def test_a_connection_that_breaks_is_an_error(clock: FakeClock) -> None:
    class Broken(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            if request.url.path == "/tokenize":
                return httpx2.Response(200, json={"tokens": [1]})
            raise httpx2.ReadError("gone")

    async def run() -> ServeResult:
        async with httpx2.AsyncClient(transport=Broken(), base_url="http://edge_rt") as client:
            driver = Driver(client, metering=FakeMetering(None), clock=clock)
            await driver.prepare("m")
            return await driver.run(_case(n_requests=2))

    assert asyncio.run(run()).record()["errors"] == {"ReadError": 2}


def test_an_unknown_model_is_the_daemons_own_error(clock: FakeClock) -> None:
    with pytest.raises(ModelNotFoundError):
        _drive(FakeDaemon(clock), _case(model="nope"))


def test_guesses_are_made_where_they_are_asked_for(clock: FakeClock) -> None:
    daemon = FakeDaemon(clock)
    without, result = _drive(daemon, _case()), _drive(daemon, _case(max_draft=8))
    assert [body["speculative.n_max"] for body in daemon.bodies] == [0] * 4 + [8] * 4
    record = result.record()
    assert (record["draft_n"], record["draft_n_accepted"]) == (24, 12)
    assert "| guesses right |" in table([result])
    assert "12 of 24 |" in table([result])
    assert "guesses" not in table([without])


def test_energy_is_what_was_spent_in_between(clock: FakeClock) -> None:
    record = _drive(FakeDaemon(clock), _case(), known(12.0, "rapl")).record()
    assert record["energy_j"] == 12.0
    assert record["avg_watts"] == 6.0
    assert record["joules_per_token"] == 1.0
    assert record["energy_reason"] == ""


def test_the_table(clock: FakeClock) -> None:
    def answer(body: dict[str, Any], number: int) -> Response:
        return daemon.stream(daemon.events(body, finish=number != 2))

    daemon = FakeDaemon(clock, answer)
    text = table([_drive(daemon, _case(n_gen=1))])
    lines = text.splitlines()
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[0].startswith("| model | streams | requests | errors | prompt | gen |  t/s | req/s |")
    assert lines[2].startswith("|     m |       1 |        4 |      1 |      6 |   1 | 1.50 |  1.50 |")
    assert "| 500.00 / 500.00 / 500.00 |" in lines[2]
    assert lines[4:] == ["error answer ended early: 1", "J/token: /sys/class/powercap: no counter"]
