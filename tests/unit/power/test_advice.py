"""What is advised in single situations; over time: test_advice_over_time.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_rt.power import levels
from edge_rt.power.learning import Memory
from edge_rt.power.levels import Model
from edge_rt.power.policy import decide
from edge_rt.power.state import Advice, Decision, Hint, Limits, Observation, Power
from tests.plants import board_model

BOARD = board_model.load("pi5_class")
MODEL = BOARD.calibration(with_threads=True)
LIMITS = Limits(ttft_slo_s=1.0, tpot_slo_s=0.1)
DECODING = Hint(work="decode", n_running=1, max_threads=4, max_batch=8)


class Play:
    """Look again and again, the advice in force a look after it was given."""

    def __init__(self, model: Model = MODEL, limits: Limits = LIMITS, *, is_taken: bool = True) -> None:
        self.model, self.limits, self.is_taken = model, limits, is_taken
        self.memory = Memory()
        self.now_s = 100.0
        self.decision = Decision(max_hz={})
        self.n_changes = 0

    def look(
        self, hint: Hint | None, *, after_s: float = 0.05, power: Power | None = None, slow: float = 1.0
    ) -> Advice:
        """Tell decoding's time per token as the board has it on the threads that compute, times slow."""
        self.now_s += after_s
        if hint is not None and hint.work == "decode":
            hint = replace(hint, tpot_s=self.tpot_s(hint) * slow)
        observation = Observation(
            now_s=self.now_s,
            hint=None if hint is None else replace(hint, sent_s=self.now_s),
            power=power,
            max_hz=self.decision.max_hz,
            advice=self.decision.advice if self.is_taken else Advice(),
        )
        before = self.decision.advice
        self.decision, self.memory = decide(observation, self.limits, self.model, self.memory)
        self.n_changes += before != self.decision.advice
        return self.decision.advice

    def work(self, hint: Hint, seconds: float, *, slow: float = 1.0) -> Advice:
        for _ in range(int(seconds / 0.5)):
            self.look(hint, after_s=0.5, slow=slow)
        return self.decision.advice

    def tpot_s(self, hint: Hint) -> float:
        n = min(self.decision.advice.n_decode_threads or 4, hint.max_threads or 4) if self.is_taken else 4
        compute_s, stall_s = BOARD.step(hint.n_running, 0, n_kv=100 * hint.n_running)
        hz = self.decision.max_hz.get(BOARD.domain_name, BOARD.points_hz[-1])
        slowness = BOARD.slowness[BOARD.points_hz.index(hz)]
        return compute_s * slowness * BOARD.computing(n) + stall_s * BOARD.waiting(n)


def _without_clocks(boundary_w: float = 0.0) -> Model:
    """The board at its highest clock, which nobody can set."""
    top = replace(MODEL.levels[-1], max_hz={}, worst_w=MODEL.levels[-1].worst_w + boundary_w)
    return replace(MODEL, levels=(top,))


FIXED = _without_clocks()


def test_without_a_sweep_nothing_is_advised() -> None:
    play = Play(BOARD.calibration())
    assert play.work(DECODING, 5.0) == Advice()
    assert Play(levels.generic([BOARD.domain])).work(DECODING, 5.0) == Advice()


def test_a_daemon_that_takes_no_advice_gets_none() -> None:
    assert Play().work(replace(DECODING, max_threads=0, max_batch=0), 5.0) == Advice()


def test_one_that_takes_none_any_more_hears_that_it_has_ended() -> None:
    play = Play()
    assert play.work(DECODING, 5.0) != Advice()
    assert play.look(replace(DECODING, max_threads=0, max_batch=0)) == Advice()


def test_decoding_gets_fewer_threads_and_a_prompt_all() -> None:
    advice = Play(FIXED).work(DECODING, 5.0)
    assert advice == Advice(n_prefill_threads=4, n_decode_threads=2, max_batch=7)


def test_the_advised_threads_take_the_fewest_joules_of_the_board() -> None:
    def above_idle_j(n: int) -> float:
        compute_s, stall_s = BOARD.step(1, 0, n_kv=100)
        compute_s, stall_s = compute_s * BOARD.computing(n), stall_s * BOARD.waiting(n)
        return (BOARD.watts(BOARD.top, compute_s, stall_s, 50.0, n)[1] - MODEL.idle_w) * (compute_s + stall_s)

    joules = {n: above_idle_j(n) for n in (1, 2, 3, 4)}
    advised = Play(FIXED).work(DECODING, 5.0).n_decode_threads
    assert advised is not None
    assert joules[advised] <= min(joules.values()) * 1.03
    assert joules[advised] < 0.9 * joules[4]


