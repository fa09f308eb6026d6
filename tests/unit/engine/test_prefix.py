"""choose: which slot a prompt takes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.engine.prefix import Saved, Shelf, Slot, choose, common_prefix


def room(n_bytes: int) -> NDArray[np.uint8]:
    return np.zeros(n_bytes, dtype=np.uint8)


tokens = st.lists(st.integers(0, 3), max_size=30)


@given(tokens, tokens)
def test_common_prefix_equals_counting(a: list[int], b: list[int]) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(a, b) == n


@given(
    st.lists(st.tuples(tokens, st.booleans(), st.floats(0, 9)), min_size=1, max_size=6),
    st.lists(tokens, max_size=4),
    tokens.filter(bool),
)
def test_reused_rows_are_the_prompts_own_and_one_stays_to_compute(
    contents: list[tuple[list[int], bool, float]], kept: list[list[int]], prompt: list[int]
) -> None:
    saved = [Saved(tuple(ids), room(0)) for ids in kept]
    slots = [Slot(i, ids, busy, used) for i, (ids, busy, used) in enumerate(contents)]
    placement = choose(slots, saved, prompt, can_trim=True, can_copy=True)
    if all(slot.busy for slot in slots):
        assert placement is None
        return
    assert placement is not None
    assert not placement.slot.busy
    assert placement.n_reused < len(prompt)
    assert list(placement.source.token_ids[: placement.n_reused]) == prompt[: placement.n_reused]
    held = [*(slot.token_ids for slot in slots), *kept]
    best = max(min(common_prefix(ids, prompt), len(prompt) - 1) for ids in held)
    assert placement.n_reused == best


def test_a_prefix_in_a_busy_slot_is_copied() -> None:
    busy, free = Slot(0, [1, 2, 3, 4], busy=True), Slot(1)
    placement = choose([busy, free], [], [1, 2, 3, 9], can_trim=True, can_copy=True)
    assert placement is not None
    assert (placement.slot, placement.source, placement.n_reused) == (free, busy, 3)


def test_a_long_idle_conversation_survives_a_short_common_prefix() -> None:
    conversation, empty = Slot(0, list(range(100))), Slot(1)
    placement = choose([conversation, empty], [], [0, 1, 2, 77], can_trim=True, can_copy=True)
    assert placement is not None
    assert (placement.slot, placement.source, placement.n_reused) == (empty, conversation, 3)


def test_a_model_that_cannot_forget_starts_anew() -> None:
    placement = choose([Slot(0, [1, 2, 3])], [], [1, 2, 3, 4], can_trim=False, can_copy=False)
    assert placement is not None
    assert placement.n_reused == 0


def test_without_a_common_prefix_the_slot_unused_longest_goes() -> None:
    slots = [Slot(0, [5], last_used_s=9.0), Slot(1, [6], last_used_s=3.0)]
    placement = choose(slots, [], [7, 8], can_trim=True, can_copy=True)
    assert placement is not None
    assert placement.slot is slots[1]


@given(st.lists(st.tuples(tokens, st.integers(0, 40)), max_size=30), st.integers(0, 100))
def test_the_shelf_never_holds_more_than_its_bytes(items: list[tuple[list[int], int]], max_bytes: int) -> None:
    shelf = Shelf(max_bytes)
    for ids, size in items:
        shelf.put(Saved(tuple(ids), room(size)))
        assert shelf.n_bytes == sum(saved.state.nbytes for saved in shelf) <= max_bytes
        held = [saved.token_ids for saved in shelf]
        assert len(set(held)) == len(held)


def test_the_shelf_gives_up_what_was_used_least_recently() -> None:
    shelf = Shelf(30)
    a, b, c = (Saved((i, i), room(10)) for i in range(3))
    for saved in (a, b, c):
        shelf.put(saved)
    shelf.touch(a)
    shelf.put(Saved((9, 9), room(10)))
    assert b not in list(shelf)
    assert a in list(shelf)


def test_the_shelf_replaces_the_beginning_of_a_conversation_by_the_whole() -> None:
    shelf = Shelf(1000)
    shelf.put(Saved((1, 2), room(5)))
    shelf.put(Saved((1, 2, 3), room(4)))
    assert [saved.token_ids for saved in shelf] == [(1, 2, 3)]
