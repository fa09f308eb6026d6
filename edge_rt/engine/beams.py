"""Beam search: the likeliest answers as wholes, instead of the likeliest token each time.

Of all continuations of n beams the n likeliest are kept at each step; one that ends is set aside. An answer's score is
the sum of its tokens' log probabilities over its length to the power of length_penalty, so above 0 longer answers gain,
and below it shorter ones. What counts as done is as in Hugging Face's generate, which gave the parameters their names.

BeamSearch is pure: rows of logits go in, parents and tokens come out. Where the beams' KV lies is the loop's to
arrange, by moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_rt.engine.sampling import Sampler
from edge_rt.engine.text import TextStream
from edge_rt.types import Beams, Capabilities, FinishReason, Hypothesis, Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer that has begun: its tokens, their summed log probability, its last bytes, and its tokens' rivals."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    tail: bytes = b""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ended:
    beam: Beam
    score: float
    reason: FinishReason


@dataclass(slots=True)
class BeamSearch:
    """One request's search.

    max_answer   tokens that an answer may have
    eog_ids      tokens that end one; they count in its length, and are no part of its text
    stop         strings that end one, and are no part of it either
    piece        a token's bytes
    top_logprobs None, or how many rivals each token of the answers is given with
    """

    settings: Beams
    n_vocab: int
    max_answer: int
    eog_ids: frozenset[int]
    stop: tuple[str, ...]
    piece: Callable[..., bytes]
    top_logprobs: int | None = None
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    _ended: list[_Ended] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Its log probabilities alone are used, which no sampling changes.
        self._sampler = Sampler(Sampling(), self.n_vocab, ())
        self._stop_bytes = [text.encode() for text in self.stop]
        self._n_tail = max(map(len, self._stop_bytes), default=1) - 1

    _sampler: Sampler = field(init=False)
    _stop_bytes: list[bytes] = field(init=False)
    _n_tail: int = field(init=False)

    def restart(self) -> None:
        """Begin again at the prompt's end."""
        self.beams, self._ended = [Beam()], []

    def advance(self, rows: Sequence[NDArray[np.float32]]) -> list[int]:
        """Take the logits after each beam, in their order, and choose the next beams.

        returns the parent of each new beam; empty once the search is over. Raises BackendStepError for broken logits.
        """
        n_beams = self.settings.n_beams
        parents: list[int] = []
        chosen: list[Beam] = []
        for rank, (logprob, parent, token_id) in enumerate(self._candidates(rows)):
            beam = self._grown(parent, token_id, logprob, rows[parent])
            if token_id in self.eog_ids or self._stops(beam):
                if rank < n_beams:  # one less likely than those that go on may yet come from them
                    self._end(beam, "stop")
            elif len(chosen) < n_beams:
                parents.append(parent)
                chosen.append(beam)
        self.beams = chosen
        if chosen and len(chosen[0].token_ids) >= self.max_answer:
            for beam in chosen:
                self._end(beam, "length")
            self.beams = []
        if self._is_done():
            self.beams = []
        return parents if self.beams else []

    def best(self) -> tuple[Hypothesis, ...]:
        """Give the answers of a search that is over, the best first."""
        return tuple(self._hypothesis(ended) for ended in self._ended[: self.settings.n_best])

    def _candidates(self, rows: Sequence[NDArray[np.float32]]) -> list[tuple[float, int, int]]:
        """Give the likeliest continuations of all beams, twice as many as there are to be: half of them may be ends."""
        n = 2 * self.settings.n_beams
        found: list[tuple[float, int, int]] = []
        for parent, (beam, logits) in enumerate(zip(self.beams, rows, strict=True)):
            _, top = self._sampler.logprobs(logits, 0, min(n, self.n_vocab))
            found += ((beam.logprob + logprob, parent, token_id) for token_id, logprob in top)
        return sorted(found, key=lambda candidate: (-candidate[0], *candidate[1:]))[:n]

    def _grown(self, parent: int, token_id: int, logprob: float, logits: NDArray[np.float32]) -> Beam:
        beam = self.beams[parent]
        is_end = token_id in self.eog_ids
        tail = b""
        if self._stop_bytes and not is_end:
            piece = self.piece(token_id)
            tail = (beam.tail + piece)[-self._n_tail - len(piece) :]
        logprobs = beam.logprobs
        if self.top_logprobs is not None and not is_end:
            own, top = self._sampler.logprobs(logits, token_id, self.top_logprobs)
            rivals = tuple((i, self.piece(i, special=True), value) for i, value in top)
            raw = self.piece(token_id, special=True)
            logprobs = (*logprobs, TokenLogprob(token_id=token_id, raw=raw, logprob=own, top=rivals))
        return Beam((*beam.token_ids, token_id), logprob, tail, logprobs)

    def _stops(self, beam: Beam) -> bool:
        return any(text in beam.tail for text in self._stop_bytes)

    def _score(self, logprob: float, n_tokens: int) -> float:
        return logprob / float(n_tokens**self.settings.length_penalty)

    def _end(self, beam: Beam, reason: FinishReason) -> None:
        self._ended.append(_Ended(beam, self._score(beam.logprob, len(beam.token_ids)), reason))
        self._ended.sort(key=lambda ended: -ended.score)  # stable: of equal ones the first that ended
        del self._ended[self.settings.n_beams :]

    def _is_done(self) -> bool:
        if not self.beams:
            return True
        if len(self._ended) < self.settings.n_beams:
            return False
        early = self.settings.early_stopping
        if early == "first":
            return True
        n_tokens = len(self.beams[0].token_ids)
        if early == "never" and self.settings.length_penalty > 0.0:
            n_tokens = self.max_answer  # the length at which a beam's score would be highest
        return self._ended[-1].score >= self._score(self.beams[0].logprob, n_tokens)

    def _hypothesis(self, ended: _Ended) -> Hypothesis:
        beam = ended.beam
        stream = TextStream(self.piece, self.stop)
        is_end = beam.token_ids[-1] in self.eog_ids
        shown = beam.token_ids[:-1] if is_end else beam.token_ids
        text = "".join([*(stream.push(token_id) for token_id in shown), stream.flush()])
        return Hypothesis(
            text=text,
            token_ids=shown,
            n_tokens=len(beam.token_ids),
            logprob=beam.logprob,
            score=ended.score,
            finish_reason=ended.reason,
            logprobs=beam.logprobs,
        )


