from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.catalog.manifest import Accuracy, Variant
from edge_rt.errors import ModelNotFoundError
from edge_rt.scheduler.placement import Candidate, Measured, Option, Policy, PolicyName, Ranking, choose, rank, wait_s
from edge_rt.tensor_types import DeviceState


def variant(name: str, quant: str, *backends: str, accuracy: float | None = None) -> Variant:
    return Variant(
        id=name,
        quant=quant,
        file=f"m.{name}.onnx",
        source="https://x/m",
        size_bytes=20 * 2**20,
        sha256="0" * 64,
        backends=backends,
        accuracy=None if accuracy is None else Accuracy(metric="top-1", value=accuracy, data="d", n=100),
    )


CPU = DeviceState(backend="onnx_cpu", id="cpu", kind="cpu", features=frozenset({"avx2", "avx512_vnni"}))
NPU = DeviceState(backend="qnn", id="htp", kind="npu", detail="an NPU")
FPGA = DeviceState(backend="overlay", id="fpga0", kind="fpga")
FP32, INT8 = variant("fp32", "FP32"), variant("int8", "INT8", "qnn", "overlay", "onnx_cpu")
FORMS = (FP32, INT8)
ALL = {"fp32", "int8"}


def order(ranking: Ranking) -> list[str]:
    return [str(row.candidate) for row in ranking.ranked]


def why(ranking: Ranking, what: str) -> str:
    return next(row.reason for row in ranking.refused if row.what == what)


def profile(**rows: tuple[float, float | None]) -> Callable[[Candidate], Measured | None]:
    """Rows by back end and variant: qnn_int8=(latency_s, energy_j)."""

    def measured(candidate: Candidate) -> Measured | None:
        row = rows.get(f"{candidate.backend}_{candidate.variant}")
        return Measured(latency_s=row[0], energy_j=row[1]) if row is not None else None

    return measured


def test_without_a_profile_the_guesses_order_and_say_that_they_are_guesses() -> None:
    ranking = rank("m", FORMS, (CPU, NPU, FPGA), Policy(), pulled=ALL)
    assert order(ranking) == [
        "int8 on qnn:htp",
        "int8 on overlay:fpga0",
        "int8 on onnx_cpu:cpu",
        "fp32 on onnx_cpu:cpu",
    ]
    assert all("guessed" in row.reason and not row.is_measured for row in ranking.ranked)


def test_a_cpu_without_dot_products_gains_little_from_int8() -> None:
    old = dataclasses.replace(CPU, features=frozenset({"avx2"}))
    fast, slow = (rank("m", FORMS, (device,), Policy(), pulled=ALL).ranked for device in (CPU, old))
    assert fast[0].latency_s < slow[0].latency_s < slow[1].latency_s


def test_what_was_measured_counts_and_scales_the_guesses_beside_it() -> None:
    measured = profile(onnx_cpu_fp32=(0.2, None), onnx_cpu_int8=(0.08, 0.3))
    ranking = rank("m", FORMS, (CPU, NPU), Policy(name="latency"), pulled=ALL, measured=measured)
    by_name = {str(row.candidate): row for row in ranking.ranked}
    assert by_name["int8 on onnx_cpu:cpu"].latency_s == 0.08
    assert by_name["int8 on onnx_cpu:cpu"].energy_j == 0.3
    assert "80 ms measured, 0.3 J measured" in by_name["int8 on onnx_cpu:cpu"].reason
    assert by_name["fp32 on onnx_cpu:cpu"].energy_j == pytest.approx(5.0 * 0.2)
    # ten times slower than the prior for a model of unknown size, so the NPU's guess is slower too
    assert by_name["int8 on qnn:htp"].latency_s == pytest.approx((0.2 + 0.08 * 2.2) / 2 / (2.2 * 4), rel=0.01)


@pytest.mark.parametrize(
    ("policy", "first"),
    [("latency", "int8 on onnx_cpu:cpu"), ("energy", "int8 on overlay:fpga0"), ("balanced", "int8 on qnn:htp")],
)
def test_the_policy_weighs_time_and_energy(policy: PolicyName, first: str) -> None:
    measured = profile(onnx_cpu_int8=(0.004, 0.1), qnn_int8=(0.006, 0.02), overlay_int8=(0.03, 0.01))
    assert order(rank("m", (INT8,), (CPU, NPU, FPGA), Policy(name=policy), pulled=ALL, measured=measured))[0] == first


