"""What a prompt's rows take, learned from the steps: a part that is the same everywhere, and attention's, which grows
with the position."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from edge_rt.backends.base import SeqRows

_MIN_ROWS = 16  # below, a step costs what reading the weights costs, whatever the rows
_KEPT = 0.85  # of the older steps' weight at each further one
_POSITION = 1024.0  # positions are counted in these, so that both parts have numbers of one size
_MAX_JUMP = 4.0  # a step that something else held up counts as this many times what was expected


class RowCosts:
    """Fits seconds = flat · rows + slope · positions of the rows, by weighted least squares over the last steps."""

    def __init__(self) -> None:
        self.row_s = 0.0  # what a row took of late, wherever it was; 0: unknown
        self._flat = self._slope = 0.0
        self._nn = self._np = self._pp = self._ny = self._py = 0.0

    def observe(self, batch: Sequence[SeqRows], seconds: float) -> None:
        """Take the measured time of a step."""
        n = sum(len(rows.token_ids) for rows in batch)
        if n < _MIN_ROWS:
            return
        positions = sum(len(rows.token_ids) * (rows.start + len(rows.token_ids) / 2) for rows in batch) / _POSITION
        if self.row_s > 0.0:
            seconds = min(seconds, _MAX_JUMP * max(self.row_s * n, self._flat * n + self._slope * positions))
        row_s = seconds / n
        self.row_s = row_s if self.row_s == 0.0 else self.row_s + 0.3 * (row_s - self.row_s)
        # Each step counts alike, however many rows it has.
        x, p = 1.0, positions / n
        self._nn, self._np, self._pp = (
            _KEPT * self._nn + x * x,
            _KEPT * self._np + x * p,
            _KEPT * self._pp + p * p,
        )
        self._ny, self._py = _KEPT * self._ny + row_s, _KEPT * self._py + p * row_s
        self._fit()

    def seconds(self, n_rows: int, start: int) -> float:
        """Expect the time of so many rows of one sequence from a position on; 0 if unknown."""
        return self._flat * n_rows + self._slope * n_rows * (start + n_rows / 2) / _POSITION

    def rows_within(self, limit_s: float, start: int) -> int | None:
        """Count the rows from a position on that take limit_s; None if unknown."""
        if self.row_s <= 0.0:
            return None
        linear = self._flat + self._slope * start / _POSITION
        square = self._slope / 2 / _POSITION
        if linear <= 0.0 and square <= 0.0:
            return None
        return int(2 * limit_s / (linear + sqrt(linear * linear + 4 * square * limit_s)))

    def _fit(self) -> None:
        spread = self._nn * self._pp - self._np * self._np
        if spread > 0.02 * self._nn * self._nn:  # positions far enough apart to tell the two parts
            slope = (self._nn * self._py - self._np * self._ny) / spread
        else:
            slope = self._slope
        mean_row_s, mean_p = self._ny / self._nn, self._np / self._nn
        # Neither part is below nothing: noise may say so.
        self._slope = min(max(slope, 0.0), mean_row_s / mean_p if mean_p > 0 else 0.0)
        self._flat = max(mean_row_s - self._slope * mean_p, 0.0)
