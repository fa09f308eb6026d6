from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt import config
from edge_rt.errors import BackendLoadError, BackendStepError, DeadlineError, WorkerLostError
from edge_rt.scheduler.dispatcher import Dispatcher
from edge_rt.scheduler.placed_model import REPLAN_S
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import Tensor, TensorAnswer, TensorRegion, TensorRequest
from tests import virtual_time
from tests.null_devices import ALWAYS, Device, World, lost, request


def cpu(**fields: object) -> Device:
    return Device(**{"name": "cpu", "kind": "cpu", "service_s": 0.05, "power_w": 5.0} | fields)


def npu(**fields: object) -> Device:
    return Device(**{"name": "npu", "kind": "npu", "service_s": 0.01, "power_w": 2.0} | fields)


async def ask(dispatcher: Dispatcher, number: int, *, wait_s: float = 60.0, **fields: object) -> TensorAnswer:
    asked = request(number, **fields)
    answer = await dispatcher.infer(asked, asyncio.get_running_loop().time() + wait_s)
    assert answer.outputs[0].data[:4] == asked.inputs[0].data, "an answer of another request, or a wrong one"
    return answer


async def loaded(dispatcher: Dispatcher) -> None:
    """Load every place."""
    await dispatcher.status("m")
    for key in dispatcher.slots("m"):
        await dispatcher._residency.load(key)


def metric(telemetry: Telemetry, name: str, device: str) -> float:
    value = telemetry.registry.get_sample_value(f"edge_rt_place_{name}", {"model": "m", "place": f"v on sim:{device}"})
    return value or 0.0


def test_requests_go_to_the_best_place_and_say_where_they_were_computed() -> None:
    async def main() -> None:
        world = World((cpu(), npu()))
        dispatcher = world.dispatcher(n_checked=0)
        assert (await ask(dispatcher, 1)).place == "sim:npu"
        assert world.n_loaded == 1, "the others are loaded only when they are needed"

    virtual_time.run(main())


def test_a_request_that_meets_a_failure_is_answered_by_the_next_place() -> None:
    async def main() -> None:
        telemetry = Telemetry()
        world = World((cpu(), npu(faults=ALWAYS)))
        dispatcher = world.dispatcher(telemetry, n_checked=0, max_failures=3, retry_s=30.0)
        for number in range(5):
            assert (await ask(dispatcher, number)).place == "sim:cpu"
        assert world.device("npu").n_runs == 3, "after max_failures it is left alone"
        assert metric(telemetry, "failures_total", "npu") == 3
        assert metric(telemetry, "requests_total", "cpu") == 5
        assert metric(telemetry, "state", "npu") == 2
        status = await dispatcher.status("m")
        assert [(p.place, p.state) for p in status.places] == [("sim:npu", "open"), ("sim:cpu", "closed")]
        assert status.places[0].retry_in_s == pytest.approx(30.0, abs=2)

    virtual_time.run(main())


def test_a_device_that_recovers_gets_its_requests_back_by_one_that_tries() -> None:
    async def main() -> None:
        world = World((cpu(), npu(faults=((0.0, 40.0),))))
        dispatcher = world.dispatcher(n_checked=0, max_failures=1, retry_s=30.0)
        await ask(dispatcher, 0)
        await asyncio.sleep(31.0)  # still broken: the pause doubles
        await asyncio.gather(*(ask(dispatcher, number) for number in range(1, 4)))
        assert world.device("npu").n_runs == 2, "one request tries, not all"
        await asyncio.sleep(62.0)
        assert (await ask(dispatcher, 9)).place == "sim:npu"
        assert (await ask(dispatcher, 10)).place == "sim:npu"

    virtual_time.run(main())


