"""pick: the rows of one step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.backends.base import SeqRows
from edge_rt.engine.batching import pick, prefill_rows, share_rows
from edge_rt.engine.row_costs import RowCosts

running = st.lists(st.integers(1, 600), min_size=1, max_size=40)


@given(running, st.integers(1, 512), st.integers(0, 600))
def test_every_decoding_sequence_gets_its_row_and_no_limit_is_passed(
    missing: list[int], n_batch: int, n_prefill: int
) -> None:
    rows = pick(missing, n_batch=n_batch, n_prefill=n_prefill)
    n_streams = missing.count(1)
    n_prompt_rows = sum(n for n, m in zip(rows, missing, strict=True) if m > 1)
    assert len(rows) == len(missing)
    assert all(0 <= n <= m for n, m in zip(rows, missing, strict=True))
    assert 0 < sum(rows) <= n_batch
    assert sum(rows) - n_prompt_rows == min(n_streams, n_batch)
    assert n_prompt_rows <= (max(n_prefill, 1) if n_streams else max(n_prefill, 1) * 5 // 4)


@given(running, st.integers(40, 512), st.integers(1, 600))
def test_an_older_prompt_is_served_before_a_younger(missing: list[int], n_batch: int, n_prefill: int) -> None:
    rows = pick(missing, n_batch=n_batch, n_prefill=n_prefill)
    prompts = [(n, m) for n, m in zip(rows, missing, strict=True) if m > 1]
    assert all(older == needed for (older, needed), (younger, _) in pairwise(prompts) if younger)


def test_a_long_prompt_beside_a_stream_is_cut_to_the_budget() -> None:
    assert pick([900, 1], n_batch=512, n_prefill=75) == [75, 1]


def test_a_small_remainder_goes_along_when_nobody_is_delayed() -> None:
    assert pick([512], n_batch=512, n_prefill=475) == [512]
    assert pick([512], n_batch=500, n_prefill=475) == [500]
    assert pick([900], n_batch=1024, n_prefill=475) == [475]
    assert pick([512, 1], n_batch=1024, n_prefill=475) == [475, 1]


def test_a_prompts_part_follows_the_measured_row_time() -> None:
    assert prefill_rows(75, n_batch=512) == 75
    assert prefill_rows(750, n_batch=512) == 512
    assert prefill_rows(0, n_batch=512) == 16
    assert prefill_rows(None, n_batch=512) == 512


def test_a_step_beside_streams_takes_what_they_may_be_held_up_by_where_the_prompt_stands() -> None:
    costs = RowCosts()
    for at in range(0, 4000, 250):
        costs.observe([SeqRows(0, at, [1] * 250, want_logits=False)], 250 * (1e-3 + 1e-6 * (at + 125)))

    def rows(parts: list[tuple[int, int]]) -> list[int]:
        return share_rows(parts, range(len(parts)), costs, max_stall_s=0.1, max_step_s=0.4, n_batch=512)

    early, late = rows([(0, 4000), (50, 1)]), rows([(3000, 1000), (50, 1)])
    assert early[1] == late[1] == 1
    assert costs.seconds(early[0], 0) == pytest.approx(0.1, rel=0.05)
    assert costs.seconds(late[0], 3000) == pytest.approx(0.1, rel=0.05)
    assert rows([(0, 4000)])[0] > 3 * early[0]


def test_prompts_get_rows_in_turn() -> None:
    shares = share_rows([(0, 900), (0, 900), (9, 1)], [1, 2, 0], RowCosts(), max_stall_s=1, max_step_s=1, n_batch=512)
    assert shares == [0, 511, 1]


def test_the_oldest_streams_get_the_rows_where_there_are_not_enough() -> None:
    assert pick([9, 9, 1, 1, 1], n_batch=2, n_prefill=16) == [0, 0, 1, 1, 0]
