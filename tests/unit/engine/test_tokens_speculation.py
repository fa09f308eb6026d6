"""TokenEngine with guesses: the same answers as without, in fewer steps, at nobody's cost."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.backends.base import NoCellsError, SeqRows
from edge_rt.types import GenerateRequest, Sampling
from tests.unit.engine.null_engine import Answer, Bench, Recorder, chat, complete

_LETTERS = np.frombuffer(b"abcd .", dtype=np.uint8)


def _noise(context: Sequence[int], size: int) -> NDArray[np.float32]:
    digest = hashlib.blake2b(np.asarray(context, dtype=np.int32).tobytes(), digest_size=size).digest()
    return np.frombuffer(digest, dtype=np.uint8).astype(np.float32) / 255


class Babbler(Recorder):
    """Writes few letters: mostly as the last two tokens say, so guesses are often right; but every token before counts
    a little, so they are as often wrong, and a token too many or too few in the KV changes the answer."""

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        before = {rows.seq_id: self.kv.get(rows.seq_id, []) for rows in batch}
        outputs = super().decode(batch)
        asking = [rows for rows in batch if rows.want_all or rows.want_logits]
        for rows, output in zip(asking, outputs, strict=True):
            held = [*before[rows.seq_id], *rows.token_ids]
            n = len(held) - len(rows.token_ids) + 1
            if rows.want_all:
                output[:] = [self._babble(held[:end]) for end in range(n, len(held) + 1)]
            else:
                output[:] = self._babble(held)
        return outputs

    def _babble(self, context: list[int]) -> NDArray[np.float32]:
        logits = np.full(self.caps.n_vocab, -8.0, dtype=np.float32)
        logits[256:] = -np.inf  # control tokens, some of which end the process
        logits[_LETTERS] = 6 * _noise(context[-2:], len(_LETTERS)) + 2 * _noise(context, len(_LETTERS))
        logits[self.vocab.eos_id] = 6.5 * _noise(context, 1)[0]
        return logits


class Paged(Babbler):
    """Gives out cells in blocks of 32, so the pool may be full before its cells are."""

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        n_cells = {seq_id: len(token_ids) for seq_id, token_ids in self.kv.items()}
        for rows in batch:
            n_cells[rows.seq_id] = n_cells.get(rows.seq_id, 0) + len(rows.token_ids)
        if sum(-(-n // 32) for n in n_cells.values()) * 32 > self.caps.n_ctx:
            raise NoCellsError
        return super().decode(batch)


class Drifting(Recorder):
    """A back end whose logits depend on the batch a little, as llama.cpp's do."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.caps = dataclasses.replace(self.caps, is_batch_invariant=False)


def ids(answer: Answer) -> list[int]:
    return [i for chunk in answer.chunks for i in chunk.token_ids]


def n_steps(bench: Bench) -> int:
    return bench.engine.stats().steps_total


def guessed(bench: Bench) -> tuple[int, int]:
    stats = bench.engine.stats()
    return stats.drafted_tokens_total, stats.accepted_tokens_total


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repeat_penalty=st.sampled_from([1.0, 1.2]),
    repeat_last_n=st.just(16),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
    logit_bias=st.sampled_from([{}, {97: 1.0, 98: -2.0}]),
)
requests = st.builds(
    complete,
    st.text("abcd .", min_size=1, max_size=60),
    max_tokens=st.one_of(st.none(), st.integers(1, 80)),
    stop=st.sampled_from([(), ("a b",), ("dc", "..")]),
    sampling=samplings,
    ignore_eos=st.booleans(),
    stream=st.booleans(),
    top_logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(requests, min_size=1, max_size=4), st.sampled_from([0.0, 0.0005, 0.004]), st.integers(1, 20))
