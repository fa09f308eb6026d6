"""Prefixes that requests share, and those that they must not."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.engine.null_engine import Answer, Bench, chat, complete

COMMON = "c" * 150


def cached(answer: Answer) -> int:
    assert answer.last.usage is not None
    return answer.last.usage.cached_tokens


def rows(bench: Bench) -> int:
    return sum(len(part.token_ids) for batch in bench.session.batches for part in batch)


def test_a_prefix_that_is_being_computed_is_not_computed_twice() -> None:
    bench = Bench(n_batch=64)
    answers = [bench.ask(chat(COMMON + name, name)) for name in "xyz"]
    bench.run(*answers)
    assert [a.text for a in answers] == [COMMON + name for name in "xyz"]
    # A third step computes the first one's last 23 rows; so few more are not waited for.
    assert [cached(a) for a in answers] == [0, 128, 128]
    bench.assert_idle()


def test_who_waits_for_a_prefix_goes_on_when_its_owner_leaves() -> None:
    bench = Bench(n_batch=64)
    first, second = bench.ask(chat(COMMON + "x", "x")), bench.ask(chat(COMMON + "y", "y"))
    bench.engine.step()
    assert bench.engine.stats().waiting == 1
    bench.engine.cancel("x")
    bench.run(second)
    assert second.text == COMMON + "y"
    assert cached(second) == 64  # of what the first had computed by then
    assert not first.is_over


def test_others_pass_by_who_waits_for_a_prefix() -> None:
    bench = Bench(n_batch=64)
    answers = [bench.ask(chat(COMMON + "x", "x")), bench.ask(chat(COMMON + "y", "y")), bench.ask(chat("other", "o"))]
    bench.engine.step()
    bench.engine.step()
    assert bench.engine.stats().running == 2
    bench.run(*answers)


def test_isolated_tenants_compute_their_own() -> None:
    bench = Bench(n_batch=64, isolate_prefixes=True)
    answers = [bench.ask(chat(COMMON + "x", f"{tenant}{i}", tenant=tenant)) for i in range(2) for tenant in "ab"]
    bench.run(*answers)
    assert [cached(a) for a in answers] == [0, 0, 128, 152]
    bench.run(late := bench.ask(chat(COMMON + "x", "late", tenant="c")))
    assert cached(late) == 0


def test_a_secret_of_one_tenant_is_in_no_row_of_another() -> None:
    """All that a tenant's steps are given, and all that comes back, is what it is without the other."""
    secret, guess = "the canary of today is 8261" * 8, "the canary of today is 0000" * 8

    def steps(first: str) -> tuple[list[tuple[int, list[int]]], str, int]:
        bench = Bench(isolate_prefixes=True, n_batch=64)
        bench.run(bench.ask(complete(first, "victim", tenant="uid:1", max_tokens=5)))
        bench.session.batches = []
        answer = bench.ask(complete(guess, "thief", tenant="uid:2", max_tokens=20, ignore_eos=True))
        bench.run(answer)
        given = [(part.start, list(part.token_ids)) for batch in bench.session.batches for part in batch]
        return given, answer.text, cached(answer)

    with_secret, without = steps(secret), steps("z" * len(secret))
    assert with_secret == without
    assert with_secret[2] == 0
    assert with_secret[0][0][0] == 0  # from the first position on

    shared = Bench(n_batch=64)  # what isolation is for: a tenant who shares would see the common beginning in its time
    shared.run(shared.ask(complete(secret, "victim", tenant="uid:1", max_tokens=5)))
    shared.run(answer := shared.ask(complete(guess, "thief", tenant="uid:2", max_tokens=5)))
    assert cached(answer) == len("the canary of today is ")
    assert answer.text == without[1][:5]


def test_more_prefixes_than_slots_are_kept() -> None:
    bench = Bench(n_seq_max=2)
    texts = [chr(97 + i) * 100 for i in range(12)]
    for turn in range(3):
        for text in texts:
            answer = bench.ask(chat(text + str(turn), f"{text}{turn}", max_tokens=4))
            bench.run(answer)
            assert cached(answer) == (101 if turn else 0)  # all begin with one token, who speaks: not worth a copy
            assert answer.text == text[:4]
    assert bench.engine.stats().prefix_hits_total == 24


def test_the_bytes_of_what_two_conversations_share_count_once() -> None:
    bench = Bench(n_seq_max=1)
    for name in "abcdefgh":
        bench.run(bench.ask(chat("s" * 200 + name, name, max_tokens=2)))
    shared = 4 * 6 * (32 + 32 + 3)
    assert bench.engine.stats().prefix_bytes < shared + 8 * 4 * 2 * 40


def test_an_idle_sequence_stays_in_the_kv_where_that_costs_nothing() -> None:
    bench = Bench(n_ctx=512)
    bench.session.caps = replace(bench.session.caps, reads_own_cells=True)
    bench.run(bench.ask(chat("a" * 100, "a", max_tokens=4)))
    bench.run(bench.ask(chat("b" * 100, "b", max_tokens=4)))
    assert bench.session.cells_used() > 200
    bench.run(bench.ask(complete("c" * 380, "c", max_tokens=4)))
    assert bench.session.cells_used() <= 512
    again = bench.ask(chat("a" * 100, "d", max_tokens=4))
    bench.run(again)
    assert cached(again) == 101