def test_a_try_costs_no_client_its_answer() -> None:
    async def main() -> None:
        world = World((cpu(), npu(faults=((0.0, 1e9),))))
        dispatcher = world.dispatcher(n_checked=0, max_failures=1, retry_s=5.0)
        await ask(dispatcher, 0)
        world.device("npu").fail_s = 30.0  # it hangs
        for number in range(1, 50):
            begun_s = world.now_s()
            assert (await ask(dispatcher, number)).place == "sim:cpu"
            assert world.now_s() - begun_s == pytest.approx(0.05)
            await asyncio.sleep(1.0)
        assert world.device("npu").n_failed == 2, "one try of 30 s, and the next no sooner than twenty times that"

    virtual_time.run(main())


def test_a_device_is_tried_early_when_queues_grow_and_takes_what_waits_when_it_works() -> None:
    async def main() -> None:
        world = World((cpu(service_s=0.1), npu(faults=((0.0, 6.0),), fail_s=0.002)))
        dispatcher = world.dispatcher(n_checked=0, max_failures=1, retry_s=10.0)
        await loaded(dispatcher)
        clients = []
        for number in range(100):  # twice as many as the CPU can take
            clients.append(asyncio.create_task(ask(dispatcher, number)))
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.1)
        late = asyncio.create_task(ask(dispatcher, 100))
        await asyncio.gather(*clients, late)
        assert world.now_s() < 7.5, "at the CPU's pace it would be 10 s"
        assert world.device("npu").n_failed <= 7, "one, and a try a second"
        assert sorted(int(name[1:]) for name, _ in world.ran) == list(range(101)), "what moved was not computed twice"

    virtual_time.run(main())


def test_what_waits_for_a_device_that_gets_hot_goes_to_the_next() -> None:
    async def main() -> None:
        world = World((cpu(), npu(service_s=1.0, hot=((5.0, 100.0),))), policy="energy")
        dispatcher = world.dispatcher(n_checked=0)
        await loaded(dispatcher)
        await asyncio.sleep(4.5)
        clients = [asyncio.create_task(ask(dispatcher, number)) for number in range(10)]
        await asyncio.sleep(1.0)
        dispatcher.replan()
        clients.append(asyncio.create_task(ask(dispatcher, 10)))
        await asyncio.gather(*clients)
        assert world.now_s() < 8.0
        assert world.device("npu").n_runs <= 2, "those that had begun"

    virtual_time.run(main())


def test_a_request_that_fails_everywhere_is_not_charged_to_the_devices() -> None:
    async def main() -> None:
        world = World((cpu(faults=((0, 9.0),)), npu(faults=((0, 9.0),))))
        dispatcher = world.dispatcher(n_checked=0, max_failures=1)
        for number in range(3):
            with pytest.raises(BackendStepError, match="scripted"):
                await ask(dispatcher, number)
        await asyncio.sleep(9.0)
        assert (await ask(dispatcher, 4)).place == "sim:npu"

    virtual_time.run(main())


def test_where_every_breaker_is_open_requests_are_still_tried() -> None:
    async def main() -> None:
        world = World((cpu(faults=((0, 5.0),), error=lost),))
        dispatcher = world.dispatcher(max_failures=1, retry_s=1000.0)
        with pytest.raises(WorkerLostError):
            await ask(dispatcher, 0)
        assert (await dispatcher.status("m")).places[0].state == "open"
        await asyncio.sleep(5.0)
        await ask(dispatcher, 1)
        assert (await dispatcher.status("m")).places[0].state == "closed"

    virtual_time.run(main())


def test_a_request_that_kills_workers_does_not_kill_them_all() -> None:
    async def main() -> None:
        devices = [
            cpu(faults=ALWAYS, error=lost),
            npu(faults=ALWAYS, error=lost),
            npu(name="n2", faults=ALWAYS, error=lost),
        ]
        world = World(tuple(devices))
        with pytest.raises(WorkerLostError):
            await ask(world.dispatcher(n_checked=0), 0)
        assert sum(device.n_failed for device in devices) == 2

    virtual_time.run(main())


