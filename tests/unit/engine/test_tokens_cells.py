"""Cells that sequences take in blocks: who is let in fits, and a step that does not fit still moves the others on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import NoCellsError, SeqRows
from edge_rt.types import Capabilities
from tests.unit.engine.null_engine import Bench, Recorder, complete

BLOCK = 32


class Paged(Recorder):
    """Gives out its cells in blocks, as the native engine does."""

    n_refused = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caps = replace(self.caps, n_cell_block=BLOCK)

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        lengths = {seq_id: len(kv) for seq_id, kv in self.kv.items()}
        for rows in batch:
            lengths[rows.seq_id] = lengths.get(rows.seq_id, 0) + len(rows.token_ids)
        if sum(self.caps.n_cells(n) for n in lengths.values()) > self.caps.n_ctx:
            self.n_refused += 1
            raise NoCellsError
        return super().decode(batch)


class Stingy(Recorder):
    """Refuses a third sequence, whatever its capabilities let one expect."""

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        if len(batch) > 2:
            raise NoCellsError
        return super().decode(batch)


@pytest.mark.parametrize(("n_tokens", "n_cells"), [(0, 0), (1, 32), (32, 32), (33, 64)])
def test_a_block_counts_whole(n_tokens: int, n_cells: int) -> None:
    caps = Bench(session_type=Paged).session.caps
    assert caps.n_cells(n_tokens) == n_cells
    assert isinstance(caps, Capabilities)
    assert replace(caps, n_cell_block=1).n_cells(n_tokens) == n_tokens


def test_a_request_waits_while_its_block_is_another_ones() -> None:
    """Two sequences of 35 tokens hold all four blocks, of which a count of tokens would give a third one some."""
    bench = Bench(n_ctx=4 * BLOCK, session_type=Paged)
    answers = [
        bench.ask(complete(c * n, c, max_tokens=8, ignore_eos=True)) for c, n in (("a", 35), ("b", 35), ("c", 8))
    ]
    bench.run(*answers, max_steps=60)
    assert [a.last.finish_reason for a in answers] == ["length"] * 3
    assert isinstance(bench.session, Paged)
    assert bench.session.n_refused == 0


def test_who_is_put_out_of_a_step_does_not_keep_the_others_from_it() -> None:
    bench = Bench(session_type=Stingy)
    answers = [bench.ask(complete(c * 8, c, max_tokens=8, ignore_eos=True)) for c in "abcd"]
    bench.run(*answers, max_steps=60)
    assert [a.last.finish_reason for a in answers] == ["length"] * 4
