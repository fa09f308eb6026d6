"""Every metric's name, type and unit in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

# Upper bounds of EngineStats.step_rows: powers of two up to n_batch's usual 512, then everything above.
STEP_ROWS_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TPOT_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_QUEUE_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_PLACE_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_REQUEST_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table; a counter's exposed name gets _total appended by the client library."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """Give the name that a scrape shows."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        """Give the unit, which ends the name; "1" for counts of the things that the name says, shares and states."""
        last = self.name.rpartition("_")[2]
        return last if last in _UNITS else _COUNTED.get(last, "1")


_UNITS: Final = frozenset({"seconds", "bytes", "joules", "watts"})
_COUNTED: Final = {"tokens": "tokens", "rows": "tokens", "cells": "tokens", "used": "tokens", "cost": "currency"}

METRICS: Final = (
    Metric("edge_rt_requests", "counter", "Answered HTTP requests.", ("route", "status", "outcome")),
    Metric("edge_rt_request_duration_seconds", "histogram", "Request to end of answer.", ("route",), _REQUEST_S),
    Metric("edge_rt_ttft_seconds", "histogram", "Submission to first token.", ("model",), _TTFT_S),
    Metric("edge_rt_tpot_seconds", "histogram", "Mean time per output token of one answer.", ("model",), _TPOT_S),
    Metric(
        "edge_rt_queue_wait_seconds", "histogram", "Submission to first prefill step.", ("model", "priority"), _QUEUE_S
    ),
    Metric("edge_rt_prompt_tokens", "counter", "Prompt tokens taken in.", ("model",)),
    Metric("edge_rt_completion_tokens", "counter", "Tokens generated, those of cancelled answers too.", ("model",)),
    Metric(
        "edge_rt_forced_tokens",
        "counter",
        "Tokens generated that an answer's form left no choice about, which took no step each.",
        ("model",),
    ),
    Metric("edge_rt_cached_tokens", "counter", "Prompt tokens not computed again.", ("model",)),
    Metric(
        "edge_rt_drafted_tokens",
        "counter",
        "Tokens guessed, by the answer's own words or by a draft model, and computed beside the answers' own.",
        ("model", "source"),
    ),
    Metric("edge_rt_accepted_tokens", "counter", "Guessed tokens that were right.", ("model", "source")),
    Metric("edge_rt_drafting_seconds", "counter", "Time that a draft model took.", ("model",)),
    Metric("edge_rt_steps", "counter", "Decode steps.", ("model",)),
    Metric("edge_rt_prefix_hits", "counter", "Requests that began with rows that were there.", ("model",)),
    Metric("edge_rt_restored_tokens", "counter", "Tokens of kept prefixes read from the disk.", ("model",)),
    Metric("edge_rt_prefixes_lost", "counter", "Kept prefixes that could not be used.", ("model",)),
    Metric(
        "edge_rt_preempted", "counter", "Requests put back for a more urgent one, or for want of cells.", ("model",)
    ),
    Metric("edge_rt_refused", "counter", "Requests whose deadline was out of reach.", ("model",)),
    Metric("edge_rt_cancelled", "counter", "Requests whose client left.", ("model",)),
    Metric(
        "edge_rt_chain_answers",
        "counter",
        "Answers of a cascade by the model that gave them, or of a model with an early exit: early or full.",
        ("chain", "stage"),
    ),
    Metric("edge_rt_worker_restarts", "counter", "Worker processes started again after a crash.", ("model",)),
    Metric("edge_rt_device_products", "counter", "Products or runs of the accelerator a model runs on.", ("model",)),
    Metric("edge_rt_device_faults", "counter", "Failures of the accelerator that a model runs on.", ("model",)),
    Metric("edge_rt_device_fallbacks", "counter", "Products or runs that the CPU computed in its place.", ("model",)),
    Metric(
        "edge_rt_stand_in",
        "gauge",
        "1 since a simulator, emulator or stub in a device's place has been loaded there: no figure of it is a speed.",
        ("model", "place", "evidence"),
    ),
    Metric("edge_rt_step_rows", "histogram", "Rows (tokens of all requests) in one decode step.", ("model",)),
    Metric("edge_rt_requests_running", "gauge", "Admitted requests.", ("model",)),
    Metric("edge_rt_requests_waiting", "gauge", "Requests in the queue.", ("model",)),
    Metric(
        "edge_rt_priority_requests",
        "gauge",
        "Requests by their priority: running or waiting in the daemon's queue.",
        ("model", "priority", "state"),
    ),
    Metric("edge_rt_threads", "gauge", "Compute threads in use.", ("model",)),
    Metric("edge_rt_kv_cells", "gauge", "KV cells of the model's pool.", ("model",)),
    Metric("edge_rt_kv_cells_used", "gauge", "KV cells that running requests hold.", ("model",)),
    Metric("edge_rt_prefix_bytes", "gauge", "Finished prompts kept outside the KV for reuse.", ("model",)),
    Metric("edge_rt_grammar_bytes", "gauge", "Compiled grammars kept for other requests.", ("model",)),
    Metric("edge_rt_prefix_disk_bytes", "gauge", "Prompts kept on disk for the next start.", ("model",)),
    Metric("edge_rt_pinned_prefixes", "gauge", "Beginnings of prompts that stay, and are computed.", ("model",)),
    Metric(
        "edge_rt_pins_with_problem",
        "gauge",
        "Pins that do not fit or cannot be computed; `edge_rt prefix list` says why.",
        ("model",),
    ),
    Metric("edge_rt_worker_resident_memory_bytes", "gauge", "RSS of the model's worker process.", ("model",)),
    Metric("edge_rt_place_requests", "counter", "Requests that a place answered.", ("model", "place")),
    Metric(
        "edge_rt_place_spilled",
        "counter",
        "Of these, sent there as a better place was busy or not loaded.",
        ("model", "place"),
    ),
    Metric(
        "edge_rt_place_batches",
        "counter",
        "Runs of a place's model, each of one request or several.",
        ("model", "place"),
    ),
    Metric(
        "edge_rt_place_duration_seconds", "histogram", "Request to answer, at a place.", ("model", "place"), _PLACE_S
    ),
    Metric("edge_rt_place_failures", "counter", "Requests that failed at a place and went on.", ("model", "place")),
    Metric("edge_rt_place_wrong", "counter", "Answers that were not the CPU's; the place is out.", ("model", "place")),
    Metric("edge_rt_place_state", "gauge", "0 closed, 1 half open, 2 open, 3 answers wrongly.", ("model", "place")),
    Metric("edge_rt_route_decisions", "counter", "Requests by where they were sent, and why.", ("where", "reason")),
    Metric("edge_rt_hand_overs", "counter", "Answers that another source took over unseen.", ("reason",)),
    Metric("edge_rt_cloud_answers", "counter", "Whole answers of a cloud endpoint.", ("endpoint",)),
    Metric("edge_rt_cloud_failures", "counter", "Tries that an endpoint failed, by error.", ("endpoint", "code")),
    Metric("edge_rt_cloud_retries", "counter", "Tries at an endpoint that had failed the same request.", ("endpoint",)),
    Metric("edge_rt_cloud_tokens", "counter", "Tokens of whole answers: prompt or completion.", ("endpoint", "kind")),
    Metric("edge_rt_cloud_cost", "counter", "What they cost, in the currency of its prices.", ("endpoint",)),
    Metric("edge_rt_cloud_first_byte_seconds", "histogram", "Request to first text of a try.", ("endpoint",), _TTFT_S),
    Metric("edge_rt_cloud_state", "gauge", "0 closed, 1 half open, 2 open, 4 asked for a pause.", ("endpoint",)),
    Metric("edge_rt_cache_requests", "counter", "Requests by what the answer cache did for them.", ("state",)),
    Metric("edge_rt_cache_answers", "counter", "Finished answers: stored, or why they were not.", ("decision",)),
    Metric("edge_rt_cache_entries", "gauge", "Stored entries."),
    Metric("edge_rt_cache_bytes", "gauge", "Bytes of stored entries."),
    Metric("edge_rt_cache_evicted", "counter", "Entries that left to make room."),
    Metric("edge_rt_cache_rejected", "counter", "Entries that were edited or damaged, and were not given."),
    Metric("edge_rt_cache_saved_seconds", "counter", "Computing time that hits saved."),
    Metric("edge_rt_cache_saved_joules", "counter", "Energy that hits saved, as far as it is known."),
    Metric(
        "edge_rt_cache_verified", "counter", "Semantic hits computed again to compare: right or wrong.", ("result",)
    ),
    Metric(
        "edge_rt_energy_joules",
        "counter",
        "Answers' shares of what was drawn meanwhile: prefill, decode, compute for models without tokens, or aborted.",
        ("model", "phase"),
    ),
    Metric(
        "edge_rt_energy_above_idle_joules", "counter", "The same, of what idling does not draw.", ("model", "phase")
    ),
    Metric("edge_rt_power_watts", "gauge", "Power now; absent while unknown.", ("source", "boundary", "quality")),
    Metric("edge_rt_power_idle_watts", "gauge", "Power without work, once it is learned.", ("source",)),
    Metric("edge_rt_power_coverage", "gauge", "Share of the last minute with values of the meter.", ("source",)),
    Metric(
        "edge_rt_power_advised_threads",
        "gauge",
        "Threads that powerd advises at most, applied or (in its dry run) shown; absent without advice.",
        ("phase", "state"),
    ),
    Metric("edge_rt_power_advised_batch", "gauge", "Answers decoded together that it advises at most.", ("state",)),
    Metric("edge_rt_build_info", "gauge", "Always 1; the labels say what runs.", ("version",)),
)  # and edge_rt_process_*: memory, CPU and open files of the front process, by the client library
