"""The search: right by comparison with the plain definition, whatever was added, removed and evicted before."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.cache.vector_index import VectorIndex

N = 8


def vector(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).normal(size=N).astype(np.float32)
    return row / np.linalg.norm(row)


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove", "touch"]), st.integers(0, 12), st.sampled_from([b"a", b"b"])
    ),
    max_size=60,
)  # fmt: skip


@given(steps, st.integers(1, 8))
def test_it_finds_what_a_plain_search_finds(steps: list[tuple[str, int, bytes]], max_entries: int) -> None:
    index: VectorIndex[int] = VectorIndex(max_entries, N)
    kept: dict[int, bytes] = {}  # the longest unused first
    for step, entry, partition in steps:
        if step == "add":
            kept.pop(entry, None)
            expected_gone = [next(iter(kept))] if len(kept) == max_entries else []
            for gone in expected_gone:
                del kept[gone]
            kept[entry] = partition
            assert index.add(partition, entry, vector(entry)) == expected_gone
        elif step == "remove":
            assert index.remove(entry) == (kept.pop(entry, None) is not None)
        elif entry in kept:
            kept[entry] = kept.pop(entry)
            index.touch(entry)
    assert len(index) == len(kept)
    asked = vector(99)
    for partition in (b"a", b"b", b"c"):
        expected = sorted(
            ((e, float(vector(e) @ asked)) for e, p in kept.items() if p == partition), key=lambda f: -f[1]
        )
        found = index.nearest(partition, asked, 3)
        assert [entry for entry, _ in found] == [entry for entry, _ in expected[:3]]
        assert [cosine for _, cosine in found] == pytest.approx([cosine for _, cosine in expected[:3]], abs=1e-5)


def test_memory_is_given_back_with_the_last_entry() -> None:
    index: VectorIndex[int] = VectorIndex(100, N)
    for entry in range(50):
        index.add(b"a", entry, vector(entry))
    assert index.n_bytes >= 50 * N * 4
    index.clear()
    assert (index.n_bytes, len(index), index.nearest(b"a", vector(0), 3)) == (0, 0, [])