def test_any_guess_gives_the_answer_that_none_gives(
    wanted: list[GenerateRequest], row_s: float, max_draft: int
) -> None:
    """Text, tokens, log probabilities, reason and usage; seeded draws too, so each token drew once, in order."""
    wanted = [dataclasses.replace(request, id=f"r{i}") for i, request in enumerate(wanted)]
    benches = {n: Bench(n_ctx=200, session_type=Babbler, row_s=row_s, max_draft=n) for n in (0, max_draft)}
    answers = {n: [bench.ask(request) for request in wanted] for n, bench in benches.items()}
    for n, bench in benches.items():
        bench.run(*answers[n])
        bench.assert_idle()
    for plain, speculative in zip(answers[0], answers[max_draft], strict=True):
        assert speculative.error is None
        assert speculative.text == plain.text
        assert ids(speculative) == ids(plain)
        assert [p for c in speculative.chunks for p in c.logprobs] == [p for c in plain.chunks for p in c.logprobs]
        assert speculative.last.finish_reason == plain.last.finish_reason
        assert speculative.last.usage == plain.last.usage
    assert guessed(benches[0]) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.text("abcd .", min_size=1, max_size=60), samplings, st.integers(1, 150), st.integers(0, 40))
def test_after_every_step_the_kv_holds_what_the_answer_says(
    text: str, sampling: Sampling, n_prompt_steps: int, n_more: int
) -> None:
    bench = Bench(n_ctx=256, session_type=Babbler, row_s=0.0)
    answer = bench.ask(complete(text, sampling=sampling, ignore_eos=True))
    for _ in range(n_prompt_steps):
        bench.engine.step()
        held = [i for token_ids in bench.session.kv.values() for i in token_ids]
        whole = [*text.encode(), *ids(answer)]
        assert held[: len(whole)] == whole[: len(held)]  # a token without text is sent with the next
        assert answer.is_over or (len(held) >= len(whole) - 1 and len(held) == bench.engine.stats().cells_used)
    bench.engine.cancel("r")
    bench.engine.step()
    # What a cancelled request left is used again, and rightly.
    prompt = (*text.encode(), *ids(answer)[:n_more])
    request = GenerateRequest(id="again", model="null", prompt_token_ids=prompt, max_tokens=8)
    lone = Bench(session_type=Babbler, max_draft=0)
    again, alone = bench.ask(request), lone.ask(request)
    bench.run(again)
    lone.run(alone)
    assert ids(again) == ids(alone)


def test_an_answer_that_repeats_the_prompt_takes_far_fewer_steps() -> None:
    text = "All work and no play makes Jack a dull boy. "
    plain, speculative = Bench(max_draft=0), Bench()
    answers = [bench.ask(chat(text * 2)) for bench in (plain, speculative)]
    plain.run(answers[0])
    speculative.run(answers[1])
    assert answers[0].text == answers[1].text == text * 2
    assert n_steps(speculative) < n_steps(plain) / 3
    timings = answers[1].last.timings
    assert timings is not None
    assert (timings.drafted_tokens, timings.accepted_tokens) == guessed(speculative)
    assert timings.accepted_tokens > 0.8 * timings.drafted_tokens > 40
    assert timings.decode_tokens == len(text) * 2


@pytest.mark.parametrize("is_off", ["engine", "request"])
def test_off_every_step_has_one_row_a_stream_and_asks_for_its_logits_only(is_off: str) -> None:
    bench = Bench(max_draft=0 if is_off == "engine" else 15)
    answers = [bench.ask(chat(text * 30, text, max_draft=0 if is_off == "request" else 15)) for text in ("ab", "cd")]
    bench.run(*answers)
    decoding = [rows for batch in bench.session.batches for rows in batch if rows.start >= 61]
    assert len(decoding) == 120
    assert all(len(rows.token_ids) == 1 and not rows.want_all for rows in decoding)
    assert guessed(bench) == (0, 0)


def test_a_request_may_lower_the_limit_and_not_raise_it() -> None:
    for engine, request, most in ((15, 3, 3), (4, 15, 4), (4, None, 4)):
        bench = Bench(row_s=0.0, max_draft=engine)
        bench.run(bench.ask(chat("ab" * 60, max_draft=request)))
        assert max(len(rows.token_ids) for batch in bench.session.batches[1:] for rows in batch) == 1 + most


@pytest.mark.parametrize(
    ("sampling", "max_draft", "guesses"),
    [
        (Sampling(), None, False),
        (Sampling(temperature=0.1, seed=1), None, False),
        (Sampling(temperature=0.1), None, True),
        (Sampling(), 15, True),
    ],
    ids=["greedy", "seed", "drawn", "asked-for"],
)
def test_where_logits_depend_on_the_batch_a_repeatable_answer_is_not_guessed(
    sampling: Sampling, max_draft: int | None, guesses: bool
) -> None:
    bench = Bench(session_type=Drifting)
    bench.run(bench.ask(chat("ab" * 60, sampling=sampling, max_draft=max_draft)))
    assert (guessed(bench)[0] > 0) == guesses


