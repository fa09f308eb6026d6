from __future__ import annotations

from dataclasses import replace

import pytest

from edge_rt.cli.scrape import DeviceLoss, Load, Scrape, median
from edge_rt.cli.top import table, watch
from edge_rt.power.monitor import PowerNow
from edge_rt.telemetry import Telemetry
from edge_rt.types import Energy, EngineStats, Timings, Usage

INF = float("inf")


def telemetry(**stats: int) -> Telemetry:
    """Metrics of a daemon with one loaded model."""
    metrics = Telemetry()
    metrics.queue_depth("m", running=2, waiting=3)
    metrics.engine_stats("m", EngineStats(**stats))
    return metrics


def text(metrics: Telemetry) -> str:
    return metrics.exposition().decode()


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ((), None),
        (((0.1, 0.0), (INF, 0.0)), None),
        (((0.1, 4.0), (0.2, 4.0), (INF, 4.0)), 0.05),
        (((0.1, 0.0), (0.2, 4.0), (INF, 4.0)), 0.15),
        (((0.1, 1.0), (0.2, 2.0), (0.4, 4.0), (INF, 4.0)), 0.2),
        (((0.1, 0.0), (0.2, 0.0), (INF, 5.0)), 0.2),
    ],
)
def test_the_median_of_a_histogram(buckets: tuple[tuple[float, float], ...], expected: float | None) -> None:
    assert median(buckets) == (None if expected is None else pytest.approx(expected))


def test_a_view_shows_the_gauges_and_the_rates_between_two_looks() -> None:
    metrics = telemetry(prompt_tokens_total=100, completion_tokens_total=10, cached_tokens_total=20, steps_total=1)
    before = Scrape.of(text(metrics), 100.0)
    metrics.engine_stats(
        "m",
        EngineStats(
            prompt_tokens_total=160,
            completion_tokens_total=50,
            cached_tokens_total=40,
            steps_total=9,
            n_threads=2,
            cells_total=4096,
            cells_used=77,
            preempted_total=4,
            refused_total=5,
            prefix_hits_total=6,
            prefix_bytes=7 * 2**20,
            rss_bytes=300 * 2**20,
        ),
    )
    metrics.answer_finished(
        "m",
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0),
        timings=Timings(queue_s=0.0, prefill_s=0.15, prefill_tokens=1, decode_s=0.1, decode_tokens=1, ttft_s=0.15),
    )
    metrics.worker_restarted("m")
    view = Load.between(before, Scrape.of(text(metrics), 102.0))
    (model,) = view.models
    assert (model.decode_tps, model.prefill_tps) == (20.0, 20.0)
    assert (model.loaded, model.running, model.waiting, model.restarts) == (True, 2, 3, 1)
    assert (model.threads, model.kv_cells_used, model.kv_cells, model.rss_bytes) == (2, 77, 4096, 300 * 2**20)
    assert model.ttft_p50_s == pytest.approx(0.15)
    header, line = table(view).splitlines()[-2:]
    assert header.split()[:4] == ["MODEL", "STATE", "RUN", "WAIT"]
    assert (
        " ".join(line.split())
        == "m loaded, 1 restarts, 4 put back, 5 refused 2 3 20.0 20.0 150 ms 2 77 / 4096 6 hits, 7 MiB 300 MiB"
    )


def test_power_and_joules_show_where_there_is_a_meter() -> None:
    metrics = telemetry(completion_tokens_total=10)
    before = Scrape.of(text(metrics), 0.0)
    assert "J/TOKEN" not in table(Load.between(before, before))
    metrics.energy_used("m", Energy(total_j=6.0, prefill_j=1.0, decode_j=5.0))
    now = PowerNow(
        power_w=6.25, idle_w=2.0, coverage=1.0, source="tc66 /dev/ttyACM0", boundary="board", quality="measured"
    )
    metrics.watch_power(lambda: now)
    view = Load.between(before, Scrape.of(text(metrics), 1.0))
    assert view.models[0].decode_j_per_token == 0.5
    shown = table(view).splitlines()
    assert shown[0].endswith(" · 6.25 W of the board, measured (tc66 /dev/ttyACM0)")
    assert shown[-2].split()[-1] == "J/TOKEN"
    assert shown[-1].split()[-1] == "0.5"
    metrics.watch_power(lambda: replace(now, power_w=None))
    assert Load.between(before, Scrape.of(text(metrics), 2.0)).power is None


