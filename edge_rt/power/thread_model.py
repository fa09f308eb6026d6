"""How a phase's time and power follow the number of threads: a small model, fitted to a calibration. Pure.

A step of r rows on n threads, at x of the highest clock, takes

    t = (stall_s + row_stall_s r) g(n) + r (serial_s + parallel_s / n) / x + sync_s n
    g(n) = (1 + (n_full / n)^4)^(1/4)

Waiting for memory gets no shorter once n_full threads fill its bandwidth; computing is divided among the threads but
for its serial part (Amdahl's law); each thread more has to be waited for. Power above idling is a part that is there
whatever the number of threads, and as much again for each of them. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edge_rt.power.calibration import Phase, ThreadPoint

_SHARP = 4.0  # how sharply the memory's bandwidth ends
_KNEE_STEP = 0.25  # of n_full, as it is tried …
_KNEE_SHARE = 1 / 32  # … and relative to it where that is more
_N_TERMS = 5
_WORTH = 0.9  # a term more must leave less than this of the squared error
_EXACT = 1e-6  # relative; what is smaller is rounding
_MAX_ERROR = 0.25  # of a measured time, relative: what fits worse is no model of this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseThreads:
    """One phase; prefill is told a token, so its r is 1.

    shares  by clock in Hz, ascending: the share of the power above idling, on all threads, that does not follow their
            number; () where no power was measured
    error   of the worst of the times it was fitted to, relative
    """

    stall_s: float
    row_stall_s: float
    serial_s: float
    parallel_s: float
    sync_s: float
    n_full: float
    shares: tuple[tuple[float, float], ...] = ()
    error: float = 0.0

    def waiting_s(self, n_threads: float, n_rows: float = 1.0) -> float:
        """Give the part of a step that no clock changes."""
        return (self.stall_s + self.row_stall_s * n_rows) * _knee(self.n_full, n_threads) + self.sync_s * n_threads

    def computing_s(self, n_threads: float) -> float:
        """Give the part of a row that follows the clock, at the highest."""
        return self.serial_s + self.parallel_s / n_threads

    def seconds(self, x: float, n_threads: float, n_rows: float = 1.0) -> float:
        """Foretell a step of n_rows at x of the highest clock."""
        return self.waiting_s(n_threads, n_rows) + self.computing_s(n_threads) * n_rows / x

    def power_share(self, hz: float, n_threads: float, n_most: float) -> float:
        """Give the power above idling on n_threads, relative to that on n_most; shares must be known."""
        fixed = _between(self.shares, hz)
        return fixed + (1 - fixed) * n_threads / n_most


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadModel:
    """Both phases, and the numbers of threads that were measured, ascending."""

    prefill: PhaseThreads
    decode: PhaseThreads
    counts: tuple[int, ...]

    @property
    def n_most(self) -> int:
        return self.counts[-1]

    @property
    def has_power(self) -> bool:
        return bool(self.prefill.shares and self.decode.shares)


def fit(points: Sequence[ThreadPoint], *, idle_w: float, top_hz: float) -> ThreadModel | None:
    """Fit both phases; None where too little was measured, or the times follow no such law.

    top_hz  the clock whose x is 1
    """
    phases = []
    counts: set[int] = set()
    for phase in ("prefill", "decode"):
        own = [point for point in points if point.phase == phase]
        found = _fit_phase(phase, own, top_hz) if len({point.n_threads for point in own}) > 1 else None
        if found is None:
            return None
        shares = _fixed_shares([point for point in own if point.n_streams == 1], idle_w)
        phases.append(replace(found, shares=shares))
        mine = {point.n_threads for point in own if point.n_streams == 1}
        counts = counts & mine if counts else mine
    if len(counts) < 2:
        return None
    return ThreadModel(prefill=phases[0], decode=phases[1], counts=tuple(sorted(counts)))


def _fit_phase(phase: Phase, points: Sequence[ThreadPoint], top_hz: float) -> PhaseThreads | None:
    most = max(point.n_threads for point in points)
    best: tuple[float, float, list[float]] | None = None
    for n_full in _knees(most):
        rows = [_terms(point, n_full, top_hz) for point in points]
        if phase == "prefill":  # its rows are tokens already
            rows = [[row[0], 0.0, *row[2:]] for row in rows]
        # Relative errors count alike for fast and slow points.
        scaled = [[value / point.s_per_token for value in row] for row, point in zip(rows, points, strict=True)]
        error, found = _least_squares(scaled)
        if best is None or error < best[0] * _WORTH - _EXACT**2:
            best = error, n_full, found
    if best is None:
        return None
    _, n_full, found = best
    fitted = PhaseThreads(
        stall_s=found[0],
        row_stall_s=found[1],
        serial_s=found[2],
        parallel_s=found[3],
        sync_s=found[4],
        n_full=n_full,
    )
    worst = 0.0
    for point in points:
        n_rows = 1 if phase == "prefill" else point.n_streams
        foretold = fitted.seconds(min(point.max_hz / top_hz, 1.0), point.n_threads, n_rows)
        worst = max(worst, abs(foretold / point.s_per_token - 1))
    if worst > _MAX_ERROR:
        return None
    return replace(fitted, error=worst)


def _knees(most: int) -> Iterator[float]:
    n_full = 2 * _KNEE_STEP
    while n_full <= most:
        yield n_full
        n_full += max(_KNEE_STEP, n_full * _KNEE_SHARE)


def _terms(point: ThreadPoint, n_full: float, top_hz: float) -> list[float]:
    n, r, x = point.n_threads, point.n_streams, min(point.max_hz / top_hz, 1.0)
    knee = _knee(n_full, n)
    return [knee, r * knee, r / x, r / (n * x), float(n)]


def _knee(n_full: float, n_threads: float) -> float:
    return float((1 + (n_full / n_threads) ** _SHARP) ** (1 / _SHARP))


def _least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
    """Find coefficients of 0 and more whose sums come nearest to 1 in each row; fewer terms before more.

    There are so few terms that all sets of them can be tried: no iteration, and nothing that does not converge. The
    rows, of which a file may hold hundreds, are gone through once.
    """
    every = range(_N_TERMS)
    products = [[sum(row[i] * row[j] for row in rows) for j in every] for i in every]
    sums = [sum(row[i] for row in rows) for i in every]
    used = [i for i in every if products[i][i] > 0]
    best_error, best = float(len(rows)), [0.0] * _N_TERMS
    for size in range(1, len(used) + 1):
        least: tuple[float, list[float]] | None = None
        for chosen in itertools.combinations(used, size):
            solved = _solve([[*(products[i][j] for j in chosen), sums[i]] for i in chosen])
            if solved is None or min(solved) < 0:
                continue
            error = float(len(rows))  # the sum of (row · solved - 1)²
            for i, c in zip(chosen, solved, strict=True):
                error += c * (sum(products[i][j] * d for j, d in zip(chosen, solved, strict=True)) - 2 * sums[i])
            if least is None or error < least[0]:
                full = [0.0] * _N_TERMS
                for i, c in zip(chosen, solved, strict=True):
                    full[i] = c
                least = max(error, 0.0), full
        if least is not None and least[0] < best_error * _WORTH - _EXACT**2:
            best_error, best = least
    return best_error, best


def _solve(table: list[list[float]]) -> list[float] | None:
    """Solve normal equations, the last column their right side; None where the terms cannot be told apart."""
    n = len(table)
    scale = [table[i][i] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(table[k][i]) / scale[k])
        table[i], table[pivot] = table[pivot], table[i]
        scale[i], scale[pivot] = scale[pivot], scale[i]
        if abs(table[i][i]) <= 1e-9 * scale[i]:
            return None
        for k in range(n):
            if k != i:
                factor = table[k][i] / table[i][i]
                table[k] = [a - factor * b for a, b in zip(table[k], table[i], strict=True)]
    return [table[i][n] / table[i][i] for i in range(n)]


def _fixed_shares(points: Sequence[ThreadPoint], idle_w: float) -> tuple[tuple[float, float], ...]:
    """Find, at each clock, the share of the power on all threads that a straight line through them has at none."""
    shares = []
    for hz in sorted({point.max_hz for point in points}):
        found = [(point.n_threads, point.power_w) for point in points if point.max_hz == hz]
        known = [(n, watts - idle_w) for n, watts in found if watts is not None]
        if len(known) < len(found) or len({n for n, _ in known}) < 2:
            return ()
        mean_n, mean_w = sum(n for n, _ in known) / len(known), sum(w for _, w in known) / len(known)
        spread = sum((n - mean_n) ** 2 for n, _ in known)
        each_w = max(sum((n - mean_n) * (w - mean_w) for n, w in known) / spread, 0.0)
        most = max(n for n, _ in known)
        whole_w = mean_w + each_w * (most - mean_n)
        shares.append((hz, min(max(1 - each_w * most / whole_w, 0.0), 1.0) if whole_w > 0 else 1.0))
    return tuple(shares)


def _between(shares: Sequence[tuple[float, float]], hz: float) -> float:
    """Interpolate; what lies outside is as the nearest."""
    last_hz, last = shares[0]
    for at_hz, share in shares:
        if hz <= at_hz:
            return share if at_hz == last_hz else last + (share - last) * max(hz - last_hz, 0.0) / (at_hz - last_hz)
        last_hz, last = at_hz, share
    return last
