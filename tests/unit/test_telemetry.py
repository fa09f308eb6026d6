from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_rt.power.monitor import PowerNow
from edge_rt.power.state import Advice
from edge_rt.telemetry import METRICS, STEP_ROWS_BOUNDS, Telemetry
from edge_rt.types import Energy, EngineStats, Timings, Usage

STATS = EngineStats(
    cells_used=10,
    cells_total=100,
    n_threads=2,
    steps_total=3,
    rows_total=40,
    prompt_tokens_total=38,
    completion_tokens_total=2,
    cached_tokens_total=4,
    drafted_tokens_total=9,
    accepted_tokens_total=5,
    model_drafted_tokens_total=6,
    model_accepted_tokens_total=1,
    drafting_s_total=0.25,
    rss_bytes=1000,
    step_rows=(1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0),
)


def samples(metrics: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: Telemetry, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def test_every_metric_of_the_table_is_exposed_with_its_type() -> None:
    metrics = Telemetry()
    metrics.engine_stats("m", STATS)
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", metrics.exposition().decode(), re.MULTILINE))
    for metric in METRICS:
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        assert types[name] == metric.kind


def test_the_page_of_metrics_lists_each_of_them_with_type_unit_labels_and_meaning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in page.splitlines() if line[:3] == "| `"
    ]
    table = [
        (f"`{m.exposed}`", m.kind, m.unit, ", ".join(f"`{label}`" for label in m.labels) or "–", m.text)
        for m in METRICS
    ]
    told = {row[0].strip("`"): row[1] for row in rows[len(table) :]}  # the client library's own, by its own words
    assert rows[: len(table)] == table
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", Telemetry().exposition().decode(), re.MULTILINE))
    assert told == {name: kind for name, kind in types.items() if name.startswith("edge_rt_process_")}


def test_requests_are_shown_by_priority_of_models_that_were_asked() -> None:
    metrics = Telemetry()
    metrics.watch_queues(lambda: [("m", "interactive", 2, 1), ("m", "background", 0, 3), ("never", "normal", 0, 0)])
    metrics.queue_depth("m", running=2, waiting=4)
    assert value(metrics, "edge_rt_priority_requests", model="m", priority="interactive", state="running") == 2
    assert value(metrics, "edge_rt_priority_requests", model="m", priority="background", state="waiting") == 3
    assert "never" not in metrics.exposition().decode()


def test_names_follow_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.startswith("edge_rt_")
        assert not metric.name.endswith(("_total", "_count", "_sum", "_ms", "_s"))
        assert metric.kind == "histogram" or not metric.buckets
        assert list(metric.buckets) == sorted(metric.buckets)


def test_a_request_is_counted_by_route_status_and_outcome() -> None:
    metrics = Telemetry()
    metrics.request_finished("/v1/models", status=200, outcome="ok", duration_s=0.003)
    metrics.request_finished("/v1/models", status=200, outcome="ok", duration_s=400.0)
    assert value(metrics, "edge_rt_requests_total", route="/v1/models", status="200", outcome="ok") == 2
    assert value(metrics, "edge_rt_request_duration_seconds_bucket", route="/v1/models", le="0.005") == 1
    assert value(metrics, "edge_rt_request_duration_seconds_count", route="/v1/models") == 2


def test_an_answer_fills_the_histograms() -> None:
    metrics = Telemetry()
    usage = Usage(prompt_tokens=5, completion_tokens=3)
    timings = Timings(queue_s=0.25, prefill_s=0.5, prefill_tokens=5, decode_s=0.5, decode_tokens=2, ttft_s=0.75)
    metrics.answer_finished("m", usage=usage, timings=timings)
    assert value(metrics, "edge_rt_ttft_seconds_sum", model="m") == 0.75
    assert value(metrics, "edge_rt_queue_wait_seconds_sum", model="m", priority="normal") == 0.25
    assert value(metrics, "edge_rt_tpot_seconds_sum", model="m") == 0.25


