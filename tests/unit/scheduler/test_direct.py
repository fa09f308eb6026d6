"""Requests that go straight to a model's only place, on simulated devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from edge_rt.errors import BackendStepError, EdgeRtError, InvalidRequestError, ShuttingDownError, WorkerLostError
from edge_rt.scheduler.direct import Held
from edge_rt.scheduler.dispatcher import Dispatcher
from edge_rt.scheduler.placed_model import REPLAN_S
from edge_rt.scheduler.queue import Admission, Queue
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import Reply, TensorAnswer, TensorRequest
from tests import virtual_time
from tests.null_devices import Device, World, lost, request
from tests.unit.scheduler.test_dispatcher import ask, cpu, metric, npu

End = TensorAnswer | EdgeRtError | TensorRequest


class Front:
    """A dispatcher whose places are ranked and loaded, and a queue before it."""

    def __init__(self, *devices: Device, max_running: int = 4) -> None:
        self.world = World(devices)
        self.telemetry = Telemetry()
        self.dispatcher: Dispatcher = self.world.dispatcher(self.telemetry, n_checked=0)
        self.queue = Queue(Admission(max_running=max_running, max_waiting=4), lambda running, waiting: None)

    async def begin(self, number: int = 1, **fields: Any) -> tuple[Callable[[], None] | None, asyncio.Future[End]]:
        """Ask without a task; give what drops the request, and its end."""
        asked, end = replace(request(number), **fields), asyncio.get_running_loop().create_future()
        place = self.dispatcher.direct_place(asked)
        ticket = self.queue.enter_now("t") if place is not None else None
        if place is None or ticket is None:
            return None, end
        held = Held(self.queue, ticket, end.set_result)
        return held.begin(partial(self.dispatcher.begin_direct, place, asked)), end

    @property
    def place(self) -> str:
        return self.dispatcher.slots("m")[0]

    def is_free(self) -> bool:
        """Nothing is held any more."""
        n_open = self.dispatcher._models["m"].order[0].n_open
        return not n_open and not self.queue.n_running and not self.dispatcher._residency.slot(self.place).n_leases


def test_an_answer_is_told_from_and_counted_as_the_dispatchers_own() -> None:
    async def main() -> None:
        front = Front(cpu())
        assert (await front.begin())[0] is None  # nothing is ranked yet
        await ask(front.dispatcher, 0)
        drop, end = await front.begin(7)
        assert drop is not None
        assert not front.is_free()
        answer = await end
        assert isinstance(answer, TensorAnswer)
        assert (answer.place, answer.variant) == ("sim:cpu", "v")
        assert answer.outputs[0].data[:4] == request(7).inputs[0].data
        assert metric(front.telemetry, "requests_total", "cpu") == 2
        assert metric(front.telemetry, "batches_total", "cpu") == 2
        assert metric(front.telemetry, "duration_seconds_count", "cpu") == 2
        assert front.is_free()
        (status,) = (await front.dispatcher.status("m")).places
        assert (status.n_answered, status.latency_s) == (2, pytest.approx(0.05))

    virtual_time.run(main())


def test_what_the_cpu_has_answered_in_a_devices_place_is_counted_as_the_cpus() -> None:
    async def main() -> None:
        front = Front(npu(stand_in="onnx_cpu:cpu"))
        assert (await ask(front.dispatcher, 0)).place == "onnx_cpu:cpu"
        assert (await ask(front.dispatcher, 1, stream="s")).place == "onnx_cpu:cpu"
        assert (await ask(front.dispatcher, 2, stream="s")).place == "onnx_cpu:cpu"
        drop, end = await front.begin(7)
        assert drop is not None
        answer = await end
        assert isinstance(answer, TensorAnswer)
        assert answer.place == "onnx_cpu:cpu"
        for name in ("requests_total", "batches_total", "duration_seconds_count"):
            assert metric(front.telemetry, name, "npu") == 0
            labels = {"model": "m", "place": "v on onnx_cpu:cpu"}
            assert front.telemetry.registry.get_sample_value(f"edge_rt_place_{name}", labels) == 4
        (status,) = (await front.dispatcher.status("m")).places
        assert status.n_answered == 0, "nothing of its speed is known"

    virtual_time.run(main())


@pytest.mark.parametrize(("place", "variant"), [("sim:cpu", "v"), ("sim:npu", "v"), ("sim:cpu", "w")])
def test_a_worker_may_write_only_what_its_place_would_be_told_of(place: str, variant: str) -> None:
    async def main() -> None:
        front = Front(cpu())
        await ask(front.dispatcher, 0)
        reply = Reply(loan=cast("Any", None), head=b"", outputs=(), place=place, variant=variant)
        _, end = await front.begin(7, reply=reply)
        assert isinstance(await end, TensorAnswer)
        assert front.world.replies == [reply if (place, variant) == ("sim:cpu", "v") else None]

    virtual_time.run(main())


def test_what_would_wait_or_choose_is_not_asked_so() -> None:
    async def main() -> None:
        front = Front(cpu(), max_running=1)
        await ask(front.dispatcher, 0)
        assert (await front.begin(stream="s"))[0] is None
        assert (await front.begin(variant="v"))[0] is None
        drop, end = await front.begin(1)
        assert drop is not None
        assert (await front.begin(2))[0] is None  # it would wait behind the first
        await end
        await asyncio.sleep(REPLAN_S)
        assert (await front.begin(3))[0] is None  # the ranking is old
        await ask(front.dispatcher, 4)
        held = front.queue.enter_now("t")
        assert held is not None
        assert (await front.begin(5))[0] is None  # the queue is full
        front.queue.leave(held, None)
        await front.dispatcher.unload("m")
        assert (await front.begin(6))[0] is None  # it would have to be loaded
        assert not front.queue.n_running
        two = Front(cpu(), npu())
        await ask(two.dispatcher, 0)
        assert (await two.begin(1))[0] is None

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("error", "n_failures"),
    [(BackendStepError("x"), 1), (InvalidRequestError("p", "x"), 0), (ShuttingDownError(), 0)],
    ids=["the device's", "the request's", "nobody's"],
)
def test_an_error_is_told_and_charged_as_by_the_dispatcher(error: EdgeRtError, n_failures: int) -> None:
    async def main() -> None:
        front = Front(cpu(faults=((1.0, 1e9),), error=lambda: error))
        await ask(front.dispatcher, 0)
        await asyncio.sleep(1.0)
        _, end = await front.begin()
        assert await end is error
        assert metric(front.telemetry, "failures_total", "cpu") == n_failures
        assert metric(front.telemetry, "requests_total", "cpu") == 1
        assert front.is_free()
        assert [p.state for p in (await front.dispatcher.status("m")).places] == ["closed"]

    virtual_time.run(main())


def test_a_request_whose_worker_died_is_given_back_to_be_asked_alone() -> None:
    async def main() -> None:
        front = Front(cpu(faults=((1.0, 1e9),), error=lost))
        await ask(front.dispatcher, 0)
        await asyncio.sleep(1.0)
        _, end = await front.begin(3)
        again = await end
        assert isinstance(again, TensorRequest)
        assert again.is_suspect
        assert again.inputs == request(3).inputs
        assert front.is_free()
        assert isinstance(lost(), WorkerLostError)

    virtual_time.run(main())


def test_a_client_that_leaves_frees_everything() -> None:
    async def main() -> None:
        front = Front(cpu())
        await ask(front.dispatcher, 0)
        drop, end = await front.begin()
        assert drop is not None
        drop()
        assert front.is_free()
        await asyncio.sleep(1.0)
        assert not end.done()
        assert metric(front.telemetry, "requests_total", "cpu") == 1
        assert (await front.begin())[0] is not None  # the next one is asked as before

    virtual_time.run(main())
