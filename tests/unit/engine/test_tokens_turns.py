"""Who is computed first, who makes room, and who is refused."""

from __future__ import annotations

import pytest

from edge_rt.errors import DeadlineUnreachableError
from tests.unit.engine.null_engine import ROW_S, Answer, Bench, chat, complete


def finish_order(bench: Bench, answers: dict[str, Answer]) -> list[str]:
    order: list[str] = []
    for _ in range(5000):
        if len(order) == len(answers):
            return order
        bench.engine.step()
        order += [name for name, answer in answers.items() if answer.is_over and name not in order]
    pytest.fail("the engine did not finish")


def test_the_more_urgent_begins_first() -> None:
    bench = Bench(n_seq_max=1)
    answers = {
        name: bench.ask(chat(name * 20, name, priority=name)) for name in ("background", "normal", "interactive")
    }
    assert finish_order(bench, answers) == ["interactive", "normal", "background"]


def test_an_interactive_request_takes_a_background_ones_place_which_goes_on_where_it_was() -> None:
    bench = Bench(n_seq_max=1)
    slow = bench.ask(complete("b" * 60, "slow", priority="background", max_tokens=60, ignore_eos=True))
    for _ in range(10):
        bench.engine.step()
    urgent = bench.ask(chat("quick", "quick", priority="interactive"))
    bench.run(urgent)
    assert not slow.is_over
    bench.session.batches = []
    bench.run(slow)
    assert bench.engine.stats().preempted_total == 1
    first = next(part for batch in bench.session.batches for part in batch if part.start >= 60)
    assert first.start > 60  # what it had computed was kept
    lone = Bench(n_seq_max=1)
    lone.run(expected := lone.ask(complete("b" * 60, "slow", max_tokens=60, ignore_eos=True)))
    assert slow.text == expected.text


def test_a_place_is_not_taken_by_who_is_as_urgent() -> None:
    bench = Bench(n_seq_max=1)
    first = bench.ask(chat("a" * 40, "a"))
    bench.engine.step()
    second = bench.ask(chat("b" * 40, "b"))
    assert finish_order(bench, {"a": first, "b": second}) == ["a", "b"]
    assert bench.engine.stats().preempted_total == 0


def test_background_goes_on_under_endless_interactive_load() -> None:
    bench = Bench(n_seq_max=1, max_draft=0)
    slow = bench.ask(complete("b" * 40, "slow", priority="background", max_tokens=40, ignore_eos=True))
    n_urgent, current = 0, None
    while not slow.is_over:
        if current is None or current.is_over:
            n_urgent += 1
            assert n_urgent < 200
            current = bench.ask(complete("u" * 30, f"u{n_urgent}", priority="interactive", max_tokens=20))
        bench.engine.step()
    assert n_urgent > 4


def test_a_tenant_with_many_requests_does_not_keep_another_waiting() -> None:
    bench = Bench(n_seq_max=1)
    many = [bench.ask(chat(f"many{i}" * 8, f"m{i}", tenant="many")) for i in range(10)]
    for _ in range(3):
        bench.engine.step()
    one = bench.ask(chat("just one", "one", tenant="one"))
    bench.run(one)
    assert sum(answer.is_over for answer in many) <= 2
    bench.run(*many)


def test_a_short_prompt_of_another_tenant_is_not_kept_behind_a_long_one() -> None:
    bench = Bench(n_ctx=2048, n_batch=64)
    long = bench.ask(complete("x" * 1500, "long", tenant="a", max_tokens=1))
    for _ in range(3):
        bench.engine.step()
    short = bench.ask(complete("y" * 60, "short", tenant="b", max_tokens=1))
    bench.run(short)
    assert not long.is_over


def test_a_deadline_out_of_reach_is_refused_at_once_with_what_it_would_take() -> None:
    bench = Bench(n_ctx=2048)
    bench.run(bench.ask(complete("w" * 200, "warm", max_tokens=1)))
    n_batches = len(bench.session.batches)
    late = bench.ask(complete("z" * 1000, "late", deadline_s=0.1))
    bench.engine.step()
    assert isinstance(late.error, DeadlineUnreachableError)
    assert late.error.deadline_s == 0.1
    assert late.error.needed_s == pytest.approx(1000 * ROW_S, rel=0.2)
    assert len(bench.session.batches) == n_batches
    assert bench.engine.stats().refused_total == 1
    bench.assert_idle()


def test_what_is_kept_of_a_prompt_counts_for_its_deadline() -> None:
    bench = Bench(n_ctx=2048)
    bench.run(bench.ask(complete("z" * 1000, "first", max_tokens=1)))
    again = bench.ask(complete("z" * 1000 + "?", "again", deadline_s=0.1, max_tokens=1))
    bench.run(again)
    assert again.error is None


def test_the_same_tenants_prompts_ahead_count_and_anothers_do_not() -> None:
    bench = Bench(n_ctx=4096)
    bench.run(bench.ask(complete("w" * 200, "warm", max_tokens=1)))
    ahead = bench.ask(complete("a" * 1000, "ahead", tenant="me", max_tokens=1))
    bench.engine.step()
    mine = bench.ask(complete("b" * 100, "mine", tenant="me", deadline_s=0.3))
    other = bench.ask(complete("c" * 100, "other", tenant="you", deadline_s=0.3, max_tokens=1))
    bench.run(ahead, other)
    assert isinstance(mine.error, DeadlineUnreachableError)
    assert other.error is None