def test_an_answer_of_one_token_has_no_tpot_and_an_empty_one_no_ttft() -> None:
    metrics = Telemetry()
    timings = Timings(queue_s=0.0, prefill_s=0.5, prefill_tokens=5, decode_s=0.0, decode_tokens=0, ttft_s=0.5)
    metrics.answer_finished("m", usage=Usage(prompt_tokens=5, completion_tokens=1), timings=timings)
    metrics.answer_finished("m", usage=Usage(prompt_tokens=5, completion_tokens=0), timings=timings)
    assert value(metrics, "edge_rt_ttft_seconds_count", model="m") == 1
    assert ("edge_rt_tpot_seconds_count", (("model", "m"),)) not in samples(metrics)


def test_totals_of_an_engine_add_up_over_a_restart() -> None:
    metrics = Telemetry()
    metrics.engine_stats("m", STATS)
    metrics.engine_stats("m", replace(STATS, steps_total=4, rows_total=41, completion_tokens_total=3))
    restarted = EngineStats(steps_total=1, rows_total=2, prompt_tokens_total=2, step_rows=(0, 1, *[0] * 9))
    metrics.engine_stats("m", restarted)
    assert value(metrics, "edge_rt_steps_total", model="m") == 5
    assert value(metrics, "edge_rt_prompt_tokens_total", model="m") == 40
    assert value(metrics, "edge_rt_completion_tokens_total", model="m") == 3
    for source, drafted, accepted in (("words", 3, 4), ("model", 6, 1)):
        assert value(metrics, "edge_rt_drafted_tokens_total", model="m", source=source) == drafted
        assert value(metrics, "edge_rt_accepted_tokens_total", model="m", source=source) == accepted
    assert value(metrics, "edge_rt_drafting_seconds_total", model="m") == 0.25


def test_step_rows_is_a_cumulative_histogram() -> None:
    metrics = Telemetry()
    metrics.engine_stats("m", STATS)
    metrics.engine_stats("m", replace(STATS, steps_total=4, rows_total=41, step_rows=(2, *STATS.step_rows[1:])))
    bucket = "edge_rt_step_rows_bucket"
    assert [value(metrics, bucket, model="m", le=le) for le in ("1.0", "2.0", "32.0", "64.0", "+Inf")] == [
        2,
        3,
        3,
        4,
        4,
    ]
    assert value(metrics, "edge_rt_step_rows_count", model="m") == 4
    assert value(metrics, "edge_rt_step_rows_sum", model="m") == 41
    assert len(STATS.step_rows) == len(STEP_ROWS_BOUNDS) + 1


def test_an_unloaded_engine_leaves_totals_but_no_gauges() -> None:
    metrics = Telemetry()
    metrics.engine_stats("m", STATS)
    assert value(metrics, "edge_rt_worker_resident_memory_bytes", model="m") == 1000
    metrics.engine_gone("m")
    metrics.engine_gone("m")
    names = {name for name, _ in samples(metrics)}
    assert "edge_rt_worker_resident_memory_bytes" not in names
    assert "edge_rt_threads" not in names
    assert value(metrics, "edge_rt_prompt_tokens_total", model="m") == 38


def test_an_engine_that_is_loaded_again_starts_its_totals_at_nothing() -> None:
    metrics = Telemetry()
    metrics.engine_stats("m", STATS)
    metrics.engine_gone("m")
    metrics.engine_stats("m", STATS)
    assert value(metrics, "edge_rt_prompt_tokens_total", model="m") == 76
    assert value(metrics, "edge_rt_step_rows_sum", model="m") == 80


def test_queue_and_restarts() -> None:
    metrics = Telemetry()
    metrics.queue_depth("m", running=2, waiting=3)
    metrics.worker_restarted("m")
    assert value(metrics, "edge_rt_requests_running", model="m") == 2
    assert value(metrics, "edge_rt_requests_waiting", model="m") == 3
    assert value(metrics, "edge_rt_worker_restarts_total", model="m") == 1


def test_two_registries_do_not_clash() -> None:
    first, second = Telemetry(), Telemetry()
    first.worker_restarted("m")
    assert ("edge_rt_worker_restarts_total", (("model", "m"),)) not in samples(second)


