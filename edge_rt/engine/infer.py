"""How a pipeline reaches the tensor model behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_rt.tensor_types import TensorTimings
from edge_rt.types import Energy


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """energy: that it took; None where nothing was measured."""

    outputs: Mapping[str, NDArray[Any]]
    timings: TensorTimings
    energy: Energy | None = None


class Infer(Protocol):
    def __call__(self, feeds: Mapping[str, NDArray[Any]], *, stream: str = "", is_last: bool = False) -> Inferred:
        """Compute and wait for it; requests of other callers may be joined with it.

        stream    names the state to go on from, as in TensorRequest
        Raises InvalidRequestError, BackendStepError, ShuttingDownError.
        """
        ...


def sum_timings(timings: Sequence[TensorTimings]) -> TensorTimings | None:
    """Add up what several inferences of one request took; the batch size is the largest."""
    if not timings:
        return None
    return TensorTimings(
        queue_s=sum(t.queue_s for t in timings),
        compute_s=sum(t.compute_s for t in timings),
        batch_size=max(t.batch_size for t in timings),
        engine_s=sum(t.engine_s for t in timings),
    )
