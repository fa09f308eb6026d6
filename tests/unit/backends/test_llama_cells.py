"""Where llama.cpp's cells lie: what is decided, and that no answer shows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, NoCellsError, SeqRows
from edge_rt.backends.llama_cells import LayoutChoice, Parts, moves, n_runs, part_tokens
from edge_rt.backends.llama_cpu import LlamaCpuSession, open_session
from edge_rt.devices.base import known
from edge_rt.engine.settings import EngineSettings
from edge_rt.engine.start import start_engine
from edge_rt.errors import BackendStepError
from edge_rt.types import Beams, GenerateRequest
from tests import byte_model
from tests.unit.engine.null_engine import Answer

N_SEQ = 4
N_PART = 256
N_CTX = N_SEQ * N_PART


def test_a_part_is_what_llama_cpp_would_round_it_to() -> None:
    assert part_tokens(8192, 16) == 512
    assert part_tokens(8192, 24) == 256
    assert part_tokens(2048, 16) == 0
    assert part_tokens(8192, 1) == 0


def test_runs_are_counted() -> None:
    assert [n_runs(parts) for parts in ([], [3], [0, 1, 2], [0, 2, 3, 7])] == [0, 1, 1, 3]


@given(st.data())
def test_a_step_s_sequences_come_side_by_side_and_nobody_shares_a_part(data: st.DataObject) -> None:
    n_parts = data.draw(st.integers(1, 8))
    held = data.draw(st.permutations(range(n_parts)))[: data.draw(st.integers(1, n_parts))]
    part_of = {100 + i: part for i, part in enumerate(held)}
    asked = data.draw(st.sets(st.sampled_from(sorted(part_of)), min_size=1))
    new = moves(part_of, asked, n_parts)
    after = part_of | new
    assert len(set(after.values())) == len(after)
    assert set(after.values()) <= set(range(n_parts))
    assert n_runs(sorted(after[seq_id] for seq_id in asked)) == 1
    n_outside = min(
        sum(part_of[seq_id] not in range(first, first + len(asked)) for seq_id in asked)
        for first in range(n_parts - len(asked) + 1)
    )
    assert sum(new.get(seq_id, part_of[seq_id]) != part_of[seq_id] for seq_id in asked) >= n_outside
    assert all(part_of[seq_id] != part for seq_id, part in new.items())


def test_nothing_moves_for_sequences_that_come_together_once() -> None:
    parts = Parts(4)
    assert [parts.give(seq_id) for seq_id in (7, 8, 9)] == [0, 1, 2]
    parts.free(8)
    assert parts.to_join([7, 9]) == {}
    assert parts.to_join([7]) == {}
    assert parts.to_join([7, 9]) == {}
    assert parts.to_join([9, 7]) == {9: 1}
    parts.moved({9: 1})
    assert parts.to_join([9, 7]) == {}


def test_cells_go_to_the_pool_for_a_long_sequence_and_come_back_behind_many_short_steps() -> None:
    choice, is_in_parts, n_changes = LayoutChoice(N_PART), True, 0
    for longest in [200] * 50 + [N_PART + 1] + [N_PART] * 300 + [100] * 300:
        chosen = choice.in_parts(longest, 4, is_in_parts=is_in_parts)
        n_changes += chosen != is_in_parts
        is_in_parts = chosen
        assert not (longest > N_PART and is_in_parts)
    assert is_in_parts
    assert n_changes == 2


def test_a_few_streams_are_not_worth_a_new_layout() -> None:
    choice = LayoutChoice(N_PART)
    assert not any(choice.in_parts(10, 2, is_in_parts=False) for _ in range(1000))


def test_beams_share_the_pool_and_leave_it_behind_many_steps_without_one() -> None:
    choice = LayoutChoice(N_PART)
    assert not choice.in_parts(50, 4, is_in_parts=True, shares=True)
    assert not any(choice.in_parts(50, 4, is_in_parts=False) for _ in range(100))
    assert any(choice.in_parts(50, 4, is_in_parts=False) for _ in range(100))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LlamaCpuSession]:
    with_parts = open_model(tmp_path, N_SEQ)
    yield with_parts
    with_parts.close()


def open_model(folder: Path, n_seq_max: int, *, available_bytes: int = 2**30) -> LlamaCpuSession:
    if isinstance(absent := registry.get("llama_cpu").probe(), Absent):
        pytest.skip(absent.reason)
    path = folder / "m.gguf"
    if not path.exists():
        byte_model.write(path)
    file = ModelFile(model="m", variant="", path=path, quant="")
    options = LoadOptions(n_ctx=N_CTX, n_seq_max=n_seq_max, n_batch=1024, n_threads=1)
    have = known(available_bytes, "test")
    return open_session(file, options, is_interrupted=lambda: False, available=lambda: have)


def test_cells_stay_in_the_pool_where_memory_does_not_hold_them_twice(tmp_path: Path) -> None:
    session = open_model(tmp_path, N_SEQ, available_bytes=2**20)
    assert not session.is_in_parts
    session.decode([SeqRows(i, 0, [9], want_logits=True) for i in range(N_SEQ)])
    session.close()


def texts(n: int, n_tokens: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(5, 250, n_tokens).tolist() for _ in range(n)]


def lone(folder: Path, ids: list[int], *cuts: int) -> NDArray[np.float32]:
    """Compute a lone sequence, in a pool, in the same pieces: llama.cpp rounds those of many rows in another way."""
    session = open_model(folder, 1)
    assert not session.is_in_parts
    for start, end in pairwise((0, *cuts, len(ids))):
        [row] = session.decode([SeqRows(0, start, ids[start:end], want_logits=True)])
    row = row.copy()
    session.close()
    return row


def test_rows_are_those_of_a_lone_sequence_wherever_its_cells_lie(session: LlamaCpuSession, tmp_path: Path) -> None:
    own = texts(N_SEQ, 40)
    rows = session.decode([SeqRows(i, 0, ids[:-1], want_logits=True) for i, ids in enumerate(own)])
    assert session.is_in_parts
    assert len(rows) == N_SEQ
    session.seq_trim(1, 0)  # a hole, which the second step of the same three closes
    left = (3, 0, 2)  # in an order of their own
    for n_again in range(3):
        found = session.decode([SeqRows(i, 39, own[i][-1:], want_logits=True) for i in left])
        for i, row in zip(left, found, strict=True):
            np.testing.assert_allclose(row, lone(tmp_path, own[i], 39), rtol=1e-4, atol=1e-4, err_msg=f"{i}, {n_again}")
            session.seq_trim(i, 39)
    assert [session.seq_length(i) for i in range(N_SEQ)] == [39, 0, 39, 39]


def test_a_sequence_that_outgrows_its_part_takes_all_to_the_pool(session: LlamaCpuSession, tmp_path: Path) -> None:
    long, *short = [texts(1, 600)[0], *texts(3, 30)]
    session.decode([SeqRows(i, 0, ids[:-1], want_logits=False) for i, ids in enumerate(short, 1)])
    session.decode([SeqRows(0, 0, long[:250], want_logits=False)])
    assert session.is_in_parts
    session.decode([SeqRows(0, 250, long[250:-1], want_logits=False)])
    assert not session.is_in_parts
    batch = [SeqRows(i, len(ids) - 1, ids[-1:], want_logits=True) for i, ids in enumerate([long, *short])]
    for row, ids, cuts in zip(session.decode(batch), [long, *short], [(250, 599)] + [(29,)] * 3, strict=True):
        np.testing.assert_allclose(row, lone(tmp_path, ids, *cuts), rtol=1e-4, atol=1e-4)
    with pytest.raises(NoCellsError):
        session.decode([SeqRows(1, 30, long[:400], want_logits=False)])  # 690 are held
    session.seq_trim(0, 0)
    for _ in range(130):
        session.decode([SeqRows(i, 30, [9], want_logits=True) for i in (1, 2, 3)])
        for i in (1, 2, 3):
            session.seq_trim(i, 30)
    assert session.is_in_parts
    assert [session.seq_length(i) for i in range(N_SEQ)] == [0, 30, 30, 30]


def test_beams_share_their_prompt_also_where_each_would_outgrow_its_part(session: LlamaCpuSession) -> None:
    prompt, answer = tuple(texts(1, 220)[0]), Answer()  # four of 410 tokens are more than all cells
    engine = start_engine(session, EngineSettings(max_prefix_bytes=0), n_threads=1, idle_cores=lambda: None)
    beams = Beams(n_beams=N_SEQ)
    engine.submit(
        GenerateRequest(id="b", model="m", prompt_token_ids=prompt, max_tokens=190, ignore_eos=True, beams=beams),
        answer,
    )
    for _ in range(300):
        if answer.is_over:
            break
        engine.step()
    assert answer.error is None
    assert len(answer.last.token_ids) == 190


def test_what_is_saved_is_the_same_in_either_layout(session: LlamaCpuSession) -> None:
    [ids] = texts(1, 50)
    n_empty_bytes = session.seq_bytes(0)
    session.decode([SeqRows(2, 0, ids, want_logits=False)])  # a lone sequence has the first part
    session.decode([SeqRows(3, 0, ids[:10], want_logits=False), SeqRows(1, 0, ids, want_logits=False)])
    in_parts = [session.seq_save(i) for i in (1, 2, 3)]
    assert [len(state) for state in in_parts] == [session.seq_bytes(i) for i in (1, 2, 3)]
    for i in (1, 2, 3):
        session.seq_trim(i, 0)
    session.decode([SeqRows(0, 0, texts(1, 300)[0], want_logits=False)])
    assert not session.is_in_parts
    for i, state in zip((1, 2, 3), in_parts, strict=True):
        session.seq_load(i, state)
        again = session.seq_save(i)
        # llama.cpp writes the place of the sequence at each token's position, and does not read it.
        assert len(again) == len(state) == session.seq_bytes(i)
        np.testing.assert_array_equal(again[1024:], state[1024:])
    session.seq_trim(0, 0)
    assert [session.seq_length(i) for i in range(N_SEQ)] == [0, 50, 50, 10]
    assert session.seq_bytes(0) == n_empty_bytes


def test_what_is_saved_of_a_long_sequence_takes_all_to_the_pool(session: LlamaCpuSession, tmp_path: Path) -> None:
    long, short = texts(1, 600)[0], texts(2, 30)[1]
    session.decode([SeqRows(0, 0, long[:-1], want_logits=False)])
    state = session.seq_save(0)
    session.close()
    session = open_model(tmp_path, N_SEQ)  # as after a start: in parts
    session.decode([SeqRows(2, 0, short[:-1], want_logits=False)])
    assert session.is_in_parts
    with pytest.raises(BackendStepError, match="cannot be restored"):
        session.seq_load(3, state[: len(state) // 2])
    session.seq_load(1, state)
    assert not session.is_in_parts
    assert [session.seq_length(i) for i in range(N_SEQ)] == [0, 599, 29, 0]
    rows = session.decode([SeqRows(1, 599, long[-1:], want_logits=True), SeqRows(2, 29, short[-1:], want_logits=True)])
    for row, ids in zip(rows, (long, short), strict=True):
        np.testing.assert_allclose(row, lone(tmp_path, ids, len(ids) - 1), rtol=1e-4, atol=1e-4)
    session.close()


def test_copies_are_whole_sequences_in_parts(session: LlamaCpuSession, tmp_path: Path) -> None:
    [ids] = texts(1, 60)
    session.decode([SeqRows(0, 0, ids, want_logits=False)])
    session.seq_copy(0, 3, 41)
    assert session.is_in_parts
    assert [session.seq_length(i) for i in (0, 3)] == [60, 41]
    [row] = session.decode([SeqRows(3, 41, [77], want_logits=True)])
    np.testing.assert_allclose(row, lone(tmp_path, [*ids[:41], 77], 41), rtol=1e-4, atol=1e-4)
    session.seq_copy(0, 1, 0)
    assert session.seq_length(1) == 0


def test_a_broken_state_leaves_the_sequence_empty(session: LlamaCpuSession) -> None:
    [ids] = texts(1, 50)
    session.decode([SeqRows(0, 0, ids, want_logits=False)])
    state = session.seq_save(0)
    with pytest.raises(BackendStepError, match="cannot be restored"):
        session.seq_load(1, state[: len(state) // 2])
    assert [session.seq_length(i) for i in (0, 1)] == [50, 0]
    session.seq_load(1, state)
    assert session.seq_length(1) == 50
