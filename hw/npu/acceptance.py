"""What the acceptance scripts of all vendors share: about the machine, how far answers are, what runs take, the report.

A script is run from a checkout, by edge_rt's own environment.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import TensorSession
from edge_rt.backends.npu.rows import random_feeds
from edge_rt.tensor_types import TensorSpec
from edge_rt.version import VERSION

json_option = click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here too."
)


def about() -> dict[str, Any]:
    """Give what a report says of the machine first."""
    machine = {"machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version()}
    return {"edge_rt": VERSION} | machine


def feeds_for(inputs: Sequence[TensorSpec], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Give random inputs; bytes are pixels of every value."""
    feeds = random_feeds(tuple(inputs), 1, seed)
    noise = np.random.default_rng(seed)
    pixels = {name: noise.integers(0, 256, a.shape, np.uint8) for name, a in feeds.items() if a.dtype == np.uint8}
    return feeds | pixels


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Give the cosine between two arrays; 1 where both are zero, 0 where one is."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norms if norms else float(np.array_equal(x, y))


def spread(times_s: Sequence[float]) -> dict[str, float]:
    """Say what runs took; {} where none was made."""
    if not times_s:
        return {}
    ordered = sorted(times_s)
    p99_s = ordered[int(len(ordered) * 0.99)]
    n = len(ordered)
    return {"median": ordered[n // 2], "least": ordered[0], "p99": p99_s, "most": ordered[-1], "n": n}


def times_s(
    session: TensorSession,
    feeds: Mapping[str, NDArray[Any]],
    n_runs: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[float]:
    """Run a model n_runs times; give what each run took."""
    took_s = []
    for _ in range(n_runs):
        begun_s = clock()
        session.run(feeds)
        took_s.append(clock() - begun_s)
    return took_s


def give(report: Mapping[str, Any], file: Path | None) -> NoReturn:
    """Print a report, write it too where a file is named, and end: with 1 where it tells of a failure."""
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")
    sys.exit("failed" in report)
