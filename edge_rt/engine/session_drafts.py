"""A small model in a session of its own that drafts for a larger one of the same vocabulary.

Its KV follows the sequences by comparison: what it holds for a slot is kept as far as the sequence begins so now, and
the rest is computed when guesses are wanted. So nobody has to tell it of what was trimmed, copied or put back.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import NoCellsError, SeqRows, TokenSession
from edge_rt.engine.draft_model import Ask, Draft
from edge_rt.engine.prefix import MIN_SHARED_TOKENS, common_prefix

_MAX_TOGETHER = 8  # sequences that are drafted for in one go, which a first round's rows must fit
_MAX_FEW_ROWS = 16
_N_TRIED = 32  # of the likeliest tokens, where a form forbids the first


@dataclass(slots=True)
class _Held:
    """The tokens of a sequence that are in the KV, from position `start` of the sequence on."""

    start: int = 0
    token_ids: list[int] = field(default_factory=list)
    owner: str = ""
    used: int = 0


class SessionDrafts:
    """A DraftModel on a session of its own, with a slot for each of the checking model's.

    A sequence that outgrows the draft's context is gone on with from the middle of what fits.

    n_bytes  of its weights and KV
    """

    def __init__(self, session: TokenSession, *, name: str, max_draft: int, n_bytes: int = 0) -> None:
        caps = session.caps
        self._session = session
        self.name = name
        self.max_draft = min(max_draft, caps.n_ctx // 4)
        self.n_bytes = n_bytes
        self._n_few = max(2, min(_MAX_FEW_ROWS, caps.n_batch // _MAX_TOGETHER))
        self._held: dict[int, _Held] = {}
        self._now = 0

    def n_missing(self, ask: Ask) -> int | None:
        if not 0 <= ask.seq_id < self._session.caps.n_seq_max or not self._session.caps.can_trim:
            return None
        held = self._follow(ask)
        return max(0, len(ask.token_ids) - held.start - len(held.token_ids) - self._n_few)

    def compute(self, ask: Ask, n_rows: int) -> int:
        held = self._follow(ask)
        # With the few that propose would compute, or it would lack one again after the next step.
        n_rows = min(n_rows + self._n_few, self._session.caps.n_batch)
        at = held.start + len(held.token_ids)
        token_ids = list(ask.token_ids[at : min(at + n_rows, len(ask.token_ids) - 1)])
        if not token_ids or not self._make_room({ask.seq_id: len(token_ids)}):
            return 0
        return 0 if self._decode({ask.seq_id: token_ids}, want_logits=False) is None else len(token_ids)

    def propose(self, asks: ListOf[Ask]) -> list[Draft]:
        self._now += 1
        drafts = [Draft([], []) for _ in asks]
        rows: dict[int, list[int]] = {}
        places = {ask.seq_id: place for place, ask in enumerate(asks)}
        for ask in asks:
            held = self._follow(ask)
            rows[ask.seq_id] = list(ask.token_ids[held.start + len(held.token_ids) :])
        while rows and not self._make_room({i: len(rows[i]) + asks[places[i]].n_max for i in rows}):
            seq_id = next(reversed(rows))  # the others' guesses are worth more than everybody's without room
            del rows[seq_id]
            self._drop(seq_id)
        while rows:
            further: dict[int, list[int]] = {}
            outputs = self._decode(rows, want_logits=True)
            if outputs is None:
                break
            for seq_id, logits in zip(rows, outputs, strict=True):
                ask, draft = asks[places[seq_id]], drafts[places[seq_id]]
                token_id, chance = _likeliest(logits, ask, draft.token_ids)
                if token_id is None or chance < ask.min_chance:
                    continue
                draft.token_ids.append(token_id)
                draft.chances.append(chance)
                if len(draft.token_ids) < ask.n_max and token_id not in self._session.vocab.eog_ids:
                    further[seq_id] = [token_id]
            rows = further
        return drafts

    def forget(self, seq_id: int) -> None:
        # Where attention reads the cells of others too, what nobody needs now makes each guess dearer.
        if not self._session.caps.reads_own_cells:
            self._drop(seq_id)

    def set_threads(self, n_threads: int) -> None:
        self._session.set_threads(n_threads)

    def close(self) -> None:
        self._session.close()

    def _follow(self, ask: Ask) -> _Held:
        """Keep of a slot's KV what the sequence begins with, at most all but its last token."""
        held, n_max, n_ctx = self._held.get(ask.seq_id), len(ask.token_ids) - 1, self._session.caps.n_ctx
        if held is not None and held.owner == ask.owner and n_max + 1 - held.start + ask.n_max <= n_ctx:
            n = min(len(held.token_ids), n_max - held.start)
            n_same = common_prefix(held.token_ids[:n], ask.token_ids[held.start : held.start + n])
            if n_same or held.start == 0:
                if n_same < len(held.token_ids):
                    self._session.seq_trim(ask.seq_id, n_same)
                    del held.token_ids[n_same:]
                self._copy_longer(ask, held)
                held.used = self._now
                return held
        self._drop(ask.seq_id)
        start = 0 if n_max + 1 + ask.n_max <= n_ctx else n_max + 1 - n_ctx // 2
        held = self._held[ask.seq_id] = _Held(start, [], ask.owner, self._now)
        self._copy_longer(ask, held)
        return held

    def _copy_longer(self, ask: Ask, held: _Held) -> None:
        """Begin with what another slot holds of the same beginning, if that is much more."""
        caps = self._session.caps
        if held.start or not caps.can_copy or len(ask.token_ids) - len(held.token_ids) <= MIN_SHARED_TOKENS:
            return
        best, n_best = None, len(held.token_ids) + MIN_SHARED_TOKENS
        for seq_id, other in self._held.items():
            if other is not held and other.start == 0 and other.owner == ask.owner and len(other.token_ids) > n_best:
                n_same = min(common_prefix(other.token_ids, ask.token_ids), len(ask.token_ids) - 1)
                if n_same > n_best:
                    best, n_best = seq_id, n_same
        if best is None or (not caps.copies_share and self._n_cells() + n_best > caps.n_ctx):
            return
        self._session.seq_trim(ask.seq_id, 0)
        held.token_ids.clear()
        self._session.seq_copy(best, ask.seq_id, n_best)
        held.token_ids += self._held[best].token_ids[:n_best]

    def _decode(self, rows: dict[int, list[int]], *, want_logits: bool) -> list[NDArray[np.float32]] | None:
        """Compute rows of several sequences; None where the cells do not suffice after all: then nothing is held."""
        batch = [SeqRows(i, len(self._held[i].token_ids), ids, want_logits=want_logits) for i, ids in rows.items()]
        try:
            logits = self._session.decode(batch)
        except NoCellsError:
            for seq_id in list(self._held):
                self._drop(seq_id)
            return None
        for seq_id, token_ids in rows.items():
            self._held[seq_id].token_ids += token_ids
        return logits

    def _n_cells(self, more: Iterable[tuple[int, int]] = ()) -> int:
        n_more, n_cells = dict(more), self._session.caps.n_cells
        return sum(n_cells(len(held.token_ids) + n_more.get(i, 0)) for i, held in self._held.items())

    def _make_room(self, wanted: dict[int, int]) -> bool:
        """Drop what was longest not used, until so many more tokens have room; never what is in use."""
        caps = self._session.caps
        while self._n_cells(wanted.items()) > caps.n_ctx:
            idle = [i for i, held in self._held.items() if i not in wanted and held.used < self._now - 1]
            if not idle:
                return False
            self._drop(min(idle, key=lambda i: self._held[i].used))
        return True

    def _drop(self, seq_id: int) -> None:
        if self._held.pop(seq_id, None) is not None:
            self._session.seq_trim(seq_id, 0)


def _likeliest(logits: NDArray[np.float32], ask: Ask, before: list[int]) -> tuple[int | None, float]:
    """Choose the likeliest token that may come next, and give its probability; None if there is none."""
    if ask.bias:
        logits = logits.copy()
        for token_id, bias in ask.bias.items():
            logits[token_id] += bias
    best = int(logits.argmax())
    peak = logits[best]
    if not np.isfinite(peak):
        return None, 0.0
    if ask.n_allowed is None or ask.n_allowed([*before, best]) > len(before):
        return best, 1.0 / float(np.exp(logits - peak).sum())
    top = np.argpartition(logits, -_N_TRIED)[-_N_TRIED:] if len(logits) > _N_TRIED else np.arange(len(logits))
    fitting = [int(i) for i in top if ask.n_allowed([*before, int(i)]) > len(before)]
    if not fitting:
        return None, 0.0
    values = logits[fitting]
    return fitting[int(values.argmax())], 1.0 / float(np.exp(values - values.max()).sum())