def test_what_stands_in_for_a_device_is_called_that_and_shows_no_speed() -> None:
    metrics = telemetry(completion_tokens_total=10, steps_total=1, n_threads=2)
    metrics.place_answered("t", "fpga_sim", spilled=False, took_s=7.0, n_joined=1)
    before = Scrape.of(text(metrics), 100.0)
    metrics.engine_stats("m", EngineStats(completion_tokens_total=87, steps_total=9, n_threads=2))
    metrics.answer_finished(
        "m",
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0),
        timings=Timings(queue_s=0.0, ttft_s=31.0, prefill_s=30.0, prefill_tokens=1, decode_s=1.0, decode_tokens=1),
    )
    metrics.place_answered("t", "fpga_sim", spilled=False, took_s=7.0, n_joined=1)
    assert "77.0" in table(Load.between(before, Scrape.of(text(metrics), 101.0)))
    metrics.stand_in_loaded("m", "v on fpga_sim:fpga-sim", "simulator")
    metrics.stand_in_loaded("t fpga_sim", "fpga_sim", "simulator")
    for _ in range(2):
        load = Load.between(before, Scrape.of(text(metrics), 101.0))
        assert (load.models[0].stand_in, load.places[0].stand_in) == ("simulator", "simulator")
        shown = table(load)
        assert "loaded (simulator)" in shown
        assert "fpga_sim (simulator)" in shown
        assert " ms" not in shown
        assert "77.0" not in shown
        metrics.engine_gone("m")  # what it took is in the histograms still


def test_only_the_place_of_a_stand_in_is_called_that() -> None:
    metrics = Telemetry()
    for place in ("int8 on npu_qnn:htp", "int8 on onnx_cpu:cpu"):
        metrics.place_answered("t", place, spilled=False, took_s=0.004, n_joined=1)
    before = Scrape.of(text(metrics), 0.0)
    metrics.stand_in_loaded("t", "int8 on npu_qnn:htp", "simulator")
    for place in ("int8 on npu_qnn:htp", "int8 on onnx_cpu:cpu"):
        metrics.place_answered("t", place, spilled=False, took_s=0.004, n_joined=1)
    load = Load.between(before, Scrape.of(text(metrics), 1.0))
    assert [place.stand_in for place in load.places] == ["simulator", None]
    simulated, real = table(load).splitlines()[-2:]
    assert "int8 on npu_qnn:htp (simulator)" in simulated
    assert " ms" not in simulated
    assert "simulator" not in real
    assert " ms" in real


def test_an_accelerator_that_failed_is_told_and_whether_the_cpu_computes_now() -> None:
    metrics = telemetry(device_products_total=5)
    before = Scrape.of(text(metrics), 0.0)
    assert Load.between(before, before).losses == ()
    metrics.engine_stats("m", EngineStats(device_products_total=5, device_faults_total=1, device_fallbacks_total=29))
    after = Scrape.of(text(metrics), 1.0)
    (loss,) = Load.between(before, after).losses
    assert loss == DeviceLoss(model="m", n_faults=1, n_fallbacks=29, n_now=29)
    assert table(Load.between(before, after)).splitlines()[-1] == (
        "m: its accelerator has failed once; the CPU computed 29 in its place, 29 of them just now"
    )
    metrics.engine_stats("m", EngineStats(device_products_total=9, device_faults_total=2, device_fallbacks_total=30))
    later = Scrape.of(text(metrics), 2.0)
    assert table(Load.between(later, later)).splitlines()[-1] == (
        "m: its accelerator has failed 2 times; the CPU computed 30 in its place"
    )


