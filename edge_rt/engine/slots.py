"""The KV slots of one session: given to sequences, kept for prompts that begin the same, saved out of others' way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import TokenSession
from edge_rt.engine.prefix import Slot, choose
from edge_rt.engine.prefix_disk import OnDisk
from edge_rt.engine.prefix_nodes import InMemory, Match, Node
from edge_rt.engine.prefix_tree import PrefixTree
from edge_rt.errors import BackendStepError

_log = logging.getLogger(__name__)

_MIN_SAVED_TOKENS = 32  # fewer are computed again in less time than a user notices
_MIN_BLOCK = 32


class Slots:
    """One slot per back-end sequence, and what is kept beside them. A slot's token_ids are what its KV holds, always.

    max_prefix_bytes  how many bytes may be kept outside the KV, given how many are; 0 keeps nothing
    """

    def __init__(self, session: TokenSession, max_prefix_bytes: Callable[[int], int]) -> None:
        caps = session.caps
        self._session = session
        self._can_keep = caps.can_save and caps.can_trim
        n_block = -(-_MIN_BLOCK // caps.n_cell_block) * caps.n_cell_block
        self.tree = PrefixTree(max_prefix_bytes, n_block=n_block, keeps_ranges=caps.can_save_ranges)
        self._max_prefix_bytes = max_prefix_bytes
        self._slots = [Slot(seq_id) for seq_id in range(caps.n_seq_max)]
        self.n_hits = 0

    @property
    def n_busy_cells(self) -> int:
        return sum(len(slot.token_ids) for slot in self._slots if slot.busy)

    @property
    def n_cells(self) -> int:
        """Count the cells in use, idle ones too."""
        return sum(self._session.caps.n_cells(len(slot.token_ids)) for slot in self._slots)

    def stats(self) -> dict[str, Any]:
        """Give the fields of EngineStats that tell of slots and what is kept beside them."""
        return {
            "cells_used": self.n_busy_cells,
            "prefix_bytes": self.prefix_bytes,
            "prefix_hits_total": self.n_hits,
            "prefixes_lost_total": self.tree.n_lost,
            "restored_tokens_total": self.tree.n_restored,
        }

    @property
    def prefix_bytes(self) -> int:
        return self.tree.n_bytes

    @property
    def n_free(self) -> int:
        return sum(not slot.busy for slot in self._slots)

    def n_known(self, token_ids: list[int], owner: str) -> int:
        """Count the tokens of a prompt that would not be computed if it began now."""
        n_kept = self.tree.find_shared(owner, token_ids).n_tokens
        placement = choose(self._slots, n_kept, token_ids, owner=owner, **self._how())
        return min(n_kept, len(token_ids) - 1) if placement is None else placement.n_reused

    def take(self, token_ids: list[int], owner: str = "") -> Slot | None:
        """Give a free slot that holds as much of the prompt as is known; None while all are busy.

        Where attention reads every cell in use, no idle tokens stay beside it.
        """
        match = self.tree.find_shared(owner, token_ids)
        placement = choose(self._slots, match.n_tokens, token_ids, owner=owner, **self._how())
        if placement is None:
            return None
        slot, source, n_reused = placement.slot, placement.source, placement.n_reused
        self.tree.touch(match)  # what leaves the KV now may push it out all the same: its nodes stay readable
        self._clear_for(slot, source if n_reused else None, len(token_ids))
        if source is None:
            self._restore(match, slot)
            if self._session.caps.reads_own_cells:
                self.tree.lower(match)
        elif source is not slot and n_reused:
            self._session.seq_copy(source.seq_id, slot.seq_id, n_reused)
            slot.token_ids = source.token_ids[:n_reused]
            if not source.busy and not self._session.caps.reads_own_cells:
                self._shelve(source)
        self.cut(slot, n_reused)
        self.n_hits += bool(slot.token_ids)
        slot.busy, slot.is_saved, slot.owner, slot.n_hot = True, False, owner, len(slot.token_ids)
        if source is not None and source is not slot and n_reused:
            source.n_hot, source.is_saved = max(source.n_hot, n_reused), False
        return slot

    def take_free(self, token_ids: list[int], owner: str) -> Slot:
        """Give a slot as take does; one must be free."""
        slot = self.take(token_ids, owner)
        assert slot is not None
        return slot

    def measure(self, slot_bytes: int, n_tokens: int) -> None:
        """Learn what a token's state takes, from a sequence's."""
        self.tree.token_bytes = slot_bytes / self._session.caps.n_cells(n_tokens)

    def release(self, slot: Slot, now_s: float) -> None:
        """Free a slot; its KV stays for a prompt that begins the same."""
        slot.busy = False
        slot.last_used_s = now_s

    def drop(self, slots: Sequence[Slot], now_s: float) -> None:
        """Free busy slots, and forget what they hold."""
        for slot in slots:
            self.empty(slot)
            self.release(slot, now_s)

    def shelve(self, slot: Slot) -> None:
        """Free a busy slot and its cells at once, keeping what is worth it outside the KV."""
        slot.busy = False
        self._shelve(slot)

    def copy(self, source: Slot, slot: Slot) -> None:
        """Let a slot hold what another does, instead of what it held."""
        self.empty(slot)
        self._session.seq_copy(source.seq_id, slot.seq_id, len(source.token_ids))
        slot.token_ids = list(source.token_ids)

    def empty(self, slot: Slot) -> None:
        """Forget a slot's KV."""
        self._session.seq_trim(slot.seq_id, 0)
        slot.token_ids = []

    def cut(self, slot: Slot, n_tokens: int) -> None:
        """Forget a slot's KV from n_tokens on; all of it where the model cannot forget a tail alone."""
        if n_tokens < len(slot.token_ids):
            n_tokens = n_tokens if self._session.caps.can_trim else 0
            self._session.seq_trim(slot.seq_id, n_tokens)
            del slot.token_ids[n_tokens:]
            slot.n_hot = min(slot.n_hot, n_tokens)

    def drop_oldest_idle(self, *, but: Slot | None = None) -> bool:
        """Move the idle slot used least recently out of the KV; False if no cell is held idle."""
        idle = [slot for slot in self._slots if not slot.busy and slot.token_ids and slot is not but]
        if idle:
            self._shelve(min(idle, key=lambda slot: slot.last_used_s))
        return bool(idle)

    def save_idle(self, is_free: Callable[[], bool], *, pushes_out: bool = True) -> None:
        """Copy idle slots out while is_free, so that the next request need not wait for it.

        pushes_out  also where another prefix must leave for it; else a slot that may stay in its cells is saved when
                    these are wanted, and both are kept as long as they are not
        """
        stays = self._session.caps.reads_own_cells and not pushes_out
        for slot in self._slots:
            if not slot.busy and is_free() and not (stays and self._pushes_out(slot)):
                self._save(slot, is_free)
        self.tree.shrink()

    def _pushes_out(self, slot: Slot) -> bool:
        return self.tree.n_bytes + self._session.seq_bytes(slot.seq_id) > self.tree.limit_bytes()

    def _how(self) -> dict[str, bool]:
        return {"can_trim": self._session.caps.can_trim, "can_copy": self._session.caps.can_copy}

    def _clear_for(self, slot: Slot, source: Slot | None, n_tokens: int) -> None:
        """Empty what is in the way of a prompt that slot is for, and source has the beginning of."""
        caps = self._session.caps
        if not caps.reads_own_cells:
            for idle in [s for s in self._slots if not s.busy and s is not source]:
                self._shelve(idle)
            return
        if slot is not source:
            self._shelve(slot)
        n_own = caps.n_cells(n_tokens) - (caps.n_cells(len(slot.token_ids)) if slot is source else 0)
        while self.n_cells + n_own > caps.n_cells(caps.n_ctx) and self.drop_oldest_idle(but=source):
            pass

    def _restore(self, match: Match, slot: Slot) -> None:
        """Load what is kept of a prompt into an empty slot: as much as can be had and has room."""
        caps = self._session.caps
        slot.token_ids = []
        n_used = self.n_cells
        for node in match.nodes:
            token_ids = slot.token_ids + node.ids() if caps.can_save_ranges else node.whole_ids()
            if n_used + caps.n_cells(len(token_ids)) > caps.n_cells(caps.n_ctx):
                return
            try:
                state = self._load(node, slot.seq_id, len(token_ids))
            except BackendStepError as exc:
                _log.warning("a kept prefix is computed again: %s", exc)
                self.tree.drop(node)
                if self._session.seq_length(slot.seq_id) != len(slot.token_ids):
                    self.empty(slot)
                return
            if isinstance(node.kept, OnDisk):
                self.tree.n_restored += len(token_ids) - len(slot.token_ids)
                self.tree.hold(node, state, node.kept)
            slot.token_ids = token_ids

    def _load(self, node: Node, seq_id: int, n_tokens: int) -> NDArray[np.uint8]:
        """Load a node's state and give it; the sequence must have n_tokens then."""
        state = node.kept.read() if node.kept is not None else None
        if state is None:
            raise BackendStepError(reason="it is not there any more")
        self._session.seq_load(seq_id, state)
        if (n_held := self._session.seq_length(seq_id)) != n_tokens:
            raise BackendStepError(reason=f"it has {n_held} tokens, not {n_tokens}")
        return state

    def _shelve(self, slot: Slot) -> None:
        """Empty an idle slot, keeping what is worth it outside the KV."""
        if slot.token_ids:
            self._save(slot)
            self.empty(slot)

    def _save(self, slot: Slot, go_on: Callable[[], bool] = lambda: True) -> None:
        if slot.is_saved or len(slot.token_ids) < _MIN_SAVED_TOKENS or not self._can_keep:
            return
        n_bytes = self._session.seq_bytes(slot.seq_id)
        self.measure(n_bytes, len(slot.token_ids))
        if not self._session.caps.can_save_ranges and n_bytes > self._max_prefix_bytes(self.prefix_bytes):
            slot.is_saved = True
            return

        def save(start: int, end: int | None) -> InMemory:
            return InMemory(self._session.seq_save(slot.seq_id, start, end))

        slot.is_saved = self.tree.put(slot.owner, slot.token_ids, save, go_on, n_hot=slot.n_hot)
