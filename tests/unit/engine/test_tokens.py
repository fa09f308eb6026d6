"""TokenEngine on the null back end: nobody is lost, nobody sees another's text, nothing leaks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.errors import (
    BackendStepError,
    ContextLengthError,
    DeadlineError,
    EdgeRtError,
    InvalidRequestError,
    ShuttingDownError,
    UnsupportedFeatureError,
)
from edge_rt.types import GenerateRequest, Message, Sampling, Usage
from tests.unit.engine.null_engine import ROW_S, STEP_S, Answer, Bench, chat, complete


def test_answers_and_accounts_for_every_token() -> None:
    bench = Bench(max_draft=0)
    answer = bench.ask(chat("Grüße, 漢字 🙂"))
    bench.run(answer)
    assert answer.text == "Grüße, 漢字 🙂"
    n_bytes = len(answer.text.encode())
    usage, timings = answer.last.usage, answer.last.timings
    assert usage is not None
    assert timings is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (n_bytes + 2, n_bytes + 1)  # two roles, end of answer
    assert sum(len(c.token_ids) for c in answer.chunks) == n_bytes
    assert (timings.prefill_tokens, timings.decode_tokens) == (n_bytes + 2, n_bytes)
    assert timings.prefill_s == pytest.approx(STEP_S + (n_bytes + 2) * ROW_S)
    assert timings.decode_s == pytest.approx(n_bytes * (STEP_S + ROW_S))
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prefill_s)
    assert all(c.finish_reason is None for c in answer.chunks[:-1])
    assert answer.chunks[0].usage == Usage(prompt_tokens=n_bytes + 2, completion_tokens=0)
    assert all(c.usage is None for c in answer.chunks[1:-1])
    bench.assert_idle()


def test_characters_are_never_split_and_unary_equals_the_stream() -> None:
    bench = Bench()
    text = "é漢🙂" * 5
    streamed, unary = bench.ask(chat(text, "a")), bench.ask(chat(text, "b", stream=False))
    bench.run(streamed, unary)
    assert len(unary.chunks) == 1
    assert streamed.text == unary.text == text
    assert all("�" not in c.text for c in streamed.chunks)


def test_requests_join_between_steps_and_share_them() -> None:
    bench = Bench()
    first = bench.ask(chat("a" * 40, "a"))
    for _ in range(5):
        bench.engine.step()
    second = bench.ask(chat("b" * 40, "b"))
    bench.run(first, second)
    assert (first.text, second.text) == ("a" * 40, "b" * 40)
    assert max(len(batch) for batch in bench.session.batches) == 2


def test_a_long_prompt_does_not_stall_a_running_stream() -> None:
    bench = Bench(n_ctx=2048, n_batch=1024, max_stall_s=0.1)
    stream = bench.ask(complete("x", "a", max_tokens=60, ignore_eos=True))
    warm = bench.ask(complete("warm" * 10, "w", max_tokens=1))
    bench.run(warm)
    long = bench.ask(complete("long prompt " * 100, "b", max_tokens=1))
    bench.run(stream, long)
    mixed = [batch for batch in bench.session.batches if len(batch) > 1 and any(len(r.token_ids) > 20 for r in batch)]
    assert len(mixed) >= 10
    assert all(sum(len(r.token_ids) for r in batch) * ROW_S <= 0.1 + STEP_S for batch in mixed)


def test_max_tokens_and_a_full_context_end_with_length() -> None:
    bench = Bench(n_ctx=64)
    answer = bench.ask(chat("abcdef", max_tokens=3))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason) == ("abc", "length")
    answer = bench.ask(complete("x" * 60, ignore_eos=True))
    bench.run(answer)
    assert answer.last.finish_reason == "length"
    assert answer.last.usage is not None
    assert answer.last.usage.total_tokens == 64


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    bench = Bench(n_ctx=64)
    answer = bench.ask(complete("x" * 64))
    assert isinstance(answer.error, ContextLengthError)
    assert (answer.error.prompt_tokens, answer.error.n_ctx) == (64, 64)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (complete(""), InvalidRequestError),
        (GenerateRequest(id="r", model="null", prompt_token_ids=(1, 99999)), InvalidRequestError),
        (GenerateRequest(id="r", model="null", prompt_token_ids=()), InvalidRequestError),
    ],
    ids=["empty", "foreign-id", "no-ids"],
)
def test_bad_prompts_are_refused(request_: GenerateRequest, error: type[EdgeRtError]) -> None:
    bench = Bench()
    assert isinstance(bench.ask(request_).error, error)
    bench.assert_idle()


def test_a_model_without_a_template_says_so() -> None:
    bench = Bench()
    bench.session.vocab = dataclasses.replace(bench.session.vocab, chat_template=None)
    assert isinstance(bench.ask(chat("hello")).error, UnsupportedFeatureError)


def test_stop_strings_end_the_answer_across_tokens() -> None:
    bench = Bench()
    answer = bench.ask(chat("one two STOP three", stop=("STOP",)))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason, answer.last.stopped_by) == ("one two ", "stop", "STOP")
    answer = bench.ask(chat("one two", stop=("STOP",)))
    bench.run(answer)
    assert (answer.last.finish_reason, answer.last.stopped_by) == ("stop", "")


def test_cancel_stops_before_the_next_step() -> None:
    bench = Bench()
    answer = bench.ask(chat("a" * 50))
    for _ in range(5):
        bench.engine.step()
    n_batches = len(bench.session.batches)
    bench.engine.cancel("r")
    bench.engine.step()
    assert len(bench.session.batches) == n_batches
    assert not answer.is_over
    bench.assert_idle()
    assert bench.engine.stats().cancelled_total == 1


def test_a_waiting_request_can_be_cancelled_and_one_past_its_deadline_is_dropped() -> None:
    bench = Bench(n_seq_max=1)
    running = bench.ask(chat("a" * 30, "a"))
    bench.engine.step()
    late, gone = bench.ask(chat("b", "b", deadline_s=0.05)), bench.ask(chat("c", "c"))
    bench.engine.cancel("c")
    bench.run(running)
    assert isinstance(late.error, DeadlineError)
    assert gone.chunks == []
    bench.assert_idle()


def test_shared_prefix_is_computed_once_and_reported() -> None:
    bench = Bench()
    first = bench.ask(chat("a" * 100 + "1", "a"))
    bench.run(first)
    second = bench.ask(chat("a" * 100 + "2", "b"))
    bench.run(second)
    assert second.text == "a" * 100 + "2"
    assert second.last.usage is not None
    assert second.last.usage.cached_tokens == 101  # the role token and the common text


def test_a_prefix_is_copied_from_a_running_sequence() -> None:
    bench = Bench()
    first = bench.ask(chat("a" * 100 + "1", "a"))
    for _ in range(3):
        bench.engine.step()
    second = bench.ask(chat("a" * 100 + "2", "b"))
    bench.run(first, second)
    assert (first.text, second.text) == ("a" * 100 + "1", "a" * 100 + "2")
    assert second.last.usage is not None
    assert second.last.usage.cached_tokens == 101


def test_a_finished_conversation_leaves_the_cells_to_others_and_comes_back() -> None:
    bench = Bench()
    first = bench.ask(chat("a" * 100, "a", max_tokens=20))
    bench.run(first)
    other = bench.ask(chat("b" * 50, "b"))
    bench.engine.step()
    assert bench.session.cells_used() == 51 + 1
    assert bench.engine.stats().prefix_bytes > 0
    bench.run(other)
    again = bench.ask(chat("a" * 100, "c", max_tokens=30))
    bench.run(again)
    assert again.text == "a" * 30
    assert again.last.usage is not None
    assert again.last.usage.cached_tokens == 101


def test_a_saved_prefix_that_cannot_be_restored_is_computed_again() -> None:
    bench = Bench()
    bench.run(bench.ask(chat("a" * 100, "a", max_tokens=20)))
    bench.run(bench.ask(chat("b" * 50, "b")))
    bench.session.breaks_states = True
    again = bench.ask(chat("a" * 100, "c", max_tokens=20))
    bench.run(again)
    assert again.text == "a" * 20
    assert again.last.usage is not None
    assert again.last.usage.cached_tokens == 0


def test_when_cells_run_out_the_youngest_waits_and_is_computed_again() -> None:
    bench = Bench(n_ctx=128, n_seq_max=4)
    texts = [letter * 30 for letter in "abcd"]
    answers = [bench.ask(chat(text, text)) for text in texts]
    bench.run(*answers)
    assert [a.text for a in answers] == texts
    bench.assert_idle()


def test_growth_beyond_the_cells_preempts_and_loses_nothing() -> None:
    bench = Bench(n_ctx=200, n_seq_max=4)
    answers = [bench.ask(complete(c * 10, c, max_tokens=80, ignore_eos=True)) for c in "abcd"]
    bench.run(*answers)
    assert bench.engine.stats().preempted_total > 0
    for letter, answer in zip("abcd", answers, strict=True):
        lone = Bench(n_ctx=200)
        expected = lone.ask(complete(letter * 10, letter, max_tokens=80, ignore_eos=True))
        lone.run(expected)
        assert answer.text == expected.text


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    bench = Bench()
    bad = bench.ask(complete("x<|fail|>", "bad"))
    bench.run(bad)
    assert isinstance(bad.error, BackendStepError)
    good = bench.ask(chat("still here", "good"))
    bench.run(good)
    assert good.text == "still here"


def test_threads_that_cannot_be_had_fail_a_step_not_the_engine() -> None:
    bench = Bench()
    bench.session.breaks_threads = True
    bad = bench.ask(chat("hello", "bad"))
    bench.run(bad)
    assert isinstance(bad.error, BackendStepError)
    bench.session.breaks_threads = False
    good = bench.ask(chat("still here", "good"))
    bench.run(good)
    assert good.text == "still here"


def test_stop_lets_running_answers_finish_and_refuses_the_rest() -> None:
    bench = Bench(n_seq_max=1)
    running = bench.ask(chat("finish me", "a"))
    bench.engine.step()
    waiting = bench.ask(chat("too late", "b"))
    bench.engine.stop(drain_s=60.0)
    bench.engine.run()
    after = bench.ask(chat("much too late", "c"))
    assert running.text == "finish me"
    assert isinstance(waiting.error, ShuttingDownError)
    assert isinstance(after.error, ShuttingDownError)


def test_stop_ends_at_the_drain_time() -> None:
    bench = Bench()
    endless = bench.ask(complete("x", ignore_eos=True))
    bench.engine.step()
    begun_s = bench.clock()
    bench.engine.stop(drain_s=1.0)
    bench.engine.run()
    assert isinstance(endless.error, ShuttingDownError)
    assert bench.clock() - begun_s <= 1.0 + STEP_S + ROW_S
    bench.assert_idle()


def test_fast_tokens_share_a_chunk_and_the_first_never_waits() -> None:
    bench = Bench(stream_interval_s=0.05, max_draft=0)
    answer = bench.ask(chat("a" * 40))
    bench.run(answer)
    assert answer.text == "a" * 40
    assert len(answer.chunks[0].text) == 1
    assert 5 <= len(answer.chunks) <= 12


def test_the_first_tokens_come_with_signals() -> None:
    bench = Bench()
    answer = bench.ask(chat("abcdef", max_signals=4))
    bench.run(answer)
    signals = [signal for chunk in answer.chunks for signal in chunk.signals]
    assert len(signals) == 4
    assert all(signal.margin > 0.9 and signal.logprob <= 0 <= signal.entropy for signal in signals)


def test_logprobs_come_with_their_tokens_and_not_for_the_end() -> None:
    bench = Bench()
    answer = bench.ask(chat("abc", top_logprobs=2))
    bench.run(answer)
    logprobs = [p for c in answer.chunks for p in c.logprobs]
    assert [p.raw for p in logprobs] == [b"a", b"b", b"c"]
    assert all(len(p.top) == 2 and p.top[0][0] == p.token_id for p in logprobs)
    assert all(-0.01 < p.logprob <= 0 for p in logprobs)


def test_sampling_with_a_seed_does_not_depend_on_the_company() -> None:
    sampling = Sampling(temperature=8.0, seed=3)
    request = complete("abc", "s", max_tokens=30, ignore_eos=True, sampling=sampling)
    lone, busy = Bench(), Bench()
    alone = lone.ask(request)
    lone.run(alone)
    others = [busy.ask(complete(c, c, max_tokens=30, sampling=sampling)) for c in "xyz"]
    together = busy.ask(request)
    busy.run(together, *others)
    ids = [i for c in alone.chunks for i in c.token_ids]
    assert [i for c in together.chunks for i in c.token_ids] == ids
    assert len(set(ids)) > 5


def test_warm_up_leaves_no_trace() -> None:
    bench = Bench()
    bench.engine.warm_up()
    assert bench.session.cells_used() == 0
    answer = bench.ask(chat("hello"))
    bench.run(answer)
    assert answer.text == "hello"


actions = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 90), st.integers(1, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 12), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.integers(96, 256), st.integers(1, 5), st.integers(32, 128))
def test_whatever_happens_each_request_ends_once_with_its_own_answer(
    plan: list[tuple[str, int, int]], n_ctx: int, n_seq_max: int, n_batch: int
) -> None:
    bench = Bench(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch)
    asked: dict[str, tuple[str, int, Answer]] = {}
    cancelled: set[str] = set()
    for verb, number, size in plan:
        if verb == "ask":
            request_id = f"r{len(asked)}"
            text = f"{request_id}:" + "ab"[number % 2] * min(number, n_ctx // 2 - 8)
            asked[request_id] = (text, size, bench.ask(chat(text, request_id, max_tokens=size)))
        elif verb == "cancel" and (request_id := f"r{number}") in asked:
            bench.engine.cancel(request_id)
            cancelled.add(request_id)
        else:
            for _ in range(number):
                bench.engine.step()
    rest = [answer for request_id, (_, _, answer) in asked.items() if request_id not in cancelled]
    bench.engine.step()
    bench.run(*rest)
    for request_id, (text, size, answer) in asked.items():
        if request_id not in cancelled:
            assert answer.error is None
            assert answer.text == text[:size]
        else:
            assert text.startswith(answer.text)
    bench.assert_idle()
    assert bench.session.cells_used() <= n_ctx


def test_engine_seconds_are_the_loop_s_time_shared_by_rows() -> None:
    bench = Bench(max_draft=0)
    begun_s = bench.clock()
    answers = [bench.ask(chat("a" * 30, "a"))]
    for _ in range(5):
        bench.engine.step()
    answers += [bench.ask(chat("b" * 20, "b")), bench.ask(chat("c" * 10, "c"))]
    bench.run(*answers)
    timings = [answer.last.timings for answer in answers]
    total_s = sum(t.prefill_engine_s + t.decode_engine_s for t in timings if t is not None)
    assert total_s == pytest.approx(bench.clock() - begun_s)
    for one in timings:
        assert one is not None
        assert 0 < one.prefill_engine_s <= one.prefill_s + 1e-9
        assert 0 < one.decode_engine_s <= one.decode_s + 1e-9


def test_a_sleep_between_requests_is_nobody_s_time() -> None:
    bench = Bench(max_draft=0)
    bench.run(bench.ask(chat("a" * 5, "a")))
    bench.clock.advance(100.0)
    answer = bench.ask(chat("b" * 5, "b"))
    bench.run(answer)
    assert answer.last.timings is not None
    assert answer.last.timings.prefill_engine_s + answer.last.timings.decode_engine_s < 1.0


def test_advice_changes_threads_between_steps_and_no_answer() -> None:
    """Prefill and decode have limits of their own, which come and go while answers are computed."""

    def texts(advice: list[tuple[int | None, int | None]]) -> tuple[list[str], list[int]]:
        bench = Bench()
        answers = [bench.ask(chat("word " * 40, f"r{i}", max_tokens=20)) for i in range(3)]
        threads = []
        for step in range(10_000):
            if all(answer.is_over for answer in answers):
                break
            bench.engine.advise(*advice[step % len(advice)])
            bench.engine.step()
            threads.append(bench.session.n_threads)
        assert all(answer.error is None for answer in answers)
        return [answer.text for answer in answers], threads

    plain, _ = texts([(None, None)])
    for advice in ([(1, 1)], [(2, 1)], [(1, 2), (2, 1), (None, None)]):
        assert texts(advice)[0] == plain
    assert set(texts([(1, 1)])[1]) == {1}
    assert max(texts([(9, 9)])[1]) <= 2  # never more than the engine's own


def test_advised_threads_are_those_of_the_step_that_is_computed() -> None:
    bench = Bench()
    bench.engine.advise(2, 1)
    answer = bench.ask(chat("word " * 40, max_tokens=20))
    bench.engine.step()
    assert bench.session.n_threads == 2
    bench.run(answer)
    assert bench.session.n_threads == 1
    assert bench.engine.stats().n_threads == 1


def test_who_asks_hears_at_the_start_how_much_of_the_prompt_is_kept() -> None:
    bench = Bench()
    text = "word " * 20
    first = bench.ask(chat(text, "a", max_tokens=5, tells_start=True))
    bench.run(first)
    again = bench.ask(chat(text, "b", max_tokens=5, tells_start=True))
    silent = bench.ask(chat(text, "c", max_tokens=5))
    bench.run(again, silent)
    for answer, has_kept in ((first, False), (again, True)):
        start, *rest = answer.chunks
        assert start.is_start
        assert start.usage is not None
        assert (start.text, start.token_ids, start.usage.completion_tokens) == ("", (), 0)
        assert (start.usage.cached_tokens > 0) is has_kept
        assert not any(chunk.is_start for chunk in rest)
        assert rest[-1].usage is not None
        assert rest[-1].usage.cached_tokens == start.usage.cached_tokens
    assert not any(chunk.is_start for chunk in silent.chunks)
    assert first.text == again.text == silent.text


def test_an_answer_goes_on_with_its_beginning() -> None:
    bench = Bench()
    messages = (Message(role="user", content="Graz is a town"), Message(role="assistant", content="Graz is"))
    answer = bench.ask(GenerateRequest(id="a", model="m", messages=messages, continues=True))
    anew = bench.ask(GenerateRequest(id="b", model="m", messages=messages))
    bench.run(answer, anew)
    assert answer.text == " a town"
    assert anew.text != answer.text
    assert answer.last.usage is not None
    assert answer.last.usage.prompt_tokens == len("Graz is a town") + 2 + len("Graz is")
