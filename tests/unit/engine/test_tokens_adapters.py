"""Requests with adapters in the step loop: whose turn it is, and whose rows are shared."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.types import Adapter, AdapterFile, Beams
from tests.fakes import FakeClock
from tests.unit.engine.null_engine import Answer, Recorder, complete

ONE, TWO = (Adapter(name="one"),), (Adapter(name="two", scale=0.5),)


class Bench:
    def __init__(self, n_ctx: int = 512) -> None:
        files = tuple(AdapterFile(name=name, path="-") for name in ("one", "two"))
        clock = FakeClock()
        self.session = Recorder(
            ModelFile(model="null", variant="step_s=0.01,row_s=0.001", path=Path("-"), quant=""),
            LoadOptions(n_ctx=n_ctx, n_seq_max=4, n_batch=64, adapters=files),
            sleep=clock.advance,
        )
        self.engine = TokenEngine(
            self.session, EngineSettings(stream_interval_s=0.0), ThreadChoice((1,)), clock=clock, entropy=lambda: 7
        )

    def ask(self, text: str, request_id: str, adapters: tuple[Adapter, ...], **more: object) -> Answer:
        answer = Answer()
        self.engine.submit(complete(text, request_id, adapters=adapters, ignore_eos=True, **more), answer)
        return answer

    def run(self, *answers: Answer) -> None:
        for _ in range(3000):
            if all(answer.is_over for answer in answers):
                return
            self.engine.step()
        raise AssertionError("the engine did not finish")


def alone(text: str, adapters: tuple[Adapter, ...], n: int) -> str:
    bench = Bench()
    answer = bench.ask(text, "r", adapters, max_tokens=n)
    bench.run(answer)
    return answer.text


cases = st.lists(
    st.tuples(
        st.text("ab", min_size=1, max_size=50),
        st.sampled_from([(), ONE, TWO, ONE + TWO]),
        st.integers(1, 12),
        st.integers(0, 15),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(cases, st.sampled_from([150, 512]))
def test_in_any_company_the_answers_are_those_of_lone_runs(
    asked: list[tuple[str, tuple[Adapter, ...], int, int]], n_ctx: int
) -> None:
    bench = Bench(n_ctx)
    answers: dict[int, Answer] = {}
    for step in range(3000):
        for i, (text, adapters, n, at) in enumerate(asked):
            if step == at:
                answers[i] = bench.ask(text, f"{i}", adapters, max_tokens=n)
        bench.engine.step()
        if step > 15 and all(answer.is_over for answer in answers.values()):
            break
    for i, (text, adapters, n, _) in enumerate(asked):
        assert answers[i].text == alone(text, adapters, n)
    assert bench.engine.stats().cells_used == 0


def test_sets_take_turns_step_by_step() -> None:
    bench = Bench()
    answers = [bench.ask("abc", f"{i}", each, max_tokens=20) for i, each in enumerate([(), ONE, TWO, ONE])]
    bench.run(*answers)
    decodes = [batch for batch in bench.session.batches if all(len(rows.token_ids) == 1 for rows in batch)]
    sizes = [len(batch) for batch in decodes[:9]]
    assert sorted(sizes) == [1] * 6 + [2] * 3  # those of one set share a step


def test_a_prompt_holds_up_streams_of_other_sets_no_longer_than_those_of_its_own() -> None:
    bench = Bench()
    stream = bench.ask("abc", "a", (), max_tokens=200)
    for _ in range(5):
        bench.engine.step()
    long = bench.ask("x" * 250, "b", ONE, max_tokens=1)
    before = len(bench.session.batches)
    bench.run(long)
    batches = bench.session.batches[before:]
    own = [i for i, batch in enumerate(batches) if any(len(rows.token_ids) > 1 for rows in batch)]
    assert all(b - a == 2 for a, b in pairwise(own))  # the stream's step in between
    assert not stream.is_over


def test_rows_of_other_adapters_are_not_begun_with() -> None:
    bench = Bench()
    text = "the same beginning " * 5
    first = bench.ask(text, "a", ONE, max_tokens=1)
    bench.run(first)
    for adapters, is_known in ((ONE, True), (TWO, False), ((), False)):
        again = bench.ask(text, "b", adapters, max_tokens=1)
        bench.run(again)
        assert again.last.usage is not None
        assert (again.last.usage.cached_tokens > 0) == is_known


def test_beams_may_have_adapters() -> None:
    bench = Bench()
    answers = [
        bench.ask("abc", "a", ONE, max_tokens=4, beams=Beams(n_beams=2)),
        bench.ask("abc", "b", TWO, max_tokens=4),
    ]
    bench.run(*answers)
    assert answers[0].last.text == alone("abc", ONE, 4)
    assert answers[1].text == alone("abc", TWO, 4)


def test_the_session_is_told_only_of_changes() -> None:
    told: list[int] = []

    class Told(Recorder):
        def set_adapters(self, adapters: object) -> None:
            told.append(len(adapters))  # type: ignore[arg-type]
            super().set_adapters(adapters)  # type: ignore[arg-type]

    bench = Bench()
    bench.session.__class__ = Told
    bench.run(bench.ask("abc", "a", (), max_tokens=5))
    assert told == []
    bench.run(bench.ask("abc", "b", ONE, max_tokens=5))
    assert told == [1]
    assert isinstance(bench.session.batches[0][0], SeqRows)


def test_sets_that_nobody_asks_for_any_more_are_forgotten() -> None:
    bench = Bench()
    for i in range(20):
        bench.run(bench.ask("abc", f"r{i}", (Adapter(name="one", scale=i + 1.0),), max_tokens=2))
    assert len(bench.engine._adapters._served) == 1
