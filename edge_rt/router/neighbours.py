"""How requests near this one fared: the mean outcome of the most similar labelled ones. Needs numpy.

The products are made by einsum, which calls no BLAS: on a busy machine its threads wait for each other, tens of
milliseconds for a product that takes a twentieth of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_SHARPNESS = 8.0  # how much faster than the cosine a neighbour's say falls
_N_NEAREST = 40
_FEW = 20.0  # neighbours that count as much as the model does
_MIN_SIMILARITY = 0.35  # what is further away says nothing


@dataclass(frozen=True, slots=True)
class Opinion:
    """What the neighbours say of one head: a probability, and how many neighbours' worth of evidence it rests on."""

    probability: float
    evidence: float

    @property
    def share(self) -> float:
        """Give its share beside the model's, 0..1: it grows with the evidence."""
        return self.evidence / (self.evidence + _FEW)

    def mixed_with(self, probability: float) -> float:
        return probability + self.share * (self.probability - probability)


class Neighbours:
    """Labelled requests by their vectors. An outcome that is not known is NaN."""

    def __init__(self, vectors: F32, outcomes: F32) -> None:
        """Keep unit vectors [n, d] and their outcomes [n, 2], for the device's and the cloud's answer."""
        if len(vectors) != len(outcomes) or outcomes.ndim != 2 or outcomes.shape[1] != 2:
            raise ValueError(f"{vectors.shape} vectors and {outcomes.shape} outcomes")
        self._vectors, self._outcomes = vectors, outcomes

    def __len__(self) -> int:
        return len(self._vectors)

    def ask(self, vector: F32) -> tuple[Opinion, Opinion]:
        """Give the opinions on the device's and on the cloud's answer."""
        if not len(self):
            return Opinion(0.5, 0.0), Opinion(0.5, 0.0)
        similarity = np.einsum("ij,j->i", self._vectors, vector)
        local, cloud = (self._opinion(similarity, self._outcomes[:, head]) for head in range(2))
        return local, cloud

    def _opinion(self, similarity: F32, outcomes: F32) -> Opinion:
        known = np.flatnonzero(~np.isnan(outcomes) & (similarity >= _MIN_SIMILARITY))
        if known.size > _N_NEAREST:
            known = known[np.argpartition(similarity[known], -_N_NEAREST)[-_N_NEAREST:]]
        if not known.size:
            return Opinion(0.5, 0.0)
        near = similarity[known]
        say = np.exp(_SHARPNESS * (near - near.max()))
        evidence = float(say.sum() ** 2 / np.square(say).sum()) * float(near.max())  # as many as equal ones would be
        probability = float(say @ outcomes[known] / say.sum())
        return Opinion(min(max(probability, 0.0), 1.0), evidence if math.isfinite(evidence) else 0.0)
