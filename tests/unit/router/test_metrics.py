from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.errors import InvalidRequestError
from edge_rt.router import metrics

_LABELS = Path(__file__).parents[2] / "data" / "router" / "routellm_labels.json"

# RouteLLM's table 1 to 3, random router; CPT in per cent of calls
_PUBLISHED = {"mmlu": (0.500, 50.07, 79.93), "gsm8k": (0.497, 50.00, 80.08)}
_ACCURACIES = {"mmlu": (0.681, 0.806), "gsm8k": (0.637, 0.858)}  # of all their rows, of which these are seven in ten


def labels(name: str) -> tuple[list[float], list[float]]:
    rows = json.loads(_LABELS.read_text())[name]
    return [float(int(row) & 1) for row in rows], [float(int(row) >> 1) for row in rows]


@pytest.mark.parametrize("name", ["mmlu", "gsm8k"])
def test_random_routing_has_the_published_figures(name: str) -> None:
    found = metrics.mean_random(*labels(name), n_routers=25)
    apgr, cpt50, cpt80 = _PUBLISHED[name]
    assert found.apgr == pytest.approx(apgr, abs=0.01)
    assert 100 * found.cpt50 == pytest.approx(cpt50, abs=1.0)
    assert 100 * found.cpt80 == pytest.approx(cpt80, abs=1.0)
    assert found.pgr40 == pytest.approx(0.4, abs=0.01)
    assert (found.weak, found.strong) == pytest.approx(_ACCURACIES[name], abs=0.015)


def test_one_random_router_may_be_further_off_than_their_mean() -> None:
    found = metrics.mean_random(*labels("gsm8k"), n_routers=25)
    assert found.low < 0.49
    assert found.high > 0.51


def test_a_constant_router_is_worth_as_much_as_chance() -> None:
    weak, strong = labels("gsm8k")
    found = metrics.evaluate([0.3] * len(weak), weak, strong, n_resamples=0)
    assert found.apgr == pytest.approx(0.5)
    assert found.cpt50 == pytest.approx(0.5)
    assert found.pgr40 == pytest.approx(0.4)


def test_the_oracle_beats_the_cloud_alone() -> None:
    weak, strong = labels("mmlu")
    found = metrics.evaluate(metrics.oracle(weak, strong), weak, strong, n_resamples=0)
    assert found.apgr > 1.2  # 1.285 on all rows
    worst = metrics.evaluate([-s for s in metrics.oracle(weak, strong)], weak, strong, n_resamples=0)
    assert worst.apgr == pytest.approx(1 - found.apgr)


def test_figures_of_a_curve_that_can_be_drawn_by_hand() -> None:
    # four requests; the cloud helps with the first two asked, harms none
    found = metrics.curve([4, 3, 2, 1], weak=[0, 0, 1, 1], strong=[1, 1, 1, 1])
    assert found.shares == (0, 0.25, 0.5, 0.75, 1)
    assert found.recovered == (0, 0.5, 1, 1, 1)
    assert found.apgr == pytest.approx((0.25 + 0.75 + 1 + 1) / 4)
    assert found.share_for(0.8) == pytest.approx(0.4)
    assert found.recovered_at(0.4) == pytest.approx(0.8)
    assert (found.weak, found.strong) == (0.5, 1.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_only_the_order_of_scores_counts(rows: list[tuple[int, bool, bool]]) -> None:
    scores, weak, strong = ([float(row[i]) for row in rows] for i in range(3))
    if sum(weak) == sum(strong):
        with pytest.raises(InvalidRequestError, match="no gap"):
            metrics.curve(scores, weak, strong)
        return
    found = metrics.curve(scores, weak, strong)
    assert metrics.curve([math.exp(s) for s in scores], weak, strong) == found
    assert found.shares[-1] == 1
    assert found.recovered[-1] == 1


def test_the_interval_holds_the_figure_and_narrows_with_rows() -> None:
    weak, strong = labels("mmlu")
    scores = [s + 4 * r for s, r in zip(metrics.oracle(weak, strong), metrics.random_scores(len(weak), 1), strict=True)]
    few, many = (metrics.evaluate(scores[:n], weak[:n], strong[:n], n_resamples=40) for n in (400, 3000))
    for found in (few, many):
        assert found.low < found.apgr < found.high
    assert many.high - many.low < few.high - few.low


@pytest.mark.parametrize(
    ("scores", "weak", "strong"),
    [([], [], []), ([1.0], [0, 0], [1, 1]), ([math.nan, 1.0], [0, 0], [1, 1])],
)
def test_what_is_no_router_is_refused(scores: list[float], weak: list[float], strong: list[float]) -> None:
    with pytest.raises(InvalidRequestError):
        metrics.curve(scores, weak, strong)


def test_calibration_error_of_honest_and_boastful_probabilities() -> None:
    outcomes = [1.0] * 30 + [0.0] * 70
    assert metrics.calibration_error([0.3] * 100, outcomes, n_bins=1) == pytest.approx(0)
    assert metrics.calibration_error([0.9] * 100, outcomes, n_bins=1) == pytest.approx(0.6)
    assert metrics.log_loss([0.3] * 100, outcomes) < metrics.log_loss([0.9] * 100, outcomes) < math.inf
    assert metrics.log_loss([1.0], [0.0]) == pytest.approx(-math.log(1e-3))
