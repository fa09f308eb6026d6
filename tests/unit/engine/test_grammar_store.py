"""Which compiled grammars stay, by the bytes they take and whose they are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.grammar_store import GrammarStore, Kept, key_of

MAX_BYTES = 40_000


def key(name: str) -> bytes:
    return key_of(name.encode())


def test_the_least_recently_used_makes_room() -> None:
    store = GrammarStore(MAX_BYTES)
    for name in "abcd":
        store.put("1000", Kept(key(name), n_bytes=9_000))
    assert store.get("1000", key("a")) is not None
    store.put("1000", Kept(key("e"), n_bytes=9_000))
    assert [name for name in "abcde" if store.get("1000", key(name)) is not None] == ["a", "c", "d", "e"]


def test_one_that_is_too_large_is_not_kept_and_puts_nobody_out() -> None:
    store = GrammarStore(MAX_BYTES)
    store.put("1000", Kept(key("a"), n_bytes=100))
    store.put("1000", Kept(key("b"), n_bytes=MAX_BYTES // 4 + 1))
    assert store.get("1000", key("b")) is None
    assert store.get("1000", key("a")) is not None


def test_who_asks_for_many_throws_out_his_own() -> None:
    store = GrammarStore(MAX_BYTES)
    store.put("1000", Kept(key("mine"), n_bytes=5_000))
    for i in range(100):
        store.put("1001", Kept(key(f"hostile {i}"), n_bytes=9_000))
    assert store.get("1000", key("mine")) is not None
    assert store.get("1001", key("mine")) is None  # a tenant's grammars are found by nobody else
    assert store.n_bytes <= MAX_BYTES


def test_one_that_grows_too_large_leaves() -> None:
    store = GrammarStore(MAX_BYTES)
    grows = Kept(key("a"), n_bytes=4_000)
    store.put("1000", grows)
    store.grow("1000", grows, 3_000)
    assert store.n_bytes > 7_000
    assert store.get("1000", key("a")) is grows
    store.grow("1000", grows, 4_000)
    assert (store.get("1000", key("a")), store.n_bytes) == (None, 0)
    store.grow("1000", grows, 4_000)  # an answer that had it ends later
    assert (grows.n_bytes, store.n_bytes) == (15_000, 0)


class Unwalked(OrderedDict[bytes, Kept]):
    """A tenant's grammars, which are looked up and never walked."""

    def items(self) -> Any:
        raise AssertionError

    __iter__ = keys = values = items


def test_growth_is_counted_without_a_look_at_all_the_others() -> None:
    store = GrammarStore(MAX_BYTES)
    kept = Kept(key("a"), n_bytes=1_000)
    store.put("1000", kept)
    store._kept["1000"] = Unwalked({kept.key: kept})
    n_before = store.n_bytes
    for n_grown in (0, 500):
        store.grow("1000", kept, n_grown)
    assert (kept.n_bytes, store.n_bytes) == (1_500, n_before + 500)


def test_growth_of_one_that_was_compiled_anew_is_not_its_successors() -> None:
    store = GrammarStore(MAX_BYTES)
    old, new = (Kept(key("a"), n_bytes=1_000) for _ in range(2))
    store.put("1000", new)
    n_before = store.n_bytes
    store.grow("1000", old, 500)
    assert (old.n_bytes, new.n_bytes, store.n_bytes) == (1_500, 1_000, n_before)


puts = st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, MAX_BYTES // 3))


@given(st.lists(puts, max_size=80))
def test_the_bound_is_kept_and_so_is_the_share(asked: list[tuple[str, int, int]]) -> None:
    store = GrammarStore(MAX_BYTES)
    for tenant, name, n_bytes in asked:
        before = {t: sum(store.get(t, key(str(i))) is not None for i in range(31)) for t in "abc"}
        held = {t: store._bytes.get(t, 0) for t in "abc"}
        if store.get(tenant, key(str(name))) is None:
            store.put(tenant, Kept(key(str(name)), n_bytes=n_bytes))
        assert store.n_bytes == sum(store._bytes.values()) <= MAX_BYTES
        for other in set("abc") - {tenant}:  # who lost one held more than the one who asks holds now
            lost = before[other] - sum(store.get(other, key(str(i))) is not None for i in range(31))
            assert not lost or held[other] >= store._bytes.get(tenant, 0)