def max_answer(caps: Capabilities, *, n_beams: int, n_prompt: int, max_tokens: int | None) -> int:
    """Give how long the answers of a search may get, that all beams fit into the cells at once; 0 or less if none do.

    Where copies share their cells the prompt counts once, and each beam has blocks of its own from there on.
    """
    block, n_shared = caps.n_cell_block, 0
    if caps.copies_share:
        n_shared = min(n_prompt, caps.n_ctx) // block * block  # a block that the prompt fills in part is copied
    n_own = (caps.n_cells(caps.n_ctx) - n_shared) // n_beams // block * block
    room = n_shared + n_own - n_prompt
    room = min(room, caps.n_ctx - n_prompt)
    return room if max_tokens is None else min(room, max_tokens)


def moves(parents: Sequence[int], n_places: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Find a place for each new beam: its parent's, for the first child of each, or one that nobody needs.

    returns the place of each new beam, and (from, to) of the copies, all of which may be made before any step
    """
    free = [place for place in range(n_places) if place not in parents]
    taken: set[int] = set()
    places: list[int] = []
    copies: list[tuple[int, int]] = []
    for parent in parents:
        if parent not in taken:
            taken.add(parent)
            places.append(parent)
        else:
            place = free.pop(0)
            places.append(place)
            copies.append((parent, place))
    return places, copies
