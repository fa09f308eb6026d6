"""The semantic tier: a question that means what an earlier one meant gets its answer, within a declared error.

A partition is everything of a request but its last user message (key.py) and is never crossed. Inside it the nearest
questions are looked up, the lexical guard and the refused classes take out what vectors do not see, and the controller
decides. Answers stay in the exact store; here is only where their questions lie, in memory, rebuilt from the stored
questions at start. Loads numpy; single-threaded.

The caller's part: serve `hit`; for every other outcome compute, compare the matches' stored answers with the computed
one and tell verified() of each; then admit() the new answer. A match whose stored answer is gone: forget().
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_rt.cache import similarity
from edge_rt.cache.agreement import is_same_answer
from edge_rt.cache.judge import PairJudge
from edge_rt.cache.lexical import differs
from edge_rt.cache.refusal import has_own_numbers, refusal
from edge_rt.cache.similarity import Subject
from edge_rt.cache.threshold import ErrorController, Evidence, reading_state, sigmoid
from edge_rt.cache.vector_index import VectorIndex
from edge_rt.text_vectors import N_DIMENSIONS, TextVectors

Mode = Literal["off", "shadow", "on"]
Outcome = Literal["hit", "verify", "shadow", "miss"]

MIN_SIMILARITY = 0.6  # cosine below which nothing is looked at more closely
N_NEAREST = 3  # candidates compared word by word
_N_TOMBSTONES = 16  # questions an entry remembers as not its own
_N_KNOWN = 16  # other entries whose answers an entry's was compared with
_N_ASKED = 64  # questions whose vectors wait for their answers


@dataclass(frozen=True, slots=True)
class Match:
    """The stored question that comes nearest, and what was known when it was found."""

    answer_ref: bytes
    similarity: float
    p_right: float
    evidence: Evidence
    was_hit: bool
    chance: float
    is_best: bool
    asked: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Lookup:
    """outcome; matches, the likeliest first, whose answers are worth comparing with; reason why it is no hit.

    hit     serve match.answer_ref
    verify  a would-be hit: compute and compare instead
    shadow  would have been a hit; the mode forbids it
    miss    compute
    """

    outcome: Outcome
    matches: tuple[Match, ...] = ()
    reason: str = ""

    @property
    def match(self) -> Match | None:
        return self.matches[0] if self.matches else None


@dataclass(slots=True)
class _Entry:
    subject: Subject
    number: int
    wrong: float | None = None
    right: float | None = None
    n_wrong: int = 0
    n_right: int = 0
    n_served: int = 0
    is_vetoed: bool = False
    tombstones: list[bytes] = field(default_factory=list)
    known: dict[int, bool] = field(default_factory=dict)  # by other entries' numbers: have they the same answer?

    def knows(self, other: _Entry) -> bool | None:
        """Tell whether another entry's answer is the same; None where they were never compared."""
        return self.known.get(other.number, other.known.get(self.number))

    def mark(self, score: float, is_right: bool) -> None:
        self.n_served = 0
        if is_right:
            self.n_right += 1
            self.right = score if self.right is None else min(self.right, score)
        else:
            self.n_wrong += 1
            self.wrong = score if self.wrong is None else max(self.wrong, score)


@dataclass(slots=True)
class _Asked:
    vector: NDArray[np.float32]
    subject: Subject
    digest: bytes
    entry: _Entry  # what it becomes if its answer is admitted