def test_pins_leave_one_form_or_one_back_end() -> None:
    pinned = rank("m", FORMS, (CPU, NPU), Policy(variant="fp32"), pulled=ALL)
    assert order(pinned) == ["fp32 on onnx_cpu:cpu"]
    assert why(pinned, "int8") == "the configuration names fp32"
    assert order(rank("m", FORMS, (CPU, NPU), Policy(backend="qnn", variant="int8"), pulled=ALL)) == ["int8 on qnn:htp"]
    with pytest.raises(ModelNotFoundError, match="m:int2"):
        rank("m", FORMS, (CPU,), Policy(variant="int2"), pulled=ALL)


def test_a_named_npu_that_fails_is_taken_for_its_worker_has_the_cpu_behind_it() -> None:
    broken = dataclasses.replace(NPU, fault="its driver does not answer")
    assert order(rank("m", (INT8,), (CPU, broken), Policy(backend="qnn"), pulled=ALL)) == ["int8 on qnn:htp"]
    absent = dataclasses.replace(NPU, id="none", kind="none", fault="it is not installed")
    assert order(rank("m", (INT8,), (CPU, absent), Policy(backend="qnn"), pulled=ALL)) == []


def test_an_answer_is_of_the_place_that_computed_it() -> None:
    (row,) = rank("m", (INT8,), (NPU,), Policy(backend="qnn"), pulled=ALL).ranked
    assert [row.candidate.place_of(told) for told in ("", "qnn:0", "onnx_cpu:cpu")] == [
        "qnn:htp",
        "qnn:htp",
        "onnx_cpu:cpu",
    ]


def test_what_cannot_be_used_is_refused_with_the_reason() -> None:
    broken = dataclasses.replace(NPU, fault="its driver does not answer")
    slow = dataclasses.replace(FPGA, reference=True, detail="emulated")
    ranking = rank("m", FORMS, (CPU, broken, slow), Policy(), pulled={"int8"})
    assert order(ranking) == ["int8 on onnx_cpu:cpu"]
    assert why(ranking, "fp32") == "not pulled; edge_rt models pull m:fp32"
    assert why(ranking, "int8 on qnn:htp") == "its driver does not answer"
    assert "emulated" in why(ranking, "int8 on overlay:fpga0")
    assert why(rank("m", (INT8,), (CPU,), Policy(), pulled=ALL), "int8 on qnn") == "no such device was found here"


def test_hot_devices_come_last_and_full_ones_behind_or_out() -> None:
    hot = dataclasses.replace(NPU, temp_c=91.0)
    full = dataclasses.replace(FPGA, free_bytes=2**20)
    ranking = rank("m", (INT8,), (CPU, hot, full), Policy(max_device_c=85.0), pulled=ALL)
    assert order(ranking) == ["int8 on onnx_cpu:cpu", "int8 on qnn:htp"]
    assert ranking.ranked[-1].reason.endswith("last: 91 °C, the limit is 85 °C, until it is below 80 °C")
    assert "1 MiB are free" in why(ranking, "int8 on overlay:fpga0")
    crowded = dataclasses.replace(CPU, free_bytes=2**20)
    behind = rank("m", (INT8,), (crowded, hot), Policy(), pulled=ALL)
    assert order(behind) == ["int8 on onnx_cpu:cpu", "int8 on qnn:htp"], "room can be made, heat cannot be waited out"
    assert [row.tier for row in behind.ranked] == [1, 2]


def test_a_form_that_lost_accuracy_is_only_taken_by_name() -> None:
    forms = (
        variant("fp32", "FP32", accuracy=0.75),
        variant("int8", "INT8", accuracy=0.745),
        variant("int4", "INT4", accuracy=0.7),
    )
    pulled = {"fp32", "int8", "int4"}
    ranking = rank("m", forms, (CPU,), Policy(), pulled=pulled)
    assert order(ranking) == ["int8 on onnx_cpu:cpu", "fp32 on onnx_cpu:cpu"]
    assert "0.7 against 0.75" in why(ranking, "int4")
    assert order(rank("m", forms, (CPU,), Policy(), pulled={"int4"})) == ["int4 on onnx_cpu:cpu"], "it is all there is"
    assert order(rank("m", forms, (CPU,), Policy(variant="int4"), pulled=pulled)) == ["int4 on onnx_cpu:cpu"]


def test_ties_go_by_the_manifest_then_the_back_end_then_the_device() -> None:
    twins = (variant("a", "INT8", "y", "x"), variant("b", "INT8", "x", "y"))
    devices = [DeviceState(backend=backend, id=name, kind="npu") for backend in "xy" for name in ("n1", "n0")]
    expected = [f"a on y:n{i}" for i in (0, 1)] + [f"a on x:n{i}" for i in (0, 1)]
    expected += [f"b on x:n{i}" for i in (0, 1)] + [f"b on y:n{i}" for i in (0, 1)]
    for seed in range(5):
        random.Random(seed).shuffle(devices)
        assert order(rank("m", twins, devices, Policy(), pulled={"a", "b"})) == expected


