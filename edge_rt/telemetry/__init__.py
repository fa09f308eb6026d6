"""Metrics of the front process, in Prometheus' text format."""

from __future__ import annotations

from edge_rt.telemetry.metrics import METRICS, STEP_ROWS_BOUNDS, Metric
from edge_rt.telemetry.recorder import CONTENT_TYPE, Advice, PowerState, Telemetry

__all__ = ["CONTENT_TYPE", "METRICS", "STEP_ROWS_BOUNDS", "Advice", "Metric", "PowerState", "Telemetry"]