def test_an_unloaded_model_keeps_its_line_and_has_no_gauges() -> None:
    metrics = telemetry(completion_tokens_total=10)
    before = Scrape.of(text(metrics), 0.0)
    metrics.engine_gone("m")
    (model,) = Load.between(before, Scrape.of(text(metrics), 1.0)).models
    assert (model.loaded, model.threads, model.kv_cells, model.rss_bytes) == (False, None, None, None)
    assert model.decode_tps == 0.0


def test_totals_of_a_daemon_that_was_started_again_are_no_negative_rate() -> None:
    before = Scrape.of(text(telemetry(completion_tokens_total=100)), 0.0)
    (model,) = Load.between(before, Scrape.of(text(telemetry(completion_tokens_total=5)), 1.0)).models
    assert model.decode_tps == 0.0


def test_a_fresh_daemon_says_that_no_model_was_used() -> None:
    scrape = Scrape.of(text(Telemetry()), 0.0)
    assert "no model has been used yet" in table(Load.between(scrape, scrape))


def test_each_view_is_taken_over_its_own_interval() -> None:
    texts = iter([text(telemetry(completion_tokens_total=n)) for n in (0, 10, 40)])
    times, pauses = iter((0.0, 1.0, 3.0)), list[float]()
    views = watch(lambda: next(texts), 1.5, clock=lambda: next(times), sleep=pauses.append)
    rates = [next(views).models[0].decode_tps for _ in range(2)]
    assert rates == [10.0, 15.0]
    assert pauses == [1.5, 1.5]


def test_a_tensor_model_has_a_line_for_each_place_with_what_came_in_the_interval() -> None:
    metrics = telemetry(completion_tokens_total=10)
    fast, slow = "int8 on onnx_cpu:cpu", "fp32 on onnx_cpu:cpu"
    for place in (fast, slow):
        metrics.place_answered("net", place, spilled=False, took_s=4.0, n_joined=1)
        metrics.place_state("net", place, "closed")
    metrics.queue_depth("net", running=1, waiting=2)
    before = Scrape.of(text(metrics), 100.0)
    for _ in range(8):
        metrics.place_answered("net", fast, spilled=False, took_s=0.004, n_joined=4)
    for _ in range(2):
        metrics.place_answered("net", fast, spilled=False, took_s=0.08, n_joined=1)
    metrics.place_failed("net", slow)
    metrics.place_state("net", slow, "open")
    metrics.engine_stats("net", EngineStats(rss_bytes=100 * 2**20))
    metrics.engine_stats(f"net {slow}", EngineStats(rss_bytes=50 * 2**20))
    view = Load.between(before, Scrape.of(text(metrics), 102.0))
    assert [model.model for model in view.models] == ["m"], "it has no line among the language models"
    open_one, used = view.places
    assert (open_one.place, open_one.breaker, open_one.failed, open_one.p50_s) == (slow, "open", 1, None)
    assert (used.place, used.breaker, used.requests_hz, used.joined) == (fast, "closed", 5.0, 2.5)
    assert used.p50_s is not None
    assert used.p95_s is not None
    assert 0.003 <= used.p50_s <= 0.005
    assert 0.05 <= used.p95_s <= 0.1
    header, first, second = table(view).splitlines()[-3:]
    assert header.split() == [
        "MODEL",
        "PLACE",
        "BREAKER",
        "RUN",
        "WAIT",
        "REQ/S",
        "JOINED",
        "P50",
        "P95",
        "FAILED",
        "RSS",
    ]
    assert " ".join(first.split()) == "net fp32 on onnx_cpu:cpu open 1 2 0.0 - - - 1 150 MiB"
    assert " ".join(second.split()).startswith("int8 on onnx_cpu:cpu closed 5.0 2.5 4.")


def test_another_daemon_in_between_gives_no_negative_times() -> None:
    metrics = telemetry()
    for _ in range(5):
        metrics.place_answered("net", "p", spilled=False, took_s=0.1, n_joined=1)
    before, other = Scrape.of(text(metrics), 0.0), telemetry()
    other.place_answered("net", "p", spilled=False, took_s=0.1, n_joined=1)
    (place,) = Load.between(before, Scrape.of(text(other), 1.0)).places
    assert (place.requests_hz, place.joined, place.p50_s) == (0.0, None, None)
