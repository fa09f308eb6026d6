from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.errors import InvalidRequestError
from edge_rt.router import calibration, metrics
from edge_rt.router.calibration import Isotonic


def test_overconfident_scores_become_honest_probabilities() -> None:
    rng = random.Random(1)
    scores = [rng.gauss(0, 4) for _ in range(4000)]
    outcomes = [float(rng.random() < 1 / (1 + math.exp(-s / 4))) for s in scores]  # as sure as a quarter of it
    boastful = [1 / (1 + math.exp(-s)) for s in scores[2000:]]
    fitted = calibration.fit(scores[:2000], outcomes[:2000])
    honest = [fitted(s) for s in scores[2000:]]
    assert metrics.calibration_error(boastful, outcomes[2000:]) > 0.1
    assert metrics.calibration_error(honest, outcomes[2000:]) < 0.04
    assert metrics.log_loss(honest, outcomes[2000:]) < metrics.log_loss(boastful, outcomes[2000:])


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 1)), min_size=1, max_size=200), st.integers(1, 30))
def test_the_map_never_falls_and_stays_a_probability(rows: list[tuple[float, float]], min_rows: int) -> None:
    fitted = calibration.fit([s for s, _ in rows], [y for _, y in rows], min_rows=min_rows)
    asked = sorted({s for s, _ in rows} | {-60.0, 60.0, 0.0})
    found = [fitted(s) for s in asked]
    assert found == sorted(found)
    assert all(0 <= p <= 1 for p in found)


def test_a_few_lucky_rows_are_no_certainty() -> None:
    assert calibration.fit([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])(3.0) == pytest.approx(3.5 / 4)


@pytest.mark.parametrize(
    ("scores", "probabilities"),
    [
        ((), ()),
        ((1.0,), (0.2, 0.3)),
        ((1.0, 1.0), (0.1, 0.2)),
        ((1.0, 2.0), (0.3, 0.2)),
        ((1.0,), (1.5,)),
        ((math.nan,), (0.5,)),
    ],
)
def test_what_is_no_calibration_is_refused(scores: tuple[float, ...], probabilities: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        Isotonic(scores=scores, probabilities=probabilities)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        calibration.fit([], [])
