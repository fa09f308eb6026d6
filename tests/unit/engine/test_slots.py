"""Slots on the null back end, which refuses rows that do not follow a sequence and cells that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.null import NullSession
from edge_rt.engine.prefix import Slot
from edge_rt.engine.prefix_nodes import InMemory
from edge_rt.engine.slots import Slots

# What is kept of 100 tokens on the null back end: their ids, and four blocks' states with a head of three words each.
STATE_BYTES = 4 * 100 + 4 * (4 * 3 + 100)


class Kv:
    """Slots over a session, and the work that an engine does with a slot."""

    def __init__(self, *, n_seq_max: int, n_ctx: int = 1000, max_prefix_bytes: int = 10 * STATE_BYTES) -> None:
        file = ModelFile(model="null", variant="", path=Path("-"), quant="")
        self.session = NullSession(file, LoadOptions(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=1000))
        self.slots = Slots(self.session, lambda _: max_prefix_bytes)
        self._now_s = 0.0

    def begin(self, token_ids: list[int]) -> tuple[Slot, int]:
        """Take a slot and compute the prompt; gives the slot and how many tokens it held already."""
        slot = self.slots.take(token_ids)
        assert slot is not None
        n_reused = len(slot.token_ids)
        rest = list(token_ids[n_reused:])
        self.session.decode([SeqRows(slot.seq_id, n_reused, rest, want_logits=True)])
        slot.token_ids += rest
        return slot, n_reused

    def end(self, *slots: Slot) -> None:
        for slot in slots:
            self._now_s += 1.0
            self.slots.release(slot, self._now_s)

    def holds(self, slot: Slot) -> bool:
        """Say whether the KV holds what the slot says, read back as the state that the session saves."""
        words = self.session.seq_save(slot.seq_id).view(np.int32).tolist()
        return bool(words[3:] == slot.token_ids)


def tokens(first: int, n: int = 100) -> list[int]:
    return [first] * n


def test_a_prefix_stays_usable_while_what_leaves_the_kv_pushes_it_off_the_shelf() -> None:
    kv = Kv(n_seq_max=1, max_prefix_bytes=STATE_BYTES)
    for first in (1, 2):
        kv.end(kv.begin(tokens(first))[0])
    slot, n_reused = kv.begin([*tokens(1), 9])
    assert n_reused == 100
    assert kv.holds(slot)
    assert kv.slots.prefix_bytes == STATE_BYTES


def test_a_prefix_is_restored_into_cells_that_an_idle_one_held() -> None:
    kv = Kv(n_seq_max=2, n_ctx=180)
    kv.end(kv.begin(tokens(1))[0])
    kv.end(kv.begin(tokens(2))[0])
    kv.slots.save_idle(lambda: True)  # it is on the shelf, and still in its cells
    slot, n_reused = kv.begin([*tokens(1), *tokens(3, 60)])
    assert n_reused == 100
    assert kv.holds(slot)


def test_what_may_stay_in_its_cells_pushes_nothing_out() -> None:
    kv = Kv(n_seq_max=2, n_ctx=250, max_prefix_bytes=STATE_BYTES)
    kv.session.caps = replace(kv.session.caps, reads_own_cells=True)
    kv.end(kv.begin(tokens(1))[0])
    kv.slots.save_idle(lambda: True, pushes_out=False)  # there is room
    kv.end(kv.begin(tokens(2))[0])
    kv.end(kv.begin(tokens(3))[0])  # in the cells of the first
    kv.slots.save_idle(lambda: True, pushes_out=False)
    reused = []
    for first in (1, 2, 3):
        slot, n_reused = kv.begin([*tokens(first), 9])
        reused.append(n_reused)
        assert kv.holds(slot)
        kv.end(slot)
    assert reused[0] == 100
    assert kv.slots.prefix_bytes <= STATE_BYTES + 4


def test_what_went_back_to_its_cells_leaves_memory_before_what_has_none() -> None:
    kv = Kv(n_seq_max=1, max_prefix_bytes=3 * STATE_BYTES)
    kv.session.caps = replace(kv.session.caps, reads_own_cells=True)
    for first in (1, 2, 3, 4):
        kv.end(kv.begin(tokens(first))[0])
    slot, n_reused = kv.begin([*tokens(2), 9])
    assert n_reused == 100
    kv.slots.tree.put("", tokens(5), lambda start, end: InMemory(np.zeros(100, np.uint8)))
    is_whole = [kv.slots.tree.find("", tokens(first)).n_tokens == 100 for first in (2, 3, 4, 5)]
    assert is_whole == [False, True, True, True]
    kv.end(slot)


def test_what_another_prompt_replaces_goes_to_the_shelf() -> None:
    kv = Kv(n_seq_max=1)
    for first in (1, 2, 3):
        kv.end(kv.begin(tokens(first))[0])
    assert kv.begin([*tokens(1), 9])[1] == 100


def test_an_idle_prefix_that_must_leave_its_cells_goes_to_the_shelf() -> None:
    kv = Kv(n_seq_max=2)
    kv.end(kv.begin(tokens(1))[0])
    assert kv.slots.drop_oldest_idle()
    assert kv.session.cells_used() == 0
    assert not kv.slots.drop_oldest_idle()
    assert kv.begin([*tokens(1), 9])[1] == 100


prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 90), st.integers(0, 2), st.integers(1, 20), st.booleans()),
    min_size=1,
    max_size=25,
)


@given(prompts, st.integers(1, 3), st.integers(0, 1500))
def test_a_slots_tokens_are_what_its_kv_holds(
    plan: list[tuple[int, int, int, int, bool]], n_seq_max: int, max_prefix_bytes: int
) -> None:
    kv = Kv(n_seq_max=n_seq_max, max_prefix_bytes=max_prefix_bytes)
    busy: list[Slot] = []
    for first, n_first, second, n_second, ends in plan:
        if len(busy) == n_seq_max:
            kv.end(busy.pop(0))
        slot, n_reused = kv.begin([*tokens(first, n_first), *tokens(second, n_second)])
        busy.append(slot)
        assert n_reused < n_first + n_second
        assert all(kv.holds(other) for other in busy)
        assert kv.session.cells_used() == sum(len(other.token_ids) for other in busy)
        assert kv.slots.n_busy_cells == kv.session.cells_used()
        if ends:
            kv.end(busy.pop())
            kv.slots.save_idle(lambda: True)
        assert kv.slots.prefix_bytes <= max_prefix_bytes
