"""Models with any number of rows on chips that take a fixed one: a request is computed part by part. Pure.

Only where rows are independent of one another, which differ tells for a model by trying it on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import DTYPES
from edge_rt.backends.tensor_feeds import shown
from edge_rt.tensor_types import TensorSpec

Feeds = Mapping[str, NDArray[Any]]
_TRIED_ROWS = 3
_TOLERANCE = 1e-3  # of an output's largest value: a CPU's kernels for other sizes add up in another order


def has_rows(specs: Sequence[TensorSpec]) -> bool:
    """Say whether all have any number of rows, and nothing else about them varies."""
    return bool(specs) and all(spec.shape[:1] == (-1,) and min(spec.shape[1:], default=0) >= 0 for spec in specs)


def static_refusal(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    """Say why a model's shapes are nothing for a chip that wants to know them; None if they are."""
    varying = [spec for spec in inputs if -1 in spec.shape]
    if not varying or (has_rows(inputs) and has_rows(outputs)):
        return None
    spec = varying[0]
    return (
        f"its input {spec.name} is {shown(spec.shape)}, and an NPU takes fixed shapes: only the number of rows of all "
        "inputs and outputs may vary. Export it with the sizes that it shall run with"
    )


def parts(feeds: Feeds, rows: int) -> Iterator[tuple[Feeds, int]]:
    """Cut feeds into as many rows as a run takes, the last filled up with zeros; with each how many are real."""
    n_rows = len(next(iter(feeds.values())))
    for begin in range(0, n_rows, rows):
        n_real = min(rows, n_rows - begin)
        cut = {name: array[begin : begin + n_real] for name, array in feeds.items()}
        if n_real < rows:
            cut = {
                name: np.concatenate([array, np.zeros((rows - n_real, *array.shape[1:]), array.dtype)])
                for name, array in cut.items()
            }
        yield cut, n_real


def run_in_parts(
    run: Callable[[Feeds, Sequence[str]], dict[str, NDArray[Any]]],
    feeds: Feeds,
    rows: int,
    specs: Sequence[TensorSpec],
    wanted: Sequence[str],
) -> dict[str, NDArray[Any]]:
    """Compute any number of rows with run, which takes rows of them; specs are the outputs'."""
    answers: dict[str, list[NDArray[Any]]] = {name: [] for name in wanted}
    for cut, n_real in parts(feeds, rows):
        for name, answer in run(cut, wanted).items():
            answers[name].append(answer[:n_real])
    empty = {spec.name: np.empty((0, *spec.shape[1:]), DTYPES[spec.datatype]) for spec in specs}
    return {name: np.concatenate(found) if found else empty[name] for name, found in answers.items()}


def random_feeds(specs: Sequence[TensorSpec], rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Make feeds for a try: floats of a normal distribution, small integers."""
    noise = np.random.default_rng(seed)
    feeds: dict[str, NDArray[Any]] = {}
    for spec in specs:
        shape = tuple(rows if size < 0 else size for size in spec.shape)
        dtype = DTYPES[spec.datatype]
        drawn = noise.standard_normal(shape) if dtype.kind == "f" else noise.integers(0, 2, shape)
        feeds[spec.name] = drawn.astype(dtype)
    return feeds


def zero_indices(feeds: Feeds) -> Feeds:
    """Make integers zeros, which are indices of any table."""
    return {name: array if array.dtype.kind == "f" else np.zeros_like(array) for name, array in feeds.items()}


def differ(run: Callable[[Feeds], dict[str, NDArray[Any]]], inputs: Sequence[TensorSpec]) -> str | None:
    """Say which output shows that rows depend on one another: computed together they are not what each is alone."""
    feeds = random_feeds(inputs, _TRIED_ROWS)
    together = run(feeds)
    for i in range(_TRIED_ROWS):
        alone = run({name: array[i : i + 1] for name, array in feeds.items()})
        for name, answer in together.items():
            if answer.shape[:1] != (_TRIED_ROWS,) or alone[name].shape[:1] != (1,):
                return name
            a, b = answer[i : i + 1].astype(np.float64), alone[name].astype(np.float64)
            if not np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * max(1e-30, float(np.abs(b).max(initial=0.0)))):
                return name
    return None