def test_a_place_that_does_not_load_is_left_for_the_next() -> None:
    async def main() -> None:
        world = World((cpu(), npu(refuses_load=True)))
        dispatcher = world.dispatcher(max_failures=1)
        assert (await ask(dispatcher, 0)).place == "sim:cpu"
        only = World((npu(refuses_load=True),)).dispatcher()
        with pytest.raises(BackendLoadError):
            await ask(only, 0)
        with pytest.raises(BackendLoadError, match="no such device was found here"):
            await ask(World(()).dispatcher(), 0)

    virtual_time.run(main())


def test_the_first_answers_are_compared_and_a_wrong_device_is_out_while_its_client_gets_the_cpus() -> None:
    async def main() -> None:
        telemetry = Telemetry()
        world = World((cpu(), npu(is_wrong=True)))
        dispatcher = world.dispatcher(telemetry, n_checked=4)
        for number in range(3):
            assert (await ask(dispatcher, number)).place == "sim:cpu"
        assert world.device("npu").n_runs == 1
        assert metric(telemetry, "wrong_total", "npu") == 1
        assert metric(telemetry, "state", "npu") == 3
        status = await dispatcher.status("m")
        assert "instead of" in next(p.wrong for p in status.places if p.place == "sim:npu")
        world.device("npu").is_wrong = False  # someone has repaired it and says so
        await dispatcher.load("m")
        assert (await ask(dispatcher, 4)).place == "sim:npu"

    virtual_time.run(main())


def test_a_right_device_is_compared_n_checked_times() -> None:
    async def main() -> None:
        world = World((cpu(), npu()))
        dispatcher = world.dispatcher(n_checked=4)
        await asyncio.gather(*(ask(dispatcher, number) for number in range(6)))
        n_before = world.device("cpu").n_runs
        for number in range(6, 26):
            await ask(dispatcher, number)
        status = await dispatcher.status("m")
        assert {p.place: p.n_to_check for p in status.places} == {"sim:cpu": 0, "sim:npu": 0}
        twice = [name for name, _ in world.ran if [n for n, _ in world.ran].count(name) == 2]
        assert len(set(twice)) == 4
        assert world.device("cpu").n_runs <= n_before + 4

    virtual_time.run(main())


def test_answers_beside_those_that_are_compared_wait_for_the_verdict() -> None:
    async def main() -> None:
        for is_wrong in (False, True):
            world = World((cpu(service_s=1.0), npu(service_s=0.01, is_wrong=is_wrong)))
            dispatcher = world.dispatcher(n_checked=1, retry_s=1.0)
            await loaded(dispatcher)
            begun_s = world.now_s()
            answers = [asyncio.create_task(ask(dispatcher, number)) for number in range(3)]
            await asyncio.sleep(0.9)
            assert world.device("npu").n_runs == 3
            assert not any(answer.done() for answer in answers), "not proven yet, not even to be wrong"
            places = {(await answer).place for answer in answers}
            assert places == ({"sim:cpu"} if is_wrong else {"sim:npu"})
            assert world.now_s() - begun_s == pytest.approx(3.01 if is_wrong else 1.01, abs=0.01)

    virtual_time.run(main())


def test_a_cpu_that_cannot_compare_holds_nobody_up() -> None:
    async def main() -> None:
        world = World((cpu(faults=ALWAYS), npu()))
        dispatcher = world.dispatcher(n_checked=8, max_failures=2)
        answers = await asyncio.gather(*(ask(dispatcher, number) for number in range(20)))
        assert {answer.place for answer in answers} == {"sim:npu"}
        assert world.device("cpu").n_failed < 20

    virtual_time.run(main())


