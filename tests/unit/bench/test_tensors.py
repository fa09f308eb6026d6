from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import DeviceCounts, ModelFile, TensorOptions
from edge_rt.backends.null_tensor import NullTensorSession
from edge_rt.bench.runner import Sensors
from edge_rt.bench.tensors import Job, make_feeds, measure, measure_apart, takes_batches
from edge_rt.catalog.pipelines import Classify, FindSpeech, ImageInput, StateTensor
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.errors import BackendLoadError, BackendStepError
from edge_rt.tensor_types import TensorSpec
from edge_rt.worker.channel import Load, TensorLoad


class FakeSensors(Sensors):
    """A counter that gains 0.5 J with each look, or none."""

    def __init__(self, *, has_energy: bool) -> None:
        self._has_energy, self._total_j = has_energy, 0.0

    def energy_mark(self) -> float:
        return self._total_j

    def energy_j(self, mark: float) -> Reading[float]:
        self._total_j += 0.5
        return known(self._total_j - mark, "fake") if self._has_energy else unknown("fake", "there is no counter")

    def rss_bytes(self) -> Reading[int]:
        return known(1000, "fake")


def session(script: str) -> NullTensorSession:
    file = ModelFile(model="m", variant=script, path=Path("none"), quant="none")
    return NullTensorSession(file, TensorOptions(), sleep=lambda _: None)


def clock(step_ns: int) -> object:
    now = iter(range(0, 10**12, step_ns))
    return lambda: next(now)


def test_times_rates_and_energy_are_of_the_runs_that_count() -> None:
    row = measure(
        session("run_s=1"),
        TensorLoad(),
        batch_size=4,
        n_runs=10,
        sensors=FakeSensors(has_energy=True),
        clock_ns=clock(2_000_000),  # type: ignore[arg-type]
    )
    assert (row.latency_p50_s, row.latency_p95_s, row.latency_min_s) == (0.002, 0.002, 0.002)
    assert row.per_s == pytest.approx(4 / 0.002)
    assert row.energy_j == pytest.approx(0.5 / 40)
    assert row.shapes == {"x": (4, 4)}
    assert row.rss_bytes == 1000


def test_what_the_cpu_computed_in_a_devices_place_is_no_figure_of_the_device() -> None:
    class Lost(NullTensorSession):
        n_runs = 0

        def run(self, *args: Any, **fields: Any) -> dict[str, NDArray[Any]]:
            self.n_runs += 1
            return super().run(*args, **fields)

        def device_counts(self) -> DeviceCounts:
            return DeviceCounts(n_products=self.n_runs, n_fallbacks=max(0, self.n_runs - 8))

    file = ModelFile(model="m", variant="", path=Path("none"), quant="none")
    lost = Lost(file, TensorOptions(), sleep=lambda _: None)
    with pytest.raises(BackendStepError, match="null:null: the CPU computed 5 times in its place"):
        measure(lost, TensorLoad(), batch_size=1, n_runs=10, sensors=FakeSensors(has_energy=False))


def test_energy_without_a_counter_is_not_measured() -> None:
    row = measure(session(""), TensorLoad(), batch_size=1, n_runs=2, sensors=FakeSensors(has_energy=False))
    assert (row.energy_j, row.energy_reason) == (None, "there is no counter")


def test_inputs_have_the_sizes_that_the_pipeline_makes() -> None:
    image = ImageInput(width=20, height=10, layout="nhwc")
    load = TensorLoad(pipeline=Classify(image=image, labels="l"), max_batch=8)
    picture = TensorSpec(name="x", datatype="UINT8", shape=(-1, -1, -1, 3))
    feeds = make_feeds((picture,), load, 2)
    assert feeds["x"].shape == (2, 10, 20, 3)
    assert takes_batches((picture,), load)
    speech = TensorLoad(
        pipeline=FindSpeech(rate_input="sr"), state=(StateTensor(input="h", output="hn", shape=(2, 1, 8)),)
    )
    specs = (
        TensorSpec(name="input", datatype="FP32", shape=(-1, -1)),
        TensorSpec(name="h", datatype="FP32", shape=(2, -1, 8)),
        TensorSpec(name="sr", datatype="INT64", shape=()),
    )
    feeds = make_feeds(specs, speech, 1)
    assert feeds["input"].shape == (1, 576)
    assert not feeds["h"].any()
    assert feeds["h"].shape == (2, 1, 8)
    assert feeds["sr"] == np.int64(16_000)
    assert not takes_batches(specs, speech)


def job(script: str) -> Job:
    load = Load(
        model="m",
        variant=script,
        path="",
        quant="none",
        backend="null",
        n_ctx=0,
        tensor=TensorLoad(max_batch=4),
        force=True,
    )
    return Job(load=load, batch_sizes=(1, 4), n_runs=3)


def test_a_candidate_is_measured_in_a_process_of_its_own() -> None:
    rows = measure_apart(job("run_s=0.001"))
    assert [(row.batch_size, row.n_runs, row.backend) for row in rows] == [(1, 3, "null"), (4, 3, "null")]
    assert all(row.latency_min_s >= 0.001 for row in rows)


def test_what_goes_wrong_there_is_told_here() -> None:
    with pytest.raises(BackendStepError):
        measure_apart(job("fail_after=2"))
    with pytest.raises(BackendLoadError, match="signal 6"):
        measure_apart(job("abort_after=2"))
    with pytest.raises(BackendLoadError, match="did not end within 1 s"):
        measure_apart(job(""), timeout_s=1.0, command=(sys.executable, "-c", "import time; time.sleep(60)"))
