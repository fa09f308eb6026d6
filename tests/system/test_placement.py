"""Requests over several null devices, each a worker process of its own: failing, wrong, killed and busy ones."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil

from edge_rt.runtime import Runtime
from edge_rt.scheduler.places import PlaceStatus
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import TensorRequest
from tests.process_signals import stop
from tests.system.test_tensor_workers import expected, request, y
from tests.system.test_workers import configured, run

# A worker's warm-up takes the first two runs of a script. FAST takes so little power that it is the better one also
# where this machine makes it slow.
RIGHT, FAST = "run_s=0.04,power_w=8", "run_s=0.002,power_w=0.01"


def running(tmp_path: Path, *scripts: str, **flags: Any) -> AbstractAsyncContextManager[tuple[Runtime, Telemetry]]:
    settings = {
        "models.trio.backend": "null",
        "models.trio.variant": " | ".join(scripts),
        "placement.n_checked": 2,
    }
    return configured(tmp_path / "store", settings | flags)


def of(model: str, value: float) -> TensorRequest:
    return request(model, value)


async def ask(runtime: Runtime, value: float) -> str:
    answer = await runtime.infer(of("trio", value))
    assert y(answer) == expected(value)
    return answer.place


async def place(runtime: Runtime, device: str) -> PlaceStatus:
    return next(p for p in (await runtime.placement("trio")).places if p.place == f"null:{device}")


def test_a_device_that_begins_to_fail_is_left_and_no_request_notices(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, RIGHT, f"{FAST},fail_after=6", **{"placement.max_failures": 2}) as (runtime, _):
            places = [await ask(runtime, value) for value in range(8)]
            assert places == ["null:null1"] * 4 + ["null:null0"] * 4
            assert (await place(runtime, "null1")).state == "open"
            status = runtime.model("trio")
            assert status.state == "ready"
            assert status.tensor is not None

    run(main())


def test_a_device_that_answers_wrongly_is_out_and_the_client_gets_the_right_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, RIGHT, f"{FAST},wrong_after=3") as (runtime, telemetry):
            assert [await ask(runtime, value) for value in range(3)] == ["null:null1", "null:null0", "null:null0"]
            wrong = await place(runtime, "null1")
            assert wrong.state == "wrong"
            assert wrong.wrong.startswith("y: ")
            assert b"edge_rt_place_wrong_total" in telemetry.exposition()

    run(main())


def test_a_worker_that_dies_again_and_again_costs_no_request(tmp_path: Path) -> None:
    async def main() -> None:
        script = f"{FAST},abort_after=2"
        async with running(tmp_path, RIGHT, script, **{"placement.max_failures": 1}) as (runtime, _):
            assert [await ask(runtime, value) for value in range(2)] == ["null:null0"] * 2
            assert (await place(runtime, "null1")).state == "open"

    run(main())


def test_a_burst_spills_over_to_a_device_that_is_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        flags = {"placement.policy": "latency", "placement.n_checked": 0, "models.trio.n_parallel": 100}
        async with running(tmp_path, "run_s=0.06", "run_s=0.05", **flags) as (runtime, _):
            await ask(runtime, 0)
            assert sorted(p.load for p in (await runtime.placement("trio")).places) == ["ready", "unloaded"]
            stop(runtime.model("trio").pid or 0)  # it only looks busy
            try:
                waiting = [asyncio.create_task(ask(runtime, value)) for value in range(1, 80)]
                while not any(task.done() for task in waiting):  # noqa: ASYNC110 - the first that spilled over is one
                    await asyncio.sleep(0.02)
            finally:
                for child in psutil.Process().children():
                    child.send_signal(signal.SIGCONT)
            places = await asyncio.gather(*waiting)
            assert set(places) == {"null:null0", "null:null1"}

    run(main())