@pytest.mark.parametrize("is_profiled", [True, False])
def test_what_the_cpu_computes_in_a_lost_devices_place_is_not_taken_for_the_devices_speed(is_profiled: bool) -> None:
    async def main() -> None:
        away = npu(stand_in="onnx_cpu:cpu", stand_in_s=0.4, away=((5.0, 15.0),))
        world = World((cpu(), away), policy="latency", is_profiled=is_profiled)
        dispatcher = world.dispatcher(n_checked=0)
        await loaded(dispatcher)
        asked = {}
        for number in range(400):
            asked[world.now_s()] = (await ask(dispatcher, number)).place
            await asyncio.sleep(0.05)
        assert {place for at_s, place in asked.items() if 5.0 < at_s < 14.0} == {"onnx_cpu:cpu"}
        assert {place for at_s, place in asked.items() if at_s > 15.5} == {"sim:npu"}
        shown = {place.place: place for place in (await dispatcher.status("m")).places}
        assert shown["sim:npu"].latency_s == pytest.approx(0.01)
        assert shown["sim:npu"].n_answered == list(asked.values()).count("sim:npu")

    virtual_time.run(main())


def test_what_the_cpu_computes_in_a_lost_devices_place_proves_nothing_of_the_device() -> None:
    async def main() -> None:
        world = World((cpu(), npu(stand_in="onnx_cpu:cpu", away=((0.0, 5.0),), is_wrong=True)))
        dispatcher = world.dispatcher(n_checked=2)
        for number in range(4):
            assert (await ask(dispatcher, number)).place == "onnx_cpu:cpu"
        assert {p.place: p.n_to_check for p in (await dispatcher.status("m")).places}["sim:npu"] == 2
        assert world.device("cpu").n_runs == 0, "to compare the CPU with itself costs time"
        await asyncio.sleep(5.0)
        assert (await ask(dispatcher, 4)).place == "sim:cpu"
        assert "instead of" in (await dispatcher.status("m")).places[0].wrong

    virtual_time.run(main())


def test_without_a_cpu_to_compare_with_a_device_is_believed() -> None:
    async def main() -> None:
        world = World((npu(), npu(name="n2", service_s=0.02)))
        dispatcher = world.dispatcher(n_checked=4)
        assert (await ask(dispatcher, 0)).place == "sim:npu"
        places = [answer.place for answer in await asyncio.gather(*(ask(dispatcher, number) for number in range(1, 9)))]
        assert places == ["sim:npu"] * 8, "they need not come one at a time, and no other worker is loaded for a few"

    virtual_time.run(main())


def test_a_hot_device_is_left_and_tried_again_when_it_has_cooled() -> None:
    async def main() -> None:
        world = World((cpu(), npu(hot=((5.0, 35.0),))))
        dispatcher = world.dispatcher(n_checked=0, retry_s=20.0)
        assert (await ask(dispatcher, 0)).place == "sim:npu"
        await asyncio.sleep(5.0 + REPLAN_S)
        assert (await ask(dispatcher, 1)).place == "sim:cpu"
        await asyncio.sleep(40.0)
        assert (await ask(dispatcher, 2)).place == "sim:npu"

    virtual_time.run(main())


def test_a_device_that_gets_hot_under_load_is_left_within_a_probes_interval_and_comes_back_when_it_has_cooled() -> None:
    async def main() -> None:
        # 90 °C at 30 W, and the limit is 85: it heats up again and again, but neither at once nor with each reading.
        heated = npu(service_s=0.1, power_w=30.0, heat_c_per_j=0.034, cool_per_s=0.02)
        telemetry = Telemetry()
        world = World((cpu(service_s=0.5), heated), is_probed_late=True)
        dispatcher = world.dispatcher(telemetry, n_checked=0, retry_s=1.0)
        await loaded(dispatcher)
        places, hottest_c = [], 0.0
        for number in range(6000):
            places.append((await ask(dispatcher, number)).place)
            hottest_c = max(hottest_c, heated.temperature_c(world.now_s()))
        moves = sum(a != b for a, b in pairwise(places))
        assert {"sim:cpu", "sim:npu"} == set(places)
        assert hottest_c < 88.0, "it is left within a few seconds"
        assert 4 <= moves <= world.now_s() / 20.0, f"{moves} moves in {world.now_s():.0f} s"

    virtual_time.run(main())


