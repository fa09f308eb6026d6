from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.bench.samples import quantile, summarise

FLOATS = st.floats(-1e9, 1e9)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys_linear_ones(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-6, abs=1e-3)


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_summary() -> None:
    summary = summarise([4.0, 1.0, 3.0, 2.0])
    assert (summary.mean, summary.median, summary.min, summary.max) == (2.5, 2.5, 1.0, 4.0)
    assert (summary.q1, summary.q3) == (1.75, 3.25)
    assert summary.stddev == pytest.approx(statistics.stdev([1, 2, 3, 4]))
    assert summarise([5.0]).stddev == 0.0
