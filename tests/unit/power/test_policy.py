"""What decide() does in single situations; over time: test_policy_over_time.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from edge_rt.power import levels, policy
from edge_rt.power.calibration import CalibratedDomain, Calibration, Point
from edge_rt.power.learning import Memory
from edge_rt.power.levels import Model
from edge_rt.power.policy import decide
from edge_rt.power.state import Decision, Domain, Hint, Limits, Observation, Power

POINTS_HZ = tuple(i * 0.2e9 for i in range(2, 13))  # 0.4 … 2.4 GHz
CPU = Domain(name="policy0", kind="cpu", points_hz=POINTS_HZ, n_cpus=4)
LIMITS = Limits(ttft_slo_s=1.0, tpot_slo_s=0.1)
TOP = len(POINTS_HZ) - 1


def _calibrated() -> Model:
    points = []
    for hz in POINTS_HZ:
        x = hz / POINTS_HZ[-1]
        volts = max(0.6, x) ** 2
        points.append(
            Point(
                max_hz=hz,
                prefill_s_per_token=0.0005 + 0.004 / x,
                decode_s_per_token=0.03 + 0.01 / x,
                prefill_w=3.0 + 5.0 * x * volts,
                decode_w=3.0 + 3.2 * x * volts,
            )
        )
    domain = CalibratedDomain(name="policy0", points=tuple(points))
    model = levels.calibrated(
        [CPU],
        Calibration(board="any", made_at="now", boundary="board", quality="measured", idle_w=2.5, domains=(domain,)),
    )
    assert model is not None
    return model


MODEL = _calibrated()
GENERIC = levels.generic([CPU])


def _level(decision: Decision) -> int:
    return POINTS_HZ.index(decision.max_hz["policy0"])


class Play:
    """Call decide() again and again, 50 ms apart unless said otherwise."""

    def __init__(self, model: Model = MODEL, limits: Limits = LIMITS, memory: Memory | None = None) -> None:
        self.model, self.limits = model, limits
        self.memory = memory if memory is not None else Memory()
        self.now_s = 100.0
        self.decision = Decision(max_hz={})

    def look(self, hint: Hint | None = None, *, after_s: float = 0.05, **seen: object) -> Decision:
        self.now_s += after_s
        if hint is not None:
            self._hint = replace(hint, sent_s=self.now_s)
        max_hz: Mapping[str, float] = self.decision.max_hz
        observation = Observation(now_s=self.now_s, hint=self._hint, max_hz=max_hz, **seen)  # type: ignore[arg-type]
        self.decision, self.memory = decide(observation, self.limits, self.model, self.memory)
        return self.decision

    _hint: Hint | None = None


DECODING = Hint(work="decode", n_running=1, tpot_s=0.045)
IDLE = Hint(work="idle")


def _power(power_w: float | None, age_s: float = 0.05) -> Power:
    return Power(power_w=power_w, boundary="board", quality="measured", age_s=age_s)


def test_decoding_gets_the_level_of_the_fewest_joules_above_idling() -> None:
    costs = [(level.decode_w - MODEL.idle_w) * level.decode_s for level in MODEL.levels]
    play = Play()
    play.look(IDLE)
    decision = play.look(DECODING)
    assert costs[_level(decision)] == min(costs)
    assert 0 < costs.index(min(costs)) <= _level(decision) < TOP
    assert decision.reason == "decode"


def test_a_tight_time_per_token_raises_the_clock_of_decoding() -> None:
    loose, tight = Play(), Play(limits=Limits(tpot_slo_s=0.048))
    assert _level(tight.look(DECODING)) > _level(loose.look(DECODING))


def test_many_rows_need_a_higher_clock_for_the_same_time_per_token() -> None:
    limits = Limits(tpot_slo_s=0.09)
    one, many = Play(limits=limits), Play(limits=limits)
    assert _level(many.look(replace(DECODING, n_running=4))) > _level(one.look(DECODING))


def test_a_prompt_gets_the_cheapest_clock_that_is_in_time() -> None:
    levels_of = [
        _level(Play().look(Hint(work="prefill", n_running=1, n_prompt_tokens=100, ttft_left_s=left_s)))
        for left_s in (30.0, 1.5, 1.2, 0.95, 0.2)
    ]
    assert levels_of == sorted(levels_of)
    assert levels_of[0] < levels_of[2] < levels_of[-1] == TOP


def test_the_clock_of_a_prompt_is_never_too_low_by_what_is_known() -> None:
    for left_s in (0.5, 0.7, 0.9, 1.1, 1.5, 2.0):
        decision = Play().look(Hint(work="prefill", n_running=1, n_prompt_tokens=100, ttft_left_s=left_s))
        need_s = 100 * MODEL.levels[_level(decision)].prefill_s
        assert need_s <= left_s or decision.reason == "race"


def test_the_clock_rises_with_the_hint_before_the_work_begins() -> None:
    play = Play()
    play.look(IDLE)
    decision = play.look(Hint(work="idle", n_waiting=1, n_prompt_tokens=150, ttft_left_s=0.95), after_s=0.001)
    assert decision.reason in {"prefill", "race"}
    assert _level(decision) > TOP // 2


def test_it_races_for_what_is_late_or_waits() -> None:
    late = Hint(work="prefill", n_running=1, n_prompt_tokens=10, ttft_left_s=-0.1)
    two = Hint(work="decode", n_running=4, n_waiting=2, n_prompt_tokens=10, ttft_left_s=0.9, tpot_s=0.05)
    for hint in (late, two):
        decision = Play().look(hint)
        assert (_level(decision), decision.reason) == (TOP, "race")


def test_a_single_request_that_goes_on_waiting_is_raced_for() -> None:
    play = Play()
    waits = Hint(work="idle", n_waiting=1, n_prompt_tokens=10, ttft_left_s=0.9)
    assert play.look(waits).reason == "prefill"
    assert [play.look().reason for _ in range(4)][-1] == "race"


def test_a_second_prompt_makes_the_first_one_hurry() -> None:
    play = Play()
    one = Hint(work="prefill", n_running=1, n_prompt_tokens=60, ttft_left_s=0.95)
    assert play.look(one).reason == "prefill"
    assert play.look(replace(one, n_waiting=1), after_s=0.01).reason == "race"
    assert play.look(replace(one, n_running=2, n_prompt_tokens=20), after_s=0.01).reason == "race"
    assert play.look(replace(DECODING, n_running=2), after_s=0.2).reason == "decode"


def test_a_hint_that_is_too_old_leaves_the_clock_to_the_kernel() -> None:
    play = Play()
    play.look(DECODING)
    decision = play.look(after_s=2.5)
    assert (_level(decision), decision.reason) == (TOP, "static")


def test_no_hint_and_an_idle_machine_is_idle() -> None:
    decision = Play().look(utilisation=0.05)
    assert decision.reason == "static"
    assert _level(decision) < TOP


def test_other_programs_get_the_clock_while_they_need_it() -> None:
    play = Play()
    assert _level(play.look(IDLE, utilisation=0.1)) < TOP
    decision = play.look(after_s=1.0, utilisation=0.9)
    assert (_level(decision), decision.reason) == (TOP, "others")
    assert play.look(after_s=0.2, utilisation=0.1).reason == "others"
    assert _level(play.look(after_s=1.5, utilisation=0.1)) < TOP


def test_what_was_busy_before_the_last_answer_ended_is_no_other_program() -> None:
    play = Play()
    play.look(DECODING)
    assert _level(play.look(IDLE, after_s=0.3, utilisation=1.0)) < TOP


def test_a_prompt_beside_answers_is_raced_for_and_one_without_a_deadline_is_not() -> None:
    beside = Hint(work="prefill", n_running=2, n_prompt_tokens=50, ttft_left_s=0.9, tpot_s=0.05)
    assert Play().look(beside).reason == "race"
    assert Play().look(replace(beside, ttft_left_s=None)).reason == "prefill"


def test_it_goes_up_at_once_and_down_after_the_dwell() -> None:
    play = Play()
    play.look(DECODING)
    low = _level(play.decision)
    late = Hint(work="prefill", n_running=1, n_prompt_tokens=10, ttft_left_s=-0.1)
    assert _level(play.look(late, after_s=0.001)) == TOP
    assert _level(play.look(DECODING, after_s=0.05)) == TOP
    assert abs(_level(play.look(DECODING, after_s=0.06)) - low) <= 1


def test_it_never_switches_more_often_than_five_times_a_second() -> None:
    play = Play()
    play.look(DECODING)
    late = Hint(work="prefill", n_running=1, n_prompt_tokens=10, ttft_left_s=-0.1)
    changes, before = [], _level(play.decision)
    for i in range(200):
        level = _level(play.look(late if i % 2 else DECODING, after_s=0.101))
        if level != before:
            changes.append(play.now_s)
        before = level
    assert max(sum(t <= at < t + 1.0 for at in changes) for t in changes) <= policy.MAX_SWITCHES_HZ
    assert len(changes) > 10


def test_a_meter_that_jumps_ends_at_the_lowest_clock_and_not_in_a_sixth_switch() -> None:
    play = Play(limits=Limits(max_w=7.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    changes, before = [], _level(play.look(race, power=_power(4.0)))
    for i in range(400):
        level = _level(play.look(race, power=_power(7.1 if i % 3 else 2.0), temperature_c=80.0 if i % 2 else 20.0))
        if level != before:
            changes.append(play.now_s)
        before = level
    assert max(sum(t <= at < t + 1.0 for at in changes) for t in changes) <= policy.MAX_SWITCHES_HZ
    assert before <= 1


def test_the_first_decision_is_a_switch_too() -> None:
    play = Play(limits=Limits(max_w=7.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    changes, before = [], None
    for hint, power_w, temperature_c, after_s in (
        (race, 2.0, 20.0, 0.11),
        (race, 7.1, 80.0, 0.2),
        (race, 2.0, 95.0, 0.2),
        (race, 9.0, 95.0, 0.11),
        (DECODING, 9.0, 95.0, 0.11),
        (race, 2.0, 80.0, 0.11),
        (DECODING, 9.0, 80.0, 0.2),
    ):
        level = _level(play.look(hint, after_s=after_s, power=_power(power_w), temperature_c=temperature_c))
        if level != before:
            changes.append(play.now_s)
        before = level
    assert sum(at_s - changes[0] < 1.0 for at_s in changes) <= policy.MAX_SWITCHES_HZ


def test_tokens_that_come_late_raise_the_clock_until_they_are_in_time_for_a_while() -> None:
    limits = Limits(tpot_slo_s=0.1)
    play = Play(limits=limits)
    low = _level(play.look(DECODING))
    # The clock was changed meanwhile, so nothing is learned from these: what is left is the feedback.
    for _ in range(3):
        play.memory = replace(play.memory, since_s=play.now_s + 1)
        play.look(replace(DECODING, tpot_s=0.15), after_s=0.5)
    raised = _level(play.decision)
    assert raised > low
    for _ in range(60):
        play.look(replace(DECODING, tpot_s=0.045), after_s=0.5)
    assert _level(play.decision) <= low + 1


def test_what_was_learned_counts_more_than_the_calibration() -> None:
    play = Play()
    hint = Hint(work="prefill", n_running=1, n_prompt_tokens=100, ttft_left_s=0.65)
    before = _level(play.look(hint))
    for _ in range(20):
        play.look(replace(hint, ttft_left_s=60.0), after_s=1.0)
        for _ in range(3):
            play.look()
        play.look(replace(hint, ttft_left_s=60.0))
        play.look(DECODING, after_s=0.12)  # 1.2 ms a token: this model is four times faster than the calibrated one
    play.look(IDLE, after_s=0.5)
    assert _level(play.look(hint, after_s=1.0)) < before


def test_a_prompt_that_was_late_against_a_promise_makes_the_next_ones_careful() -> None:
    play = Play()
    hint = Hint(work="prefill", n_running=1, n_prompt_tokens=100, ttft_left_s=0.9)
    play.look(hint)
    assert play.memory.promised
    play.look(replace(hint, n_prompt_tokens=30, ttft_left_s=-0.01), after_s=0.91)
    assert play.memory.caution > 1.0
    for _ in range(100):
        play.look(DECODING)
        play.look(hint)
    assert play.memory.caution == 1.0


def test_a_prompt_that_is_told_of_again_and_again_is_not_begun_again() -> None:
    play = Play()
    hint = Hint(work="prefill", n_running=1, n_prompt_tokens=800, ttft_left_s=9.0)
    levels_seen = [_level(play.look(hint))]
    for i in range(1, 6):
        for _ in range(9):
            play.look()
        levels_seen.append(_level(play.look(replace(hint, ttft_left_s=9.0 - i / 2))))
    assert play.decision.reason == "prefill"
    assert max(levels_seen) - min(levels_seen) <= 1
    start_s = play.memory.prompt_s
    assert start_s is not None
    assert play.now_s - start_s == pytest.approx(2.5)


def test_without_a_deadline_only_joules_count() -> None:
    decision = Play(GENERIC).look(Hint(work="prefill", n_running=1))
    assert decision.reason == "prefill"
    assert _level(decision) < TOP


def test_an_inference_without_tokens_is_learned_too() -> None:
    play = Play()
    frame = Hint(work="prefill", ttft_left_s=0.1)
    assert play.look(frame).reason == "race"
    for _ in range(5):
        play.look(IDLE, after_s=0.02)
        play.look(frame, after_s=0.3)
    play.look(IDLE, after_s=0.02)
    decision = play.look(frame, after_s=0.5)
    assert decision.reason == "prefill"
    assert _level(decision) < TOP


# -- a chip that nobody has calibrated --------------------------------------------------------------------------------


def test_without_a_calibration_a_first_prompt_is_raced_and_later_ones_are_not() -> None:
    play = Play(GENERIC)
    prompt = Hint(work="prefill", n_running=1, n_prompt_tokens=100, ttft_left_s=0.99)
    assert play.look(prompt).reason == "race"
    play.look(replace(prompt, ttft_left_s=0.9), after_s=0.1)
    play.look(DECODING, after_s=0.3)
    play.look(IDLE, after_s=5.0)
    decision = play.look(prompt, after_s=5.0)
    assert decision.reason == "prefill"
    assert _level(decision) < TOP


def test_without_a_calibration_decoding_is_below_the_highest_clock_and_keeps_its_time() -> None:
    for slo_s, lowest, highest in ((0.1, 1, TOP // 2), (0.05, TOP // 2 + 1, TOP), (0.04, TOP, TOP)):
        play = Play(GENERIC, limits=Limits(tpot_slo_s=slo_s))
        play.look(DECODING)
        for _ in range(10):
            x = POINTS_HZ[_level(play.decision)] / POINTS_HZ[-1]
            play.look(replace(DECODING, tpot_s=0.03 + 0.01 / x), after_s=0.5)
        assert lowest <= _level(play.decision) <= highest


def test_without_a_calibration_and_a_meter_a_cap_leaves_the_lowest_clock() -> None:
    play = Play(GENERIC, limits=Limits(max_w=8.0))
    for _ in range(50):
        decision = play.look(replace(DECODING, n_waiting=2))
    assert (_level(decision), decision.reason) == (0, "cap")


def test_without_a_calibration_a_meter_opens_one_level_after_the_other() -> None:
    play = Play(GENERIC, limits=Limits(max_w=20.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=10, ttft_left_s=-1.0)
    seen = [_level(play.look(race, power=_power(3.0 + 0.5 * _level(play.decision) if i else 3.0))) for i in range(400)]
    assert all(b - a <= 1 for a, b in itertools.pairwise(seen))
    assert seen[-1] == TOP
    assert seen[0] == 0


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_cap_is_kept_by_the_table_before_any_meter_tells() -> None:
    cap_w = 6.0
    play = Play(limits=Limits(max_w=cap_w))
    decision = play.look(Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=0.5))
    assert decision.reason == "cap"
    assert MODEL.levels[_level(decision)].worst_w <= cap_w < MODEL.levels[_level(decision) + 1].worst_w


def test_a_meter_only_takes_away_from_the_table_and_gives_back_slowly() -> None:
    play = Play(limits=Limits(max_w=6.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    table = _level(play.look(race, power=_power(4.0)))
    for _ in range(100):
        assert _level(play.look(race, power=_power(1.0))) <= table
    assert _level(play.look(race, power=_power(6.1))) < table
    soon = [_level(play.look(race, power=_power(4.0))) for _ in range(60)]
    assert max(soon) < table
    later = [_level(play.look(race, power=_power(4.0))) for _ in range(400)]
    assert later[-1] == table


def test_a_cap_that_is_far_exceeded_goes_down_by_more() -> None:
    drops = []
    for watts in (6.05, 9.0):
        play = Play(limits=Limits(max_w=6.0))
        race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
        table = _level(play.look(race, power=_power(4.0)))
        drops.append(table - _level(play.look(race, power=_power(watts))))
    assert 0 < drops[0] < drops[1]


def test_a_stale_meter_leaves_the_table_in_force() -> None:
    play = Play(limits=Limits(max_w=6.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    table = _level(play.look(race, power=_power(4.0)))
    for power in (_power(50.0, age_s=3.0), _power(None), None, _power(float("nan"))):
        assert _level(play.look(race, power=power)) == table


def test_a_meter_of_another_boundary_than_the_calibration_makes_the_table_worthless() -> None:
    play = Play(limits=Limits(max_w=6.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    chip = Power(power_w=5.9, boundary="soc", quality="measured", age_s=0.05)
    assert _level(play.look(race, power=chip)) == 0
    blind = Power(power_w=None, boundary="soc", quality="measured", age_s=9.0)
    assert [_level(play.look(race, power=blind)) for _ in range(40)][-1] == 0


def test_watts_of_a_table_are_no_measurement() -> None:
    play = Play(limits=Limits(max_w=6.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    table = _level(play.look(race))
    modelled = Power(power_w=50.0, boundary="board", quality="modelled", age_s=0.0)
    assert [_level(play.look(race, power=modelled)) for _ in range(40)][-1] == table


def test_on_battery_the_battery_cap_holds_and_racing_is_bounded() -> None:
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    limits = Limits(max_w=50.0, battery_w=6.0)
    on_mains, on_battery = Play(limits=limits), Play(limits=limits)
    high = on_mains.look(race, is_on_battery=False)
    low = on_battery.look(race, is_on_battery=True)
    assert _level(high) == TOP
    assert _level(low) < TOP
    assert MODEL.levels[_level(low)].worst_w <= 6.0


def test_heat_is_foreseen() -> None:
    play = Play(limits=Limits(max_c=80.0))
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    assert _level(play.look(race, temperature_c=60.0)) == TOP
    temperature_c = 60.0
    while _level(play.decision) == TOP and temperature_c < 90:
        temperature_c += 0.05  # a degree a second
        play.look(race, temperature_c=temperature_c)
    assert 68.0 < temperature_c < 79.0
    assert play.decision.reason == "heat"


def test_a_thermometer_that_is_lost_leaves_half_of_the_clock() -> None:
    play = Play()
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    play.look(race, temperature_c=60.0)
    for _ in range(60):
        decision = play.look(race)
    assert _level(decision) == TOP // 2
    never = Play()
    for _ in range(60):
        decision = never.look(race)
    assert _level(decision) == TOP


def test_what_the_kernel_throttles_is_not_driven_harder() -> None:
    play = Play()
    race = Hint(work="prefill", n_running=1, n_prompt_tokens=500, ttft_left_s=-1.0)
    play.look(race)
    for _ in range(80):
        decision = play.look(race, throttled=True)
    assert _level(decision) < TOP // 2
    assert decision.reason == "heat"


def test_the_same_calls_give_the_same_decisions() -> None:
    def decisions() -> list[Decision]:
        play = Play(limits=Limits(max_w=7.0))
        return [
            play.look(DECODING if i % 7 else IDLE, power=_power(4 + i % 5), temperature_c=50 + i % 30, utilisation=0.5)
            for i in range(300)
        ]

    assert decisions() == decisions()


@pytest.mark.parametrize("model", [MODEL, GENERIC])
def test_two_looks_at_the_same_moment_are_allowed(model: Model) -> None:
    play = Play(model, limits=Limits(max_w=7.0))
    play.look(DECODING, temperature_c=50.0, power=_power(5.0))
    decision = play.look(after_s=0.0, temperature_c=90.0, power=_power(5.0))
    assert decision.max_hz["policy0"] in POINTS_HZ


def test_a_prompt_that_turns_out_shorter_is_no_fast_prompt() -> None:
    """The engine says how many tokens it computes: the others are kept, and took no time."""
    play = Play()
    long = Hint(work="prefill", n_running=1, n_prompt_tokens=900, ttft_left_s=1.0)
    play.look(long)
    play.look(after_s=0.004)
    learned = play.memory.prefill
    short = replace(long, n_prompt_tokens=30, ttft_left_s=1.0 - 0.005)
    play.look(short, after_s=0.001)
    assert play.memory.prefill == learned
    assert play.memory.done == 0
    # And the clock need not be that of the long one.
    play.look(after_s=0.1)
    assert (play.decision.reason, _level(play.decision) < TOP) == ("prefill", True)


def _prompt(play: Play, n_tokens: int, *, took: float) -> None:
    """Let a prompt be computed that takes so many times as long as the calibration says, whatever the clock is."""
    hint = Hint(work="prefill", n_running=1, n_prompt_tokens=n_tokens, ttft_left_s=1.0)
    play.look(IDLE)
    left = float(n_tokens)
    play.look(hint)
    while left > 0:
        token_s = MODEL.levels[_level(play.decision)].prefill_s * took
        passed_s = min(0.05, left * token_s)
        left -= passed_s / token_s
        if left > 1e-9:
            play.look(after_s=passed_s)
        else:
            play.look(Hint(work="decode", n_running=1), after_s=passed_s)
            break
    play.look(IDLE)


def test_a_prompt_is_learned_from_though_the_machine_had_to_race_in_between() -> None:
    play = Play()
    for _ in range(12):
        _prompt(play, 100, took=1.3)
    assert play.memory.prefill is not None
    assert play.memory.prefill.seconds(1.0) == pytest.approx(1.3 * MODEL.levels[TOP].prefill_s, rel=0.1)


def test_a_prompt_whose_neighbour_ended_is_not_learned_from() -> None:
    play = Play()
    play.look(IDLE)
    first = Hint(work="prefill", n_running=2, n_prompt_tokens=120, ttft_left_s=1.0, tpot_s=0.05)
    play.look(first)
    play.look(after_s=0.3)
    before = play.memory.prefill
    play.look(replace(first, n_running=1, ttft_left_s=0.7, tpot_s=None))
    # What is left of it takes 0.1 s: no 120 tokens were computed in that time.
    play.look(Hint(work="decode", n_running=1), after_s=0.1)
    assert play.memory.prefill == before
