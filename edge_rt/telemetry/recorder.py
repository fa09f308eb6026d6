"""Count and measure in the front process, which owns one Telemetry.

Histograms and request counters are fed as answers end; a model's engine totals come as EngineStats and are added up
here, so that they go on rising when a worker is restarted or unloaded. Prompts and answers never reach a metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from edge_rt.telemetry.metrics import METRICS, STEP_ROWS_BOUNDS, Metric
from edge_rt.types import Energy, EngineStats, Priority, Timings, Usage
from edge_rt.version import VERSION

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_TOTALS: Final = {
    "edge_rt_prompt_tokens": "prompt_tokens_total",
    "edge_rt_completion_tokens": "completion_tokens_total",
    "edge_rt_cached_tokens": "cached_tokens_total",
    "edge_rt_drafting_seconds": "drafting_s_total",
    "edge_rt_steps": "steps_total",
    "edge_rt_prefix_hits": "prefix_hits_total",
    "edge_rt_restored_tokens": "restored_tokens_total",
    "edge_rt_prefixes_lost": "prefixes_lost_total",
    "edge_rt_preempted": "preempted_total",
    "edge_rt_forced_tokens": "forced_tokens_total",
    "edge_rt_refused": "refused_total",
    "edge_rt_cancelled": "cancelled_total",
    "edge_rt_device_products": "device_products_total",
    "edge_rt_device_faults": "device_faults_total",
    "edge_rt_device_fallbacks": "device_fallbacks_total",
}
_GAUGES: Final = {
    "edge_rt_threads": "n_threads",
    "edge_rt_kv_cells": "cells_total",
    "edge_rt_kv_cells_used": "cells_used",
    "edge_rt_prefix_bytes": "prefix_bytes",
    "edge_rt_grammar_bytes": "grammar_bytes",
    "edge_rt_prefix_disk_bytes": "prefix_disk_bytes",
    "edge_rt_pinned_prefixes": "pinned_prefixes",
    "edge_rt_pins_with_problem": "pins_with_problem",
    "edge_rt_worker_resident_memory_bytes": "rss_bytes",
}
# Guesses of all sources, and of these a draft model's: what is left is from the answers' own words.
_GUESSES: Final = {
    "edge_rt_drafted_tokens": ("drafted_tokens_total", "model_drafted_tokens_total"),
    "edge_rt_accepted_tokens": ("accepted_tokens_total", "model_accepted_tokens_total"),
}
_PLACE_STATES: Final = {"closed": 0, "half_open": 1, "open": 2, "wrong": 3, "resting": 4}


@dataclass(slots=True)
class _StepRows:
    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_ROWS_BOUNDS) + 1))
    rows: int = 0


class _StepRowsCollector(Collector):
    """Expose the engines' own histograms; the client library's Histogram cannot be loaded with counts."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.models: dict[str, _StepRows] = {}

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.metric.name, self.metric.text, labels=self.metric.labels)
        for model, steps in self.models.items():
            buckets: list[tuple[str, float]] = []
            n_steps = 0
            for bound, count in zip((*STEP_ROWS_BOUNDS, None), steps.counts, strict=True):
                n_steps += count
                buckets.append(("+Inf" if bound is None else f"{float(bound)}", n_steps))
            family.add_metric([model], buckets=buckets, sum_value=steps.rows)
        yield family


# A start time beside every counter doubles the page, and no dashboard reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


_M = TypeVar("_M", Counter, Gauge, Histogram)


class Advice(Protocol):
    """What powerd advises; power.state.Advice is one."""

    @property
    def n_prefill_threads(self) -> int | None: ...
    @property
    def n_decode_threads(self) -> int | None: ...
    @property
    def max_batch(self) -> int | None: ...


class PowerState(Protocol):
    """A meter's state; power.monitor.PowerNow is one."""

    @property
    def power_w(self) -> float | None: ...
    @property
    def idle_w(self) -> float | None: ...
    @property
    def coverage(self) -> float: ...
    @property
    def source(self) -> str: ...
    @property
    def boundary(self) -> str: ...
    @property
    def quality(self) -> str: ...


