"""What leaves a full cache: the bounds hold, what is wanted stays, and a scan does not flush it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.cache.eviction import S3Fifo


def _hits(cache: S3Fifo[int], keys: Iterable[int]) -> int:
    n_hits = 0
    for key in keys:
        if key in cache:
            cache.hit(key)
            n_hits += 1
        else:
            cache.add(key, 1)
    return n_hits


def _lru_hits(capacity: int, keys: Iterable[int]) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    n_hits = 0
    for key in keys:
        n_hits += key in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return n_hits


def _zipf(n: int, n_keys: int, *, seed: int = 0) -> list[int]:
    weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(n_keys)))
    return random.Random(seed).choices(range(n_keys), cum_weights=weights, k=n)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ahr"), st.integers(0, 30), st.integers(0, 60)), max_size=200),
    st.integers(1, 100),
    st.none() | st.integers(1, 10),
)
def test_that_the_bounds_hold_and_each_key_that_goes_is_told_once(
    steps: list[tuple[str, int, int]], max_bytes: int, max_entries: int | None
) -> None:
    cache: S3Fifo[int] = S3Fifo(max_bytes, max_entries=max_entries)
    kept: dict[int, int] = {}
    for step, key, size_bytes in steps:
        if step == "a":
            kept[key] = size_bytes
            for gone in cache.add(key, size_bytes, saved_s=float(key)):
                del kept[gone]
        elif step == "h":
            cache.hit(key)
        else:
            cache.remove(key)
            kept.pop(key, None)
        assert all(key in cache for key in kept)
        assert len(cache) == len(kept) <= (max_entries or len(kept))
        assert cache.size_bytes == sum(kept.values()) <= max_bytes


def test_that_an_entry_larger_than_the_cache_is_not_taken() -> None:
    cache: S3Fifo[str] = S3Fifo(10)
    cache.add("a", 5)
    assert cache.add("b", 11) == ["b"]
    assert "a" in cache
    assert "b" not in cache
    with pytest.raises(ValueError, match="positive"):
        S3Fifo(0)


def test_that_what_is_wanted_outlives_a_scan() -> None:
    cache: S3Fifo[int] = S3Fifo(100)
    wanted = range(50)
    for _ in range(2):
        _hits(cache, wanted)
    _hits(cache, range(1000, 3000))
    assert sum(key in cache for key in wanted) == 50
    assert _lru_hits(100, [*wanted, *wanted, *range(1000, 3000), *wanted]) == 50, "LRU keeps none of them"


def test_that_what_is_wanted_no_more_leaves() -> None:
    cache: S3Fifo[int] = S3Fifo(100)
    for _ in range(3):
        _hits(cache, range(50))
    for start in range(1000, 21000, 50):
        for _ in range(3):
            _hits(cache, range(start, start + 50))
    assert not any(key in cache for key in range(50))


def test_that_a_key_which_comes_back_is_believed() -> None:
    cache: S3Fifo[int] = S3Fifo(10)
    _hits(cache, range(20))
    assert 0 not in cache
    cache.add(0, 1)
    _hits(cache, range(100, 103))
    assert 0 in cache
    cache_that_knows: S3Fifo[int] = S3Fifo(10)
    cache_that_knows.add(0, 1, is_known=True)
    _hits(cache_that_knows, range(100, 112))
    assert 0 in cache_that_knows, "known from an earlier run"


def test_that_what_saves_little_per_byte_goes_first() -> None:
    cache: S3Fifo[int] = S3Fifo(1000)
    for key in range(20):
        cache.add(key, 50, saved_s=0.1 if key == 7 else 10.0)
    gone = cache.add(99, 50, saved_s=10.0)
    assert gone == [7]


def test_that_time_saved_is_higher_than_without_weights() -> None:
    dice = random.Random(1)
    keys = _zipf(20_000, 4000, seed=3)
    sizes = {key: int(200 * dice.lognormvariate(1, 1)) for key in range(4000)}
    seconds = {key: dice.lognormvariate(0, 1.2) for key in range(4000)}

    def saved(*, weighted: bool) -> float:
        cache: S3Fifo[int] = S3Fifo(100_000)
        total_s = 0.0
        for key in keys:
            if key in cache:
                cache.hit(key)
                total_s += seconds[key]
            else:
                cache.add(key, sizes[key], saved_s=seconds[key] if weighted else float(sizes[key]))
        return total_s

    assert saved(weighted=True) > 1.05 * saved(weighted=False)


@pytest.mark.parametrize("capacity", [100, 500, 2000])
def test_that_it_is_not_worse_than_lru_where_popularity_lasts_and_where_it_drifts(capacity: int) -> None:
    lasting = _zipf(30_000, 6000)
    drifting = [key + (i // 2000) * 20 for i, key in enumerate(_zipf(30_000, 4000, seed=2))]
    for keys in (lasting, drifting):
        assert _hits(S3Fifo(capacity), keys) >= _lru_hits(capacity, keys) - 0.01 * len(keys)


def test_that_worth_is_of_no_account_where_all_are_worth_the_same() -> None:
    keys = _zipf(5000, 1000)
    plain: S3Fifo[int] = S3Fifo(100)
    valued: S3Fifo[int] = S3Fifo(100)
    for key in keys:
        for cache, saved_s in ((plain, 1.0), (valued, 0.003)):
            if key in cache:
                cache.hit(key)
            else:
                cache.add(key, 1, saved_s=saved_s)
        assert (key in plain) == (key in valued)
    assert plain.n_evicted == valued.n_evicted > 0
