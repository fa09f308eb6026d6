"""How far one engine's logits are from another's on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Divergence:
    """What windows of text added up to; the reference is what the other engine is measured against.

    kl  the Kullback-Leibler divergence of each token's distribution from the reference's, in nats
    """

    kl: list[float] = field(default_factory=list)
    n_same_choice: int = 0
    n_scored: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0

    def add(self, token_ids: Sequence[int], reference: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        """Take a window: the logits after each of its tokens, from both engines."""
        p, q = _log_softmax(reference), _log_softmax(logits)
        self.kl.extend((np.exp(p) * (p - q)).sum(axis=-1).tolist())
        self.n_same_choice += int((p.argmax(axis=-1) == q.argmax(axis=-1)).sum())
        rows, following = np.arange(len(token_ids) - 1), np.asarray(token_ids[1:])
        self.n_scored += len(following)
        self.nll -= float(q[rows, following].sum())
        self.reference_nll -= float(p[rows, following].sum())

    def __iadd__(self, other: Divergence) -> Divergence:
        self.kl += other.kl
        self.n_same_choice += other.n_same_choice
        self.n_scored += other.n_scored
        self.nll += other.nll
        self.reference_nll += other.reference_nll
        return self

    @property
    def mean_kl(self) -> float:
        return float(np.mean(self.kl))

    @property
    def same_choice(self) -> float:
        """The share of tokens after which both would choose the same next token greedily."""
        return self.n_same_choice / len(self.kl)

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / self.n_scored))

    @property
    def reference_perplexity(self) -> float:
        return float(np.exp(self.reference_nll / self.n_scored))

    @property
    def perplexity_change(self) -> float:
        """The perplexity's distance from the reference's, as a share of that."""
        return abs(self.perplexity / self.reference_perplexity - 1)


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    x = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))
