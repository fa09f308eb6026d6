"""A head's guesses as the engine asks for them: of a fake session, then of the native engine with a random model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_rt.backends.base import LoadOptions
from edge_rt.backends.drafting import HeadAsk
from edge_rt.backends.native import NativeBackend
from edge_rt.catalog.draft_head import DraftHead, read_head
from edge_rt.engine.draft_model import Ask, Draft
from edge_rt.engine.head_drafts import HeadDrafts
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.types import GenerateRequest, Sampling
from tests.draft_heads import TinyHead, need_native
from tests.fakes import FakeClock
from tests.tiny_models import TinyModel
from tests.unit.engine.null_engine import Answer

HEAD = DraftHead(Path("small.gguf"), 32, (), ())


class Session:
    """Guesses a token's successors, where it has a state."""

    def __init__(self) -> None:
        self.heads: list[DraftHead] = []
        self.asked: list[HeadAsk] = []

    def load_head(self, head: DraftHead) -> None:
        self.heads.append(head)

    def head_bytes(self) -> int:
        return 7 * len(self.heads)

    def can_draft(self, seq_id: int) -> bool:
        return seq_id != 5

    def draft(self, asks: Sequence[HeadAsk]) -> list[tuple[list[int], list[float]]]:
        self.asked += asks
        return [([a.token_id + 1 + i for i in range(a.n_max)], [0.5] * a.n_max) for a in asks]


def ask(seq_id: int, token_ids: list[int], n_max: int) -> Ask:
    return Ask(seq_id=seq_id, token_ids=token_ids, n_max=n_max, min_chance=0.1)


def test_all_sequences_are_asked_for_in_one_call_behind_their_last_tokens() -> None:
    session = Session()
    drafts = HeadDrafts(session, HEAD)
    assert (session.heads, drafts.n_bytes, drafts.name) == ([HEAD], 7, "small.gguf")
    found = drafts.propose([ask(0, [1, 2], 2), ask(3, [9, 8, 7], 99)])
    assert session.asked == [HeadAsk(0, 2, 2, 0.1), HeadAsk(3, 7, drafts.max_draft, 0.1)]
    assert found[0] == Draft([3, 4], [0.5, 0.5])
    assert found[1].token_ids == list(range(8, 8 + drafts.max_draft))


def test_it_lacks_nothing_or_cannot_guess() -> None:
    drafts = HeadDrafts(Session(), HEAD)
    assert drafts.n_missing(ask(0, [1, 2], 2)) == 0
    assert drafts.n_missing(ask(5, [1, 2], 2)) is None
    assert drafts.compute(ask(0, [1, 2], 2), 4) == 0


@pytest.fixture
def files(tmp_path: Path) -> Path:
    need_native()
    return tmp_path


def answers(folder: Path, *, with_head: bool) -> tuple[list[list[int]], TokenEngine]:
    """Run greedy and drawn requests at once; each step of the clock is free, so that guessing pays."""
    model = TinyModel(n_vocab=64)
    file = model.write(folder / "m.gguf")
    path = TinyHead(model=model).write(folder / "head.gguf", file)
    session = NativeBackend().load(file, LoadOptions(n_ctx=512, n_seq_max=4, n_batch=64, n_threads=2))
    clock = FakeClock()
    decode = session.decode
    session.decode = lambda batch: (clock.advance(0.01), decode(batch))[1]  # type: ignore[method-assign]
    drafts = HeadDrafts(session, read_head(path, "tiny", file.path, file.header)) if with_head else None
    engine = TokenEngine(
        session,
        EngineSettings(stream_interval_s=0.0),
        ThreadChoice((1, 2)),
        clock=clock,
        entropy=lambda: 7,
        draft_model=drafts,
    )
    sinks = []
    for i in range(4):
        sampling = Sampling(temperature=0.5 * (i % 2), seed=i)
        request = GenerateRequest(
            id=str(i), model="tiny", prompt_token_ids=(5, 9, 1 + i), max_tokens=70, ignore_eos=True, sampling=sampling
        )
        sinks.append(Answer())
        engine.submit(request, sinks[-1])
    for _ in range(3000):
        if all(sink.is_over for sink in sinks):
            break
        engine.step()
    assert [sink.error for sink in sinks] == [None] * 4
    found = [[token for chunk in sink.chunks for token in chunk.token_ids] for sink in sinks]
    session.close()
    return found, engine


def test_answers_are_those_that_come_without_a_head(files: Path) -> None:
    plain, _ = answers(files, with_head=False)
    drafted, engine = answers(files, with_head=True)
    assert drafted == plain
    assert engine.stats().model_drafted_tokens_total > 0
