"""Matrices of few entries, and their products. Needs numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

MAX_SUMMED = 65536  # entries multiplied at a time


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """A matrix of few entries: row number, column and value of each; rows in order."""

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    value: F64
    n_rows: int

    def take(self, rows: NDArray[np.int64]) -> Sparse:
        begin = np.searchsorted(self.row, rows)
        length = np.searchsorted(self.row, rows, side="right") - begin
        new_row = np.repeat(np.arange(len(rows)), length)
        entry = np.arange(length.sum()) + np.repeat(begin - (np.cumsum(length) - length), length)
        return Sparse(new_row, self.column[entry], self.value[entry], len(rows))

    def weighted(self, rarity: F64) -> Sparse:
        """Multiply each column and bring each row to length 1."""
        value = self.value * rarity[self.column]
        length = np.sqrt(np.bincount(self.row, value * value, minlength=self.n_rows))
        return Sparse(self.row, self.column, value / np.maximum(length, 1e-9)[self.row], self.n_rows)

    def times(self, w: F64) -> F64:
        return np.bincount(self.row, self.value * w[self.column], minlength=self.n_rows).astype(np.float64)

    def transposed_times(self, r: F64, n_columns: int) -> F64:
        total = np.bincount(self.column, self.value * r[self.row], minlength=n_columns)
        return total.astype(np.float64)

    def folded(self, n_columns: int) -> Sparse:
        return Sparse(self.row, self.column % n_columns, self.value, self.n_rows)

    def times_many(self, w: F32) -> F32:
        """Multiply with a matrix of several columns."""
        return summed(self.row, self.column, self.value, w, self.n_rows)


def summed(group: NDArray[np.int64], entry: NDArray[np.int64], value: F64, matrix: F32, n_groups: int) -> F32:
    """Add up value times matrix[entry] by group, whose numbers rise: [n_groups, columns of matrix]."""
    total = np.zeros((n_groups, matrix.shape[1]), np.float32)
    weight = value.astype(np.float32)[:, None]
    for at in range(0, len(group), MAX_SUMMED):
        part = slice(at, at + MAX_SUMMED)
        begins = np.flatnonzero(np.diff(group[part], prepend=-1))
        total[group[part][begins]] += np.add.reduceat(weight[part] * matrix[entry[part]], begins, axis=0)
    return total
