"""Labels on disk, refits beside the loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_rt.router.learner import Learner
from edge_rt.router.learning import Labels
from edge_rt.router.scorer import Score, Scorer
from edge_rt.router.weights import Weights
from tests.unit.router import test_learning
from tests.unit.router.test_learning import sketch

weights = test_learning.weights


class NoEmbedder:
    def embed(self, texts: Any) -> Any:
        raise NotImplementedError


def score(rng: np.random.Generator, kind: int) -> Score:
    return Score(0.5, 0.9, (), sketch(rng, kind))


def teach(learner: Learner, n: int) -> None:
    """The device answers one kind of request well, the other badly; the shipped judges do not tell them apart."""
    rng = np.random.default_rng(1)
    for i in range(n):
        kind = int(rng.integers(2))
        worth = float(rng.random() < (0.95, 0.1)[kind])
        learner.label(score(rng, kind), source="feedback", local=worth, cloud=None, tenant=str(i % 5))


def test_enough_labels_change_the_scorer_in_the_background(tmp_path: Path, weights: Weights) -> None:
    scorer = Scorer(weights, NoEmbedder())

    async def main() -> None:
        learner = Learner(scorer, tmp_path / "labels")
        teach(learner, 24)
        assert scorer.learnt is None
        teach(learner, 300)
        await learner.settle()
        learner.begin()
        await learner.close()

    asyncio.run(main())
    rng = np.random.default_rng(2)
    assert scorer.learnt is not None
    good, bad = (scorer.learnt.correct(sketch(rng, kind)) for kind in range(2))
    assert good is not None
    assert bad is not None
    assert good[0] - bad[0] > 0.2
    assert len(Labels.load(tmp_path / "labels")) == 324


def test_what_was_learnt_is_learnt_again_after_a_restart(tmp_path: Path, weights: Weights) -> None:
    async def main() -> Scorer:
        learner = Learner(Scorer(weights, NoEmbedder()), tmp_path / "labels")
        teach(learner, 300)
        await learner.close()
        scorer = Scorer(weights, NoEmbedder())
        again = Learner(scorer, tmp_path / "labels")
        again.begin()
        await again.settle()
        return scorer

    assert asyncio.run(main()).learnt is not None


def test_a_damaged_file_begins_anew_and_is_told_of(
    tmp_path: Path, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "labels").write_bytes(b"not labels")
    asyncio.run(Learner(Scorer(weights, NoEmbedder()), tmp_path / "labels").close())
    assert "labels are begun anew" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_memory(
    tmp_path: Path, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        learner = Learner(Scorer(weights, NoEmbedder()), tmp_path / "nowhere" / "labels")
        teach(learner, 30)
        await learner.close()

    asyncio.run(main())
    assert "cannot be written" in caplog.text


def test_other_requests_than_before_are_told_of_once(
    tmp_path: Path, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(Scorer(weights, NoEmbedder()), tmp_path / "labels")
    rng = np.random.default_rng(3)
    for i in range(1500):
        p_local = float(rng.random()) * 0.5 + (0.0 if i < 700 else 0.5)
        learner.score_seen(Score(p_local, 0.9, (), sketch(rng, 0)))
    assert caplog.text.count("requests have become others") == 1
