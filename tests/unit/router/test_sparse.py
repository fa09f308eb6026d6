"""Sparse products against dense ones."""

from __future__ import annotations

import numpy as np
import pytest

from edge_rt.router.sparse import MAX_SUMMED, Sparse, summed


def test_sums_by_group_are_a_sparse_product() -> None:
    rng = np.random.default_rng(1)
    n = MAX_SUMMED + 5000  # two parts, and a group that lies in both
    group = np.sort(rng.integers(0, 9, n) * 2)  # odd groups are empty
    entry, value, matrix = rng.integers(0, 30, n), rng.random(n), rng.random((30, 4)).astype(np.float32)
    dense = np.zeros((19, 30))
    np.add.at(dense, (group, entry), value)
    assert summed(group, entry, value, matrix, 19) == pytest.approx(dense @ matrix, rel=1e-3)


def test_products_and_rows_are_those_of_the_dense_matrix() -> None:
    rng = np.random.default_rng(2)
    dense = rng.random((6, 8)) * (rng.random((6, 8)) < 0.4)
    dense[3] = 0
    row, column = np.nonzero(dense)
    sparse = Sparse(row, column, dense[row, column], 6)
    many, one, left = rng.random((8, 3)).astype(np.float32), rng.random(8), rng.random(6)
    assert sparse.times_many(many) == pytest.approx(dense @ many, rel=1e-5)
    assert sparse.times(one) == pytest.approx(dense @ one)
    assert sparse.transposed_times(left, 8) == pytest.approx(dense.T @ left)
    assert sparse.folded(4).times(one[:4]) == pytest.approx((dense[:, :4] + dense[:, 4:]) @ one[:4])
    taken = np.array([4, 3, 0])
    assert sparse.take(taken).times(one) == pytest.approx(dense[taken] @ one)
