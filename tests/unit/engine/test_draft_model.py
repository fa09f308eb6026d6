"""TokenEngine with a drafting model: the same answers, sooner where it is right, and hardly later where it is not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.engine.session_drafts import SessionDrafts
from edge_rt.types import Beams, GenerateRequest, ResponseFormat, Sampling
from tests.fakes import FakeClock
from tests.unit.engine.null_draft import NullDraft
from tests.unit.engine.null_engine import STEP_S, Answer, Bench, Recorder, chat, complete
from tests.unit.engine.test_tokens_speculation import Babbler, Drifting, ids, requests


def by_model(bench: Bench) -> tuple[int, int]:
    stats = bench.engine.stats()
    return stats.model_drafted_tokens_total, stats.model_accepted_tokens_total


def own_session(
    session_type: type[Recorder] = Recorder, *, n_ctx: int = 400, n_seq_max: int = 4, step_s: float = 0.0
) -> Callable[[FakeClock], SessionDrafts]:
    """Let a second session of the null model draft, which is right wherever the first one is greedy."""

    def make(clock: FakeClock) -> SessionDrafts:
        file = ModelFile(model="child", variant=f"step_s={step_s}", path=Path("-"), quant="")
        options = LoadOptions(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=64)
        return SessionDrafts(session_type(file, options, sleep=clock.advance), name="child", max_draft=16)

    return make


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=4),
    st.sampled_from([0.0, 0.0005, 0.004]),
    st.integers(1, 20),
    st.integers(40, 400),
    st.sampled_from([0.0, 0.001, 0.02]),
)
def test_drafts_of_a_session_give_the_answer_that_none_gives(
    wanted: list[GenerateRequest], row_s: float, max_draft: int, n_draft_ctx: int, draft_s: float
) -> None:
    """Text, tokens, log probabilities, reason and usage; seeded draws too, so each token drew once, in order."""
    wanted = [dataclasses.replace(request, id=f"r{i}") for i, request in enumerate(wanted)]
    plain = Bench(n_ctx=200, session_type=Babbler, row_s=row_s, max_draft=0)
    drafted = Bench(
        n_ctx=200,
        session_type=Babbler,
        row_s=row_s,
        max_draft=max_draft,
        draft_model=own_session(Babbler, n_ctx=n_draft_ctx, step_s=draft_s),
    )
    answers = [[bench.ask(request) for request in wanted] for bench in (plain, drafted)]
    for bench, asked in zip((plain, drafted), answers, strict=True):
        bench.run(*asked)
        bench.assert_idle()
    for alone, other in zip(*answers, strict=True):
        assert other.error is None
        assert ids(other) == ids(alone)
        assert other.text == alone.text
        assert [p for c in other.chunks for p in c.logprobs] == [p for c in alone.chunks for p in c.logprobs]
        assert other.last.finish_reason == alone.last.finish_reason
        assert other.last.usage == alone.last.usage


def test_a_session_of_the_same_model_is_nearly_always_right() -> None:
    bench = Bench(session_type=Babbler, n_ctx=2048, row_s=0.0, draft_model=own_session(Babbler, step_s=0.001))
    answers = [bench.ask(complete("abc" * 9 + str(i), str(i), max_tokens=300, ignore_eos=True)) for i in range(3)]
    bench.run(*answers)
    drafted, accepted = by_model(bench)
    assert accepted > 0.9 * drafted > 100
    timings = answers[0].last.timings
    assert timings is not None
    assert 0 < timings.accepted_tokens <= timings.drafted_tokens
    stats = bench.engine.stats()
    assert stats.draft_model == "child"
    assert 0.0 < stats.drafting_s_total < bench.clock() - 1000.0


def seconds(
    n_streams: int,
    acceptance: Callable[[int], float] | None,
    *,
    token_s: float,
    row_s: float = 0.0,
    sureness: float | None = 0.7,
    n_tokens: int = 600,
    n_rounds: int = 2,
) -> tuple[float, NullDraft | None]:
    """Measure by the fake clock how long some rounds of answers take; acceptance by the tokens given so far."""
    made: list[NullDraft] = []

    def make(clock: FakeClock) -> NullDraft:
        assert acceptance is not None
        made.append(
            NullDraft(
                clock,
                lambda: acceptance(bench.engine.stats().completion_tokens_total // n_streams),
                token_s=token_s,
                row_s=row_s,
                sureness=sureness,
            )
        )
        return made[0]

    bench = Bench(
        n_ctx=20_000,
        n_seq_max=max(4, n_streams),
        max_draft=0 if acceptance is None else 15,
        max_prefix_bytes=0,
        draft_model=None if acceptance is None else make,
    )
    for number in range(n_rounds):
        texts = [f"{number} {i} once upon a time" for i in range(n_streams)]
        bench.run(*(bench.ask(complete(t, t, max_tokens=n_tokens, ignore_eos=True)) for t in texts))
    return bench.clock() - 1000.0, made[0] if made else None


@pytest.mark.parametrize(
    ("n_streams", "token_s", "row_s", "at_least"),
    [(1, 0.001, 0.0, 1.6), (1, 0.001, 0.0005, 1.6), (4, 0.001, 0.0, 1.15)],
)
def test_a_good_draft_model_brings_answers_sooner(
    n_streams: int, token_s: float, row_s: float, at_least: float
) -> None:
    plain_s, _ = seconds(n_streams, None, token_s=0.0)
    drafted_s, _ = seconds(n_streams, lambda _: 0.8, token_s=token_s, row_s=row_s)
    assert plain_s / drafted_s > at_least


@settings(max_examples=25, deadline=None)
@given(
    n_streams=st.sampled_from([1, 2, 4]),
    token_s=st.sampled_from([0.0005, 0.002, STEP_S]),
    row_s=st.sampled_from([0.0, 0.0002, 0.002]),
    sureness=st.sampled_from([None, 0.4, 0.99]),
    periods=st.lists(st.integers(5, 300), min_size=1, max_size=6),
    phases=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=2),
)
def test_whatever_an_adversary_does_little_is_lost(
    n_streams: int,
    token_s: float,
    row_s: float,
    sureness: float | None,
    periods: list[int],
    phases: list[float],
) -> None:
    """What it accepts changes at any time, and what the draft model says of its own sureness tells nothing of it."""

    def acceptance(n_tokens: int) -> float:
        at = n_tokens % sum(periods)
        for number, period in enumerate(periods):
            if at < period:
                return phases[number % 2]
            at -= period
        return 0.0

    plain_s, _ = seconds(n_streams, None, token_s=0.0, n_tokens=800)
    drafted_s, _ = seconds(n_streams, acceptance, token_s=token_s, row_s=row_s, sureness=sureness, n_tokens=800)
    assert plain_s / drafted_s > 0.97


def test_eight_streams_are_not_drafted_for() -> None:
    _, draft = seconds(8, lambda _: 1.0, token_s=0.0001, n_tokens=50)
    assert draft is not None
    assert draft.asked == []


def test_all_streams_are_drafted_for_in_one_go() -> None:
    _, draft = seconds(4, lambda _: 1.0, token_s=0.0005)
    assert draft is not None
    assert max(len(asks) for asks in draft.asked) == 4


def test_words_of_its_own_go_before_a_model_that_takes_time() -> None:
    """A text that is copied is guessed for nothing."""
    text = "All work and no play makes Jack a dull boy. "
    bench = Bench(n_ctx=2048, draft_model=lambda clock: NullDraft(clock, lambda: 1.0, token_s=0.004))
    answer = bench.ask(chat(text * 12))
    bench.run(answer)
    assert answer.text == text * 12
    drafted, _ = by_model(bench)
    assert drafted < 0.1 * bench.engine.stats().drafted_tokens_total


def test_a_draft_model_that_fails_is_left_out_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    made: list[NullDraft] = []

    def make(clock: FakeClock) -> NullDraft:
        made.append(NullDraft(clock, lambda: 1.0))
        return made[0]

    bench = Bench(n_ctx=2048, draft_model=make)
    answers = [bench.ask(complete(text, text, max_tokens=200, ignore_eos=True)) for text in ("one", "two")]
    while by_model(bench)[0] < 20:
        bench.engine.step()
    made[0].fails = True
    with caplog.at_level(logging.WARNING):
        bench.run(*answers)
    assert [answer.error for answer in answers] == [None, None]
    assert [r.message for r in caplog.records if "null-draft" in r.message] == [
        "the draft model null-draft failed; answers go on without its guesses: "
        + str(next(iter([r.args[1] for r in caplog.records if r.args and "null-draft" in r.message])))
    ]
    assert made[0].is_closed
    assert bench.engine.stats().draft_bytes == 0
    lone = Bench(n_ctx=2048, max_draft=0)
    alone = [lone.ask(complete(text, text, max_tokens=200, ignore_eos=True)) for text in ("one", "two")]
    lone.run(*alone)
    assert [ids(answer) for answer in answers] == [ids(answer) for answer in alone]


def test_a_stopped_engine_closes_its_draft_model() -> None:
    made: list[NullDraft] = []

    def make(clock: FakeClock) -> NullDraft:
        made.append(NullDraft(clock))
        return made[0]

    bench = Bench(draft_model=make)
    bench.engine.stop(0.0)
    while bench.engine.step():
        pass
    assert made[0].is_closed


def drafted_for(request: GenerateRequest, session_type: type[Recorder] = Recorder) -> tuple[Answer, Bench, NullDraft]:
    made: list[NullDraft] = []

    def make(clock: FakeClock) -> NullDraft:
        made.append(NullDraft(clock, lambda: 1.0, token_s=0.0005))
        return made[0]

    bench = Bench(n_ctx=2048, session_type=session_type, draft_model=make)
    answer = bench.ask(request)
    bench.run(answer)
    return answer, bench, made[0]


@pytest.mark.parametrize(
    "fields",
    [{"max_draft": 0}, {"beams": Beams(n_beams=3)}, {"max_tokens": 1}],
    ids=["off", "beams", "one token"],
)
def test_some_requests_are_not_drafted_for(fields: dict[str, object]) -> None:
    _, _, draft = drafted_for(complete("once", **{"max_tokens": 60, "ignore_eos": True, **fields}))
    assert draft.asked == []


def test_where_logits_depend_on_the_batch_a_repeatable_answer_is_not_drafted_for() -> None:
    _, _, draft = drafted_for(complete("once", max_tokens=60, ignore_eos=True), Drifting)
    assert draft.asked == []
    asked_for = complete("once", max_tokens=60, ignore_eos=True, max_draft=8)
    _, bench, _ = drafted_for(asked_for, Drifting)
    assert by_model(bench)[1] > 0


def test_no_more_is_guessed_than_may_come() -> None:
    answer, _, draft = drafted_for(complete("once", max_tokens=40, ignore_eos=True))
    assert len(ids(answer)) == 40
    assert draft.asked
    for asks in draft.asked:
        for n_tokens, n_max in asks:
            assert n_tokens - 4 + n_max < 40


def test_a_session_drafts_under_the_answers_form_and_bias() -> None:
    pytest.importorskip("llguidance")
    form = ResponseFormat(kind="regex", text="([a-z ]{3}[xy]){40}")
    request = complete("once", max_tokens=300, response_format=form, sampling=Sampling(logit_bias={ord("y"): 3.0}))
    plain = Bench(n_ctx=2048, max_draft=0)
    alone = plain.ask(request)
    plain.run(alone)
    bench = Bench(n_ctx=2048, row_s=0.0, draft_model=own_session(n_ctx=600, step_s=0.0005))
    answer = bench.ask(request)
    bench.run(answer)
    assert answer.text == alone.text
    assert len(answer.text) == 160
    assert answer.text.count("y") >= 40
    drafted, accepted = by_model(bench)
    assert accepted > 0.9 * drafted > 20


def test_a_prompt_that_costs_more_to_read_than_can_be_won_is_not_read() -> None:
    made: list[NullDraft] = []

    def make(clock: FakeClock) -> NullDraft:
        made.append(NullDraft(clock, lambda: 1.0, row_s=0.01))
        return made[0]

    bench = Bench(n_ctx=4096, n_batch=512, draft_model=make)
    answer = bench.ask(complete("x" * 2000, max_tokens=100, ignore_eos=True))
    bench.run(answer)
    assert made[0].n_computed <= 64  # a part, before it is known what a row takes


def test_a_long_prompt_is_read_in_parts_that_hold_up_nobody_for_long() -> None:
    made: list[NullDraft] = []

    def make(clock: FakeClock) -> NullDraft:
        made.append(NullDraft(clock, lambda: 1.0, row_s=0.00003))
        return made[0]

    bench = Bench(n_ctx=4096, n_batch=512, max_stall_s=0.02, draft_model=make)
    answer = bench.ask(complete("x" * 1500, max_tokens=400, ignore_eos=True))
    longest_s = 0.0
    while not answer.is_over:
        begun_s, has_begun = bench.clock(), bool(answer.chunks)
        bench.engine.step()
        if has_begun:
            longest_s = max(longest_s, bench.clock() - begun_s)
    assert made[0].n_computed >= 1480
    assert by_model(bench)[1] > 100
    assert longest_s < 0.06
