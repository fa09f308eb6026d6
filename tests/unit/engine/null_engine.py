"""A TokenEngine over the null back end, driven step by step by a test, and sinks that keep what they hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.null import NullSession
from edge_rt.engine.draft_model import DraftModel
from edge_rt.engine.prefix_disk import PrefixDisk
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.errors import BackendStepError, EdgeRtError
from edge_rt.types import Chunk, GenerateRequest, Message
from tests.fakes import FakeClock

STEP_S, ROW_S = 0.01, 0.001


class Answer:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.error: EdgeRtError | None = None

    def chunk(self, chunk: Chunk) -> None:
        assert not self.is_over
        self.chunks.append(chunk)

    def failed(self, error: EdgeRtError) -> None:
        assert not self.is_over
        self.error = error

    @property
    def is_over(self) -> bool:
        return self.error is not None or bool(self.chunks and self.chunks[-1].finish_reason)

    @property
    def text(self) -> str:
        return "".join(c.text for c in self.chunks)

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]


class Recorder(NullSession):
    """A null session that keeps the batches it was given."""

    batches: list[list[SeqRows]]
    breaks_states = False
    breaks_logits = False
    breaks_threads = False

    @property
    def kv(self) -> dict[int, list[int]]:
        return {seq_id: list(token_ids) for seq_id, token_ids in self._kv.items() if token_ids}

    def set_threads(self, n_threads: int) -> None:
        if self.breaks_threads:
            raise BackendStepError(reason="no more threads can be had")
        super().set_threads(n_threads)

    def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
        super().seq_load(seq_id, state[4:] if self.breaks_states else state)

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        self.batches = [*getattr(self, "batches", []), list(batch)]
        outputs = super().decode(batch)
        return [np.full_like(output, np.nan) for output in outputs] if self.breaks_logits else outputs


class Whole(Recorder):
    """Saves whole sequences only, as llama.cpp does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caps = replace(self.caps, can_save_ranges=False)

    def seq_save(self, seq_id: int, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        assert (start, end) == (0, None)
        return super().seq_save(seq_id)


class Bench:
    """An engine over a null session, and a clock that its steps move."""

    def __init__(
        self,
        *,
        n_ctx: int = 512,
        n_seq_max: int = 4,
        n_batch: int = 256,
        row_s: float = ROW_S,
        session_type: type[Recorder] = Recorder,
        disk: PrefixDisk | None = None,
        draft_model: Callable[[FakeClock], DraftModel] | None = None,
        **settings: float | bool,
    ) -> None:
        self.clock = FakeClock()
        file = ModelFile(model="null", variant=f"step_s={STEP_S},row_s={row_s}", path=Path("-"), quant="")
        options = LoadOptions(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
        self.session = session_type(file, options, sleep=self.clock.advance)
        settings = {"stream_interval_s": 0.0, **settings}
        self.engine = TokenEngine(
            self.session,
            EngineSettings(**settings),
            ThreadChoice((1, 2)),
            clock=self.clock,
            entropy=lambda: 7,
            disk=disk,
            draft_model=None if draft_model is None else draft_model(self.clock),
        )

    def ask(self, request: GenerateRequest) -> Answer:
        answer = Answer()
        self.engine.submit(request, answer)
        return answer

    def run(self, *answers: Answer, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if all(a.is_over for a in answers):
                return
            self.engine.step()
        pytest.fail("the engine did not finish")

    def assert_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.waiting, stats.running, stats.cells_used) == (0, 0, 0)


def chat(text: str, request_id: str = "r", **fields: object) -> GenerateRequest:
    message = Message(role="user", content=text)
    return GenerateRequest(id=request_id, model="null", messages=(message,), **fields)  # type: ignore[arg-type]


def complete(text: str, request_id: str = "r", **fields: object) -> GenerateRequest:
    return GenerateRequest(id=request_id, model="null", prompt=text, **fields)  # type: ignore[arg-type]
