"""The KV slots of one session: given to sequences, kept for prompts that begin the same, saved out of others' way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from edge_rt.backends.base import TokenSession
from edge_rt.engine.prefix import Saved, Shelf, Slot, choose
from edge_rt.errors import BackendStepError

_log = logging.getLogger(__name__)

_MIN_SAVED_TOKENS = 32  # fewer are computed again in less time than a user notices


class Slots:
    """One slot per back-end sequence, and the shelf beside them. A slot's token_ids are what its KV holds, always.

    max_prefix_bytes bounds the shelf; 0 keeps nothing outside the KV.
    """

    def __init__(self, session: TokenSession, max_prefix_bytes: int) -> None:
        self._session = session
        self._max_prefix_bytes = max_prefix_bytes
        self._shelf = Shelf(max_prefix_bytes)
        self._slots = [Slot(seq_id) for seq_id in range(session.caps.n_seq_max)]

    @property
    def n_busy_cells(self) -> int:
        return sum(len(slot.token_ids) for slot in self._slots if slot.busy)

    @property
    def n_cells(self) -> int:
        """Count the cells in use, idle ones too."""
        return sum(self._session.caps.n_cells(len(slot.token_ids)) for slot in self._slots)

    @property
    def prefix_bytes(self) -> int:
        return self._shelf.n_bytes

    def take(self, token_ids: Sequence[int]) -> Slot | None:
        """Give a free slot that holds as much of the prompt as is known; None while all are busy.

        No idle tokens stay beside it: attention reads every cell in use, whoever's it is.
        """
        caps = self._session.caps
        placement = choose(self._slots, self._shelf, token_ids, can_trim=caps.can_trim, can_copy=caps.can_copy)
        if placement is None:
            return None
        slot, source, n_reused = placement.slot, placement.source, placement.n_reused
        if isinstance(source, Saved):
            self._shelf.touch(source)  # what leaves the KV now may push it off the shelf all the same
        for idle in [s for s in self._slots if not s.busy]:
            if idle is not source or n_reused == 0:
                self._shelve(idle)
        if isinstance(source, Saved):
            self._restore(source, slot)
        elif source is not slot:
            self._session.seq_copy(source.seq_id, slot.seq_id, n_reused)
            slot.token_ids = source.token_ids[:n_reused]
            if not source.busy:
                self._shelve(source)
        if n_reused < len(slot.token_ids):
            self._session.seq_trim(slot.seq_id, n_reused)
            del slot.token_ids[n_reused:]
        slot.busy, slot.is_saved = True, False
        return slot

    def release(self, slot: Slot, now_s: float) -> None:
        """Free a slot; its KV stays for a prompt that begins the same."""
        slot.busy = False
        slot.last_used_s = now_s

    def empty(self, slot: Slot) -> None:
        """Forget a slot's KV."""
        self._session.seq_trim(slot.seq_id, 0)
        slot.token_ids = []

    def drop_oldest_idle(self) -> bool:
        """Move the idle slot used least recently out of the KV; False if no cell is held idle."""
        idle = [slot for slot in self._slots if not slot.busy and slot.token_ids]
        if idle:
            self._shelve(min(idle, key=lambda slot: slot.last_used_s))
        return bool(idle)

    def save_idle(self, is_free: Callable[[], bool]) -> None:
        """Copy idle slots to the shelf while is_free, so that the next request need not wait for it."""
        for slot in self._slots:
            if not slot.busy and is_free():
                self._save(slot)

    def _restore(self, saved: Saved, slot: Slot) -> None:
        """Load a saved sequence into an empty slot, which stays empty where that fails."""
        try:
            self._session.seq_load(slot.seq_id, saved.state)
        except BackendStepError as exc:
            _log.warning("a saved prefix is computed again: %s", exc)
            self._shelf.drop(saved)
        else:
            slot.token_ids = list(saved.token_ids)

    def _shelve(self, slot: Slot) -> None:
        """Empty an idle slot, keeping what is worth it outside the KV."""
        if slot.token_ids:
            self._save(slot)
            self.empty(slot)

    def _save(self, slot: Slot) -> None:
        caps = self._session.caps
        if slot.is_saved or len(slot.token_ids) < _MIN_SAVED_TOKENS or not (caps.can_save and caps.can_trim):
            return
        if self._session.seq_bytes(slot.seq_id) <= self._max_prefix_bytes:
            self._shelf.put(Saved(tuple(slot.token_ids), self._session.seq_save(slot.seq_id)))
        slot.is_saved = True