def test_no_more_than_the_daemons_own_threads_are_advised() -> None:
    for most in (1, 2, 3):
        advice = Play(FIXED).work(replace(DECODING, max_threads=most), 5.0)
        assert advice.n_prefill_threads is not None
        assert advice.n_decode_threads is not None
        assert max(advice.n_prefill_threads, advice.n_decode_threads) <= most


def test_more_threads_than_were_measured_are_left_to_the_daemon() -> None:
    advice = Play(FIXED).work(replace(DECODING, max_threads=16), 5.0)
    assert advice.n_prefill_threads is None
    assert advice.n_decode_threads == 2


def test_the_time_per_token_comes_before_joules() -> None:
    # 2 threads take 42 ms, 4 take 35 ms: with room for a fifth the first ones are too slow for 48 ms.
    assert Play(FIXED, replace(LIMITS, tpot_slo_s=0.048)).work(DECODING, 5.0).n_decode_threads in (3, 4)
    assert Play(FIXED, replace(LIMITS, tpot_slo_s=0.020)).work(DECODING, 5.0).n_decode_threads == 4


def test_more_answers_want_more_threads() -> None:
    one = Play(FIXED).work(DECODING, 5.0).n_decode_threads
    many = Play(FIXED).work(replace(DECODING, n_running=6), 10.0).n_decode_threads
    assert one is not None
    assert many is not None
    assert many > one


def test_tokens_that_come_late_never_take_threads_away() -> None:
    play = Play(FIXED)
    assert play.work(DECODING, 5.0).n_decode_threads == 2
    assert play.work(DECODING, 5.0, slow=3.0).n_decode_threads == 4


def test_joules_alone_change_threads_seldom() -> None:
    play = Play(FIXED)
    play.work(DECODING, 5.0)
    before = play.n_changes
    for i in range(60):  # the number of answers swings each half second
        play.look(replace(DECODING, n_running=1 if i % 2 else 6), after_s=0.5)
    # Down after 2 s, up at once for the time per token.
    assert play.n_changes - before <= 2 * 30 / 2


def test_advice_stays_while_nobody_asks() -> None:
    play = Play(FIXED)
    advice = play.work(DECODING, 5.0)
    assert play.look(Hint(work="idle", max_threads=4, max_batch=8)) == advice
    assert play.look(None) == advice


def test_without_watts_answers_are_advised_and_threads_are_not() -> None:
    table = FIXED.threads
    assert table is not None
    prefill, decode = replace(table.prefill, shares=()), replace(table.decode, shares=())
    model = replace(FIXED, threads=replace(table, prefill=prefill, decode=decode))
    assert Play(model).work(DECODING, 5.0) == Advice(max_batch=7)


def test_fewer_answers_are_decoded_together_where_the_time_per_token_would_not_keep() -> None:
    tight = replace(LIMITS, tpot_slo_s=0.06)
    advice = Play(FIXED, tight).work(DECODING, 5.0)
    assert advice.max_batch is not None
    assert 2 <= advice.max_batch <= 4
    assert Play(FIXED, replace(LIMITS, tpot_slo_s=0.01)).work(DECODING, 5.0).max_batch == 1


def test_never_more_answers_than_the_daemon_decodes_together() -> None:
    assert Play(FIXED, replace(LIMITS, tpot_slo_s=10.0)).work(replace(DECODING, max_batch=3), 5.0).max_batch == 3


@pytest.mark.parametrize(("share", "n_answers"), [(0.94, 4), (1.03, 3)])
def test_under_a_cap_answers_join_up_to_nearly_the_whole_time_per_token(share: float, n_answers: int) -> None:
    compute_s, stall_s = BOARD.step(4, 0, n_kv=400)
    slo_s = (compute_s * BOARD.slowness[0] + stall_s) / share
    limits = replace(LIMITS, tpot_slo_s=slo_s, max_w=MODEL.levels[0].worst_w + 0.01)
    assert Play(MODEL, limits).work(replace(DECODING, n_running=4), 20.0).max_batch == n_answers


