from __future__ import annotations

import asyncio

from edge_rt.scheduler.probes import HOT_AGE_S, MAX_AGE_S, Probes, cpu_state
from edge_rt.tensor_types import DeviceState
from tests import virtual_time

NPU = DeviceState(backend="qnn", id="htp", kind="npu", temp_c=50.0)


class Vendor:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.temp_c = 50.0

    async def probe(self, backend: str) -> tuple[DeviceState, ...]:
        self.calls.append(backend)
        await asyncio.sleep(1.0)
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


def test_an_old_state_is_given_at_once_and_looked_up_again_beside() -> None:
    async def main() -> None:
        vendor = Vendor()
        probes = Probes(probe=vendor.probe, max_device_c=85.0)
        await probes.ensure(["qnn"])
        vendor.temp_c = 91.0
        await asyncio.sleep(MAX_AGE_S)
        assert probes.states(["qnn"])[0].temp_c == 50.0
        assert probes.states(["qnn"])[0].temp_c == 50.0
        await asyncio.sleep(1.5)
        assert probes.states(["qnn"])[0].temp_c == 91.0
        assert vendor.calls == ["qnn", "qnn"]
        vendor.temp_c = 60.0
        await asyncio.sleep(HOT_AGE_S)
        probes.states(["qnn"])
        await asyncio.sleep(1.5)
        assert probes.states(["qnn"])[0].temp_c == 60.0, "a hot one is looked after more often"

    virtual_time.run(main())


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
