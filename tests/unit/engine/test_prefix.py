"""choose: which slot a prompt takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.prefix import Slot, choose, common_prefix, shared_ahead

tokens = st.lists(st.integers(0, 3), max_size=30)


@given(tokens, tokens)
def test_common_prefix_equals_counting(a: list[int], b: list[int]) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(a, b) == n


@given(
    st.lists(st.tuples(tokens, st.booleans(), st.floats(0, 9), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 30),
    tokens.filter(bool),
)
def test_reused_rows_are_the_prompts_own_and_one_stays_to_compute(
    contents: list[tuple[list[int], bool, float, bool]], n_kept: int, prompt: list[int]
) -> None:
    slots = [
        Slot(i, ids, busy, used, owner="me" if is_own else "other")
        for i, (ids, busy, used, is_own) in enumerate(contents)
    ]
    n_kept = min(n_kept, len(prompt))
    placement = choose(slots, n_kept, prompt, owner="me", can_trim=True, can_copy=True)
    if all(slot.busy for slot in slots):
        assert placement is None
        return
    assert placement is not None
    assert not placement.slot.busy
    assert placement.n_reused < len(prompt)
    if placement.source is not None and placement.n_reused:
        assert placement.source.owner == "me"
        assert placement.source.token_ids[: placement.n_reused] == prompt[: placement.n_reused]
    held = [slot.token_ids for slot in slots if slot.owner == "me"]
    best = max([min(common_prefix(ids, prompt), len(prompt) - 1) for ids in held] + [min(n_kept, len(prompt) - 1)])
    # A few tokens may be left alone where they would have to be copied.
    assert placement.n_reused == best or placement.n_reused < best < 16


def test_a_prefix_in_a_busy_slot_is_copied() -> None:
    busy, free = Slot(0, list(range(20)), busy=True), Slot(1)
    placement = choose([busy, free], 0, [*range(19), 99], can_trim=True, can_copy=True)
    assert placement is not None
    assert (placement.slot, placement.source, placement.n_reused) == (free, busy, 19)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_few_tokens_are_not_copied(is_busy: bool) -> None:
    other, free = Slot(0, list(range(100)), busy=is_busy), Slot(1)
    placement = choose([other, free], 0, [0, 1, 2, 77], can_trim=True, can_copy=True)
    assert placement is not None
    assert (placement.slot, placement.source, placement.n_reused) == (free, free, 0)


def test_a_long_idle_conversation_survives_a_short_common_prefix() -> None:
    conversation, empty = Slot(0, list(range(100))), Slot(1)
    placement = choose([conversation, empty], 0, [*range(30), 77], can_trim=True, can_copy=True)
    assert placement is not None
    assert (placement.slot, placement.source, placement.n_reused) == (empty, conversation, 30)


def test_a_model_that_cannot_forget_starts_anew() -> None:
    placement = choose([Slot(0, [1, 2, 3])], 0, [1, 2, 3, 4], can_trim=False, can_copy=False)
    assert placement is not None
    assert placement.n_reused == 0


def test_without_a_common_prefix_the_slot_unused_longest_goes() -> None:
    slots = [Slot(0, [5], last_used_s=9.0), Slot(1, [6], last_used_s=3.0)]
    placement = choose(slots, 0, [7, 8], can_trim=True, can_copy=True)
    assert placement is not None
    assert placement.slot is slots[1]


def test_who_is_isolated_finds_only_what_is_his_own() -> None:
    slots = [Slot(0, [1, 2, 3], owner="a"), Slot(1)]
    placement = choose(slots, 0, [1, 2, 3, 4], owner="b", can_trim=True, can_copy=True)
    assert placement is not None
    assert placement.n_reused == 0


def test_a_prompt_waits_for_what_another_is_about_to_compute() -> None:
    common = list(range(100))
    other = ([*common, 1000, 1001], 10)
    assert shared_ahead([*common, 2000], [other], 0) == 100
    assert shared_ahead([*common, 2000], [other], 90) == 0  # the rest is soon computed
    assert shared_ahead([*common, 2000], [([*common, 1000, 1001], 100)], 0) == 0  # it is there to be copied
    assert shared_ahead([9, *common], [other], 0) == 0