def test_a_device_whose_probe_tells_of_a_fault_is_left_and_comes_back() -> None:
    async def main() -> None:
        world = World((cpu(), npu(gone=((20.0, 60.0),))), is_probed_late=True)
        dispatcher = world.dispatcher(n_checked=0)
        await loaded(dispatcher)
        places = {}
        for number in range(100):
            places[round(world.now_s())] = (await ask(dispatcher, number)).place
            await asyncio.sleep(1.0)
        late_s = 4.0
        for at_s, place in places.items():
            if at_s < 20 or at_s > 60 + late_s:
                assert place == "sim:npu", at_s
            elif 20 + late_s < at_s < 60:
                assert place == "sim:cpu", at_s

    virtual_time.run(main())


def test_another_policy_and_other_limits_count_from_the_next_request_on() -> None:
    async def main() -> None:
        # The NPU is the faster one, the CPU the thriftier.
        world = World((cpu(service_s=0.02, power_w=1.0), npu(service_s=0.01, power_w=9.0)), policy="latency")
        dispatcher = world.dispatcher(n_checked=0)
        await loaded(dispatcher)
        assert (await ask(dispatcher, 0)).place == "sim:npu"
        dispatcher.configure(config.Placement(policy="energy", n_checked=0, max_failures=1, retry_s=30.0))
        assert (await ask(dispatcher, 1)).place == "sim:cpu"
        world.device("cpu").faults = ALWAYS
        for number in range(2, 5):
            assert (await ask(dispatcher, number)).place == "sim:npu"
        assert world.device("cpu").n_failed == 1, "max_failures is that of places that were there before too"

    virtual_time.run(main())


def test_a_busy_device_spills_over_only_when_the_wait_costs_more() -> None:
    async def main() -> None:
        telemetry = Telemetry()
        world = World((cpu(service_s=0.05), npu(service_s=0.01)), policy="latency")
        dispatcher = world.dispatcher(telemetry, n_checked=0)
        await loaded(dispatcher)
        places = [answer.place for answer in await asyncio.gather(*(ask(dispatcher, i) for i in range(8)))]
        # The fifth waits for four on the NPU, as long in all as the CPU takes; the sixth would wait longer.
        assert places.index("sim:cpu") == 5
        assert metric(telemetry, "spilled_total", "cpu") == places.count("sim:cpu") == 1

    virtual_time.run(main())


def test_nothing_spills_over_onto_a_place_that_would_push_out_another_model() -> None:
    async def main() -> None:
        world = World((cpu(), npu()), policy="latency")
        dispatcher = world.dispatcher(n_checked=0, max_loaded=1)
        answers = await asyncio.gather(*(ask(dispatcher, number) for number in range(500)))
        assert {answer.place for answer in answers} == {"sim:npu"}
        assert world.most_loaded == 1

    virtual_time.run(main())


def test_with_room_for_one_worker_checks_and_retries_still_end() -> None:
    async def main() -> None:
        world = World((cpu(), npu(faults=((3.0, 6.0),))))
        dispatcher = world.dispatcher(n_checked=2, max_loaded=1, max_failures=1)
        for number in range(20):
            await ask(dispatcher, number)
            await asyncio.sleep(0.5)
        assert world.most_loaded == 1

    virtual_time.run(main())


def test_a_stream_stays_where_its_state_is() -> None:
    async def main() -> None:
        world = World((cpu(), npu()), policy="latency")
        dispatcher = world.dispatcher(n_checked=2)

        async def talk(number: int) -> None:
            for turn in range(1, 9):
                answer = await ask(dispatcher, number, stream=f"s{number}", is_last=turn == 8)
                assert answer.outputs[0].data[4] == turn, "the stream's state was left behind"

        await asyncio.gather(*(talk(number) for number in range(6)))
        assert dispatcher._streams["m"] == {}

    virtual_time.run(main())


