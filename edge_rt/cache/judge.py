"""Do two questions want the same answer? A small network that lays their words side by side. Loads numpy.

A static embedding knows each word, but not which word of the one question stands for which of the other. Here each
token's vector is seen with its two neighbours, each token of one question is compared with the blend of the other's
tokens that comes nearest to it (attention), and what does not fit is added up. Some 60,000 weights, trained by
tools/train_cache_judge.py; a pair takes a fraction of a millisecond. The file holds numbers only and is read as if a
stranger had written it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.text_vectors import N_DIMENSIONS

SHIPPED = Path(__file__).parent / "judge.weights"
N_WIDE = 64
N_MEASURES = 18
MAX_TOKENS = 32
SCALE = 16.0  # gives a unit vector's elements a spread of about 1

F32 = NDArray[np.float32]

_MAGIC = b"ERTJUDG1"
_MAX_DEVIATIONS = 5.0  # no measure counts for more
_MAX_WEIGHT = 1000.0
_MAX_PRODUCT_ROWS = 15  # of a matrix product: so small ones are computed by the calling thread alone
_SHAPES: dict[str, tuple[int, ...]] = {
    "mean": (N_MEASURES,),
    "deviation": (N_MEASURES,),
    "project": (N_DIMENSIONS, N_WIDE),
    "project_bias": (N_WIDE,),
    "around": (3 * N_WIDE, N_WIDE),
    "around_bias": (N_WIDE,),
    "sharpness": (2,),
    "compare": (4 * N_WIDE + 3, N_WIDE),
    "compare_bias": (N_WIDE,),
    "join": (4 * N_WIDE + N_MEASURES, N_WIDE),
    "join_bias": (N_WIDE,),
    "decide": (N_WIDE, 1),
    "decide_bias": (1,),
}


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """A question's tokens as they are compared: unit vectors [n, 256], lengths [n, 1], seen in context [n, N_WIDE]."""

    units: F32
    lengths: F32
    seen: F32


class PairJudge:
    """Scores pairs of questions. Threads may share it."""

    def __init__(self, weights: dict[str, F32]) -> None:
        self._weights = weights

    @classmethod
    def load(cls, path: Path = SHIPPED) -> PairJudge:
        """Read and check a file. Raises ModelFormatError for one that is not sound, OSError where there is none."""
        return cls(read_weights(path))

    def align(self, token_vectors: F32) -> Aligned:
        """Take in a question's token vectors [n, 256], as text_vectors gives them; the first MAX_TOKENS count."""
        w = self._weights
        rows = token_vectors[:MAX_TOKENS]
        lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-6))
        units = rows / lengths
        x = _times(units * np.float32(SCALE), w["project"]) + w["project_bias"]
        padded = np.zeros((len(x) + 2, N_WIDE), np.float32)
        padded[1:-1] = x
        near = np.concatenate([padded[:-2], x, padded[2:]], axis=1)
        return Aligned(units, lengths, x + np.maximum(_times(near, w["around"]) + w["around_bias"], 0))

    def log_odds(self, a: Aligned, b: Aligned, measures: Sequence[float]) -> float:
        """Give the log-odds that a and b want the same answer; measures as similarity.py gives them. Symmetric."""
        w = self._weights
        raw = _times(a.units, b.units.T)
        pull = _times(a.seen, b.seen.T) * (w["sharpness"][0] / np.float32(N_WIDE**0.5)) + raw * w["sharpness"][1]
        sum_a, most_a = self._side(a, b, raw, pull)
        sum_b, most_b = self._side(b, a, raw.T, pull.T)
        standard = (np.array(measures, np.float32) - w["mean"]) / w["deviation"]
        joined = np.concatenate([
            sum_a + sum_b, np.abs(sum_a - sum_b), np.maximum(most_a, most_b), np.minimum(most_a, most_b),
            np.clip(standard, -_MAX_DEVIATIONS, _MAX_DEVIATIONS),
        ])  # fmt: skip
        hidden = np.maximum(joined @ w["join"] + w["join_bias"], 0)
        return float(hidden @ w["decide"][:, 0] + w["decide_bias"][0])

    def _side(self, a: Aligned, b: Aligned, raw: F32, pull: F32) -> tuple[F32, F32]:
        """Compare each token of a with its blend of b's: sum and maximum of what is found."""
        w = self._weights
        shares = np.exp(pull - pull.max(axis=1, keepdims=True))
        blend = _times(shares / shares.sum(axis=1, keepdims=True), b.seen)
        best = raw.max(axis=1, keepdims=True)
        sides = [a.seen, blend, np.abs(a.seen - blend), a.seen * blend, best, a.lengths, (1 - best) * a.lengths]
        found = np.maximum(_times(np.concatenate(sides, axis=1), w["compare"]) + w["compare_bias"], 0)
        return found.sum(axis=0) / 4, found.max(axis=0)


def _times(x: F32, y: F32) -> F32:
    """Multiply in pieces so small that no other thread is woken: on a busy machine that costs more than the product."""
    if len(x) <= _MAX_PRODUCT_ROWS:
        return x @ y
    return np.concatenate([x[at : at + _MAX_PRODUCT_ROWS] @ y for at in range(0, len(x), _MAX_PRODUCT_ROWS)])


def write_weights(path: Path, weights: dict[str, NDArray[np.floating]]) -> None:
    """Write a file of half-precision weights. Raises ValueError for other names or shapes, OSError."""
    if weights.keys() != _SHAPES.keys() or any(weights[name].shape != shape for name, shape in _SHAPES.items()):
        raise ValueError(f"weights must be {_SHAPES}, are { {name: w.shape for name, w in weights.items()} }")
    body = b"".join(np.ascontiguousarray(weights[name], "<f2").tobytes() for name in _SHAPES)
    path.write_bytes(_MAGIC + hashlib.sha256(body).digest() + body)


def read_weights(path: Path) -> dict[str, F32]:
    """Read and check a file. Raises ModelFormatError for one that is not sound, OSError where there is none."""
    n_bytes = 40 + 2 * sum(map(prod, _SHAPES.values()))
    with open_regular(path) as file:
        data = file.read(n_bytes + 1)
    if data[:8] != _MAGIC:
        raise _misfit(path, "beginning", f"must be {_MAGIC!r}, is {data[:8]!r}: no such weights, or of another version")
    if len(data) != n_bytes:
        raise _misfit(path, "file", f"must be {n_bytes} bytes long")
    if hashlib.sha256(data[40:]).digest() != data[8:40]:
        raise _misfit(path, "checksum", "does not fit the contents")
    weights: dict[str, F32] = {}
    at = 40
    for name, shape in _SHAPES.items():
        weights[name] = np.frombuffer(data, "<f2", prod(shape), at).astype(np.float32).reshape(shape)
        at += 2 * prod(shape)
        if not (np.abs(weights[name]) <= _MAX_WEIGHT).all():  # NaN fails too
            raise _misfit(path, name, f"must be numbers up to {_MAX_WEIGHT:g}")
    if (weights["deviation"] <= 0).any():
        raise _misfit(path, "deviation", "must be positive")
    return weights


def _misfit(path: Path, part: str, problem: str) -> ModelFormatError:
    return ModelFormatError(path=str(path), field=part, problem=problem)
