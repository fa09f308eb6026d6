"""pick: the rows of one step."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.batching import SeqView, Share, pick, prefill_rows


@st.composite
def views(draw: st.DrawFn) -> list[SeqView]:
    missing = draw(st.lists(st.integers(1, 600), max_size=40))
    return [SeqView(i, n + 5, 5) for i, n in enumerate(missing)]


@given(views(), st.integers(40, 512), st.integers(1, 600))
def test_every_decoding_sequence_gets_its_row_and_no_limit_is_passed(
    running: list[SeqView], n_batch: int, n_prefill: int
) -> None:
    shares = pick(running, n_batch=n_batch, n_prefill=n_prefill)
    rows = {share.key: share.n_rows for share in shares}
    assert len(rows) == len(shares)
    assert all(0 < n <= running[key].n_missing for key, n in rows.items())
    assert sum(rows.values()) <= n_batch
    assert all(rows.get(v.key) == 1 for v in running if v.n_missing == 1)
    n_streams = sum(v.n_missing == 1 for v in running)
    n_prompt_rows = sum(n for key, n in rows.items() if running[key].n_missing > 1)
    assert n_prompt_rows <= (n_prefill if n_streams else n_prefill * 5 // 4)
    assert bool(shares) == bool(running)


@given(views(), st.integers(40, 512), st.integers(1, 600))
def test_an_older_prompt_is_served_before_a_younger(running: list[SeqView], n_batch: int, n_prefill: int) -> None:
    rows = {s.key: s.n_rows for s in pick(running, n_batch=n_batch, n_prefill=n_prefill)}
    prompts = [v for v in running if v.n_missing > 1]
    for older, younger in pairwise(prompts):
        if younger.key in rows:
            assert rows[older.key] == older.n_missing


def test_a_long_prompt_beside_a_stream_is_cut_to_the_budget() -> None:
    assert pick([SeqView(0, 900, 0), SeqView(1, 10, 9)], n_batch=512, n_prefill=75) == (Share(1, 1), Share(0, 75))


def test_a_small_remainder_goes_along_when_nobody_is_delayed() -> None:
    assert pick([SeqView(0, 512, 0)], n_batch=512, n_prefill=475) == (Share(0, 512),)
    assert pick([SeqView(0, 512, 0)], n_batch=500, n_prefill=475) == (Share(0, 500),)
    assert pick([SeqView(0, 900, 0)], n_batch=1024, n_prefill=475) == (Share(0, 475),)


def test_prefill_rows_follow_the_measured_row_time() -> None:
    sizes = {"max_stall_s": 0.15, "max_step_s": 1.5, "n_batch": 512}
    assert prefill_rows(row_s=0.002, n_decoding=1, **sizes) == 75
    assert prefill_rows(row_s=0.002, n_decoding=0, **sizes) == 512
    assert prefill_rows(row_s=0.2, n_decoding=3, **sizes) == 16
    assert prefill_rows(row_s=0.0, n_decoding=0, **sizes) == 512
