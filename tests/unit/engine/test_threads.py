"""ThreadChoice against simulated machines whose best thread count is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.engine.threads import AdvisedThreads, ThreadChoice, bucket, candidates

# Seconds of a decode step by thread count: measured on two cores, alone and with one and three busy neighbours.
ALONE = {1: 0.0145, 2: 0.0100}
ONE_NEIGHBOUR = {1: 0.0147, 2: 0.0400}
THREE_NEIGHBOURS = {1: 0.0330, 2: 0.1300}


def run(
    choice: ThreadChoice,
    step_s: Callable[[float], dict[int, float]],
    *,
    until_s: float,
    idle: Callable[[float], float | None] = lambda _: None,
    noise: float = 0.05,
    from_s: float = 0.0,
    n_rows: int = 1,
) -> tuple[int, float]:
    """Step until until_s; give the number of steps and the time at the end."""
    rng = random.Random(7)
    now_s, n_steps = from_s, 0
    while now_s < until_s:
        n_threads = choice.choose(n_rows, now_s, idle(now_s))
        seconds = step_s(now_s)[n_threads] * rng.lognormvariate(0, noise)
        now_s += seconds
        n_steps += 1
        choice.observe(n_rows, n_threads, seconds, now_s)
    return n_steps, now_s


@pytest.mark.parametrize("machine", [ALONE, ONE_NEIGHBOUR, THREE_NEIGHBOURS], ids=["alone", "one", "three"])
@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_comes_close_to_the_best_fixed_count(machine: dict[int, float], start: int, noise: float) -> None:
    choice = ThreadChoice(candidates(2), start=start)
    n_steps, seconds = run(choice, lambda _: machine, until_s=30.0, noise=noise)
    best = seconds / (min(machine.values()) * 2.718281828 ** (noise**2 / 2))
    assert n_steps >= 0.92 * best


def test_leaves_two_threads_soon_after_a_neighbour_came() -> None:
    choice = ThreadChoice(candidates(2))
    _, now_s = run(choice, lambda _: ALONE, until_s=20.0)
    n_steps, end_s = run(choice, lambda _: ONE_NEIGHBOUR, until_s=now_s + 2.0, from_s=now_s)
    assert n_steps >= 0.8 * (end_s - now_s) / ONE_NEIGHBOUR[1]


def test_goes_back_to_two_threads_once_a_core_is_idle() -> None:
    choice = ThreadChoice(candidates(2))
    _, now_s = run(choice, lambda _: ONE_NEIGHBOUR, until_s=30.0, idle=lambda _: 0.0)
    n_steps, end_s = run(choice, lambda _: ALONE, until_s=now_s + 2.0, from_s=now_s, idle=lambda _: 0.9)
    assert n_steps >= 0.9 * (end_s - now_s) / ALONE[2]


def test_climbs_over_several_counts() -> None:
    counts = candidates(8)
    choice = ThreadChoice(counts, start=1)
    machine = {n: 0.08 / n + 0.001 * n for n in counts}  # best at 8 of these
    run(choice, lambda _: machine, until_s=20.0)
    assert choice.choose(1, 20.0) in {6, 8}


def test_keeps_decode_and_prefill_apart() -> None:
    choice = ThreadChoice((1, 2))
    now_s = 0.0
    for _ in range(400):
        for n_rows, times in ((1, {1: 0.01, 2: 0.03}), (64, {1: 0.2, 2: 0.11})):
            n_threads = choice.choose(n_rows, now_s)
            now_s += times[n_threads]
            choice.observe(n_rows, n_threads, times[n_threads], now_s)
    assert (choice.choose(1, now_s), choice.choose(64, now_s)) == (1, 2)


def test_on_a_quiet_machine_trials_cost_next_to_nothing() -> None:
    choice = ThreadChoice(candidates(2))
    run(choice, lambda _: ALONE, until_s=1.0)
    n_steps, now_s = run(choice, lambda _: ALONE, until_s=61.0, from_s=1.0, noise=0.0, idle=lambda _: 0.0)
    assert n_steps >= 0.99 * (now_s - 1.0) / ALONE[2]


def test_a_trial_that_clearly_loses_ends_behind_two_steps() -> None:
    machine = {1: 0.018, 2: 0.0100}
    choice = ThreadChoice(candidates(2))
    tried: list[int] = []

    def step_s(_: float) -> dict[int, float]:
        tried.append(choice.choose(1, 0.0))
        return machine

    run(choice, step_s, until_s=0.3, noise=0.02)
    assert 2 <= tried.count(1) <= 3  # one more wakes the threads


def test_a_step_of_more_rows_does_not_wait_for_more_threads() -> None:
    choice = ThreadChoice(candidates(2), start=1)
    run(choice, lambda _: {1: 0.005, 2: 0.0049}, until_s=3.0)  # one row: as fast on one
    assert choice.choose(1, 3.0) == 1
    run(choice, lambda _: {1: 0.019, 2: 0.0100}, from_s=3.0, until_s=3.3, n_rows=4)
    assert choice.choose(4, 3.3) == 2


def test_a_prompt_is_never_slowed_by_a_trial_without_a_reason() -> None:
    choice = ThreadChoice(candidates(2), start=2)
    run(choice, lambda _: ALONE, until_s=5.0)
    counts = [choice.choose(400, 5.0 + i, 0.0) for i in range(50) if choice.observe(400, 2, 0.8, 5.0 + i) is None]
    assert set(counts) == {2}


def test_prefill_leaves_two_threads_when_its_rows_become_slower() -> None:
    choice = ThreadChoice(candidates(2), start=2)
    _, now_s = run(choice, lambda _: {1: 1.7, 2: 0.96}, until_s=30.0, n_rows=512, noise=0.02)
    run(choice, lambda _: {1: 1.7, 2: 2.6}, until_s=now_s + 40.0, from_s=now_s, n_rows=512, noise=0.02)
    assert choice.choose(512, now_s + 41.0, 0.0) == 1


def test_one_core_has_nothing_to_try() -> None:
    choice = ThreadChoice(candidates(1))
    run(choice, lambda _: {1: 0.01}, until_s=2.0)
    assert choice.choose(1, 2.0) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.lists(st.tuples(st.integers(1, 700), st.floats(0, 10)), max_size=200))
def test_never_leaves_the_counts_whatever_the_times(n_cores: int, steps: list[tuple[int, float]]) -> None:
    counts = candidates(n_cores)
    choice = ThreadChoice(counts)
    now_s = 0.0
    for n_rows, seconds in steps:
        n_threads = choice.choose(n_rows, now_s)
        assert n_threads in counts
        now_s += seconds
        choice.observe(n_rows, n_threads, seconds, now_s)


def test_candidates_rise_from_one_to_all_cores() -> None:
    assert candidates(1) == (1,)
    assert candidates(2) == (1, 2)
    assert candidates(8) == (1, 2, 3, 4, 6, 8)
    assert candidates(64)[-1] == 64


def test_buckets_part_decode_from_chunks() -> None:
    assert len({bucket(n) for n in range(1, 17)}) == 16
    assert bucket(512) == bucket(4096)


# -- advice ----------------------------------------------------------------------------------------------------------


def test_a_choice_within_a_limit_knows_the_limit_and_what_is_below_it() -> None:
    choice = ThreadChoice(candidates(8))
    for most in range(1, 8):
        within = choice.within(most)
        n_steps = 0
        for i in range(2000):
            n = within.choose(1, float(i))
            n_steps += n == most
            assert 1 <= n <= most
            within.observe(1, n, 0.1 / n, float(i) + 0.1)
        assert n_steps > 1500  # where more threads are faster the limit itself is used
    assert choice.within(8) is choice
    assert choice.within(100) is choice
    assert choice.within(0).choose(1, 0.0) == 1


def test_a_count_that_is_fixed_is_lowered_and_not_tried() -> None:
    within = ThreadChoice((6,)).within(4)
    assert {within.choose(n_rows, float(i)) for i in range(100) for n_rows in (1, 64)} == {4}


def test_a_busy_neighbour_is_found_out_within_a_limit_too() -> None:
    within = ThreadChoice((1, 2, 3, 4)).within(2)
    run(within, lambda _: ONE_NEIGHBOUR, until_s=20.0)
    assert within.choose(1, 20.0) == 1


def test_advice_counts_for_its_phase_and_what_was_learned_within_it_is_kept() -> None:
    advised = AdvisedThreads(ThreadChoice((4,)))
    advised.advise(3, 2)
    prefill, decode = advised.choice(is_prefill=True), advised.choice(is_prefill=False)
    assert (prefill.choose(64, 0.0), decode.choose(1, 0.0)) == (3, 2)
    advised.advise(None, None)
    assert advised.choice(is_prefill=True).choose(64, 0.0) == advised.choice(is_prefill=False).choose(1, 0.0) == 4
    advised.advise(None, 2)
    assert advised.choice(is_prefill=False) is decode