def test_a_streams_failure_is_told_and_not_hidden_by_another_device() -> None:
    async def main() -> None:
        world = World((cpu(), npu(faults=((5.0, 10.0),))))
        dispatcher = world.dispatcher(n_checked=0)
        await ask(dispatcher, 1, stream="s")
        await asyncio.sleep(5.0)
        with pytest.raises(BackendStepError):
            await ask(dispatcher, 1, stream="s")
        assert world.device("cpu").n_runs == 0

    virtual_time.run(main())


def test_a_streams_first_request_finds_its_place_as_any_other() -> None:
    async def main() -> None:
        world = World((cpu(), npu(is_wrong=True)))
        dispatcher = world.dispatcher(n_checked=2)
        for turn in range(1, 4):
            answer = await ask(dispatcher, 1, stream="s")
            assert (answer.place, answer.outputs[0].data[4]) == ("sim:cpu", turn)
        broken = World((cpu(), npu(faults=ALWAYS))).dispatcher(n_checked=0)
        assert (await ask(broken, 1, stream="s")).place == "sim:cpu"

    virtual_time.run(main())


def test_streams_of_one_name_are_their_tenants_own() -> None:
    async def main() -> None:
        dispatcher = World((cpu(), npu())).dispatcher(n_checked=0)
        for tenant, is_last in (("a", False), ("b", False), ("a", True)):
            asked = replace(request(1, stream="s", is_last=is_last), tenant=tenant)
            await dispatcher.infer(asked, asyncio.get_running_loop().time() + 60.0)
        assert list(dispatcher._streams["m"]) == [("b", "s", "")]

    virtual_time.run(main())


def test_a_stream_that_starts_anew_is_free_to_go_elsewhere() -> None:
    async def main() -> None:
        dispatcher = World((cpu(), npu(faults=((5.0, 1e9),)))).dispatcher(n_checked=0)
        assert (await ask(dispatcher, 1, stream="s")).place == "sim:npu"
        await asyncio.sleep(5.0)
        asked = replace(request(1, stream="s"), is_first=True)
        assert (await dispatcher.infer(asked, asyncio.get_running_loop().time() + 60.0)).place == "sim:cpu"

    virtual_time.run(main())


def test_answers_that_go_into_shared_memory_are_compared_all_the_same() -> None:
    region = TensorRegion(name="r", path="", device=0, inode=0, offset=0, size_bytes=64)

    async def main() -> None:
        dispatcher = World((cpu(), npu(is_wrong=True))).dispatcher(n_checked=1)
        asked = replace(request(1), regions={"y": region})
        answer = await dispatcher.infer(asked, asyncio.get_running_loop().time() + 60.0)
        assert (answer.place, answer.outputs[0].region) == ("sim:cpu", None)
        trusted = World((npu(),)).dispatcher(n_checked=0)
        answer = await trusted.infer(asked, asyncio.get_running_loop().time() + 60.0)
        assert answer.outputs[0].region == region

    virtual_time.run(main())


def test_a_place_that_takes_too_long_to_load_is_a_missed_deadline() -> None:
    async def main() -> None:
        world = World((cpu(load_s=50.0),))
        with pytest.raises(DeadlineError):
            await ask(world.dispatcher(), 0, wait_s=3.0)

    virtual_time.run(main())


def test_a_copy_that_tries_a_device_goes_on_when_its_client_leaves() -> None:
    async def main() -> None:
        world = World((cpu(), npu(faults=((0.0, 1.0),))))
        dispatcher = world.dispatcher(n_checked=0, max_failures=1, retry_s=10.0)
        await ask(dispatcher, 0)
        await asyncio.sleep(10.0)
        world.device("npu").throttle_c, world.device("npu").throttle_factor = 0.0, 1000.0
        leaver = asyncio.create_task(ask(dispatcher, 1))
        await asyncio.sleep(1.0)
        leaver.cancel()
        await asyncio.wait([leaver])
        world.device("npu").throttle_factor = 1.0
        assert (await ask(dispatcher, 2)).place == "sim:cpu", "one tries at a time"
        await asyncio.sleep(10.0)
        assert [p.state for p in (await dispatcher.status("m")).places] == ["closed", "closed"]
        assert all(place.n_open == 0 for place in dispatcher._models["m"].known.values())

    virtual_time.run(main())


