"""A tensor model without weights, for tests and simulations: deterministic answers, scripted speed, power and faults.

The variant string is the script, for example "run_s=0.005,row_s=0.001,fail_every=7,wrong_after=20,power_w=3":

    run_s, row_s      seconds a run takes, and each row of it (the first dimension) on top
    load_s            seconds the load takes
    power_w           what the device draws while it computes; kept in the session's power_w for whoever meters it
    memory_bytes      what the estimate says
    fail_every=7      runs 7, 14, … raise BackendStepError
    fail_after=20     so do all runs after the first 20 …
    fail_until=30     … up to the 30th
    wrong_after=20    runs after the first 20 give wrong answers
    abort_after, hang_after  the run after so many ends the process, or never returns: what a broken driver does
    inputs, outputs   the tensors, "x:FP32:-1x4+state:FP32:2x1x8"; the default is one x and one y of FP32, -1x4

Every element of an answer comes from a hash of the inputs: of the same row of each where all of them and the output
begin with a dimension of any size, else of all inputs whole. So a row given to the wrong request, or a state of
another stream, changes the answer. Floats lie in 0..1. An output's other dimensions of any size are the first input's
that has one there, else 1.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import DTYPES, ModelFile, TensorOptions
from edge_rt.backends.tensor_feeds import check_feeds, check_outputs
from edge_rt.errors import BackendLoadError, BackendStepError
from edge_rt.tensor_types import Datatype, NodePlacement, TensorModelInfo, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a variant string says; 0 for a fault is never."""

    run_s: float = 0.0
    row_s: float = 0.0
    load_s: float = 0.0
    power_w: float = 0.0
    memory_bytes: int = 0
    fail_every: int = 0
    fail_after: int | None = None
    fail_until: int | None = None
    wrong_after: int | None = None
    abort_after: int | None = None
    hang_after: int | None = None
    inputs: tuple[TensorSpec, ...] = (TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec(name="y", datatype="FP32", shape=(-1, 4)),)

    def fails(self, n_run: int) -> bool:
        """Tell whether run n_run, the first is 1, fails."""
        if self.fail_every and n_run % self.fail_every == 0:
            return True
        return self.fail_after is not None and self.fail_after < n_run <= (self.fail_until or n_run)


def read_script(file: ModelFile) -> Script:
    """Read a variant string. Raises BackendLoadError."""
    values: dict[str, Any] = {}
    for part in filter(None, file.variant.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name] = _specs(value) if name in ("inputs", "outputs") else _number(name, value)
        except (KeyError, ValueError) as exc:
            known = ", ".join(field.name for field in fields(Script))
            raise BackendLoadError(
                model=file.model, reason=f"variant {part!r}: the null model takes NAME=VALUE of {known}"
            ) from exc
    return Script(**values)


def _number(name: str, value: str) -> float:
    kind = {field.name: field.type for field in fields(Script)}[name]
    number = float(value) if kind == "float" else int(value)
    if not 0 <= number < float("inf"):
        raise ValueError(value)
    return number


def _specs(text: str) -> tuple[TensorSpec, ...]:
    specs = []
    for part in text.split("+"):
        name, datatype, shape = part.split(":")
        if datatype not in DTYPES:
            raise ValueError(datatype)
        sizes = tuple(int(size) for size in filter(None, shape.split("x")))
        specs.append(TensorSpec(name=name, datatype=cast("Datatype", datatype), shape=sizes))
    return tuple(specs)


class NullTensorSession:
    """Plays a script.

    power_w  as in the script
    """

    def __init__(self, file: ModelFile, options: TensorOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._script = script = read_script(file)
        self._sleep = sleep
        self._n_runs = 0
        self._closed = False
        self.power_w = script.power_w
        self.inputs, self.outputs = script.inputs, script.outputs
        device = options.device if options.device.startswith("null") else "null"
        self.info = TensorModelInfo(
            model=file.model,
            variant=file.variant,
            backend="null",
            device=device,
            quant="none",
            size_bytes=0,
            inputs=self.inputs,
            outputs=self.outputs,
            n_threads=options.n_threads or 1,
            max_batch=options.max_batch,
            placement=(NodePlacement(provider="null", n_nodes=1, kinds=(("Hash", 1),)),),
            evidence="stub",
        )
        if script.load_s:
            sleep(script.load_s)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        if self._closed:
            raise BackendStepError(reason="the session is closed")
        check_feeds(self.inputs, feeds)
        wanted = check_outputs(self.outputs, outputs)
        self._n_runs += 1
        self._play(max((array.shape[0] for array in feeds.values() if array.ndim), default=1))
        script = self._script
        salt = b"wrong" if script.wrong_after is not None and self._n_runs > script.wrong_after else b""
        return {spec.name: self._answer(spec, feeds, salt) for spec in self.outputs if spec.name in wanted}

    def close(self) -> None:
        self._closed = True

    def _play(self, n_rows: int) -> None:
        script = self._script
        if (duration_s := script.run_s + n_rows * script.row_s) > 0:
            self._sleep(duration_s)
        if script.abort_after is not None and self._n_runs > script.abort_after:
            os.abort()
        if script.hang_after is not None and self._n_runs > script.hang_after:
            threading.Event().wait()
        if script.fails(self._n_runs):
            raise BackendStepError(reason=f"the script of the null model makes run {self._n_runs} fail")

    def _answer(self, spec: TensorSpec, feeds: Mapping[str, NDArray[Any]], salt: bytes) -> NDArray[Any]:
        arrays = [feeds[given.name] for given in self.inputs]
        shape = tuple(_size(at, size, self.inputs, arrays) for at, size in enumerate(spec.shape))
        salt += spec.name.encode()
        by_row = all(given.shape[:1] == (-1,) for given in (*self.inputs, spec))
        if not by_row or len({len(array) for array in arrays}) != 1:
            return _hashed(arrays, spec.datatype, shape, salt)
        rows = [_hashed([array[i, ...] for array in arrays], spec.datatype, shape[1:], salt) for i in range(shape[0])]
        return np.stack(rows) if rows else np.empty(shape, DTYPES[spec.datatype])


def _size(at: int, size: int, specs: Sequence[TensorSpec], arrays: Sequence[NDArray[Any]]) -> int:
    if size >= 0:
        return size
    return next((a.shape[at] for s, a in zip(specs, arrays, strict=True) if s.shape[at : at + 1] == (-1,)), 1)


def _hashed(arrays: Sequence[NDArray[Any]], datatype: Datatype, shape: tuple[int, ...], salt: bytes) -> NDArray[Any]:
    digest = hashlib.blake2b(salt, digest_size=8)
    for array in arrays:
        digest.update(repr((array.shape, array.tolist())).encode() if array.dtype == object else array.tobytes())
    noise = np.random.default_rng(int.from_bytes(digest.digest(), "little"))
    dtype = DTYPES[datatype]
    if datatype == "BYTES":
        words = np.empty(shape, dtype)
        for at in range(words.size):
            words.flat[at] = noise.bytes(4).hex().encode()
        return words
    if datatype == "BOOL":
        return noise.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "f":
        return noise.random(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return noise.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
