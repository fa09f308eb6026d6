"""One inference of a tensor model in arrays: who hears of it, and the rows by which it is joined with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import DTYPES
from edge_rt.errors import BackendStepError, EdgeRtError
from edge_rt.tensor_types import TensorSpec, TensorTimings

Arrays = Mapping[str, NDArray[Any]]


@dataclass(slots=True, kw_only=True)  # not frozen, which takes several times as long to make; nobody changes it
class Call:
    """One inference, as TensorRequest has it, in arrays."""

    id: str
    feeds: Arrays
    outputs: tuple[str, ...] = ()
    stream: str = ""
    is_first: bool = False
    is_last: bool = False
    tenant: str = ""
    deadline_s: float | None = None


class Sink(Protocol):
    """Takes one call's answer, once; called on a computing thread, so it must not block.

    The arrays are the sink's. A call that is cancelled while it waits ends without either.
    """

    def answered(self, outputs: Arrays, timings: TensorTimings, *, n_stream_calls: int) -> None: ...

    def failed(self, error: EdgeRtError) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    """A call that has been checked and is not answered; n_rows as count_rows has it."""

    call: Call
    sink: Sink
    submitted_s: float
    n_rows: int

    def is_past_deadline(self, now_s: float) -> bool:
        return self.call.deadline_s is not None and now_s - self.submitted_s > self.call.deadline_s


def has_rows(specs: Sequence[TensorSpec]) -> bool:
    """Tell whether the first dimension of all of them takes any number of rows."""
    return all(spec.shape and spec.shape[0] < 0 for spec in specs)


def count_rows(feeds: Arrays) -> int:
    """Give the rows that a call brings; 0 if its inputs have none in common."""
    n_rows = -1
    for array in feeds.values():
        n = array.shape[0] if array.ndim else 0
        if n_rows not in (-1, n):
            return 0
        n_rows = n
    return max(n_rows, 0)


def check_rows(outputs: Arrays, n_rows: int) -> None:
    """Raise BackendStepError for an output that has not a row for each of the inputs'."""
    for name, array in outputs.items():
        if not array.ndim or array.shape[0] != n_rows:
            raise BackendStepError(reason=f"output {name!r} has the shape {array.shape} for {n_rows} rows")


def zeros(spec: TensorSpec) -> NDArray[Any]:
    """Make an input of nothing, with 1 where any size goes."""
    shape = tuple(max(size, 1) if size < 0 else size for size in spec.shape)
    if spec.datatype == "BYTES":
        return np.full(shape, b"", object)
    return np.zeros(shape, DTYPES[spec.datatype])