class Telemetry:
    """The front process' metrics. Cheap to call, never raises, belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._last: dict[str, EngineStats] = {}
        # Of the metrics that every request sets: to find one by its labels takes longer than to set it.
        self._found: dict[tuple[str, ...], Any] = {}
        self._depths: dict[str, tuple[int, int]] = {}  # requests running and waiting, by model
        self._power: Callable[[], PowerState] | None = None
        self._queues: Callable[[], Iterable[tuple[str, Priority, int, int]]] | None = None
        self._advice: Callable[[], tuple[Advice, bool]] | None = None
        for metric in METRICS:
            if metric.kind == "counter":
                self._counters[metric.name] = Counter(metric.name, metric.text, metric.labels, registry=self.registry)
            elif metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(metric.name, metric.text, metric.labels, registry=self.registry)
            elif metric.buckets:
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.text, metric.labels, buckets=metric.buckets, registry=self.registry
                )
            else:
                self._step_rows = _StepRowsCollector(metric)
                self.registry.register(self._step_rows)
        self._gauges["edge_rt_build_info"].labels(VERSION).set(1)
        ProcessCollector(namespace="edge_rt", registry=self.registry)

    def request_finished(self, route: str, *, status: int, outcome: str, duration_s: float) -> None:
        """Count one HTTP request. outcome: ok, an error's code, or hung_up; route: the pattern, never the raw path."""
        self._labelled(self._counters, "edge_rt_requests", route, str(status), outcome).inc()
        self._labelled(self._histograms, "edge_rt_request_duration_seconds", route).observe(duration_s)

    def answer_finished(self, model: str, *, usage: Usage, timings: Timings, priority: Priority = "normal") -> None:
        """Record the times of one whole answer. Its tokens are counted by engine_stats."""
        self._histograms["edge_rt_queue_wait_seconds"].labels(model, priority).observe(timings.queue_s)
        if usage.completion_tokens:
            self._histograms["edge_rt_ttft_seconds"].labels(model).observe(timings.ttft_s)
        if (tpot_s := timings.tpot_s) is not None:
            self._histograms["edge_rt_tpot_seconds"].labels(model).observe(tpot_s)
        if usage.energy is not None:
            self.energy_used(model, usage.energy)

    def energy_used(self, model: str, energy: Energy) -> None:
        """Count what an answer took."""
        for phase, total_j, above_idle_j in energy.phases():
            self._labelled(self._counters, "edge_rt_energy_joules", model, phase).inc(total_j)
            if above_idle_j is not None:
                self._labelled(self._counters, "edge_rt_energy_above_idle_joules", model, phase).inc(above_idle_j)

    def energy_aborted(self, model: str, energy: Energy) -> None:
        """Count what was spent on an answer that broke off or was cancelled."""
        self._labelled(self._counters, "edge_rt_energy_joules", model, "aborted").inc(energy.total_j)
        if energy.above_idle_j is not None:
            counter = self._labelled(self._counters, "edge_rt_energy_above_idle_joules", model, "aborted")
            counter.inc(energy.above_idle_j)

    def watch_power(self, read: Callable[[], PowerState]) -> None:
        """Show a meter's state whenever the metrics are asked for."""
        self._power = read

    def watch_advice(self, read: Callable[[], tuple[Advice, bool]]) -> None:
        """Show what is advised whenever the metrics are asked for; True: and applied."""
        self._advice = read

    def watch_queues(self, read: Callable[[], Iterable[tuple[str, Priority, int, int]]]) -> None:
        """Show how many requests run and wait, by model and priority, whenever the metrics are asked for."""
        self._queues = read

    def engine_stats(self, model: str, stats: EngineStats) -> None:
        """Take in one engine's newest totals and gauges.

        Totals that went down are those of a new worker, which began at nothing.
        """
        last = self._last.get(model, EngineStats())
        if stats.steps_total < last.steps_total or stats.prompt_tokens_total < last.prompt_tokens_total:
            last = EngineStats()
        for name, source in _TOTALS.items():
            self._counters[name].labels(model).inc(max(0, getattr(stats, source) - getattr(last, source)))
        for name, (of_all, of_model) in _GUESSES.items():
            by_model = max(0, getattr(stats, of_model) - getattr(last, of_model))
            by_all = max(0, getattr(stats, of_all) - getattr(last, of_all))
            self._counters[name].labels(model, "words").inc(max(0, by_all - by_model))
            self._counters[name].labels(model, "model").inc(by_model)
        for name, source in _GAUGES.items():
            self._gauges[name].labels(model).set(getattr(stats, source))
        if len(stats.step_rows) == len(STEP_ROWS_BOUNDS) + 1:
            steps = self._step_rows.models.setdefault(model, _StepRows())
            before = last.step_rows or (0,) * len(stats.step_rows)
            steps.counts = [n + new - old for n, new, old in zip(steps.counts, stats.step_rows, before, strict=True)]
            steps.rows += stats.rows_total - last.rows_total
        self._last[model] = stats

    def stand_in_loaded(self, model: str, place: str, evidence: str) -> None:
        """Note what computes in a device's place. It stays: histograms and totals keep what it took, too."""
        self._gauges["edge_rt_stand_in"].labels(model, place, evidence).set(1)

    def engine_gone(self, model: str) -> None:
        """Drop an unloaded or dead engine's gauges; its totals stay."""
        if self._last.pop(model, None) is not None:
            for name in _GAUGES:
                self._gauges[name].remove(model)

    def queue_depth(self, model: str, *, running: int, waiting: int) -> None:
        self._depths[model] = running, waiting  # it changes several times a request, and is seldom asked for

    def chain_answered(self, chain: str, stage: str) -> None:
        self._counters["edge_rt_chain_answers"].labels(chain, stage).inc()

    def worker_restarted(self, model: str) -> None:
        self._counters["edge_rt_worker_restarts"].labels(model).inc()

    def place_answered(self, model: str, place: str, *, spilled: bool, took_s: float, n_joined: int) -> None:
        """Count a request that a place of a tensor model answered.

        spilled: a better one was busy; n_joined: requests of its batch, itself among them.
        """
        self._labelled(self._counters, "edge_rt_place_requests", model, place).inc()
        self._labelled(self._counters, "edge_rt_place_batches", model, place).inc(1 / max(1, n_joined))
        self._labelled(self._histograms, "edge_rt_place_duration_seconds", model, place).observe(took_s)
        if spilled:
            self._counters["edge_rt_place_spilled"].labels(model, place).inc()

    def place_failed(self, model: str, place: str) -> None:
        self._counters["edge_rt_place_failures"].labels(model, place).inc()

    def place_wrong(self, model: str, place: str) -> None:
        self._counters["edge_rt_place_wrong"].labels(model, place).inc()

    def place_state(self, model: str, place: str, state: str) -> None:
        self._labelled(self._gauges, "edge_rt_place_state", model, place).set(_PLACE_STATES[state])

    def routed(self, where: str, reason: str) -> None:
        """Count a decision of the router; reason is one of its fixed words."""
        self._counters["edge_rt_route_decisions"].labels(where, reason).inc()

    def handed_over(self, reason: str) -> None:
        self._counters["edge_rt_hand_overs"].labels(reason).inc()

    def cloud_answered(self, endpoint: str, *, usage: Usage, cost: float, first_byte_s: float) -> None:
        self._counters["edge_rt_cloud_answers"].labels(endpoint).inc()
        self._counters["edge_rt_cloud_tokens"].labels(endpoint, "prompt").inc(usage.prompt_tokens)
        self._counters["edge_rt_cloud_tokens"].labels(endpoint, "completion").inc(usage.completion_tokens)
        self._counters["edge_rt_cloud_cost"].labels(endpoint).inc(cost)
        self._histograms["edge_rt_cloud_first_byte_seconds"].labels(endpoint).observe(first_byte_s)

    def cloud_failed(self, endpoint: str, code: str) -> None:
        self._counters["edge_rt_cloud_failures"].labels(endpoint, code).inc()

    def cloud_retried(self, endpoint: str) -> None:
        self._counters["edge_rt_cloud_retries"].labels(endpoint).inc()

    def cloud_state(self, endpoint: str, state: str) -> None:
        self._gauges["edge_rt_cloud_state"].labels(endpoint).set(_PLACE_STATES[state])

    def cache_looked_up(self, state: str, *, saved_s: float = 0.0, saved_j: float = 0.0) -> None:
        """Count what the answer cache did for a request: hit-exact, hit-semantic, miss, shadow or bypass."""
        self._counters["edge_rt_cache_requests"].labels(state).inc()
        self._counters["edge_rt_cache_saved_seconds"].inc(saved_s)
        self._counters["edge_rt_cache_saved_joules"].inc(saved_j)

    def cache_decided(self, decision: str) -> None:
        self._counters["edge_rt_cache_answers"].labels(decision).inc()

    def cache_verified(self, *, is_right: bool) -> None:
        self._counters["edge_rt_cache_verified"].labels("right" if is_right else "wrong").inc()

    def cache_size(self, *, n_entries: int, size_bytes: int) -> None:
        self._gauges["edge_rt_cache_entries"].set(n_entries)
        self._gauges["edge_rt_cache_bytes"].set(size_bytes)

    def cache_evicted(self, n: int) -> None:
        self._counters["edge_rt_cache_evicted"].inc(n)

    def cache_rejected(self) -> None:
        self._counters["edge_rt_cache_rejected"].inc()

    def exposition(self) -> bytes:
        """Give all metrics in Prometheus' text format (CONTENT_TYPE)."""
        for model, (running, waiting) in self._depths.items():
            self._gauges["edge_rt_requests_running"].labels(model).set(running)
            self._gauges["edge_rt_requests_waiting"].labels(model).set(waiting)
        if self._queues is not None:
            gauge = self._gauges["edge_rt_priority_requests"]
            for model, priority, running, waiting in (each for each in self._queues() if each[0] in self._depths):
                gauge.labels(model, priority, "running").set(running)
                gauge.labels(model, priority, "waiting").set(waiting)
        if self._power is not None:
            self._show_power(self._power())
        if self._advice is not None:
            self._show_advice(*self._advice())
        return generate_latest(self.registry)

    def _show_advice(self, advice: Advice, is_applied: bool) -> None:
        state = "applied" if is_applied else "shown"
        threads, batch = self._gauges["edge_rt_power_advised_threads"], self._gauges["edge_rt_power_advised_batch"]
        threads.clear()
        batch.clear()
        for phase, n in (("prefill", advice.n_prefill_threads), ("decode", advice.n_decode_threads)):
            if n is not None:
                threads.labels(phase, state).set(n)
        if advice.max_batch is not None:
            batch.labels(state).set(advice.max_batch)

    def _show_power(self, now: PowerState) -> None:
        shown = (
            ("edge_rt_power_watts", now.power_w, (now.source, now.boundary, now.quality)),
            ("edge_rt_power_idle_watts", now.idle_w, (now.source,)),
            ("edge_rt_power_coverage", now.coverage, (now.source,)),
        )
        for name, value, labels in shown:
            self._gauges[name].clear()  # what is unknown is absent
            if value is not None:
                self._gauges[name].labels(*labels).set(value)

    def _labelled(self, metrics: Mapping[str, _M], name: str, *labels: str) -> _M:
        """Give a metric with its labels, which is never removed."""
        found: _M | None = self._found.get((name, *labels))
        if found is None:
            found = self._found[name, *labels] = metrics[name].labels(*labels)
        return found
