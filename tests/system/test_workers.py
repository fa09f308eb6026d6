"""Real worker processes with the null back end: killed, aborted, hung, cancelled, unloaded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from edge_rt import config
from edge_rt.catalog.store import Store
from edge_rt.errors import BackendLoadError, ShuttingDownError, WorkerLostError
from edge_rt.runtime import Runtime
from edge_rt.telemetry import Telemetry
from edge_rt.types import Chunk, GenerateRequest, Message
from tests.patience import PATIENCE_S
from tests.process_signals import stop

T = TypeVar("T")

SLOW = "step_s=0.02"


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(limited())


def running(store_dir: Path, **flags: Any) -> AbstractAsyncContextManager[tuple[Runtime, Telemetry]]:
    settings = {"models.null.backend": "null", "models.slow.backend": "null", "models.slow.variant": SLOW}
    return configured(store_dir, settings | {k.replace("__", "."): v for k, v in flags.items()})


@asynccontextmanager
async def configured(store_dir: Path, flags: Mapping[str, Any]) -> AsyncGenerator[tuple[Runtime, Telemetry], None]:
    """Run a runtime with these settings; it leaves no process behind."""
    before = psutil.Process().children()
    flags = {"catalog.store_dir": str(store_dir), **flags}
    loaded = config.load(environ={}, flags=flags, system_file=store_dir / "none")
    telemetry = Telemetry()
    runtime = Runtime(loaded, Store.open(loaded.config.catalog, {}), telemetry)
    await runtime.start()
    try:
        yield runtime, telemetry
    finally:
        await runtime.close(0.0)
        assert set(psutil.Process().children()) <= set(before)


def chat(text: str, *, model: str = "null", request_id: str = "r", **fields: Any) -> GenerateRequest:
    return GenerateRequest(id=request_id, model=model, messages=(Message(role="user", content=text),), **fields)


def endless(model: str = "slow", **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="endless", model=model, prompt="go on", ignore_eos=True, **fields)


async def answer(runtime: Runtime, request: GenerateRequest) -> str:
    return "".join([chunk.text async for chunk in runtime.generate(request)])


def pid_of(runtime: Runtime, model: str) -> int:
    pid = runtime.model(model).pid
    assert pid is not None
    return pid


def restarts(telemetry: Telemetry, model: str) -> float:
    return telemetry.registry.get_sample_value("edge_rt_worker_restarts_total", {"model": model}) or 0.0


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - another process decides
        await asyncio.sleep(0.02)


def test_a_real_worker_answers_many_at_once_each_its_own(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir) as (runtime, _):
            nonces = [f"grüße {i} 🎈" for i in range(24)]
            answers = await asyncio.gather(
                *(answer(runtime, chat(nonce, request_id=f"r{i}")) for i, nonce in enumerate(nonces))
            )
            assert answers == nonces
            assert await runtime.tokenize("null", "ab", special=False, add_bos=False) == [97, 98]
            assert await runtime.detokenize("null", [97, 98]) == "ab"

    run(main())


def test_kill_in_mid_stream_fails_that_stream_restarts_and_leaves_other_models_alone(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir) as (runtime, telemetry):
            await runtime.load("null")
            neighbour_pid = pid_of(runtime, "null")
            async with aclosing(runtime.generate(endless())) as chunks:
                await anext(chunks)
                killed_pid = pid_of(runtime, "slow")
                os.kill(killed_pid, signal.SIGKILL)
                with pytest.raises(WorkerLostError, match="SIGKILL"):
                    async for _ in chunks:
                        pass
            assert await answer(runtime, chat("still here")) == "still here"
            assert await answer(runtime, chat("back", model="slow")) == "back"
            assert pid_of(runtime, "slow") != killed_pid
            assert pid_of(runtime, "null") == neighbour_pid
            assert (restarts(telemetry, "slow"), restarts(telemetry, "null")) == (1.0, 0.0)

    run(main())


def test_a_request_whose_worker_dies_before_its_first_byte_is_answered_all_the_same(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir) as (runtime, telemetry):
            await runtime.load("null")
            pid = pid_of(runtime, "null")
            stop(pid)  # so that it is asked, and cannot answer
            asked = asyncio.create_task(answer(runtime, chat("twice")))
            await until(lambda: runtime.model("null").running == 1)
            await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            assert await asked == "twice"
            assert restarts(telemetry, "null") == 1.0

    run(main())


def test_a_poison_request_is_tried_twice_and_its_neighbours_survive(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir) as (runtime, telemetry):
            poison = GenerateRequest(id="p", model="null", prompt="<|abort|>")
            with pytest.raises(WorkerLostError, match="SIGABRT"):
                await answer(runtime, poison)
            assert await answer(runtime, chat("well")) == "well"
            assert restarts(telemetry, "null") == 2.0

    run(main())


def test_a_hung_worker_is_killed_and_replaced(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir, worker__step_timeout_s=0.5) as (runtime, _):
            await runtime.load("null")
            pid = pid_of(runtime, "null")
            with pytest.raises(WorkerLostError, match="no progress"):
                await answer(runtime, GenerateRequest(id="h", model="null", prompt="<|hang|>"))
            assert not psutil.pid_exists(pid)
            assert await answer(runtime, chat("again")) == "again"

    run(main())


def test_leaving_stops_the_engine_within_a_token_or_so(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir, engine__stream_interval_s=0.0) as (runtime, telemetry):
            seen = 0
            async with aclosing(runtime.generate(endless())) as chunks:
                async for chunk in chunks:
                    seen += len(chunk.token_ids)
                    if seen >= 5:
                        break
            # The last figures of a busy worker come when nothing runs any more.
            await until(lambda: (e := runtime.model("slow").engine) and e.cancelled_total == 1 and not e.running)
            engine = runtime.model("slow").engine
            assert engine is not None
            # One token may be under way when the client leaves, another while the message travels; the machine is slow.
            assert seen <= engine.completion_tokens_total <= seen + 10
            assert engine.rss_bytes > 0
            assert telemetry.registry.get_sample_value("edge_rt_cancelled_total", {"model": "slow"}) == 1.0

    run(main())


def test_unload_and_keep_alive_end_the_process(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir, models__null__keep_alive_s=0.2) as (runtime, _):
            await runtime.load("slow")
            pid = pid_of(runtime, "slow")
            await runtime.unload("slow")
            assert not psutil.pid_exists(pid)
            await runtime.load("null")
            pid = pid_of(runtime, "null")
            await until(lambda: runtime.model("null").state == "unloaded")
            assert not psutil.pid_exists(pid)
            assert await answer(runtime, chat("reloaded")) == "reloaded"

    run(main())


def test_two_models_with_room_for_one_take_turns_without_a_kill(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir, worker__max_loaded=1) as (runtime, telemetry):

            async def client(model: str) -> list[str]:
                return [await answer(runtime, chat(f"{model} {i}", model=model)) for i in range(2)]

            answers = await asyncio.gather(client("null"), client("slow"))
            assert answers == [["null 0", "null 1"], ["slow 0", "slow 1"]]
            assert restarts(telemetry, "null") == restarts(telemetry, "slow") == 0.0

    run(main())


def test_close_lets_a_running_answer_finish_and_cuts_off_an_endless_one(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir) as (runtime, _):

            async def collect(request: GenerateRequest, into: list[Chunk]) -> None:
                into.extend([chunk async for chunk in runtime.generate(request)])

            short: list[Chunk] = []
            finishes = asyncio.create_task(collect(chat("x" * 20, model="slow"), short))
            cut_off = asyncio.create_task(collect(endless(), []))
            await until(lambda: runtime.model("slow").running == 2 and runtime.model("slow").state == "ready")
            pid = pid_of(runtime, "slow")
            await runtime.close(3.0)
            await finishes
            assert short[-1].finish_reason == "stop"
            with pytest.raises(ShuttingDownError):
                await cut_off
            assert not psutil.pid_exists(pid)

    run(main())


def test_what_the_back_end_refuses_to_load_is_told_and_not_tried_again(store_dir: Path) -> None:
    async def main() -> None:
        async with running(store_dir, models__null__variant="step_s=soon") as (runtime, telemetry):
            with pytest.raises(BackendLoadError, match="'soon' is not a number"):
                await answer(runtime, chat("x"))
            assert restarts(telemetry, "null") == 0.0

    run(main())


PARENT = """
    import asyncio, sys
    from edge_rt import config
    from edge_rt.worker.channel import Load
    from edge_rt.worker.spawn import spawn
    from edge_rt.worker.process import Process

    async def main():
        load = Load(model="null", variant="", path="", quant="", backend="null", n_ctx=64)
        process = await Process.start(
            spawn, load, load_timeout_s=60.0, step_timeout_s=60.0, on_stats=lambda stats: None
        )
        print(process.pid, flush=True)
        sys.stdin.read()

    asyncio.run(main())
"""


def test_a_worker_dies_with_its_daemon() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running()
        os.kill(worker.pid, signal.SIGTERM)  # a service manager's signal is not for workers
        parent.kill()
        parent.wait(PATIENCE_S)
        psutil.wait_procs([worker], timeout=PATIENCE_S)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
