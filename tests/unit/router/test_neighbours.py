from __future__ import annotations

import numpy as np
import pytest

from edge_rt.router.neighbours import Neighbours


def unit(*rows: list[float]) -> np.ndarray:
    x = np.array(rows, np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_near_requests_count_and_far_ones_do_not() -> None:
    vectors = unit([1, 0, 0], [0.99, 0.1, 0], [0, 1, 0], [0, 0, 1])
    known = Neighbours(vectors, np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32))
    local, cloud = known.ask(vectors[0])
    assert local.probability == 1
    assert cloud.probability == 0
    assert 1.5 < local.evidence < 2.1
    nobody, _ = known.ask(unit([-1, -1, -1])[0])
    assert nobody.share == 0
    assert nobody.mixed_with(0.7) == 0.7


def test_their_share_grows_with_their_number_and_stays_below_one() -> None:
    shares = []
    for n in (1, 10, 40, 400):
        known = Neighbours(unit(*[[1.0, 0.0]] * n), np.ones((n, 2), np.float32))
        local, _ = known.ask(unit([1, 0])[0])
        shares.append(local.share)
        assert local.mixed_with(0.0) == pytest.approx(local.share)
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] < 0.7


def test_an_answer_nobody_judged_has_no_say() -> None:
    known = Neighbours(unit([1, 0], [1, 0.01]), np.array([[np.nan, 1], [0, np.nan]], np.float32))
    local, cloud = known.ask(unit([1, 0])[0])
    assert local.probability == 0
    assert cloud.probability == 1
    assert Neighbours(np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32)).ask(unit([1, 0])[0])[0].share == 0


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="outcomes"):
        Neighbours(unit([1, 0]), np.zeros((2, 2), np.float32))
