"""How likely two questions want the same answer: measures of the pair and the judge's word, weighed by a regression.

The cosine of two means sees no word that matters; matching the tokens one by one does, and the judge (judge.py) knows
what kinds of words may be another's. The weights (score.py) are a starting point: the controller (threshold.py)
recalibrates on this device's own verified answers. Loads numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.cache import score
from edge_rt.cache.judge import PairJudge
from edge_rt.cache.lexical import Reading, read
from edge_rt.text_vectors import N_DIMENSIONS, TextVectors

_MAX_TOKENS = 64  # matched one by one

NAMES = (
    "cosine", "cosine³", "matched", "matched, other way", "worst match", "worst match, other way", "unmatched",
    "common words", "words of the shorter", "length", "shortest", "same opening", "lead", "crowd", "other words",
    "other names", "kind of answer", "tense",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """A question with what is compared of it; kept with its entry."""

    reading: Reading
    content: frozenset[str]
    ids: array[int]


def subject(question: str, vectors: TextVectors) -> Subject:
    reading = read(question)
    ids = array("H", vectors.token_ids(question.lower())[:_MAX_TOKENS])
    return Subject(reading, frozenset(reading.roles), ids)


def log_odds(
    a: Subject,
    b: Subject,
    vectors: TextVectors,
    judge: PairJudge,
    *,
    cosine: float,
    rivals: Sequence[float],
) -> float:
    """Give the log-odds that two questions want the same answer; arguments as of measures()."""
    measured = measures(a, b, vectors, cosine=cosine, rivals=rivals)
    return score.log_odds((*measured, judged(a, b, vectors, judge, measured)))


def judged(a: Subject, b: Subject, vectors: TextVectors, judge: PairJudge, measured: Sequence[float]) -> float:
    """Give what the judge says of a pair."""
    return judge.log_odds(judge.align(_rows(a, vectors)), judge.align(_rows(b, vectors)), measured)


def measures(
    a: Subject, b: Subject, vectors: TextVectors, *, cosine: float, rivals: Sequence[float]
) -> tuple[float, ...]:
    """Measure a pair, in the order of NAMES; rivals are the cosines of the asked question to other near entries."""
    rows_a, length_a = _unit(a, vectors)
    rows_b, length_b = _unit(b, vectors)
    matches = np.einsum("ik,jk->ij", rows_a, rows_b)  # no BLAS, no threads of it
    lack_a, lack_b = 1 - matches.max(axis=1), 1 - matches.max(axis=0)
    loss_a, loss_b = lack_a * length_a, lack_b * length_b
    share_a, share_b = float(loss_a.sum() / length_a.sum()), float(loss_b.sum() / length_b.sum())
    worst_a, worst_b = float(loss_a.max()), float(loss_b.max())
    ra, rb = a.reading, b.reading
    n_common, n_all = len(a.content & b.content), len(a.content | b.content)
    n_a, n_b = len(ra.words), len(rb.words)
    return (
        cosine,
        cosine**3,
        1 - max(share_a, share_b),
        1 - min(share_a, share_b),
        max(worst_a, worst_b),
        min(worst_a, worst_b),
        float(loss_a.sum() + loss_b.sum()),
        n_common / max(n_all, 1),
        n_common / max(min(len(a.content), len(b.content)), 1),
        abs(n_a - n_b) / max(n_a, n_b, 1),
        float(min(n_a, n_b)),
        float(ra.words[:1] == rb.words[:1]),
        cosine - max(rivals, default=0.0),
        sum(rivals) / max(len(rivals), 1),
        float(n_all - n_common),
        float(len(ra.entities ^ rb.entities)),
        float(ra.asks != rb.asks),
        float(ra.tense != rb.tense),
    )


def _unit(one: Subject, vectors: TextVectors) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rows = _rows(one, vectors)
    lengths = np.maximum(np.linalg.norm(rows, axis=1), np.float32(1e-6))
    return rows / lengths[:, None], lengths


def _rows(one: Subject, vectors: TextVectors) -> NDArray[np.float32]:
    return vectors.token_vectors(one.ids) if one.ids else np.ones((1, N_DIMENSIONS), np.float32)
