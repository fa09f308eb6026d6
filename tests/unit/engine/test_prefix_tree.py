"""PrefixTree against a plain list of what was put into it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.engine.prefix import common_prefix
from edge_rt.engine.prefix_nodes import InMemory, Match, common_tokens, packed
from edge_rt.engine.prefix_tree import PrefixTree

BLOCK = 4
PER_TOKEN = 10  # bytes of a state


def saver(token_ids: list[int], log: list[tuple[int, int | None]] | None = None) -> object:
    """Make states that tell which tokens they are of."""

    def save(start: int, end: int | None) -> InMemory:
        if log is not None:
            log.append((start, end))
        ids = token_ids[start:end]
        return InMemory(np.array([*ids, *[0] * (PER_TOKEN - 1) * len(ids)], dtype=np.uint8))

    return save


def tree(max_bytes: int = 10**6, *, keeps_ranges: bool = True) -> PrefixTree:
    return PrefixTree(lambda _: max_bytes, n_block=BLOCK, keeps_ranges=keeps_ranges)


def put(kept: PrefixTree, owner: str, token_ids: list[int], log: list[tuple[int, int | None]] | None = None) -> bool:
    return kept.put(owner, token_ids, saver(token_ids, log))  # type: ignore[arg-type]


def restored(kept: PrefixTree, match: Match) -> list[int]:
    """Give the tokens of the states that a match restores."""
    ids: list[int] = []
    for node in match.nodes:
        assert node.kept is not None
        state = node.kept.read()
        assert state is not None
        ids += state[: state.nbytes // PER_TOKEN].tolist()
    return ids


def size(token_ids: list[int]) -> int:
    return len(token_ids) * (4 + PER_TOKEN)


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=18)


@given(sequences, sequences)
def test_packed_lists_share_as_many_tokens_as_the_lists(a: list[int], b: list[int]) -> None:
    assert common_tokens(packed(a), packed(b)) == common_prefix(a, b)


@pytest.mark.parametrize("keeps_ranges", [True, False])
@given(st.lists(st.tuples(st.sampled_from(["", "a"]), sequences), max_size=20), sequences)
def test_the_longest_beginning_that_was_put_is_found_and_its_states_are_the_prompts(
    keeps_ranges: bool, items: list[tuple[str, list[int]]], prompt: list[int]
) -> None:
    kept = tree(keeps_ranges=keeps_ranges)
    for owner, ids in items:
        assert put(kept, owner, ids)
    for owner in ("", "a", "nobody"):
        match = kept.find(owner, prompt)
        held = [ids for whose, ids in items if whose == owner]
        assert match.n_tokens == max([common_prefix(ids, prompt) for ids in held], default=0)
        assert restored(kept, match)[: match.n_tokens] == prompt[: match.n_tokens]


@given(st.lists(sequences, max_size=20))
def test_what_two_sequences_share_is_kept_once(items: list[list[int]]) -> None:
    kept = tree()
    for ids in items:
        put(kept, "", ids)
    blocks = {tuple(ids[:end]) for ids in items for end in range(BLOCK, len(ids) + 1, BLOCK)}
    tails = {tuple(ids) for ids in items if len(ids) % BLOCK}
    tails = {t for t in tails if not any(len(o) > len(t) and o[: len(t)] == t for o in blocks | tails)}
    whole = sum(size(list(block[-BLOCK:])) for block in blocks)
    assert kept.n_bytes == whole + sum(size(list(tail[len(tail) // BLOCK * BLOCK :])) for tail in tails)


@pytest.mark.parametrize("keeps_ranges", [True, False])
@given(
    st.lists(st.tuples(st.sampled_from(["", "a"]), sequences, st.booleans()), max_size=40),
    st.integers(0, 600),
)
def test_never_more_than_its_bytes_and_what_is_found_is_whole(
    keeps_ranges: bool, items: list[tuple[str, list[int], bool]], max_bytes: int
) -> None:
    kept = tree(max_bytes, keeps_ranges=keeps_ranges)
    for owner, ids, is_lookup in items:
        if is_lookup:
            kept.touch(kept.find(owner, ids))
        else:
            put(kept, owner, ids)
        assert kept.n_bytes <= max_bytes
        match = kept.find(owner, ids)
        assert restored(kept, match)[: match.n_tokens] == ids[: match.n_tokens]


@settings(max_examples=50)
@given(st.integers(2, 12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_interleaved_tenants_keep_their_prefixes_while_memory_is_free(
    n_tenants: int, n_turns: int, random: object
) -> None:
    """Whatever order they come in, each finds all of its last turn, as long as everything fits."""
    conversations = {str(i): [i % 200, i // 200, *range(10)] for i in range(n_tenants)}
    kept = tree(sum(size(ids) + n_turns * size([0] * 9) for ids in conversations.values()))
    turns = [name for name in conversations for _ in range(n_turns)]
    random.shuffle(turns)  # type: ignore[attr-defined]
    seen: set[str] = set()
    for name in turns:
        ids = conversations[name]
        assert kept.find("", ids).n_tokens == (len(ids) if name in seen else min(kept.find("", ids).n_tokens, 2))
        ids += [random.randrange(200) for _ in range(9)]  # type: ignore[attr-defined]
        assert put(kept, "", ids)
        seen.add(name)


def test_the_end_used_least_recently_goes_first_and_block_by_block() -> None:
    kept = tree(size([0] * 16))
    first, second = list(range(8)), list(range(100, 108))
    put(kept, "", first)
    put(kept, "", second)
    kept.touch(kept.find("", first))
    put(kept, "", [50, 51, 52, 53])
    assert kept.find("", second).n_tokens == BLOCK
    assert kept.find("", first).n_tokens == 8


def test_only_blocks_that_are_new_are_saved() -> None:
    kept = tree()
    ids = list(range(10))
    put(kept, "", ids)
    log: list[tuple[int, int | None]] = []
    put(kept, "", [*ids, 90, 91, 92], log)
    assert log == [(8, 12), (12, 13)]


def test_saving_ends_when_it_must_and_goes_on_where_it_ended() -> None:
    kept = tree()
    ids = list(range(16))
    room = iter([True, True, False])
    assert not kept.put("", ids, saver(ids), lambda: next(room))  # type: ignore[arg-type]
    assert kept.find("", ids).n_tokens == 8
    assert put(kept, "", ids)
    assert kept.find("", ids).n_tokens == 16


def test_what_is_pinned_stays_and_may_go_once_it_is_not() -> None:
    kept = tree(size([0] * 12))
    pinned = list(range(8))
    put(kept, "", pinned)
    end = kept.pin("", pinned)
    assert end is not None
    for first in range(100, 150):
        put(kept, "", [first] * 8)
        assert kept.find("", pinned).n_tokens == 8
    kept.unpin(end)
    for first in range(100, 110):
        put(kept, "", [first] * 12)
    assert kept.find("", pinned).n_tokens == 0
    assert kept.pin("", pinned) is None


def test_an_owner_of_nothing_is_forgotten() -> None:
    kept = tree(size([0] * 4))
    put(kept, "a", [1, 2, 3, 4])
    put(kept, "b", [1, 2, 3, 4])
    assert [owner for owner, _, _ in kept.ends()] == ["b"]
    assert kept.find("a", [1, 2, 3, 4]).n_tokens == 0


def test_a_state_that_is_dropped_takes_what_goes_on_from_it() -> None:
    kept = tree()
    put(kept, "", list(range(12)))
    kept.drop(kept.find("", list(range(8))).nodes[-1])
    assert kept.find("", list(range(12))).n_tokens == BLOCK
    kept.drop(kept.find("", list(range(4))).nodes[0])
    assert kept.n_bytes == 0
    assert not list(kept.ends())


def ask(kept: PrefixTree, owner: str, token_ids: list[int]) -> int:
    """Look a prompt up and keep it; give how much of it was there."""
    match = kept.find(owner, token_ids)
    kept.touch(match)
    put(kept, owner, token_ids)
    return match.n_tokens


def test_what_was_used_longest_ago_leaves_however_many_prompts_began_with_it() -> None:
    often = [1, 2, 3, 4, 5, 6, 7, 8]
    kept = tree(3 * size([9] * 4))
    for _ in range(4):
        ask(kept, "", often)
    for first in (9, 10, 11, 12):
        ask(kept, "", [first] * 4)
    assert kept.find("", often).n_tokens == 0
    assert kept.find("", [12] * 4).n_tokens == 4


@given(st.integers(1, 60), st.integers(2, 6))
@settings(max_examples=30)
def test_nobody_is_pushed_below_an_equal_share(n_floods: int, n_users: int) -> None:
    kept = tree(n_users * 2 * size([1] * 4))
    for user in range(n_users):
        ask(kept, f"\1uid:{user}", [user] * 8)
    for n in range(n_floods):
        ask(kept, "\1uid:0", [200, n, 0, 0, n, 1, 2, 3])
        ask(kept, "\1uid:0\0lora\x001.0", [201, n, 0, 0, n, 1, 2, 3])  # an adapter brings no share
    for user in range(1, n_users):
        assert kept.find(f"\1uid:{user}", [user] * 8).n_tokens == 8
    assert kept.n_bytes <= n_users * 2 * size([1] * 4)
    assert kept.find("\1uid:0", [200, n_floods - 1, 0, 0]).n_tokens or kept.find("\1uid:0\0lora\x001.0", [201]).n_tokens


def test_who_is_alone_may_have_all_and_gives_as_others_come() -> None:
    kept = tree(8 * size([1] * 4))
    for n in range(8):
        ask(kept, "\1uid:0", [n] * 4)
    assert kept.n_bytes == 8 * size([1] * 4)
    for n in range(8):
        ask(kept, "\1uid:1", [n] * 4)
    own = [sum(kept.find(f"\1uid:{user}", [n] * 4).n_tokens for n in range(8)) for user in (0, 1)]
    assert own == [16, 16]