def test_a_back_end_that_cannot_forget_gets_no_guesses() -> None:
    class Forgetless(Recorder):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self.caps = dataclasses.replace(self.caps, can_trim=False)

    bench = Bench(session_type=Forgetless)
    bench.run(bench.ask(chat("ab" * 60)))
    assert guessed(bench) == (0, 0)


def test_guesses_that_are_dear_are_left_out() -> None:
    bench = Bench(row_s=1.0)  # two rows cost as much as two steps
    bench.run(bench.ask(chat("the same again and again " * 4)))
    drafted, _ = guessed(bench)
    assert drafted <= 2  # one tried before the cost of a row is known


def test_text_that_repeats_only_to_mislead_is_soon_computed_plainly() -> None:
    words = [f"if x{chr(97 + i)}{chr(110 + i % 13)}" for i in range(26)]
    text = "".join(words)
    bench = Bench(n_ctx=1024, row_s=0.004)
    answer = bench.ask(chat(text))
    bench.run(answer)
    assert answer.text == text
    drafted, accepted = guessed(bench)
    rows = bench.engine.stats().rows_total - len(text) - 2
    assert rows <= (len(text) + 1) * 1.2
    assert accepted <= drafted


def test_no_guesses_beside_a_prompt_whose_part_of_the_step_is_sized() -> None:
    bench = Bench(n_ctx=2048, n_batch=1024, max_stall_s=0.1)
    bench.engine.warm_up()
    stream = bench.ask(chat("ab" * 200, "stream"))
    while guessed(bench)[0] == 0:
        bench.engine.step()
    long = bench.ask(complete("long prompt " * 100, "long", max_tokens=1))
    bench.run(stream, long)
    mixed = [batch for batch in bench.session.batches if any(len(r.token_ids) > 20 for r in batch) and len(batch) > 1]
    assert len(mixed) > 5
    assert not any(rows.want_all for batch in mixed for rows in batch)


def test_a_step_never_has_more_rows_than_the_batch() -> None:
    bench = Bench(n_ctx=2048, n_seq_max=6, n_batch=8, row_s=0.0)
    answers = [bench.ask(chat("ab" * 40, f"r{i}")) for i in range(6)]
    bench.run(*answers)
    assert all(answer.text == "ab" * 40 for answer in answers)
    assert max(sum(len(r.token_ids) for r in batch) for batch in bench.session.batches) == 8
    assert guessed(bench)[1] > 0


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(0, 3))
def test_guesses_preempt_nobody(n_requests: int, seed: int) -> None:
    """The pool is just large enough without guesses, by blocks and by cells."""
    sampling = Sampling(temperature=0.7, seed=seed)
    results = []
    for max_draft in (0, 15):
        bench = Bench(n_ctx=64 * n_requests, session_type=Paged, row_s=0.0, max_draft=max_draft)
        answers = [
            bench.ask(complete("abcd" * 4, f"r{i}", max_tokens=48, ignore_eos=True, sampling=sampling))
            for i in range(n_requests)
        ]
        bench.run(*answers)
        assert bench.engine.stats().preempted_total == 0
        results.append([ids(answer) for answer in answers])
    assert results[0] == results[1]
    assert guessed(bench)[0] > 0


def test_tokens_of_one_step_share_a_chunk() -> None:
    bench = Bench(row_s=0.0)
    answer = bench.ask(chat("ab" * 60))
    bench.run(answer)
    assert answer.text == "ab" * 60
    assert len(answer.chunks) <= n_steps(bench)


def test_logits_that_are_no_numbers_end_the_request_once_and_empty_its_cells() -> None:
    bench = Bench(row_s=0.0)
    broken = bench.ask(chat("ab" * 60, "broken"))
    while guessed(bench)[0] == 0:
        bench.engine.step()
    bench.session.breaks_logits = True
    bench.run(broken)
    assert broken.error is not None
    assert bench.session.kv == {}
    bench.session.breaks_logits = False
    good = bench.ask(chat("ab" * 60, "good"))
    bench.run(good)
    assert good.text == "ab" * 60
