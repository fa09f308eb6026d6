"""Keeps labels on disk and refits the scorer from them now and then, beside the event loop. Needs numpy.

A refit takes some hundred milliseconds of one core, so it runs in a thread, at most one at a time, once enough labels
are new. learning.refit decides whether it is better; this swaps it in.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from pathlib import Path
from typing import Final

from edge_rt.errors import ModelFormatError
from edge_rt.router.drift import Drift
from edge_rt.router.learning import Labels, Learnt, Refit, Source, refit
from edge_rt.router.scorer import Score, Scorer

_log = logging.getLogger(__name__)

_REFIT_EVERY: Final = 25  # new labels


class Learner:
    """Belongs to one event loop. path: the file of labels; one that is damaged is told of and begun anew."""

    def __init__(self, scorer: Scorer, path: Path) -> None:
        self._scorer, self._path = scorer, path
        self._drift = Drift()
        self._was_alarming = False
        self._n_new = 0
        self._task: asyncio.Task[None] | None = None
        self._labels = _load(path)
        self._learnt: Learnt | None = None

    def score_seen(self, score: Score) -> None:
        """Watch whether requests are still like those that the scorer was calibrated on."""
        self._drift.add(score.gain)
        if (is_alarming := self._drift.is_alarming) and not self._was_alarming:
            _log.warning(
                "requests have become others than before (stability index %.2f): scores mean less for a while",
                self._drift.index,
            )
        self._was_alarming = is_alarming

    def label(self, score: Score, *, source: Source, local: float | None, cloud: float | None, tenant: str) -> None:
        """Add what an answer was worth, 0..1. Raises InvalidRequestError for what cannot be."""
        self._labels.add(score.sketch, source=source, local=local, cloud=cloud, tenant=tenant)
        self._n_new += 1
        if self._n_new >= _REFIT_EVERY:
            self.begin()

    def begin(self) -> None:
        """Refit in the background, unless that is being done."""
        if self._task is None or self._task.done():
            self._n_new = 0
            # Labels.add replaces its rows, so a shallow copy stays as it is.
            self._task = asyncio.get_running_loop().create_task(self._refit(copy.copy(self._labels)))

    async def settle(self) -> None:
        """Wait for a refit that is under way."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Keep the labels."""
        await self.settle()
        await asyncio.to_thread(self._save, copy.copy(self._labels))

    async def _refit(self, labels: Labels) -> None:
        found = await asyncio.to_thread(self._fitted, labels)
        if not found.is_better:
            return
        self._scorer.learnt = self._learnt = found.learnt
        self._drift.reset()
        _log.info(
            "routing by %d labels from here on: %s %.3f before, %.3f now, on %d held back",
            len(labels),
            found.by,
            found.before,
            found.after,
            found.n_held,
        )

    def _fitted(self, labels: Labels) -> Refit:
        self._save(labels)
        return refit(labels, self._scorer.weights, self._learnt, seed=len(labels))

    def _save(self, labels: Labels) -> None:
        if not len(labels):
            return
        try:
            labels.save(self._path)
        except OSError as exc:
            _log.warning("%s cannot be written, what was learnt ends with this process: %s", self._path, exc.strerror)


def _load(path: Path) -> Labels:
    try:
        return Labels.load(path)
    except FileNotFoundError:
        return Labels()
    except (OSError, ModelFormatError) as exc:
        _log.warning("labels are begun anew: %s", exc)
        return Labels()