class SemanticTier:
    """Questions by meaning. draw gives numbers in 0..1 that choose what is verified."""

    def __init__(
        self,
        vectors: TextVectors,
        controller: ErrorController,
        *,
        mode: Mode,
        max_entries: int,
        draw: Callable[[], float],
        judge: PairJudge | None = None,
    ) -> None:
        self.mode = mode
        self.controller = controller
        self._vectors = vectors
        self._draw = draw
        self._pairs = judge or PairJudge.load()
        self._numbers = count()
        self._index: VectorIndex[bytes] = VectorIndex(max_entries, N_DIMENSIONS)
        self._entries: dict[bytes, _Entry] = {}
        self._asked: OrderedDict[bytes, _Asked] = OrderedDict()
        self._n: dict[str, int] = dict.fromkeys(("hit", "verify", "shadow", "miss", "right", "wrong"), 0)

    def lookup(self, partition: bytes, question: str) -> Lookup:
        """Find a stored answer for a question. Every request that could have had one passes here once."""
        if self.mode == "off":
            return Lookup("miss", reason="off")
        if refused := refusal(question):
            found = Lookup("miss", reason=refused)
            self.controller.judge(None, 1.0)
        else:
            found = self._judge(partition, self._ask(partition, question))
        self._n[found.outcome] += 1
        return found

    def admit(self, partition: bytes, question: str, answer_ref: bytes, answer: str) -> bool:
        """Make an answer findable by its question's meaning; False for one that only fits its own question.

        A question admitted again keeps what was verified of it.
        """
        if self.mode == "off" or refusal(question) or has_own_numbers(answer, [question]):
            return False
        asked = self._ask(partition, question)
        del self._asked[asked.digest]
        for gone in self._index.add(partition, answer_ref, asked.vector):
            del self._entries[gone]
        self._entries.setdefault(answer_ref, asked.entry)
        return True

    def verified(self, match: Match, is_right: bool) -> None:
        """Take in that a match's answer was compared with a computed one.

        One wrong would-be hit and the entry serves nobody but those who ask its very words; from two right ones on it
        is verified half as often. A near miss found right makes the entry more trusted, one found wrong less.
        """
        self._n["right" if is_right else "wrong"] += 1
        if match.is_best:
            self.controller.learn(match.evidence, is_right, chance=match.chance)
        asked = self._asked.get(match.asked)
        if asked is not None:
            asked.entry.mark(match.evidence.score, is_right)
        if (entry := self._entries.get(match.answer_ref)) is None:
            return
        if asked is not None and len(asked.entry.known) < _N_KNOWN:
            asked.entry.known[entry.number] = is_right
        entry.mark(match.evidence.score, is_right)
        if not is_right:
            entry.tombstones = [*entry.tombstones[1 - _N_TOMBSTONES :], match.asked]
            entry.is_vetoed = entry.is_vetoed or match.was_hit

    def same_answer(self, one: str, other: str) -> bool:
        """Tell whether two answers say the same, as agreement.py means it."""
        return is_same_answer(one, other, self._cosine)

    def corrected(self, answer_ref: bytes) -> None:
        """An entry's answer was replaced: what was verified of the old one says nothing now."""
        if answer_ref in self._entries:
            self._entries[answer_ref] = _Entry(self._entries[answer_ref].subject, next(self._numbers))

    def forget(self, answer_ref: bytes) -> None:
        """An answer is gone from the store."""
        if self._index.remove(answer_ref):
            del self._entries[answer_ref]

    def clear(self) -> None:
        """Forget all questions; what the controller learned stays."""
        self._index.clear()
        self._entries.clear()
        self._asked.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def stats(self) -> dict[str, float]:
        """Counts of outcomes and comparisons, entries and vetoed ones, bytes of vectors, and the controller's state."""
        return {
            **self._n,
            "entries": len(self._entries),
            "vetoed": sum(entry.is_vetoed for entry in self._entries.values()),
            "bytes": self._index.n_bytes,
            "threshold": self.controller.threshold,
            "bias": self.controller.bias,
        }

    def state(self) -> dict[str, Any]:
        """What must outlive a restart beside the questions themselves, as plain JSON: verified entries, controller."""
        names = {entry.number: ref.hex() for ref, entry in self._entries.items()}
        verified = {
            ref.hex(): [
                *(e.wrong, e.right, e.n_wrong, e.n_right, e.is_vetoed, [t.hex() for t in e.tombstones]),
                {names[number]: is_same for number, is_same in e.known.items() if number in names},
            ]
            for ref, e in self._entries.items()
            if e.n_right or e.n_wrong
        }
        return {"controller": self.controller.state(), "verified": verified}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a state() after the questions were admitted again; entries that are gone are left out.

        Raises CacheStoreError where it is no such state.
        """
        restored: dict[bytes, _Entry] = {}
        with reading_state():
            for name, (wrong, right, n_wrong, n_right, is_vetoed, tombstones, known) in state["verified"].items():
                if (entry := self._entries.get(ref := bytes.fromhex(name))) is not None:
                    others = [(self._entries.get(bytes.fromhex(other)), same) for other, same in known.items()]
                    restored[ref] = _Entry(
                        entry.subject,
                        entry.number,
                        wrong=None if wrong is None else float(wrong),
                        right=None if right is None else float(right),
                        n_wrong=int(n_wrong),
                        n_right=int(n_right),
                        is_vetoed=bool(is_vetoed),
                        tombstones=[bytes.fromhex(digest) for digest in tombstones][-_N_TOMBSTONES:],
                        known={other.number: bool(same) for other, same in others[:_N_KNOWN] if other is not None},
                    )
            controller = state["controller"]
        self.controller.restore(controller)
        self._entries.update(restored)

    def _judge(self, partition: bytes, asked: _Asked) -> Lookup:
        candidates, reason = self._candidates(partition, asked)
        if not candidates:
            self.controller.judge(None, 1.0)
            return Lookup("miss", reason=reason)
        judgement = self.controller.judge(candidates[0][2], self._draw(), may_serve=self.mode == "on")
        outcome: Outcome = judgement.decision
        if self.mode == "shadow" and outcome != "miss":
            outcome = "shadow"
        matches = tuple(
            Match(
                answer_ref=ref,
                similarity=min(max(cosine, 0.0), 1.0),
                p_right=self.controller.probability(evidence),
                evidence=evidence,
                was_hit=at == 0 and outcome in {"verify", "shadow"},
                chance=judgement.chance,
                is_best=at == 0,
                asked=asked.digest,
            )
            for at, (ref, cosine, evidence) in enumerate(candidates)
        )
        if outcome == "hit":
            self._index.touch(matches[0].answer_ref)
            self._entries[matches[0].answer_ref].n_served += 1
        return Lookup(outcome, matches, "below the threshold" if outcome == "miss" else "")

    def _candidates(self, partition: bytes, asked: _Asked) -> tuple[list[tuple[bytes, float, Evidence]], str]:
        """Give the nearest entries that nothing speaks against, the likeliest first, or why there is none."""
        near = self._index.nearest(partition, asked.vector, N_NEAREST)
        scores: dict[bytes, float] = {}
        reason = "nothing near"
        for at, (ref, cosine) in enumerate(near):
            if cosine < MIN_SIMILARITY:
                break
            entry = self._entries[ref]
            if entry.is_vetoed or asked.digest in entry.tombstones:
                reason = "vetoed"
            elif difference := differs(asked.subject.reading, entry.subject.reading):
                reason = difference
            else:
                scores[ref] = similarity.log_odds(
                    asked.subject,
                    entry.subject,
                    self._vectors,
                    self._pairs,
                    cosine=cosine,
                    rivals=[other for i, (_, other) in enumerate(near) if i != at],
                )
        found = [(ref, cosine, self._evidence(ref, scores)) for ref, cosine in near if ref in scores]
        found.sort(key=lambda candidate: -self.controller.probability(candidate[2]))
        return found, reason

    def _evidence(self, ref: bytes, scores: Mapping[bytes, float]) -> Evidence:
        """Gather what is known of a match, and what the other matches say of it: some were compared with it."""
        entry = self._entries[ref]
        support = against = 0.0
        for other, score in scores.items():
            is_same = entry.knows(self._entries[other]) if other != ref else None
            if is_same:
                support = max(support, sigmoid(score))
            elif is_same is not None:
                against = max(against, sigmoid(score))
        return Evidence(
            scores[ref], entry.wrong, entry.right, entry.n_wrong, entry.n_right, entry.n_served, support, against
        )

    def _ask(self, partition: bytes, question: str) -> _Asked:
        """Take a question apart; the last few are kept until their answers come."""
        digest = blake2b(partition + question.encode(errors="replace"), digest_size=8).digest()
        asked = self._asked.get(digest)
        if asked is None:
            subject = similarity.subject(question, self._vectors)
            vector = self._vectors.embed([question])[0]
            asked = self._asked[digest] = _Asked(vector, subject, digest, _Entry(subject, next(self._numbers)))
            if len(self._asked) > _N_ASKED:
                self._asked.popitem(last=False)
        return asked

    def _cosine(self, one: str, other: str) -> float:
        a, b = self._vectors.embed([one, other])
        return float(a @ b)
