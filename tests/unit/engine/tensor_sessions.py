"""Sessions and sinks for the tests of the tensor engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.null_tensor import NullTensorSession
from edge_rt.engine.calls import Arrays, Call
from edge_rt.errors import EdgeRtError
from edge_rt.tensor_types import TensorTimings

STATEFUL = "inputs=x:FP32:1x4+s:FP32:1x8,outputs=y:FP32:1x4+t:FP32:1x8"


def session(variant: str = "", *, sleep: Callable[[float], None] = lambda _: None) -> NullTensorSession:
    file = ModelFile(model="m", variant=variant, path=Path(), quant="none")
    return NullTensorSession(file, TensorOptions(max_batch=8), sleep=sleep)


class WatchedSession(NullTensorSession):
    """Notes the rows of each run, and fails or misbehaves as on_run says."""

    def __init__(self, variant: str = "", on_run: Callable[[Arrays], object] = lambda _: None) -> None:
        super().__init__(
            ModelFile(model="m", variant=variant, path=Path(), quant="none"), TensorOptions(), sleep=lambda _: None
        )
        self.runs: list[int] = []
        self.on_run = on_run
        self.cut_rows = 0

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        self.runs.append(next(iter(feeds.values())).shape[0])
        self.on_run(feeds)
        made = super().run(feeds, outputs)
        return {name: array[self.cut_rows :] for name, array in made.items()}


class Heard:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.outputs: Arrays | None = None
        self.timings: TensorTimings | None = None
        self.error: EdgeRtError | None = None
        self.n_stream_calls = 0
        self.n_ends = 0

    def answered(self, outputs: Arrays, timings: TensorTimings, *, n_stream_calls: int) -> None:
        self.outputs, self.timings, self.n_stream_calls = outputs, timings, n_stream_calls
        self.n_ends += 1

    def failed(self, error: EdgeRtError) -> None:
        self.error = error
        self.n_ends += 1


def rows(*values: float) -> NDArray[np.float32]:
    """Give one row of four for each value."""
    return np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)


def call(call_id: str, *values: float, **fields: Any) -> Call:
    return Call(id=call_id, feeds={"x": rows(*values)}, **fields)


def alone(variant: str, feeds: Arrays) -> dict[str, NDArray[Any]]:
    """Give what a model answers to a call that is computed by itself."""
    return session(variant).run(feeds)
