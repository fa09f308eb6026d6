"""Real worker processes with the null back end's tensor model: joined, killed, aborted, cancelled, shut down."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_rt.engine.arrays import to_array, to_tensor
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError, WorkerLostError
from edge_rt.runtime import Runtime
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import MediaRequest, TensorAnswer, TensorRequest
from edge_rt.types import EngineStats, GenerateRequest
from tests.process_signals import stop
from tests.system.test_workers import configured, pid_of, restarts, run, until
from tests.unit.engine.tensor_sessions import STATEFUL, alone, rows

MANIFEST = """
id = "{id}"
name = "for tests"
license = "MIT"
kind = "tensor"
n_params = 1
{more}

[[variants]]
id = "fp32"
quant = "FP32"
file = "model.onnx"
source = "pypi:nothing==1.0#model.onnx"
size_bytes = 1
sha256 = "{sha256}"
"""
STATE = '[[state]]\ninput = "s"\noutput = "t"\nshape = [1, 8]\n'
BATCHING = "[batching]\nmax_batch = 8\nmax_delay_s = 0.005\n"


def running(store_dir: Path, tmp_path: Path, **flags: Any) -> AbstractAsyncContextManager[tuple[Runtime, Telemetry]]:
    for model, more in (("plain", BATCHING), ("slow", BATCHING), ("stateful", STATE)):
        text = MANIFEST.format(id=model, more=more, sha256="0" * 64)
        (tmp_path / f"{model}.toml").write_text(text, encoding="utf-8")
    settings = {
        "catalog.manifest_dirs": [str(tmp_path)],
        "models.plain.backend": "null",
        "models.slow.backend": "null",
        "models.slow.variant": "run_s=0.3",
        "models.stateful.backend": "null",
        "models.stateful.variant": STATEFUL,
    }
    return configured(store_dir, settings | flags)


def request(model: str, value: float, **fields: Any) -> TensorRequest:
    return TensorRequest(id=f"{value}", model=model, inputs=(to_tensor("x", rows(value)),), **fields)


def y(answer: TensorAnswer) -> list[float]:
    (found,) = [to_array(tensor) for tensor in answer.outputs if tensor.name == "y"]
    values: list[float] = found[0].tolist()
    return values


def expected(value: float) -> list[float]:
    values: list[float] = alone("", {"x": rows(value)})["y"][0].tolist()
    return values


def engine_of(runtime: Runtime, model: str) -> EngineStats:
    engine = runtime.model(model).engine
    assert engine is not None
    return engine


def test_many_at_once_are_joined_and_each_gets_its_own(store_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(store_dir, tmp_path) as (runtime, _):
            answers = await asyncio.gather(*(runtime.infer(request("slow", i)) for i in range(8)))
            assert [y(answer) for answer in answers] == [expected(i) for i in range(8)]
            assert max(answer.timings.batch_size for answer in answers) > 1
            assert {answer.place for answer in answers} == {"null:null"}
            info = runtime.model("slow").tensor
            assert info is not None
            assert (info.max_batch, info.is_stateful) == (8, False)

    run(main())


def test_bad_requests_are_refused_with_words_and_cost_no_worker(store_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(store_dir, tmp_path) as (runtime, telemetry):
            wrong = TensorRequest(id="w", model="plain", inputs=(to_tensor("x", np.zeros((1, 3), np.float32)),))
            with pytest.raises(InvalidRequestError, match="shape"):
                await runtime.infer(wrong)
            with pytest.raises(UnsupportedFeatureError, match="no pipeline"):
                await runtime.look(MediaRequest(id="m", model="plain", data=b"picture"))
            with pytest.raises(UnsupportedFeatureError, match="tensor model"):
                await anext(runtime.generate(GenerateRequest(id="g", model="plain", prompt="x")))
            assert y(await runtime.infer(request("plain", 1))) == expected(1)
            assert restarts(telemetry, "plain") == 0.0

    run(main())


def test_a_worker_killed_in_the_middle_is_asked_again(store_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(store_dir, tmp_path) as (runtime, telemetry):
            await runtime.load("slow")
            killed_pid = pid_of(runtime, "slow")
            asked = [asyncio.create_task(runtime.infer(request("slow", i))) for i in range(3)]
            await until(lambda: runtime.model("slow").running == 3)
            await asyncio.sleep(0.05)
            os.kill(killed_pid, signal.SIGKILL)
            assert [y(answer) for answer in await asyncio.gather(*asked)] == [expected(i) for i in range(3)]
            assert restarts(telemetry, "slow") == 1.0
            assert pid_of(runtime, "slow") != killed_pid

    run(main())


def test_a_streams_request_in_a_killed_worker_fails_and_the_loss_of_its_state_shows(
    store_dir: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with running(store_dir, tmp_path) as (runtime, _):
            first = await runtime.infer(request("stateful", 1, stream="s"))
            second = await runtime.infer(request("stateful", 2, stream="s"))
            assert (first.n_stream_calls, second.n_stream_calls) == (1, 2)
            stop(pid := pid_of(runtime, "stateful"))
            asked = asyncio.create_task(runtime.infer(request("stateful", 3, stream="s")))
            await until(lambda: runtime.model("stateful").running == 1)
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerLostError):
                await asked
            again = await runtime.infer(request("stateful", 2, stream="s"))
            assert again.n_stream_calls == 1
            assert y(again) != y(second)

    run(main())


def test_a_model_whose_driver_aborts_each_time_fails_its_request_only(store_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        flags = {"models.slow.variant": "abort_after=2"}  # the warm-up takes two runs
        async with running(store_dir, tmp_path, **flags) as (runtime, telemetry):
            with pytest.raises(WorkerLostError, match="SIGABRT"):
                await runtime.infer(request("slow", 1))
            assert restarts(telemetry, "slow") == 2.0
            assert y(await runtime.infer(request("plain", 1))) == expected(1)

    run(main())


def test_a_hung_run_is_killed(store_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        flags = {"models.slow.variant": "hang_after=2", "worker.step_timeout_s": 0.5}
        async with running(store_dir, tmp_path, **flags) as (runtime, _):
            with pytest.raises(WorkerLostError, match="no progress"):
                await runtime.infer(request("slow", 1))

    run(main())


def test_leaving_takes_a_waiting_request_out_of_the_queue(store_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        flags = {"tensor.max_batch": 1}
        async with running(store_dir, tmp_path, **flags) as (runtime, telemetry):
            await runtime.load("slow")
            first = asyncio.create_task(runtime.infer(request("slow", 1)))
            await until(lambda: runtime.model("slow").running == 1)
            leaves = asyncio.create_task(runtime.infer(request("slow", 2)))
            await until(lambda: runtime.model("slow").running == 2)
            await asyncio.sleep(0.05)
            leaves.cancel()
            assert y(await first) == expected(1)
            await until(lambda: telemetry.registry.get_sample_value("edge_rt_cancelled_total", {"model": "slow"}))
            assert engine_of(runtime, "slow").steps_total == 1

    run(main())


def test_close_lets_a_running_request_finish(store_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(store_dir, tmp_path) as (runtime, _):
            await runtime.load("slow")
            asked = asyncio.create_task(runtime.infer(request("slow", 1)))
            await until(lambda: runtime.model("slow").running == 1)
            await asyncio.sleep(0.05)
            await runtime.close(5.0)
            assert y(await asked) == expected(1)

    run(main())