def test_a_copy_that_outlives_its_request_has_tensors_of_its_own() -> None:
    async def main() -> None:
        world = World((cpu(), npu(faults=((0.0, 1.0),))))
        dispatcher = world.dispatcher(n_checked=0, max_failures=1, retry_s=10.0)
        await ask(dispatcher, 0)
        await asyncio.sleep(10.0)
        asked: dict[str, TensorRequest] = {}

        def factor(device: Device, request: TensorRequest) -> float:
            asked[device.name] = request
            return 100.0 if device.name == "npu" else 1.0

        world.factor = factor  # type: ignore[method-assign]
        memory = bytearray(b"mine")
        tensor = Tensor(name="x", datatype="UINT8", shape=(4,), data=memoryview(memory))
        answer = await dispatcher.infer(replace(request(1), inputs=(tensor,)), asyncio.get_running_loop().time() + 60.0)
        assert answer.place == "sim:cpu"
        memory[:] = b"next"
        assert [bytes(asked[name].inputs[0].data) for name in ("cpu", "npu")] == [b"next", b"mine"]
        await asyncio.sleep(60.0)

    virtual_time.run(main())


def test_what_was_guessed_gives_way_to_what_is_shown() -> None:
    async def main() -> None:
        world = World((cpu(service_s=0.02), npu(service_s=0.4)), policy="latency", is_profiled=False)
        dispatcher = world.dispatcher(n_checked=1)
        assert (await ask(dispatcher, 0)).place == "sim:npu", "a guess thinks that it is faster"
        # The comparison has shown what the CPU takes.
        assert (await ask(dispatcher, 1)).place == "sim:cpu"
        assert [p.place for p in (await dispatcher.status("m")).places] == ["sim:cpu", "sim:npu"]

    virtual_time.run(main())


def test_a_better_place_that_is_not_loaded_is_loaded_beside_the_requests() -> None:
    async def main() -> None:
        world = World((cpu(), npu(load_s=5.0, faults=((0.0, 6.0),))))
        dispatcher = world.dispatcher(n_checked=0, max_failures=1, retry_s=1000.0)
        assert (await ask(dispatcher, 0)).place == "sim:cpu"
        place = dispatcher._models["m"].known["v on sim:npu"]
        await dispatcher._residency.unload(place.key)
        place.breaker.retry_at_s = None
        assert (await ask(dispatcher, 1)).place == "sim:cpu", "a request does not wait for a load where it need not"
        await asyncio.sleep(6.0)
        assert (await ask(dispatcher, 2)).place == "sim:npu"

    virtual_time.run(main())


WINDOWS = st.lists(st.tuples(st.floats(0, 60), st.floats(0.1, 30)).map(lambda w: (w[0], w[0] + w[1])), max_size=3)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Device], list[float], dict[str, object]]:
    """Two accelerators that may fail, get hot, answer wrongly or not load, and a CPU that works."""
    options: dict[str, object] = {
        "n_checked": draw(st.integers(0, 3)),
        "max_failures": draw(st.integers(1, 3)),
        "retry_s": draw(st.sampled_from([1.0, 10.0])),
    }
    devices = [cpu(service_s=draw(st.sampled_from([0.02, 0.1])), jitter=0.2)]
    for name in ("npu", "fpga"):
        device = npu(
            name=name,
            kind=name,
            service_s=draw(st.sampled_from([0.005, 0.03, 0.3])),
            faults=tuple(draw(WINDOWS)),
            hot=tuple(draw(WINDOWS)),
            is_wrong=options["n_checked"] and draw(st.sampled_from([False, False, False, True])),
            refuses_load=draw(st.sampled_from([False, False, False, True])),
            jitter=0.3,
        )
        if name == "npu" and draw(st.booleans()):
            device.error = lost
        devices.append(device)
    arrivals: list[float] = []
    for start, n in draw(st.lists(st.tuples(st.floats(0, 80), st.integers(1, 30)), min_size=1, max_size=5)):
        arrivals += [start] * n
    return devices, sorted(arrivals), options


