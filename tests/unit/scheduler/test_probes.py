from __future__ import annotations

import asyncio

from edge_rt.scheduler.placement import is_hot
from edge_rt.scheduler.probes import COST_FACTOR, WATCHED_S, Probes, cpu_state
from edge_rt.tensor_types import DeviceState
from tests import virtual_time

PROBE_S = 1.0


class Vendor:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.temp_c = 50.0

    async def probe(self, backend: str) -> tuple[DeviceState, ...]:
        self.calls.append(backend)
        await asyncio.sleep(PROBE_S)
        return (DeviceState(backend=backend, id="htp", kind="npu", temp_c=self.temp_c),)


def test_each_back_end_is_probed_once_and_the_cpu_never() -> None:
    async def main() -> None:
        vendor = Vendor()
        probes = Probes(probe=vendor.probe, host=lambda b: DeviceState(backend=b, id="cpu", kind="cpu"))
        await asyncio.gather(*(probes.ensure(["qnn", "onnx_cpu"]) for _ in range(5)))
        await probes.ensure(["qnn"])
        assert vendor.calls == ["qnn"]
        assert [state.place for state in probes.states(["qnn", "onnx_cpu"])] == ["qnn:htp", "onnx_cpu:cpu"]

    virtual_time.run(main())


def test_devices_are_read_again_while_they_are_asked_for_and_who_listens_hears_of_it() -> None:
    async def main() -> None:
        vendor, n_heard = Vendor(), 0

        def listener() -> None:
            nonlocal n_heard
            n_heard += 1

        probes = Probes(probe=vendor.probe, max_device_c=85.0, every_s=5.0)
        probes.listen(listener)
        await probes.ensure(["qnn"])
        assert probes.states(["qnn"])[0].temp_c == 50.0
        vendor.temp_c = 91.0
        await asyncio.sleep(10.0)
        assert n_heard == 2, "nobody has asked meanwhile"
        (state,) = probes.states(["qnn"])
        assert (state.temp_c, state.is_hot) == (91.0, True)

    virtual_time.run(main())


def test_a_probe_takes_a_twentieth_of_the_time_and_none_when_nobody_asks() -> None:
    async def main() -> None:
        vendor = Vendor()
        probes = Probes(probe=vendor.probe, every_s=5.0)
        await probes.ensure(["qnn"])
        for _ in range(100):
            probes.states(["qnn"])
            await asyncio.sleep(2.0)
        n_calls = len(vendor.calls)
        assert 200.0 / (COST_FACTOR * PROBE_S + 6.5) <= n_calls <= 200.0 / (COST_FACTOR * PROBE_S) + 2
        await asyncio.sleep(10 * WATCHED_S)
        assert len(vendor.calls) <= n_calls + WATCHED_S / (COST_FACTOR * PROBE_S)
        probes.states(["qnn"])
        await asyncio.sleep(PROBE_S + 0.1)
        assert len(vendor.calls) > n_calls, "an old reading is renewed at once"

    virtual_time.run(main())


def test_the_cpu_is_read_no_more_often_than_every_so_many_seconds() -> None:
    async def main() -> None:
        temps_c = iter((84.0, 86.0, 82.0, 79.0))
        read: list[float] = []

        def host(backend: str) -> DeviceState:
            read.append(next(temps_c))
            return DeviceState(backend=backend, id="cpu", kind="cpu", temp_c=read[-1])

        probes = Probes(host=host, max_device_c=85.0, cool_by_c=5.0, every_s=5.0)
        hot: list[bool] = []
        for _ in range(8):
            hot.append(probes.states(["onnx_cpu"])[0].is_hot)
            await asyncio.sleep(2.5)
        assert read == [84.0, 86.0, 82.0, 79.0]
        assert hot == [False, False, True, True, True, True, False, False], "82 °C is not cool enough"
        await probes.close()

    virtual_time.run(main())


def test_heat_is_left_with_a_margin() -> None:
    limits = {"max_device_c": 85.0, "cool_by_c": 5.0}
    assert [is_hot(t, was_hot=False, **limits) for t in (None, 79.0, 84.9, 85.0)] == [False, False, False, True]
    assert [is_hot(t, was_hot=True, **limits) for t in (None, 79.9, 80.0, 84.9)] == [False, False, True, True]


def test_close_ends_what_is_under_way() -> None:
    async def main() -> None:
        probes = Probes(probe=Vendor().probe)
        waiting = asyncio.create_task(probes.ensure(["qnn"]))
        await asyncio.sleep(0.5)
        await probes.close()
        await waiting
        assert probes.states([]) == ()

    virtual_time.run(main())


def test_the_cpu_describes_itself() -> None:
    state = cpu_state("onnx_cpu")
    assert (state.place, state.kind, state.fault) == ("onnx_cpu:cpu", "cpu", "")
    assert state.free_bytes is None or state.free_bytes > 0
