"""The logprobs of a prompt's own tokens."""

from __future__ import annotations

import math

import pytest

from edge_rt.types import TokenLogprob
from tests.unit.engine.null_engine import Answer, Bench, chat, complete


def scored(answer: Answer) -> list[TokenLogprob]:
    return [token for chunk in answer.chunks for token in chunk.prompt_logprobs]


def expected(bench: Bench, prompt: bytes) -> list[float]:
    """What the null model's softmax says: one token has a logit of 16, all others 0."""
    total = math.log(math.exp(16.0) + bench.session.caps.n_vocab - 1)
    likely = []
    for i in range(1, len(prompt)):
        one = bench.ask(complete(prompt[:i].decode(), f"{i}", max_tokens=1, ignore_eos=True))
        bench.run(one)
        likely.append((16.0 if one.last.token_ids[0] == prompt[i] else 0.0) - total)
    return likely


@pytest.mark.parametrize("n", [1, 2, 33, 65, 100])
def test_each_token_is_scored_after_those_before_it(n: int) -> None:
    bench = Bench()
    text = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it w"[:n]
    answer = bench.ask(complete(text, prompt_logprobs=1, max_tokens=2))
    bench.run(answer)
    tokens = scored(answer)
    assert bytes(token.token_id for token in tokens) == text.encode()
    assert (tokens[0].logprob, tokens[0].top) == (0.0, ())
    assert [token.logprob for token in tokens[1:]] == pytest.approx(expected(bench, text.encode()), abs=1e-5)
    assert all(len(token.top) == 1 and token.top[0][2] > -0.01 for token in tokens[1:])
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == 2
    bench.assert_idle()


def test_nothing_need_be_answered() -> None:
    bench = Bench()
    answer = bench.ask(complete("abc", prompt_logprobs=0, max_tokens=0))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason, len(scored(answer))) == ("", "length", 3)
    assert answer.last.usage is not None
    assert (answer.last.usage.prompt_tokens, answer.last.usage.completion_tokens) == (3, 0)
    assert answer.last.timings is not None
    assert answer.last.timings.decode_tokens == 0


def test_a_kept_prefix_is_computed_again_because_it_has_no_logits() -> None:
    bench = Bench()
    first = bench.ask(complete("the same prompt, twice over", "a", max_tokens=1))
    bench.run(first)
    answer = bench.ask(complete("the same prompt, twice over", "b", prompt_logprobs=0, max_tokens=1))
    bench.run(answer)
    assert len(scored(answer)) == 27
    assert answer.last.usage is not None
    assert answer.last.usage.cached_tokens == 0


def test_no_step_asks_for_more_logits_than_are_provided_for() -> None:
    bench = Bench(n_ctx=2048, n_seq_max=8)
    answers = [bench.ask(complete(f"{i}" * 100, f"{i}", prompt_logprobs=0, max_tokens=1)) for i in range(8)]
    bench.run(*answers)
    asked = [[len(rows.token_ids) for rows in batch if rows.want_all] for batch in bench.session.batches]
    assert max(map(sum, asked)) == 128
    assert max(map(max, filter(None, asked))) <= 32
    assert [len(scored(answer)) for answer in answers] == [100] * 8


def test_a_preempted_prompt_is_scored_once() -> None:
    bench = Bench(n_ctx=128)
    first = bench.ask(chat("x" * 50, "a", max_tokens=50))
    second = bench.ask(complete("y" * 40, "b", prompt_logprobs=0, max_tokens=60, ignore_eos=True))
    bench.run(first, second)
    assert bench.engine.stats().preempted_total > 0
    assert len(scored(second)) == 40
    assert second.last.usage is not None
    assert second.last.usage.completion_tokens == 60


def test_others_stream_beside_it() -> None:
    bench = Bench()
    alone = bench.ask(chat("word for word", "a"))
    bench.run(alone)
    beside = [
        bench.ask(chat("word for word", "b")),
        bench.ask(complete("q" * 90, "c", prompt_logprobs=2, max_tokens=1)),
    ]
    bench.run(*beside)
    assert beside[0].text == alone.text == "word for word"
    assert len(scored(beside[1])) == 90
