"""PromptLookup: what it guesses, and what it learns from being wrong."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.drafts import PromptLookup

texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def pushed(lookup: PromptLookup, token_ids: list[int], more: list[int]) -> None:
    for token_id in more:
        token_ids.append(token_id)
        lookup.push()


def followers(token_ids: list[int]) -> dict[int, int]:
    """Find by search, for n = 4, 3, 2, where the latest occurrence of the last n tokens before the end ends."""
    found = {}
    for n in (4, 3, 2):
        ends = [end for end in range(n, len(token_ids)) if token_ids[end - n : end] == token_ids[-n:]]
        if ends:
            found[n] = ends[-1]
    return found


@given(texts)
def test_a_fresh_guess_follows_the_latest_occurrence_of_the_longest_ngram(token_ids: list[int]) -> None:
    lookup = PromptLookup(token_ids, 4096)
    found = followers(token_ids)
    if not found:
        assert lookup.chances(8) == []
        return
    follow = found[max(found)]
    assert lookup.draft(1) == [token_ids[follow]]
    assert lookup.draft(len(token_ids) - follow) == token_ids[follow:]


@given(texts, texts)
def test_tokens_that_come_one_by_one_are_found_as_those_of_the_prompt(first: list[int], more: list[int]) -> None:
    grown, whole = list(first), [*first, *more]
    lookup = PromptLookup(grown, 4096)
    pushed(lookup, grown, more)
    found = followers(whole)
    assert bool(lookup.chances(8)) == bool(found)
    if found:  # a guess that goes on being right is kept; it matches at least as far back as the longest n-gram
        (guess,) = lookup.draft(1)
        n = max(found)
        assert any(whole[i] == guess and whole[i - n : i] == whole[-n:] for i in range(n, len(whole)))


@given(texts, st.integers(1, 40))
def test_a_guess_that_reaches_the_end_goes_on_with_itself(token_ids: list[int], n: int) -> None:
    lookup = PromptLookup(token_ids, 4096)
    if not lookup.chances(1):
        return
    draft = lookup.draft(n)
    assert len(draft) == n
    follow = followers(token_ids)[max(followers(token_ids))]
    whole = [*token_ids, *draft]
    assert all(whole[len(token_ids) + i] == whole[follow + i] for i in range(n))


def test_a_period_is_continued_beyond_what_is_there() -> None:
    assert PromptLookup([1, 2, 3, 1, 2, 3, 1, 2], 64).draft(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_guess_that_came_true_for_long_is_kept_over_a_later_short_match() -> None:
    copied = [10, 11, 12, 13, 14, 15, 16, 17]
    token_ids = [*copied, 50, 51, 13, 14, 15, 16, 99, 60, 61]
    lookup = PromptLookup(token_ids, 64)
    pushed(lookup, token_ids, copied[:7])
    assert lookup.draft(1) == [17]


def test_chances_fall_from_token_to_token_and_end() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 1, 2], 64)
    chances = lookup.chances(100)
    assert 0 < len(chances) < 100
    assert all(0 < later < earlier < 1 for earlier, later in pairwise(chances))
    assert lookup.chances(2) == chances[:2]


def test_wrong_guesses_lower_the_chance_and_right_ones_raise_it_again() -> None:
    token_ids = [1, 2, 1000]
    lookup = PromptLookup(token_ids, 4096)
    first = 0.0
    for i in range(40):  # the same two tokens, each time followed by another
        pushed(lookup, token_ids, [1, 2])
        first = first or lookup.chances(1)[0]
        last = lookup.chances(1)[0]
        pushed(lookup, token_ids, [1001 + i])
    assert last < first / 4
    for _ in range(40):
        pushed(lookup, token_ids, [1, 2])
        again = lookup.chances(1)[0]
        pushed(lookup, token_ids, [1040])
    assert again > 4 * last


def test_a_wrong_guess_is_not_made_twice_in_a_row() -> None:
    token_ids = [1, 2, 3, 1, 2]
    lookup = PromptLookup(token_ids, 64)
    assert lookup.draft(1) == [3]
    pushed(lookup, token_ids, [4])
    assert lookup.chances(4) == []


@given(texts)
def test_ngrams_that_share_a_place_are_told_apart(token_ids: list[int]) -> None:
    spread = [token_id * 0x10001 + i % 7 for i, token_id in enumerate(token_ids * 20)]
    lookup = PromptLookup(spread, 1)  # 256 places for up to 1,600 n-grams
    if lookup.chances(1):
        guess = lookup.draft(1)[0]
        assert any(spread[i] == guess and spread[i - 2 : i] == spread[-2:] for i in range(2, len(spread)))


def test_the_tables_are_bounded() -> None:
    small, large = PromptLookup([1, 2, 3], 16), PromptLookup([1, 2, 3], 10**9)
    assert [table.itemsize * len(table) for table in small._tables] == [4 * 256] * 3
    assert [table.itemsize * len(table) for table in large._tables] == [4 * 32768] * 3