STATES = st.builds(
    DeviceState,
    backend=st.sampled_from(["onnx_cpu", "qnn", "overlay"]),
    id=st.sampled_from(["0", "1"]),
    kind=st.sampled_from(["cpu", "npu", "fpga", "null"]),
    free_bytes=st.none() | st.integers(0, 2**30),
    temp_c=st.none() | st.floats(0, 120),
    fault=st.sampled_from(["", "", "broken"]),
    reference=st.booleans(),
)
POLICIES = st.sampled_from(["latency", "energy", "balanced"])


@given(
    st.lists(STATES, unique_by=lambda d: d.place), POLICIES, st.sets(st.sampled_from(["fp32", "int8"])), st.randoms()
)
def test_every_pair_is_ranked_or_refused_once_and_the_order_of_devices_is_nothing(
    devices: list[DeviceState], policy: PolicyName, pulled: set[str], rng: random.Random
) -> None:
    ranking = rank("m", FORMS, devices, Policy(name=policy), pulled=pulled)
    names = order(ranking) + [row.what for row in ranking.refused]
    assert len(set(names)) == len(names)
    assert [row.tier for row in ranking.ranked] == sorted(row.tier for row in ranking.ranked)
    for device in devices:
        expected = {v.id for v in FORMS if v.id in pulled and device.backend in (v.backends or ("onnx_cpu",))}
        assert {v for v in ("fp32", "int8") if f"{v} on {device.place}" in names} == expected
    shuffled = list(devices)
    rng.shuffle(shuffled)
    assert rank("m", FORMS, shuffled, Policy(name=policy), pulled=pulled) == ranking


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "d"]), st.tuples(st.floats(1e-4, 1), st.floats(1e-3, 10)), min_size=1
    ),
    POLICIES,
)
def test_idle_devices_are_chosen_in_the_order_of_the_ranking(
    rows: dict[str, tuple[float, float]], policy: PolicyName
) -> None:
    devices = [DeviceState(backend=name, id="0", kind="npu") for name in rows]
    form = variant("v", "INT8", *rows)
    measured = lambda c: Measured(latency_s=rows[c.backend][0], energy_j=rows[c.backend][1])  # noqa: E731
    ranked = rank("m", (form,), devices, Policy(name=policy), pulled={"v"}, measured=measured).ranked
    options = [Option(latency_s=row.latency_s, energy_j=row.energy_j, wait_s=0.0) for row in ranked]
    chosen = options[choose(options, policy)]
    a, b = {"latency": (1, 0), "balanced": (1, 1), "energy": (0.1, 1)}[policy]
    assert chosen.latency_s**a * chosen.energy_j**b == pytest.approx(
        options[0].latency_s ** a * options[0].energy_j ** b
    )


def test_a_wait_that_costs_more_than_the_slower_device_spills_over() -> None:
    def at(n_ahead: int, policy: PolicyName) -> int:
        fast = Option(latency_s=0.01, energy_j=0.02, wait_s=wait_s(n_ahead=n_ahead, service_s=0.01))
        slow = Option(latency_s=0.05, energy_j=0.06, wait_s=0.0)
        return choose([fast, slow], policy)

    assert [at(n, "latency") for n in (0, 3, 4, 5)] == [0, 0, 0, 1]
    # the slower one also takes two more of the first one's energies: two more of its times are waited
    assert [at(n, "balanced") for n in (0, 5, 6, 7)] == [0, 0, 0, 1]
    assert [at(n, "energy") for n in (0, 23, 25)] == [0, 0, 1]


def test_loading_counts_as_waiting() -> None:
    assert wait_s(n_ahead=3, service_s=0.5, load_s=2.0) == 3.5
    loaded = Option(latency_s=0.05, energy_j=0.1, wait_s=wait_s(n_ahead=10, service_s=0.05))
    cold = Option(latency_s=0.01, energy_j=0.1, wait_s=wait_s(n_ahead=0, service_s=0.01, load_s=1.0))
    assert choose([loaded, cold], "latency") == 0


@given(
    st.lists(
        st.builds(Option, latency_s=st.floats(1e-4, 1), energy_j=st.floats(1e-4, 9), wait_s=st.floats(0, 9)), min_size=1
    ),
    POLICIES,
)
def test_a_longer_queue_never_draws_requests(options: list[Option], policy: PolicyName) -> None:
    chosen = choose(options, policy)
    assert math.isfinite(options[chosen].wait_s)
    for i in range(len(options)):
        if i != chosen:
            longer = [dataclasses.replace(o, wait_s=o.wait_s + 1.0) if j == i else o for j, o in enumerate(options)]
            assert choose(longer, policy) == chosen
