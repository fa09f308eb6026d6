"""The declared workload's replay: what it adds up, and that it can be written as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from edge_rt.router import fitting

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import router  # type: ignore[import-not-found]
import router_workload  # type: ignore[import-not-found]

_TOPICS = ("task: arc_challenge", "task: math", "task: commonsense_qa", "task: gpqa")


class Embedder:
    """Gives each kind of request a corner of its own."""

    def embed(self, texts: list[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), 256), np.float32)
        vectors[np.arange(len(texts)), [int(text.split()[0]) for text in texts]] = 1
        return vectors


def examples(n: int) -> list[fitting.Example]:
    """Requests of which the cloud answers all, and the device those of the first and third kind."""
    return [
        fitting.Example(text=f"{i % 4} request {i}", local=float(i % 2 == 0), cloud=1.0, topic=_TOPICS[i % 4])
        for i in range(n)
    ]


def rows(n: int) -> fitting.Rows:
    return fitting.prepare(examples(n), Embedder())


@pytest.fixture(scope="module")
def load() -> router_workload.Load:
    return router_workload.replay([(rows(1200), router.predicted(rows(400), rows(1200)))])


def test_the_simple_stay_and_the_gap_is_recovered(load: router_workload.Load) -> None:
    assert load.simple_local_share > 0.9
    assert load.complex_local_share < load.simple_local_share
    assert load.recovered > 0.8


def test_joined_rows_are_what_the_texts_together_give() -> None:
    parts = [rows(30), rows(7)]
    joined, together = router.joined(parts), fitting.prepare([*examples(30), *examples(7)], Embedder())
    assert joined.topics == together.topics
    for name in ("surface", "vectors", "outcomes", "folds"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(together, name))
    assert joined.terms.n_rows == together.terms.n_rows
    for name in ("row", "column", "value"):
        np.testing.assert_array_equal(getattr(joined.terms, name), getattr(together.terms, name))


def test_bars_can_be_written_whatever_their_numbers_are(load: router_workload.Load) -> None:
    json.dumps(asdict(load))
    bar = router.Bar(name="a bar", value=np.float64(0.9), at_least=0.8)
    assert json.loads(json.dumps(asdict(bar) | {"holds": bar.holds}))["holds"] is True
