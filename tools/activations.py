"""What values a model's activations take: counted, merged exactly, and made into the ranges that quantising needs.

A value is counted by its sign, its exponent and the first three bits of its mantissa, so every count has its fixed
place: statistics of two sets of inputs added up are the statistics of both sets, bit for bit, whatever came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from edge_rt.convert.qdq import Range

_SHIFT = 20
_N_BINS = 4096
# The edge of each bin that is nearer to zero, and the one farther from it.
_BITS = np.arange(_N_BINS, dtype=np.uint32) << np.uint32(_SHIFT)
with np.errstate(invalid="ignore"):  # some bins are of no finite number
    _NEAR = _BITS.view(np.float32).astype(np.float64)
    _FAR = (_BITS | np.uint32(2**_SHIFT - 1)).view(np.float32).astype(np.float64)
    _MIDDLE = (_NEAR + _FAR) / 2
_FINITE = np.isfinite(_MIDDLE)
_SHRINK = 0.5 ** (np.arange(0, 33) / 8)  # of a range's ends, tried against each other


@dataclass(slots=True)
class Counts:
    """Of one activation: its values counted by bin, the least and the greatest of them exactly."""

    bins: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_N_BINS))
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: NDArray[Any]) -> None:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not flat.size:
            return
        if not np.isfinite(flat).all():
            raise ValueError("an activation is not finite")
        self.bins += np.bincount(flat.view(np.uint32) >> np.uint32(_SHIFT), minlength=_N_BINS)
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))

    def merge(self, other: Counts, weight: float = 1.0) -> None:
        """Add the other's values; weight is what one of them counts against one here."""
        self.bins += other.bins * weight
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def scaled(self, weight: float) -> Counts:
        return Counts(self.bins * weight, self.low, self.high)

    def range_minmax(self) -> Range:
        return self.low, self.high

    def range_mse(self, n_levels: int = 256) -> Range:
        """Give the range of the least mean squared error: the steps' own, and that of what is cut off."""
        seen = (self.bins > 0) & _FINITE
        values, weights = np.clip(_MIDDLE[seen], self.low, self.high), self.bins[seen]
        # Cheap first: one end at a time, twice, finds the best pair but for rare ties.
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        for _ in range(2):
            high = min(max(self.high, 0.0) * _SHRINK, key=lambda h: _error(values, weights, low, float(h), n_levels))
            low = min(min(self.low, 0.0) * _SHRINK, key=lambda lo: _error(values, weights, float(lo), high, n_levels))
        return float(low), float(high)


def _error(values: NDArray[Any], weights: NDArray[Any], low: float, high: float, n_levels: int) -> float:
    step = (high - low) / (n_levels - 1)
    cut = values - np.clip(values, low, high)
    inside = weights[cut == 0].sum()
    return float((weights * cut**2).sum() + inside * step**2 / 12)


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    n_inputs: float
    low: float
    high: float
    bins: dict[int, float]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    activations: dict[str, _Saved]


class Statistics:
    """Counts of all activations of a model over its n_inputs inputs so far, of which older ones may count less."""

    def __init__(self, counts: dict[str, Counts] | None = None, n_inputs: float = 0.0):
        self.counts = counts or {}
        self.n_inputs = n_inputs

    @classmethod
    def collect(cls, model: ModelProto, feeds: Iterable[Mapping[str, NDArray[Any]]]) -> Statistics:
        """Run the float model over feeds and count. Raises ValueError for an activation that is not finite."""
        found = cls()
        session = session_with_activations(model)
        for feed in feeds:
            for name, values in activations(session, feed):
                found.counts.setdefault(name, Counts()).add(values)
            found.n_inputs += 1
        return found

    def merge(self, other: Statistics, weight: float = 1.0) -> None:
        for name, counts in other.counts.items():
            self.counts.setdefault(name, Counts()).merge(counts, weight)
        self.n_inputs += other.n_inputs * weight

    def fade(self, half_life: float, n_new: float) -> Statistics:
        """Give the statistics with each count worth less, as n_new newer inputs come; half after half_life of them.

        The least and the greatest value ever stay, but a range of the least error follows what counts now.
        """
        weight = 0.5 ** (n_new / half_life)
        return Statistics({name: c.scaled(weight) for name, c in self.counts.items()}, self.n_inputs * weight)

    def ranges(self, method: str = "mse") -> dict[str, Range]:
        return {
            name: counts.range_minmax() if method == "minmax" else counts.range_mse()
            for name, counts in sorted(self.counts.items())
        }

    def save(self, path: Path) -> None:
        saved = {
            name: _Saved(self.n_inputs, c.low, c.high, {int(i): float(c.bins[i]) for i in np.flatnonzero(c.bins)})
            for name, c in sorted(self.counts.items())
        }
        path.write_bytes(msgspec.json.encode(_File(1, saved)))

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """Read what save wrote. Raises msgspec.DecodeError and ValueError."""
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        found = cls()
        for name, saved in file.activations.items():
            counts = Counts(low=saved.low, high=saved.high)
            for index, number in saved.bins.items():
                if not 0 <= index < _N_BINS or not 0 <= number < 1e18:
                    raise ValueError(f"{path}: {name}: bin {index} holds {number}")
                counts.bins[index] = number
            found.counts[name] = counts
            found.n_inputs = saved.n_inputs
        return found


def float_activations(model: ModelProto) -> list[str]:
    """Name the float values between a model's nodes, its inputs and outputs among them."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    constants = {tensor.name for tensor in graph.initializer}
    values = (*graph.input, *graph.value_info, *graph.output)
    names = [v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT and v.name not in constants]
    return list(dict.fromkeys(names))


def session_with_activations(model: ModelProto) -> Any:
    """Give a session of the model whose outputs are all its float activations."""
    inferred = onnx.shape_inference.infer_shapes(model)
    wanted = set(float_activations(model))
    present = {output.name for output in inferred.graph.output}
    inputs = {value.name for value in inferred.graph.input}
    shown = [v for v in inferred.graph.value_info if v.name in wanted and v.name not in present | inputs]
    inferred.graph.output.extend(shown)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(inferred.SerializeToString(), options, providers=["CPUExecutionProvider"])


def activations(session: Any, feed: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Run once and give each float activation with its name, the float inputs first."""
    for name, values in feed.items():
        if values.dtype == np.float32:
            yield name, values
    names = [output.name for output in session.get_outputs()]
    for name, values in zip(names, session.run(names, dict(feed)), strict=True):
        if values.dtype == np.float32:
            yield name, values
