"""Which compiled grammars stay, by the bytes they take and whose they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.grammar_store import GrammarStore, Kept

MAX_BYTES = 40_000


def test_the_least_recently_used_makes_room() -> None:
    store = GrammarStore(MAX_BYTES)
    for name in "abcd":
        store.put("1000", name, Kept(name, n_bytes=9_000))
    assert store.get("1000", "a") is not None
    store.put("1000", "e", Kept("e", n_bytes=9_000))
    assert [name for name in "abcde" if store.get("1000", name) is not None] == ["a", "c", "d", "e"]


def test_one_that_is_too_large_is_not_kept_and_puts_nobody_out() -> None:
    store = GrammarStore(MAX_BYTES)
    store.put("1000", "a", Kept("a", n_bytes=100))
    store.put("1000", "b", Kept("b", n_bytes=MAX_BYTES // 4 + 1))
    assert store.get("1000", "b") is None
    assert store.get("1000", "a") is not None


def test_who_asks_for_many_throws_out_his_own() -> None:
    store = GrammarStore(MAX_BYTES)
    store.put("1000", "mine", Kept("mine", n_bytes=5_000))
    for i in range(100):
        store.put("1001", f"hostile {i}", Kept(i, n_bytes=9_000))
    assert store.get("1000", "mine") is not None
    assert store.get("1001", "mine") is None  # a tenant's grammars are found by nobody else
    assert store.n_bytes <= MAX_BYTES


def test_one_that_grows_too_large_leaves() -> None:
    store = GrammarStore(MAX_BYTES)
    grows = Kept("a", n_bytes=4_000)
    store.put("1000", "a", grows)
    store.grow("1000", grows, 3_000)
    assert store.n_bytes > 7_000
    assert store.get("1000", "a") is grows
    store.grow("1000", grows, 4_000)
    assert (store.get("1000", "a"), store.n_bytes) == (None, 0)
    store.grow("1000", grows, 4_000)  # an answer that had it ends later
    assert (grows.n_bytes, store.n_bytes) == (15_000, 0)


puts = st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, MAX_BYTES // 3))


@given(st.lists(puts, max_size=80))
def test_the_bound_is_kept_and_so_is_the_share(asked: list[tuple[str, int, int]]) -> None:
    store = GrammarStore(MAX_BYTES)
    for tenant, name, n_bytes in asked:
        before = {t: sum(store.get(t, str(i)) is not None for i in range(31)) for t in "abc"}
        held = {t: store._bytes.get(t, 0) for t in "abc"}
        if store.get(tenant, str(name)) is None:
            store.put(tenant, str(name), Kept(name, n_bytes=n_bytes))
        assert store.n_bytes == sum(store._bytes.values()) <= MAX_BYTES
        for other in set("abc") - {tenant}:  # who lost one held more than the one who asks holds now
            lost = before[other] - sum(store.get(other, str(i)) is not None for i in range(31))
            assert not lost or held[other] >= store._bytes.get(tenant, 0)
