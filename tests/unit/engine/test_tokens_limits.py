"""TokenEngine where its numbers end: the last cell, the last token, fewer rows than streams, one place."""

from __future__ import annotations

import pytest

from edge_rt.errors import BackendStepError, DeadlineError
from edge_rt.types import Sampling, TokenLogprob
from tests.unit.engine.null_engine import Answer, Bench, chat, complete


def logprobs(answer: Answer) -> list[TokenLogprob]:
    return [entry for chunk in answer.chunks for entry in chunk.logprobs]


def n_cached(answer: Answer) -> int:
    assert answer.last.usage is not None
    return answer.last.usage.cached_tokens


def test_a_prompt_that_leaves_one_cell_gets_one_token() -> None:
    bench = Bench(n_ctx=64)
    answer = bench.ask(complete("x" * 63, ignore_eos=True))
    bench.run(answer)
    assert answer.last.finish_reason == "length"
    assert answer.last.usage is not None
    assert (answer.last.usage.prompt_tokens, answer.last.usage.completion_tokens) == (63, 1)
    bench.assert_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_of_one_token(stream: bool) -> None:
    bench = Bench()
    answer = bench.ask(chat("abc", max_tokens=1, stream=stream))
    bench.run(answer)
    (only,) = answer.chunks
    assert (only.text, only.token_ids, only.finish_reason) == ("a", (97,), "length")
    assert only.timings is not None
    assert (only.timings.decode_tokens, only.timings.decode_tps, only.timings.tpot_s) == (0, None, None)


def test_an_end_of_answer_at_the_last_token_allowed_is_a_stop() -> None:
    bench = Bench()
    answer = bench.ask(chat("abc", max_tokens=4))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason) == ("abc", "stop")
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == 4


def test_a_stop_string_that_ends_at_the_last_token_allowed_is_a_stop() -> None:
    bench = Bench()
    answer = bench.ask(chat("ab STOP more", max_tokens=7, stop=("STOP",)))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason) == ("ab ", "stop")


@pytest.mark.parametrize(("max_tokens", "reason"), [(None, "stop"), (5, "length")], ids=["end", "cut"])
def test_the_beginning_of_a_stop_string_at_the_end_of_an_answer_is_sent(max_tokens: int | None, reason: str) -> None:
    bench = Bench()
    answer = bench.ask(chat("abcST", max_tokens=max_tokens, stop=("STOP",)))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason) == ("abcST", reason)


def test_logprobs_cover_every_token_sent_those_of_a_stop_string_too() -> None:
    bench = Bench()
    answer = bench.ask(chat("ab STOP", top_logprobs=0, stop=("STOP",)))
    bench.run(answer)
    assert answer.text == "ab "
    assert b"".join(entry.raw for entry in logprobs(answer)) == b"ab STOP"
    assert [entry.token_id for entry in logprobs(answer)] == [i for c in answer.chunks for i in c.token_ids]
    assert all(entry.top == () for entry in logprobs(answer))


def test_a_character_cut_by_max_tokens_becomes_one_replacement() -> None:
    bench = Bench()
    answer = bench.ask(chat("é漢", max_tokens=4))
    bench.run(answer)
    assert answer.text == "é\N{REPLACEMENT CHARACTER}"


def test_fewer_rows_than_streams_serve_everybody_in_turn() -> None:
    bench = Bench(n_ctx=2048, n_seq_max=9, n_batch=4)
    texts = [f"{i} stream" for i in range(9)]
    answers = [bench.ask(chat(text, text)) for text in texts]
    bench.run(*answers)
    assert [answer.text for answer in answers] == texts
    assert max(sum(len(rows.token_ids) for rows in batch) for batch in bench.session.batches) <= 4


def test_one_place_serves_one_after_the_other() -> None:
    bench = Bench(n_seq_max=1)
    texts = [letter * 40 for letter in "abc"]
    answers = [bench.ask(chat(text, text)) for text in texts]
    bench.run(*answers)
    assert [answer.text for answer in answers] == texts
    assert all(len(batch) == 1 for batch in bench.session.batches)


def test_a_prompt_cancelled_half_way_is_taken_up_where_it_was() -> None:
    bench = Bench(n_ctx=1024, n_batch=64)
    text = "abcdefgh" * 50
    gone = bench.ask(chat(text, "gone"))
    for _ in range(3):
        bench.engine.step()
    bench.engine.cancel("gone")
    again = bench.ask(chat(text, "again"))
    bench.run(again)
    assert gone.chunks == []
    assert again.text == text
    assert n_cached(again) == 3 * 64


def test_what_a_failed_step_left_in_the_kv_is_not_used_again() -> None:
    bench = Bench()
    before = bench.ask(complete("abc" * 30, "before", max_tokens=8))
    bench.run(before)
    failed = bench.ask(complete("abc" * 30 + "xyz<|fail|>", "failed"))
    bench.run(failed)
    assert isinstance(failed.error, BackendStepError)
    again = bench.ask(complete("abc" * 30, "again", max_tokens=8))
    bench.run(again)
    assert again.text == before.text
    bench.assert_idle()


def test_a_kv_that_gives_no_numbers_is_not_used_again() -> None:
    bench = Bench()
    bench.session.breaks_logits = True
    broken = bench.ask(chat("a" * 100, "broken"))
    bench.run(broken)
    assert isinstance(broken.error, BackendStepError)
    bench.session.breaks_logits = False
    again = bench.ask(chat("a" * 100, "again"))
    bench.run(again)
    assert again.text == "a" * 100
    assert n_cached(again) == 0


def test_preemption_changes_no_choice_of_a_seeded_request_with_penalties() -> None:
    sampling = Sampling(
        temperature=8.0, seed=3, repeat_penalty=1.3, repeat_last_n=16, presence_penalty=1.0, frequency_penalty=0.5
    )

    def ids(answer: Answer) -> list[int]:
        return [i for chunk in answer.chunks for i in chunk.token_ids]

    def ask(bench: Bench, name: str) -> Answer:
        return bench.ask(complete(name * 10, name, max_tokens=80, ignore_eos=True, sampling=sampling))

    crowded = Bench(n_ctx=200, n_seq_max=4)
    together = [ask(crowded, name) for name in "abcd"]
    crowded.run(*together)
    assert crowded.engine.stats().preempted_total > 0
    for name, answer in zip("abcd", together, strict=True):
        lone = Bench(n_ctx=200)
        alone = ask(lone, name)
        lone.run(alone)
        assert ids(answer) == ids(alone)
        assert answer.last.usage == alone.last.usage


def test_a_deadline_counts_until_the_first_token_only() -> None:
    bench = Bench(n_seq_max=1)
    begun = bench.ask(chat("a" * 50, "a", deadline_s=0.2))
    waiting = bench.ask(chat("b", "b", deadline_s=0.2))
    bench.run(begun, waiting)
    assert begun.text == "a" * 50
    assert isinstance(waiting.error, DeadlineError)
    assert waiting.error.deadline_s == 0.2
