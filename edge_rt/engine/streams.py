"""The state that a stateful tensor model carries from one call of a stream to the next.

A stream belongs to its tenant: another's stream of the same name is another stream. When there is no room, the
tenant with the most streams loses the one it has not used for longest, so that nobody drives out others by opening
many. An evicted stream begins anew; the number of its calls, which every answer carries, tells its client so.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import DTYPES
from edge_rt.catalog.pipelines import StateTensor
from edge_rt.errors import BackendLoadError, BackendStepError
from edge_rt.tensor_types import TensorSpec

_log = logging.getLogger(__name__)

_Key = tuple[str, str]  # tenant, stream


@dataclass(frozen=True, slots=True)
class _Stream:
    state: dict[str, NDArray[Any]]  # by the name of the input
    n_calls: int


class Streams:
    """The states of one model's streams. max_bytes bounds one state.

    Raises BackendLoadError for a state that is not the model's.
    """

    def __init__(
        self,
        state: Sequence[StateTensor],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        model: str,
        max_streams: int,
        max_bytes: int,
    ) -> None:
        self._specs = _matched(state, inputs, outputs, model, max_bytes)
        self._output_of = {tensor.input: tensor.output for tensor in state}
        self._shapes = {tensor.input: tensor.shape for tensor in state}
        self._max_streams = max_streams
        self._streams: OrderedDict[_Key, _Stream] = OrderedDict()  # least recently used first
        self._n_of: Counter[str] = Counter()  # streams by tenant
        self._lock = threading.RLock()  # one thread computes, others forget

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def inputs(self) -> frozenset[str]:
        """The state's inputs, which a client may leave out."""
        return frozenset(self._output_of)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The state's outputs, which must be computed whether wanted or not."""
        return tuple(self._output_of.values())

    def state(self, tenant: str, stream: str) -> dict[str, NDArray[Any]]:
        """Give the state to go on from: zeros for a new stream, and for "", which is none."""
        known = self._streams.get((tenant, stream)) if stream else None
        if known is not None:
            return dict(known.state)
        return {name: np.zeros(shape, DTYPES[self._specs[name].datatype]) for name, shape in self._shapes.items()}

    def keep(self, tenant: str, stream: str, outputs: Mapping[str, NDArray[Any]]) -> int:
        """Keep the state after a call; give the number of the stream's calls so far. Raises BackendStepError."""
        state = {name: outputs[output] for name, output in self._output_of.items()}
        for name, array in state.items():
            if not _fits(array.shape, self._specs[name].shape):
                reason = (
                    f"the state {self._output_of[name]!r} has the shape {array.shape}, which {name!r} does not take"
                )
                raise BackendStepError(reason=reason)
        key = (tenant, stream)
        with self._lock:
            known = self._streams.get(key)
            if known is None:
                self._make_room(tenant)
                self._n_of[tenant] += 1
            n_calls = 1 if known is None else known.n_calls + 1
            self._streams[key] = _Stream(state, n_calls)
            self._streams.move_to_end(key)
        return n_calls

    def n_calls(self, tenant: str, stream: str) -> int:
        known = self._streams.get((tenant, stream))
        return 0 if known is None else known.n_calls

    def forget(self, tenant: str, stream: str) -> None:
        with self._lock:
            if self._streams.pop((tenant, stream), None) is not None:
                self._n_of[tenant] -= 1
                if not self._n_of[tenant]:
                    del self._n_of[tenant]

    def _make_room(self, tenant: str) -> None:
        """Forget a stream if a new one of tenant's is one too many."""
        if len(self._streams) < self._max_streams:
            return
        # The newcomer counts as its tenant's, so that a tenant with as many as any other loses its own.
        largest = max(self._n_of, key=lambda name: (self._n_of[name] + (name == tenant), name == tenant))
        key = next(key for key in self._streams if key[0] == largest)
        self.forget(*key)
        _log.warning("a stream's state is forgotten: there are more than %d streams", self._max_streams)


def _matched(
    state: Sequence[StateTensor],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    model: str,
    max_bytes: int,
) -> dict[str, TensorSpec]:
    """Find the inputs that a manifest's state names, and check that the model has what it says."""
    specs = {spec.name: spec for spec in inputs}
    made = {spec.name: spec for spec in outputs}
    room_bytes = max_bytes
    for tensor in state:
        spec, output = specs.get(tensor.input), made.get(tensor.output)
        if spec is None or output is None:
            missing = f"input {tensor.input!r}" if spec is None else f"output {tensor.output!r}"
            raise BackendLoadError(model=model, reason=f"its manifest's state names the {missing}, which it has not")
        if spec.datatype != output.datatype or spec.datatype == "BYTES":
            reason = f"its state goes from {tensor.output!r} ({output.datatype}) to {tensor.input!r} ({spec.datatype})"
            raise BackendLoadError(model=model, reason=reason)
        if not _fits(tensor.shape, spec.shape):
            reason = f"its manifest's state {tensor.input!r} has the shape {tensor.shape}, the model's is {spec.shape}"
            raise BackendLoadError(model=model, reason=reason)
        room_bytes -= math.prod(tensor.shape) * DTYPES[spec.datatype].itemsize
    if room_bytes < 0:
        size_bytes = max_bytes - room_bytes
        reason = f"its manifest's state takes {size_bytes} bytes, the limit is {max_bytes} (limits.max_tensor_bytes)"
        raise BackendLoadError(model=model, reason=reason)
    return {tensor.input: specs[tensor.input] for tensor in state}


def _fits(shape: Sequence[int], spec: Sequence[int]) -> bool:
    return len(shape) == len(spec) and all(size == want or want < 0 for size, want in zip(shape, spec, strict=True))
