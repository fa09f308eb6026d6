"""How likely the device's answer to a request is good enough, and the cloud's, by the request's text. Needs numpy.

    scorer = Scorer.load(None)
    score = scorer.score("Prove that there is no largest prime.")
    score.gain  # what the cloud would add

Three judges look at a text: one at surface features and its static embedding, one at its words, one at what kind of
request it is. Their log-odds are averaged and calibrated to two probabilities. What the cloud adds is their difference,
a small number beside two uncertain ones: what it missed in training is predicted from the judges' votes, and the
probabilities are moved apart or together by that. Then they are mixed with what is known of similar requests here.
What is large enough for BLAS to use threads is multiplied by einsum, as in neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.router import features
from edge_rt.router.neighbours import Neighbours
from edge_rt.router.weights import N_KIND_BINS, N_SURFACE, N_VOTES, Weights, load

SHIPPED = Path(__file__).parent / "scorer.weights"
VECTOR_SCALE = 16.0  # gives a vector's elements about the spread of a standardised feature
MAX_Z = 4.0  # no surface feature counts for more deviations
MIN_ODDS = 1e-4

F32 = NDArray[np.float32]


class Embedder(Protocol):
    """What edge_rt.text_vectors.TextVectors does."""

    def embed(self, texts: Sequence[str]) -> F32: ...


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A request without its text: what a label is stored with.

    surface   standardised, [N_SURFACE]
    vector    unit vector of the text, [256]
    log_odds  of the shipped judges for the device and the cloud
    """

    surface: F32
    vector: F32
    log_odds: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """p_local and p_cloud: probability that the device's and the cloud's answer are good enough; reasons for people."""

    p_local: float
    p_cloud: float
    reasons: tuple[str, ...]
    sketch: Sketch

    @property
    def gain(self) -> float:
        """What the cloud would add, -1..1: requests with the highest gain go first."""
        return self.p_cloud - self.p_local


class Correction(Protocol):
    """What was learnt on this device, as learning.Learnt does it."""

    def correct(self, sketch: Sketch) -> tuple[float, float] | None:
        """Give p_local and p_cloud instead of the calibrated ones; None if too little is known."""
        ...

    @property
    def neighbours(self) -> Neighbours | None: ...


