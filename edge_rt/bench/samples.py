"""Statistics of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Centre and spread of some samples; stddev is the sample's (n - 1), 0.0 for a single one as llama-bench has it."""

    mean: float
    stddev: float
    median: float
    q1: float
    q3: float
    min: float
    max: float


def quantile(values: Sequence[float], q: float) -> float:
    """Give the q-quantile (0..1), linear between the two nearest samples. Raises ValueError without samples."""
    if not values:
        raise ValueError("a quantile needs at least one sample")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(values: Sequence[float]) -> Summary:
    return Summary(
        mean=statistics.fmean(values),
        stddev=statistics.stdev(values) if len(values) > 1 else 0.0,
        median=statistics.median(values),
        q1=quantile(values, 0.25),
        q3=quantile(values, 0.75),
        min=min(values),
        max=max(values),
    )
