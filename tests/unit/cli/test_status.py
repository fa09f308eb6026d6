"""What `edge_rt status` tells of a daemon, by the metrics of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from edge_rt.cli.scrape import Scrape
from edge_rt.cli.status import _language_lines, _language_models, _told, text
from edge_rt.errors import DaemonLostError, EdgeRtError
from edge_rt.telemetry import Telemetry
from edge_rt.types import EngineStats

NO_POWER = {"answers": False, "problem": ""}
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


def exposition(stats: EngineStats | None) -> str:
    metrics = Telemetry()
    metrics.queue_depth("m", running=2, waiting=3)
    metrics.watch_queues(lambda: [("m", "interactive", 1, 0), ("m", "normal", 0, 0), ("m", "background", 1, 3)])
    metrics.engine_stats("m", stats or STATS)
    if stats is None:
        metrics.engine_gone("m")
    return metrics.exposition().decode()


@dataclass
class Daemon:
    """Answers with two models, and with these metrics or an error in their place."""

    metrics: str | EdgeRtError

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "m", "status": "loaded"}, {"id": "n", "status": "unloaded"}]

    def metrics_text(self) -> str:
        if isinstance(self.metrics, EdgeRtError):
            raise self.metrics
        return self.metrics


def test_a_loaded_models_requests_and_prefixes_are_told() -> None:
    [told] = _language_models(Scrape.of(exposition(STATS), 0.0))
    assert told["requests"]["background"] == {"running": 1, "waiting": 3}
    assert _language_lines(told) == [
        "m: 2 running, 3 waiting (interactive 1 + 0, background 1 + 3)",
        "  prefixes: 700 of 8192 cells in use; 180 MiB kept, 200 MiB on disk; 31 hits; 11 pinned",
        "  1 pins are not kept",
        "  → edge_rt prefix list",
    ]


def test_nothing_is_told_of_a_model_that_has_left_memory() -> None:
    assert _language_models(Scrape.of(exposition(None), 0.0)) == []


def test_a_daemon_answers_by_its_models_and_its_metrics() -> None:
    told = _told(Daemon(exposition(STATS)))
    assert (told["answers"], told["models"], told["n_pulled"], told["problem"]) == (True, ["m"], 2, "")
    assert [each["model"] for each in told["language_models"]] == ["m"]


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        (DaemonLostError(address="/run/s", reason="it closed the connection"), "it closed the connection"),
        ("edge_rt_kv_cells{model=", "metrics"),
    ],
)
def test_a_daemon_without_readable_metrics_answers_all_the_same(metrics: str | EdgeRtError, problem: str) -> None:
    told = _told(Daemon(metrics))
    assert (told["answers"], told["models"]) == (True, ["m"])
    assert "language_models" not in told
    lines = text(
        {"units": [], "systemd": True, "daemon": {"socket": "/run/s", **told}, "power": NO_POWER, "last_errors": []}
    )
    assert "daemon: answers on /run/s; in memory: m; 2 models pulled" in lines
    assert problem in lines
