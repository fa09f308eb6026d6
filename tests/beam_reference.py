"""Beam search as one would write it down: whole contexts, no kept state, double precision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edge_rt.types import Beams

Logits = Callable[[Sequence[int]], NDArray[np.float32]]


@dataclass(frozen=True)
class Found:
    token_ids: tuple[int, ...]  # with the one that ended it
    logprob: float
    score: float
    reason: str


def random_logits(n_vocab: int, seed: int) -> Logits:
    """A model whose logits are drawn anew for each context, always alike for the same one."""

    def logits(context: Sequence[int]) -> NDArray[np.float32]:
        digest = hashlib.blake2b(np.asarray([seed, *context], dtype=np.int64).tobytes(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "little"))
        return (2.0 * rng.standard_normal(n_vocab)).astype(np.float32)

    return logits


class NearTie(Exception):
    """Two numbers that are compared differ by less than single precision tells apart."""


def _refuse_ties(values: Sequence[float]) -> None:
    if any(abs(a - b) < 1e-5 for a, b in pairwise(values)):
        raise NearTie


def search(
    logits: Logits, prompt: Sequence[int], beams: Beams, *, max_answer: int, eog_ids: frozenset[int]
) -> list[Found]:
    """Find the answers, best first. Raises NearTie where rounding may decide what they are."""
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[Found] = []
    for length in range(1, max_answer + 1):
        grown = []
        for token_ids, logprob in running:
            row = logits([*prompt, *token_ids]).astype(np.float64)
            log_total = np.log(np.exp(row - row.max()).sum()) + row.max()
            grown += [((*token_ids, i), logprob + float(value - log_total)) for i, value in enumerate(row)]
        grown.sort(key=lambda beam: -beam[1])
        running = []
        _refuse_ties([logprob for _, logprob in grown[: 2 * beams.n_beams + 1]])
        for rank, (token_ids, logprob) in enumerate(grown[: 2 * beams.n_beams]):
            if token_ids[-1] in eog_ids:
                if rank < beams.n_beams:
                    ended.append(Found(token_ids, logprob, logprob / length**beams.length_penalty, "stop"))
            elif len(running) < beams.n_beams:
                running.append((token_ids, logprob))
        if length == max_answer:
            ended += [Found(t, lp, lp / length**beams.length_penalty, "length") for t, lp in running]
            running = []
        ended = sorted(ended, key=lambda found: -found.score)
        _refuse_ties([found.score for found in ended[: beams.n_beams + 1]])
        del ended[beams.n_beams :]
        if not running:
            break
        if len(ended) == beams.n_beams:
            never = beams.early_stopping == "never" and beams.length_penalty > 0
            best = running[0][1] / (max_answer if never else length) ** beams.length_penalty
            _refuse_ties([ended[-1].score, best])
            if beams.early_stopping == "first" or ended[-1].score >= best:
                break
    return ended[: beams.n_best]
