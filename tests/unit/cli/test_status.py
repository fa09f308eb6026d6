"""What `edge_rt status` tells of a daemon, by the metrics of one."""

from __future__ import annotations

from edge_rt.cli.scrape import Scrape
from edge_rt.cli.status import _language_lines, _language_model
from edge_rt.telemetry import Telemetry
from edge_rt.types import EngineStats

STATS = EngineStats(
    steps_total=1,
    cells_total=8192,
    cells_used=700,
    prefix_bytes=180 * 2**20,
    prefix_disk_bytes=200 * 2**20,
    prefix_hits_total=31,
    pinned_prefixes=11,
    pins_with_problem=1,
)


def scrape(stats: EngineStats | None) -> Scrape:
    metrics = Telemetry()
    metrics.queue_depth("m", running=2, waiting=3)
    metrics.watch_queues(lambda: [("m", "interactive", 1, 0), ("m", "normal", 0, 0), ("m", "background", 1, 3)])
    metrics.engine_stats("m", stats or STATS)
    if stats is None:
        metrics.engine_gone("m")
    return Scrape.of(metrics.exposition().decode(), 0.0)


def test_a_loaded_models_requests_and_prefixes_are_told() -> None:
    told = _language_model("m", scrape(STATS))
    assert told["requests"]["background"] == {"running": 1, "waiting": 3}
    assert _language_lines(told) == [
        "m: 2 running, 3 waiting (interactive 1 + 0, background 1 + 3)",
        "  prefixes: 700 of 8192 cells in use; 180 MiB kept, 200 MiB on disk; 31 hits; 11 pinned",
        "  1 pins are not kept",
        "  → edge_rt prefix list",
    ]


def test_nothing_is_told_of_a_model_that_has_left_memory() -> None:
    assert _language_lines(_language_model("m", scrape(None))) == []