def test_energy_is_counted_by_phase() -> None:
    metrics = Telemetry()
    timings = Timings(queue_s=0.0, prefill_s=0.5, prefill_tokens=5, decode_s=0.5, decode_tokens=2, ttft_s=0.5)
    energy = Energy(
        total_j=3.0, above_idle_j=1.5, prefill_j=1.0, prefill_above_idle_j=0.5, decode_j=2.0, decode_above_idle_j=1.0
    )
    metrics.answer_finished("m", usage=Usage(prompt_tokens=5, completion_tokens=3, energy=energy), timings=timings)
    metrics.answer_finished("m", usage=Usage(prompt_tokens=5, completion_tokens=3), timings=timings)
    metrics.energy_used("eyes", Energy(total_j=0.25))
    metrics.energy_aborted("m", Energy(total_j=0.5, above_idle_j=0.25))
    assert value(metrics, "edge_rt_energy_joules_total", model="m", phase="aborted") == 0.5
    assert value(metrics, "edge_rt_energy_above_idle_joules_total", model="m", phase="aborted") == 0.25
    assert value(metrics, "edge_rt_energy_joules_total", model="m", phase="prefill") == 1.0
    assert value(metrics, "edge_rt_energy_joules_total", model="m", phase="decode") == 2.0
    assert value(metrics, "edge_rt_energy_above_idle_joules_total", model="m", phase="decode") == 1.0
    assert value(metrics, "edge_rt_energy_joules_total", model="eyes", phase="compute") == 0.25
    assert not [name for name, labels in samples(metrics) if "above_idle" in name and ("model", "eyes") in labels]


@pytest.mark.parametrize("silent", ["prefill", "decode"])
def test_a_phase_in_which_the_meter_was_silent_has_what_is_left(silent: str) -> None:
    metrics = Telemetry()
    known = {"prefill_j": 1.0, "prefill_above_idle_j": 0.5, "decode_j": 2.0, "decode_above_idle_j": 1.0}
    told = {name: None if name.startswith(silent) else joules for name, joules in known.items()}
    metrics.energy_used("m", Energy(total_j=3.0, above_idle_j=1.5, **told))  # type: ignore[arg-type]
    for phase, total_j, above_j in (("prefill", 1.0, 0.5), ("decode", 2.0, 1.0)):
        assert value(metrics, "edge_rt_energy_joules_total", model="m", phase=phase) == total_j
        assert value(metrics, "edge_rt_energy_above_idle_joules_total", model="m", phase=phase) == above_j


def test_power_is_shown_while_it_is_known() -> None:
    metrics = Telemetry()
    shown = {"source": "tc66", "boundary": "board", "quality": "measured"}
    now = PowerNow(power_w=5.5, idle_w=None, coverage=0.75, **shown)  # type: ignore[arg-type]
    metrics.watch_power(lambda: now)
    text = metrics.exposition().decode()
    assert 'edge_rt_power_watts{boundary="board",quality="measured",source="tc66"} 5.5' in text
    assert 'edge_rt_power_coverage{source="tc66"} 0.75' in text
    assert "edge_rt_power_idle_watts{" not in text
    now = replace(now, power_w=None, idle_w=2.0)
    text = metrics.exposition().decode()
    assert "edge_rt_power_watts{" not in text
    assert 'edge_rt_power_idle_watts{source="tc66"} 2.0' in text


def test_without_a_meter_no_power_is_shown() -> None:
    assert "edge_rt_power_watts{" not in Telemetry().exposition().decode()


def test_advice_is_shown_as_applied_or_not_and_absent_without() -> None:
    metrics = Telemetry()
    told = [(Advice(n_prefill_threads=4, n_decode_threads=2, max_batch=6), True)]
    metrics.watch_advice(lambda: told[-1])
    text = metrics.exposition().decode()
    assert 'edge_rt_power_advised_threads{phase="decode",state="applied"} 2.0' in text
    assert 'edge_rt_power_advised_threads{phase="prefill",state="applied"} 4.0' in text
    assert 'edge_rt_power_advised_batch{state="applied"} 6.0' in text
    told.append((Advice(n_decode_threads=1), False))
    text = metrics.exposition().decode()
    assert 'edge_rt_power_advised_threads{phase="decode",state="shown"} 1.0' in text
    assert 'state="applied"' not in text
    assert "edge_rt_power_advised_batch{" not in text
    told.append((Advice(), True))
    assert "edge_rt_power_advised_threads{" not in metrics.exposition().decode()
