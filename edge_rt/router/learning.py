"""What the router learns on this device: labels without text, a correction fitted to them, and when it is trusted.

    labels.add(score.sketch, local=0.0, source="feedback", tenant="1000")
    found = refit(labels, scorer.weights, scorer.learnt, seed=day)
    if found.is_better: scorer.learnt = found.learnt

A label is a request's features and what an answer was worth. A correction moves the shipped log-odds a little, as far
as labels carry it, and lets similar requests vote; it replaces the one in use only if a slice of labels that it has not
seen says that it is no worse. Needs numpy.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.router import metrics
from edge_rt.router.fitting import F64, minimise
from edge_rt.router.neighbours import Neighbours
from edge_rt.router.scorer import Sketch
from edge_rt.router.weights import N_SURFACE, N_VECTOR, Weights, write_whole

Source = Literal["feedback", "regenerate", "shadow"]

_SOURCES: tuple[Source, ...] = ("feedback", "regenerate", "shadow")
_MAGIC = b"ERTLABL1"
_MAX_TENANT_SHARE = 0.5  # of the labels, so that nobody alone decides where others' requests go
_MIN_LABELS = 40  # of a head, before it is corrected
_MIN_HELD = 12
_HELD_PART = 4  # one label in so many is kept for the decision
_L2_SLOPE = 20.0  # of the shipped log-odds' factor towards 1, in rows
_L2_SURFACE = 20.0
_ROW = np.dtype(
    [
        ("vector", "<f2", (N_VECTOR,)),
        ("surface", "<f4", (N_SURFACE,)),
        ("log_odds", "<f4", (2,)),
        ("outcome", "<f4", (2,)),
        ("tenant", "<u4"),
        ("source", "u1"),
    ]
)


class Labels:
    """The newest labels, at most max_rows. One thread adds and refits; a file holds numbers only."""

    def __init__(self, max_rows: int = 4000) -> None:
        self.max_rows = max_rows
        self._rows = np.zeros(0, _ROW)

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        sketch: Sketch,
        *,
        source: Source,
        local: float | None = None,
        cloud: float | None = None,
        tenant: str = "",
    ) -> None:
        """Add what an answer was worth, 0..1; None is not known. The oldest one goes where there is no room.

        Raises InvalidRequestError for values out of range, an unknown source and a label that says nothing.
        """
        for name, value in (("local", local), ("cloud", cloud)):
            if value is not None and not 0 <= value <= 1:  # NaN fails too
                raise InvalidRequestError(param=name, problem=f"must be 0..1, is {value}")
        if local is None and cloud is None:
            raise InvalidRequestError(param="local", problem="a label needs the worth of one answer at least")
        if source not in _SOURCES:
            raise InvalidRequestError(param="source", problem=f"must be one of {', '.join(_SOURCES)}, is {source!r}")
        row = np.zeros(1, _ROW)
        row["vector"], row["surface"], row["log_odds"] = sketch.vector, sketch.surface, sketch.log_odds
        row["outcome"] = [math.nan if value is None else value for value in (local, cloud)]
        row["tenant"] = owner = zlib.crc32(tenant.encode(errors="replace"))
        row["source"] = _SOURCES.index(source)
        own = np.flatnonzero(self._rows["tenant"] == owner)
        rows = self._rows
        if len(own) >= max(1, int(self.max_rows * _MAX_TENANT_SHARE)):
            rows = np.delete(rows, own[0])
        self._rows = np.concatenate([rows, row])[-self.max_rows :]

    @property
    def vectors(self) -> NDArray[np.float32]:
        return self._rows["vector"].astype(np.float32)

    @property
    def outcomes(self) -> NDArray[np.float32]:
        return self._rows["outcome"].astype(np.float32)

    def inputs(self, weights: Weights) -> F64:
        """Give [n, 2, 2 + N_SURFACE]: by head, the shipped calibrated log-odds, 1, and the surface."""
        x = np.empty((len(self), 2, 2 + N_SURFACE))
        for head in range(2):
            x[:, head, 0] = [_start(weights, head, float(z)) for z in self._rows["log_odds"][:, head]]
        x[:, :, 1] = 1
        x[:, :, 2:] = self._rows["surface"][:, None, :]
        return x

    def held(self, seed: int) -> NDArray[np.bool_]:
        """Choose the slice that decides; equal requests are on the same side."""
        return np.array(
            [zlib.crc32(v.tobytes(), seed & 0xFFFFFFFF) % _HELD_PART == 0 for v in self._rows["vector"]], bool
        )

    def save(self, path: Path) -> None:
        """Write the file at once or not at all. Raises OSError."""
        body = json.dumps({"n": len(self), "row_bytes": _ROW.itemsize}).encode()
        body = struct.pack("<I", len(body)) + body + self._rows.tobytes()
        write_whole(path, _MAGIC + hashlib.sha256(body).digest() + body)

    @classmethod
    def load(cls, path: Path, max_rows: int = 4000) -> Labels:
        """Read a file as if a stranger had written it. Raises ModelFormatError, OSError where there is none."""
        max_bytes = 4096 + max_rows * _ROW.itemsize
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
        problem = _problem(data, max_bytes)
        labels = cls(max_rows)
        if not problem:
            rows = np.frombuffer(data[44 + struct.unpack("<I", data[40:44])[0] :], _ROW).copy()
            problem = _rows_problem(rows)
            labels._rows = rows[-max_rows:]
        if problem:
            raise ModelFormatError(path=str(path), field="labels", problem=problem)
        return labels


def _problem(data: bytes, max_bytes: int) -> str:
    if len(data) > max_bytes:
        return f"longer than {max_bytes} bytes"
    if data[:8] != _MAGIC:
        return f"must begin with {_MAGIC!r}, begins with {data[:8]!r}"
    if len(data) < 44 or hashlib.sha256(data[40:]).digest() != data[8:40]:
        return "the checksum does not fit the contents"
    n_header = struct.unpack("<I", data[40:44])[0]
    try:
        header: Any = json.loads(data[44 : 44 + n_header]) if n_header < 4096 else None
        is_whole = header == {"n": header["n"], "row_bytes": _ROW.itemsize}
        is_whole = is_whole and header["n"] * _ROW.itemsize == len(data) - 44 - n_header
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = False
    return "" if is_whole else "the header does not describe the rows"


def _rows_problem(rows: NDArray[Any]) -> str:
    for name in ("vector", "surface", "log_odds"):
        if not np.isfinite(rows[name]).all() or np.abs(rows[name]).max(initial=0) > 1000:
            return f"{name} holds what is no sensible number"
    outcome = rows["outcome"]
    if np.isinf(outcome).any() or (outcome < 0).any() or (outcome > 1).any() or np.isnan(outcome).all(axis=1).any():
        return "an outcome is not 0..1"
    return "" if (rows["source"] < len(_SOURCES)).all() else "a source is not known"


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    """A correction in use: by head, coefficients of Labels.inputs, or None where too little is known."""

    weights: Weights
    coefficients: tuple[F64 | None, F64 | None]
    neighbours: Neighbours

    def correct(self, sketch: Sketch) -> tuple[float, float] | None:
        found = []
        for head, own in enumerate(self.coefficients):
            z = _start(self.weights, head, sketch.log_odds[head])
            if own is not None:
                z = float(own[0] * z + own[1] + own[2:] @ sketch.surface)
            found.append(1 / (1 + math.exp(-min(max(z, -30.0), 30.0))))
        return found[0], found[1]


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """What a refit found. by: apgr (more is better) or log loss (less is better), on n_held labels it had not seen."""

    learnt: Learnt | None
    is_better: bool
    by: Literal["apgr", "log loss", "too few labels"]
    before: float = math.nan
    after: float = math.nan
    n_held: int = 0


def refit(labels: Labels, weights: Weights, current: Learnt | None = None, *, seed: int = 0) -> Refit:
    """Fit a correction on three quarters of the labels and let the last quarter decide.

    APGR decides where both answers of enough held requests were judged and one model does better; otherwise the log
    loss of what was judged. Equal is not better: nothing is swapped for nothing.
    """
    held = labels.held(seed)
    known = ~np.isnan(labels.outcomes)
    trained = known & ~held[:, None]
    if trained.sum(axis=0).max(initial=0) < _MIN_LABELS or held.sum() < _MIN_HELD:
        return Refit(None, is_better=False, by="too few labels", n_held=int(held.sum()))
    x = labels.inputs(weights)
    trial = _fit(labels, weights, x, trained)
    both = held & known.all(axis=1)
    outcomes = labels.outcomes.astype(np.float64)
    before, after = (_predict(labels, x, held, each) for each in (current, trial))
    n_held = int(held.sum())
    if both.sum() >= 4 * _MIN_HELD and outcomes[both, 0].sum() != outcomes[both, 1].sum():
        rows = both[held]
        weak, strong = outcomes[both].T.tolist()
        old, new = (metrics.curve((p[rows, 1] - p[rows, 0]).tolist(), weak, strong).apgr for p in (before, after))
        is_better, by = new > old, "apgr"
    else:
        old, new = (_loss(p, outcomes[held]) for p in (before, after))
        is_better, by = new < old, "log loss"
    learnt = _fit(labels, weights, x, known) if is_better else None
    return Refit(learnt, is_better=is_better, by=by, before=old, after=new, n_held=n_held)  # type: ignore[arg-type]


def _fit(labels: Labels, weights: Weights, x: F64, rows: NDArray[np.bool_]) -> Learnt:
    coefficients = [
        _correction(x[rows[:, head], head], labels.outcomes[rows[:, head], head].astype(np.float64))
        if rows[:, head].sum() >= _MIN_LABELS
        else None
        for head in range(2)
    ]
    outcomes = np.where(rows, labels.outcomes, np.nan).astype(np.float32)
    some = ~np.isnan(outcomes).all(axis=1)
    return Learnt(weights, (coefficients[0], coefficients[1]), Neighbours(labels.vectors[some], outcomes[some]))


def _correction(x: F64, y: F64) -> F64:
    """Fit coefficients that are held to "the shipped log-odds as they are"."""
    start = np.zeros(x.shape[1])
    start[0] = 1
    hold = np.full(x.shape[1], _L2_SURFACE)
    hold[0], hold[1] = _L2_SLOPE, 1.0

    def loss(w: F64) -> tuple[float, F64]:
        z, away = x @ w, w - start
        value = float((np.logaddexp(0, z) - y * z).sum() + (hold * away) @ away / 2)
        return value, x.T @ (1 / (1 + np.exp(-z)) - y) + hold * away

    return minimise(loss, start)


def _predict(labels: Labels, x: F64, rows: NDArray[np.bool_], learnt: Learnt | None) -> F64:
    """Give [n, 2] probabilities as the scorer would."""
    own = learnt.coefficients if learnt is not None else (None, None)
    z = np.stack([x[rows, h, 0] if c is None else x[rows, h] @ c for h, c in enumerate(own)], axis=1)
    p: F64 = 1 / (1 + np.exp(-np.clip(z, -30, 30)))
    if learnt is not None:
        for i, vector in enumerate(labels.vectors[rows]):
            p[i] = [
                opinion.mixed_with(float(q)) for q, opinion in zip(p[i], learnt.neighbours.ask(vector), strict=True)
            ]
    return p


def _loss(p: F64, outcomes: F64) -> float:
    known = ~np.isnan(outcomes)
    return metrics.log_loss(p[known].tolist(), outcomes[known].tolist())


def _start(weights: Weights, head: int, log_odds: float) -> float:
    p = min(max(weights.calibration[head](log_odds), 1e-3), 1 - 1e-3)
    return math.log(p / (1 - p))
