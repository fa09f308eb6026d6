"""The native engine's paged KV against a model of it: what is shared, what is refused, and that nothing leaks."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from numpy.typing import NDArray

from edge_rt.backends.base import Absent, LoadOptions, NoCellsError, SeqRows
from edge_rt.backends.native import NativeBackend, NativeSession
from edge_rt.backends.native_library import load_native
from edge_rt.errors import BackendStepError
from tests.tiny_models import TinyModel

if isinstance(NativeBackend().probe(), Absent):
    pytest.skip("the native engine is not here", allow_module_level=True)

BLOCK, N_BLOCKS, N_SEQS, N_VOCAB = 32, 7, 4, 64
N_CTX = BLOCK * N_BLOCKS
SEQS = st.integers(0, N_SEQS - 1)
LENGTHS = st.integers(0, N_CTX) | st.builds(  # and where blocks begin and end
    lambda block, apart: max(0, BLOCK * block + apart), st.integers(0, 3), st.sampled_from([-1, 0, 1])
)


def load(n_threads: int, n_ubatch: int, kv_type: str, n_ctx: int = N_CTX, n_seqs: int = N_SEQS) -> NativeSession:
    """Load a tiny model with random weights, the same each time."""
    with tempfile.TemporaryDirectory() as folder:
        file = TinyModel(n_vocab=N_VOCAB).write(Path(folder) / "m.gguf")
        options = LoadOptions(
            n_ctx=n_ctx, n_seq_max=n_seqs, n_batch=4096, n_ubatch=n_ubatch, n_threads=n_threads, kv_type=kv_type
        )
        return NativeBackend().load(file, options)


def n_blocks(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK)


@dataclass
class Sequence:
    ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass
class Saved:
    ids: list[int]
    state: NDArray[np.uint8]


class PagedKv(RuleBasedStateMachine):
    """Steps, copies, cuts and states of four sequences in a pool of seven blocks."""

    kv_type: ClassVar[str]
    _sessions: ClassVar[dict[str, tuple[NativeSession, NativeSession]]] = {}
    _expected: ClassVar[dict[tuple[str, tuple[int, ...]], bytes]] = {}
    saved = Bundle("saved")

    def __init__(self) -> None:
        super().__init__()
        if self.kv_type not in self._sessions:
            self._sessions[self.kv_type] = load(2, 24, self.kv_type), load(1, 512, self.kv_type, n_seqs=1)
        self.session, self.reference = self._sessions[self.kv_type]
        self.sequences = [Sequence() for _ in range(N_SEQS)]
        self.n_made = 0

    def teardown(self) -> None:
        for seq_id in range(N_SEQS):
            self.session.seq_trim(seq_id, 0)
        assert self.free_blocks() == N_BLOCKS

    def free_blocks(self) -> int:
        return int(load_native().en_free_blocks(self.session._opened()))

    def refs(self) -> Counter[int]:
        return Counter(block for sequence in self.sequences for block in sequence.blocks)

    def need(self, batch: list[tuple[int, list[int]]]) -> int:
        """Count the blocks of a batch as the engine does: each sequence that shares its last block takes a copy."""
        refs, total = self.refs(), 0
        for seq_id, ids in batch:
            sequence = self.sequences[seq_id]
            n_old = len(sequence.ids)
            total += n_blocks(n_old + len(ids)) - n_blocks(n_old)
            total += int(n_old % BLOCK != 0 and refs[sequence.blocks[-1]] > 1)
        return total

    def extend(self, seq_id: int, ids: list[int]) -> None:
        sequence = self.sequences[seq_id]
        if len(sequence.ids) % BLOCK and self.refs()[sequence.blocks[-1]] > 1:
            sequence.blocks.pop()
        sequence.ids += ids
        while len(sequence.blocks) < n_blocks(len(sequence.ids)):
            sequence.blocks.append(self.n_made)
            self.n_made += 1

    def logits_after(self, ids: list[int]) -> bytes:
        """Give the logits after these tokens, computed alone and at once."""
        key = self.kv_type, tuple(ids)
        if key not in self._expected:
            self.reference.seq_trim(0, 0)
            self._expected[key] = self.reference.decode([SeqRows(0, 0, ids, True)])[0].tobytes()
        return self._expected[key]

    def snapshot(self) -> list[bytes]:
        return [self.session.seq_save(seq_id).tobytes() for seq_id in range(N_SEQS)]

    @rule(
        lengths=st.dictionaries(SEQS, st.integers(1, 70) | st.sampled_from([31, 32, 33, 64]), min_size=1),
        token=st.integers(0, N_VOCAB - 1),
    )
    def decode(self, lengths: dict[int, int], token: int) -> None:
        batch = [(seq_id, [(token + i * i) % N_VOCAB for i in range(n)]) for seq_id, n in lengths.items()]
        rows = [SeqRows(seq_id, len(self.sequences[seq_id].ids), ids, True) for seq_id, ids in batch]
        too_long = any(len(self.sequences[seq_id].ids) + len(ids) > N_CTX for seq_id, ids in batch)
        if too_long or self.need(batch) > self.free_blocks():
            before = self.snapshot()
            with pytest.raises(NoCellsError):
                self.session.decode(rows)
            assert self.snapshot() == before
            return
        logits = [row.tobytes() for row in self.session.decode(rows)]
        for seq_id, ids in batch:
            self.extend(seq_id, ids)
        assert logits == [self.logits_after(self.sequences[seq_id].ids) for seq_id, _ in batch]

    @rule(seq_id=SEQS, gap=st.integers(1, 3), good=SEQS)
    def decode_rows_that_do_not_follow(self, seq_id: int, gap: int, good: int) -> None:
        rows = [
            SeqRows(good, len(self.sequences[good].ids), [1], True),
            SeqRows(seq_id, len(self.sequences[seq_id].ids) + (seq_id == good) + gap, [1], True),
        ]
        before = self.snapshot()
        with pytest.raises(BackendStepError):
            self.session.decode(rows)
        assert self.snapshot() == before

    @rule(src=SEQS, dst=SEQS, n=LENGTHS)
    def copy(self, src: int, dst: int, n: int) -> None:
        source, target = self.sequences[src], self.sequences[dst]
        if src == dst or target.ids or n > len(source.ids):
            with pytest.raises(BackendStepError):
                self.session.seq_copy(src, dst, n)
            return
        self.session.seq_copy(src, dst, n)
        target.ids, target.blocks = source.ids[:n], source.blocks[: n_blocks(n)]

    @rule(seq_id=SEQS, n=LENGTHS)
    def trim(self, seq_id: int, n: int) -> None:
        self.session.seq_trim(seq_id, n)
        sequence = self.sequences[seq_id]
        sequence.ids, sequence.blocks = sequence.ids[:n], sequence.blocks[: n_blocks(min(n, len(sequence.ids)))]

    @rule(target=saved, seq_id=SEQS)
    def save(self, seq_id: int) -> Saved:
        state = self.session.seq_save(seq_id)
        assert state.nbytes == self.session.seq_bytes(seq_id)
        return Saved(list(self.sequences[seq_id].ids), state)

    @rule(saved=consumes(saved), seq_id=SEQS)
    def load(self, saved: Saved, seq_id: int) -> None:
        if self.sequences[seq_id].ids or n_blocks(len(saved.ids)) > self.free_blocks():
            with pytest.raises(BackendStepError):
                self.session.seq_load(seq_id, saved.state)
            return
        self.session.seq_load(seq_id, saved.state)
        self.extend(seq_id, saved.ids)

    @rule(seq_id=SEQS, target_id=SEQS, cut=st.integers(0, 5))
    def save_and_load_in_two_parts(self, seq_id: int, target_id: int, cut: int) -> None:
        ids, middle = list(self.sequences[seq_id].ids), cut * BLOCK
        if middle > len(ids) or self.sequences[target_id].ids or n_blocks(len(ids)) > self.free_blocks():
            return
        parts = [self.session.seq_save(seq_id, 0, middle), self.session.seq_save(seq_id, middle)]
        n_head = self.session.seq_save(seq_id, 0, 0).nbytes
        whole = self.session.seq_save(seq_id)[n_head:].tobytes()
        assert b"".join(part[n_head:].tobytes() for part in parts) == whole
        for part in parts:
            self.session.seq_load(target_id, part)
        self.extend(target_id, ids)

    @rule(saved=consumes(saved), seq_id=SEQS, n_lost=st.integers(1, 5000))
    def load_broken(self, saved: Saved, seq_id: int, n_lost: int) -> None:
        with pytest.raises(BackendStepError):
            self.session.seq_load(seq_id, saved.state[: max(0, saved.state.nbytes - n_lost)])

    @invariant()
    def blocks_are_those_that_sequences_hold(self) -> None:
        assert self.free_blocks() == N_BLOCKS - len(self.refs())
        for seq_id, sequence in enumerate(self.sequences):
            assert load_native().en_seq_length(self.session._opened(), seq_id) == len(sequence.ids)


class PagedF16(PagedKv):
    kv_type = "f16"


class PagedInt8(PagedKv):
    kv_type = "q8_0"


_MANY = settings(max_examples=100, stateful_step_count=30)
TestPagedF16: Any = PagedF16.TestCase
TestPagedF16.settings = _MANY
TestPagedInt8: Any = PagedInt8.TestCase
TestPagedInt8.settings = _MANY


def test_state_of_another_kv_type_is_refused() -> None:
    ours, other = load(1, 16, "f16"), load(1, 16, "q8_0")
    try:
        ours.decode([SeqRows(0, 0, [1, 2, 3], False)])
        with pytest.raises(BackendStepError, match="type of KV"):
            other.seq_load(0, ours.seq_save(0))
        assert other.seq_bytes(0) == other.seq_bytes(1)
    finally:
        ours.close()
        other.close()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_kv_takes_what_the_estimate_says(tmp_path: Path, kv_type: str) -> None:
    file = TinyModel().write(tmp_path / "m.gguf")
    options = LoadOptions(n_ctx=N_CTX, n_seq_max=1, kv_type=kv_type)
    session = NativeBackend().load(file, options)
    try:
        empty = session.seq_bytes(0)
        session.decode([SeqRows(0, 0, [1] * N_CTX, False)])
        assert session.seq_bytes(0) - empty == NativeBackend().estimate(file, options).kv_bytes
    finally:
        session.close()


def test_the_engine_reserves_the_blocks_that_sequences_take() -> None:
    session = load(1, 64, "f16", n_ctx=4 * BLOCK)
    try:
        assert session.caps.n_cell_block == BLOCK
        session.decode([SeqRows(0, 0, [1] * 40, False), SeqRows(1, 0, [1] * 40, False)])
        with pytest.raises(NoCellsError):
            session.decode([SeqRows(2, 0, [1] * 8, False)])
    finally:
        session.close()