class Scorer:
    """Scores requests. Threads may share it; what it has learnt is swapped in one assignment."""

    def __init__(self, weights: Weights, embedder: Embedder, learnt: Correction | None = None) -> None:
        self.weights = weights
        self._embedder = embedder
        self.learnt = learnt

    @classmethod
    def load(cls, path: Path | None = None, *, embedder: Embedder | None = None) -> Scorer:
        """Read weights, the shipped ones if path is None.

        Raises ModelFormatError for a file that is not sound, OSError where there is none, BackendUnavailableError
        without edge_rt[vectors].
        """
        if embedder is None:
            from edge_rt.text_vectors import TextVectors  # tests and tools pass one of their own

            embedder = TextVectors.load()
        return cls(load(path or SHIPPED), embedder)

    def score(self, text: str, *, n_turns: int = 1, max_tokens: int | None = None) -> Score:
        """Score the last user message of a conversation of n_turns messages."""
        weights = self.weights
        surface = features.surface(text, n_turns=n_turns, max_tokens=max_tokens)
        standard = standardise(np.array([surface], np.float32), weights)[0]
        vector = self._embedder.embed([text])[0]
        dense = np.concatenate([standard, vector * VECTOR_SCALE, _ONE])
        bins, values = self._terms(features.hashed_terms(text))
        votes = {"dense": weights.dense @ dense, "terms": weights.terms[:, bins].astype(np.float32) @ values}
        votes["terms"] = votes["terms"] * weights.term_scale + weights.term_bias
        kind = ""
        shares = np.zeros(0, np.float32)
        if weights.topic_names:
            said = weights.topic_terms[bins % N_KIND_BINS].astype(np.float32)
            by_terms = np.einsum("i,ij->j", values, said) * weights.topic_scale
            shares = softmax(np.einsum("ij,j->i", weights.topics.astype(np.float32), dense) + by_terms)
            votes["topics"] = log_odds(weights.topic_odds @ shares)
            best = int(shares.argmax())
            kind = f"looks like {weights.topic_names[best]} ({shares[best]:.0%})"
        joined = sum(weights.blend[i] * votes[name] for i, name in enumerate(_JUDGES) if name in votes)
        sketch = Sketch(standard, vector, (float(joined[0]), float(joined[1])))
        everything = np.stack([votes.get(name, _ZEROS) for name in _JUDGES])[:, None]
        gain = float((gain_inputs(everything, shares[None]) @ weights.gain)[0])
        p_local, p_cloud = moved_by(
            gain, *(map_(z) for map_, z in zip(weights.calibration, sketch.log_odds, strict=True))
        )
        if (corrected := self._corrected(sketch)) is not None:
            p_local, p_cloud = corrected
        reasons = (kind, *self._strongest(standard)) if kind else self._strongest(standard)
        if (learnt := self.learnt) is not None and learnt.neighbours is not None:
            local, cloud = learnt.neighbours.ask(vector)
            p_local, p_cloud = local.mixed_with(p_local), cloud.mixed_with(p_cloud)
            if local.share >= 0.2:
                reasons = (f"similar ones here: {local.probability:.0%} good on the device", *reasons)
        return Score(p_local, p_cloud, reasons, sketch)

    def _corrected(self, sketch: Sketch) -> tuple[float, float] | None:
        return None if self.learnt is None else self.learnt.correct(sketch)

    def _terms(self, counts: Mapping[int, int]) -> tuple[NDArray[np.int64], F32]:
        """Give the terms' bins and their shares, weighed by rarity, of length 1."""
        bins = np.fromiter(counts, np.int64, len(counts))
        values = (1 + np.log(np.fromiter(counts.values(), np.float32, len(counts)))) * self.weights.rarity[bins]
        return bins, (values / max(math.sqrt(float(values @ values)), 1e-9)).astype(np.float32)

    def _strongest(self, standard: F32) -> tuple[str, ...]:
        """Name the two surface features that say most about the cloud's gain."""
        push = (self.weights.dense[1] - self.weights.dense[0])[:N_SURFACE] * standard
        order = np.argsort(-np.abs(push))[:2]
        return tuple(f"{features.NAMES[i]} {'for the cloud' if push[i] > 0 else 'for the device'}" for i in order)


_JUDGES = ("dense", "terms", "topics")
_ONE = np.ones(1, np.float32)
_ZEROS = np.zeros(2, np.float32)


def gain_inputs(votes: NDArray[Any], shares: NDArray[Any]) -> NDArray[Any]:
    """Give what the gain is predicted from, [n, N_VOTES + n_topics + 1]; votes [3, n, 2], shares [n, n_topics]."""
    flat = votes.transpose(1, 0, 2).reshape(votes.shape[1], N_VOTES // 2)
    return np.concatenate([1 / (1 + np.exp(-flat)), flat, shares, np.ones((len(flat), 1), flat.dtype)], axis=1)


def moved_by(gain: float, p_local: float, p_cloud: float) -> tuple[float, float]:
    """Move two probabilities apart by gain, or together where it is negative, by the same amount if they stay ones."""
    gain = min(max(p_cloud - p_local + gain, -1.0), 1.0)
    middle = min(max((p_local + p_cloud) / 2, abs(gain) / 2), 1 - abs(gain) / 2)
    return middle - gain / 2, middle + gain / 2


def standardise(surface: F32, weights: Weights) -> F32:
    """Bring surface features [n, N_SURFACE] to the training rows' mean and deviation."""
    standard: F32 = np.clip((surface - weights.mean) / weights.deviation, -MAX_Z, MAX_Z)
    return standard


def softmax(x: F32) -> F32:
    """Over the last axis."""
    exps = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: F32 = exps / exps.sum(axis=-1, keepdims=True)
    return shares


def log_odds(p: F32) -> F32:
    kept = np.clip(p, MIN_ODDS, 1 - MIN_ODDS)
    odds: F32 = np.log(kept / (1 - kept))
    return odds