@settings(deadline=None, max_examples=60)
@given(worlds(), st.sampled_from(["latency", "energy", "balanced"]), st.integers(1, 4))
def test_no_request_is_lost_or_answered_twice(
    drawn: tuple[list[Device], list[float], dict[str, object]], policy: str, max_loaded: int
) -> None:
    async def main() -> None:
        devices, arrivals, options = drawn
        world = World(tuple(replace(device, lock=asyncio.Lock()) for device in devices), policy=policy)
        dispatcher = world.dispatcher(max_loaded=max_loaded, **options)

        async def client(number: int, at_s: float) -> TensorAnswer:
            await asyncio.sleep(at_s)
            return await ask(dispatcher, number, wait_s=600.0)

        clients = [asyncio.create_task(client(i, at_s)) for i, at_s in enumerate(arrivals)]
        answers = await asyncio.gather(*clients)
        await asyncio.gather(*dispatcher._copies)
        assert len(answers) == len(arrivals)
        for number in range(len(arrivals)):
            on = [device for name, device in world.ran if name == f"r{number}"]
            assert on, "an answer that nobody computed"
            assert len(set(on) - {"cpu"}) == len([device for device in on if device != "cpu"]), "asked there twice"
            assert on.count("cpu") <= (2 if options["n_checked"] else 1)
            assert options["n_checked"] or len(on) <= 2, "more than itself and a copy"
        assert all(place.n_open == 0 for place in dispatcher._models["m"].known.values())
        assert world.most_loaded <= max_loaded
        for place in dispatcher._models["m"].known.values():
            if options["n_checked"] and world.device(place.row.candidate.device).is_wrong and place.n_answered:
                assert place.wrong

    virtual_time.run(main())


def test_another_form_on_the_device_that_failed_is_not_loaded_for_it() -> None:
    async def main() -> None:
        world = World((cpu(faults=((0.0, 5.0),)),), forms=("v", "w"))
        dispatcher = world.dispatcher()
        with pytest.raises(BackendStepError):
            await ask(dispatcher, 0)
        assert world.device("cpu").n_runs == 1
        assert world.n_loaded == 1

    virtual_time.run(main())


def test_a_hot_device_without_another_goes_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        dispatcher = World((cpu(hot=ALWAYS),)).dispatcher()
        for number in range(6):
            await ask(dispatcher, number)
            await asyncio.sleep(REPLAN_S)

    virtual_time.run(main())
    assert sum("is left for now" in line for line in caplog.messages) == 1


def test_a_form_that_is_named_answers_and_shares_its_place() -> None:
    async def main() -> None:
        dispatcher = World((cpu(),), forms=("first", "second")).dispatcher()
        answers = [
            await dispatcher.infer(replace(request(n), variant=form), asyncio.get_running_loop().time() + 60.0)
            for n, form in enumerate(("", "second", "first", "second"))
        ]
        assert [answer.variant for answer in answers] == ["first", "second", "first", "second"]
        assert len(dispatcher.slots("m")) == 2
        assert dispatcher.slots("m", "second") == [dispatcher.slots("m")[1]]
        await dispatcher.unload("m")
        assert all(dispatcher._residency.slot(key).state == "unloaded" for key in dispatcher.slots("m"))

    virtual_time.run(main())