def test_a_number_of_answers_that_just_keeps_the_time_stays() -> None:
    play = Play(FIXED, replace(LIMITS, tpot_slo_s=0.06))
    first = play.work(DECODING, 10.0).max_batch
    before = play.n_changes
    for i in range(40):
        play.look(DECODING, after_s=0.5, slow=1.04 if i % 2 else 0.96)
    assert play.decision.advice.max_batch == first
    assert play.n_changes == before


def test_below_what_the_lowest_clock_takes_threads_keep_the_cap() -> None:
    lowest = MODEL.levels[0]
    power = Power(power_w=3.0, boundary=MODEL.boundary, quality="measured", age_s=0.05)
    for share in (0.9, 0.8):
        cap_w = lowest.worst_w * share
        play = Play(MODEL, replace(LIMITS, max_w=cap_w))
        for _ in range(10):
            advice = play.look(DECODING, after_s=0.5, power=power)
        assert play.decision.max_hz == lowest.max_hz
        for n, phase in ((advice.n_prefill_threads, "prefill"), (advice.n_decode_threads, "decode")):
            assert n is not None
            on = levels.on_threads(MODEL, n, n).levels[0]
            takes_w = on.prefill_w if phase == "prefill" else on.decode_w
            assert takes_w * 1.10 <= cap_w or n == 1
    assert advice.n_prefill_threads is not None
    assert advice.n_prefill_threads < 4


def test_a_cap_of_another_boundary_takes_no_threads_away() -> None:
    power = Power(power_w=3.0, boundary="soc", quality="measured", age_s=0.05)
    play = Play(MODEL, replace(LIMITS, max_w=MODEL.levels[0].worst_w * 0.8))
    for _ in range(10):
        advice = play.look(DECODING, after_s=0.5, power=power)
    assert advice.n_prefill_threads == 4


def test_advice_never_lets_the_clock_above_what_all_threads_may_have() -> None:
    cap_w = (MODEL.levels[0].worst_w + MODEL.levels[-1].worst_w) / 2
    with_advice, without = Play(MODEL, replace(LIMITS, max_w=cap_w)), Play(MODEL, replace(LIMITS, max_w=cap_w))
    racing = Hint(work="prefill", n_running=1, n_waiting=3, n_prompt_tokens=500, ttft_left_s=0.1)
    with_advice.work(replace(racing, max_threads=4, max_batch=8), 5.0)
    without.work(racing, 5.0)
    assert with_advice.decision.max_hz == without.decision.max_hz
    assert with_advice.decision.max_hz != MODEL.levels[-1].max_hz


def test_what_was_learned_moves_along_with_the_threads() -> None:
    play = Play(FIXED)
    play.look(DECODING)
    assert play.decision.advice.n_decode_threads == 2
    learned = play.memory.decode
    play.look(DECODING)
    after = play.memory.decode
    assert learned is not None
    assert after is not None
    assert play.memory.advised is not None
    assert play.memory.advised.n_decode == 2
    assert after.seconds(1.0) == pytest.approx(learned.seconds(1.0) * 1.25, rel=0.15)
    # And back again, when the daemon takes it no more.
    play.is_taken = False
    play.look(DECODING)
    back = play.memory.decode
    assert back is not None
    assert back.seconds(1.0) == pytest.approx(learned.seconds(1.0), rel=0.02)


def test_times_of_other_threads_are_not_learned_from() -> None:
    """The first hints after a change still tell of tokens from before it."""
    play = Play(FIXED)
    play.look(DECODING)
    play.look(DECODING, after_s=0.01)
    before = play.memory.decode
    play.look(DECODING, after_s=0.31, slow=1.5)
    assert play.memory.decode == before


def test_the_same_calls_give_the_same_advice() -> None:
    hints = [replace(DECODING, n_running=1 + i % 5) for i in range(40)]
    plays = [Play(), Play()]
    told = [[play.look(hint, after_s=0.3) for hint in hints] for play in plays]
    assert told[0] == told[1]


def test_advice_does_not_outlive_another_calibration() -> None:
    play = Play(FIXED)
    play.work(DECODING, 5.0)
    play.model = BOARD.calibration()
    assert play.look(DECODING) == Advice()


def test_advice_is_part_of_the_policy_only_where_there_is_a_sweep() -> None:
    memory = Memory()
    observation = Observation(now_s=1.0, hint=replace(DECODING, sent_s=1.0))
    _, memory = decide(observation, LIMITS, BOARD.calibration(), memory)
    assert memory.advised is None
