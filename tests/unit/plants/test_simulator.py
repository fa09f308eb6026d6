"""Plant A itself: its governors against references in small steps, its engine and its watts against sums by hand."""

from __future__ import annotations

import math

import pytest

from edge_rt.power import levels
from edge_rt.power.state import Advice
from tests.plants import board_model, oracle, simulator, traces
from tests.plants.board_model import Board, Chip
from tests.plants.governors import NEVER, Conservative, Fixed, Ondemand, Schedutil
from tests.plants.simulator import DISPATCH_S, DRAIN_S, KernelDriver, Simulation, most_in_a_second
from tests.plants.traces import Request, Trace

PI = board_model.load("pi5_class")


@pytest.fixture(params=board_model.NAMES)
def board(request: pytest.FixtureRequest) -> Board:
    return board_model.load(request.param)


def _trace(*requests: Request, span_s: float = 20.0) -> Trace:
    return Trace(name="by hand", span_s=span_s, requests=requests)


def _one(n_prompt: int = 100, n_output: int = 50, arrival_s: float = 1.0) -> Request:
    return Request(arrival_s=arrival_s, n_prompt=n_prompt, n_output=n_output)


def test_boards_take_more_and_go_faster_at_each_higher_point(board: Board) -> None:
    watts = [board.watts(i, 0.3, 0.7, 50.0) for i in range(board.top + 1)]
    assert watts == sorted(watts)
    assert all(soc_w < board_w for soc_w, board_w in watts)
    assert list(board.slowness) == sorted(board.slowness, reverse=True)
    volts = [v for _, v in board.points]
    assert volts == sorted(volts)


def test_the_calibration_of_a_board_is_what_its_meter_would_show(board: Board) -> None:
    model = board.calibration()
    assert model.boundary == board.meter.boundary
    assert model.levels[-1].decode_s == pytest.approx(sum(board.step(1, 0, n_kv=100)))
    assert model.idle_w < model.levels[0].decode_w < model.levels[-1].prefill_w < model.levels[-1].worst_w


def test_one_request_takes_the_sum_of_its_steps() -> None:
    result = simulator.run(PI, _trace(_one()), Fixed(PI.top), name="performance")
    work = PI.work
    prefill_s = 100 * (work.prefill_row_s + work.prefill_row_stall_s) + work.decode_stall_s
    assert result.ttft_s == [pytest.approx(DISPATCH_S + prefill_s)]
    decode_s = work.decode_stall_s + work.decode_row_stall_s + work.decode_row_s
    assert result.tpot_s == [pytest.approx(decode_s, rel=0.01)]
    assert (result.n_tokens, result.n_requests, result.n_unfinished) == (50, 1, 0)


def test_joules_are_watts_times_seconds_whatever_the_events(board: Board) -> None:
    trace = traces.poisson(1, rate_hz=0.1, span_s=100.0)
    result = simulator.run(board, trace, Schedutil(board.points_hz), name="schedutil")
    assert result.soc_j == pytest.approx(result.prefill_j + result.decode_j + result.idle_j)
    assert sum(result.at_point_s) == pytest.approx(result.span_s) == pytest.approx(100.0 + DRAIN_S)
    # The board takes its rest at every moment, and loses a share of all in its regulators.
    least_j = (result.soc_j + (board.power.rest_w + board.power.dram_idle_w) * result.span_s) / board.power.efficiency
    assert least_j < result.board_j < 1.5 * least_j


def test_no_request_is_lost_and_all_governors_give_the_same_tokens(board: Board) -> None:
    trace = traces.bursts(3, span_s=200.0)
    n_tokens = sum(request.n_output for request in trace.requests)
    for governor in (Fixed(board.top), Ondemand(board.points_hz), Conservative(board.points_hz)):
        result = simulator.run(board, trace, governor, name="any")
        assert result.n_unfinished == 0
        assert result.n_tokens == n_tokens


def test_a_prompt_delays_running_answers_by_little_and_joins_between_steps() -> None:
    alone = simulator.run(PI, _trace(_one(n_output=200)), Fixed(PI.top), name="alone")
    beside = _trace(_one(n_output=200), _one(n_prompt=400, arrival_s=4.0))
    both = simulator.run(PI, beside, Fixed(PI.top), name="both")
    prefill_s = 400 * (PI.work.prefill_row_s + PI.work.prefill_row_stall_s)
    assert 1.1 * prefill_s < max(both.ttft_s) < 1.6 * prefill_s
    assert alone.tpot_s[0] < max(both.tpot_s) < 3 * alone.tpot_s[0]


def test_more_requests_than_slots_wait() -> None:
    requests = [_one(n_prompt=20, n_output=100, arrival_s=1.0 + i / 100) for i in range(9)]
    result = simulator.run(PI, _trace(*requests), Fixed(PI.top), name="nine")
    assert sorted(result.ttft_s)[7] < 2.0 < sorted(result.ttft_s)[8]


def test_pelt_jumps_to_where_small_steps_lead() -> None:
    governor = Schedutil(PI.points_hz, has_util_est=False)
    running, util, at_s = 0, 0.0, 0.0
    governor.load(0.0, is_busy=True, running=running)
    looks_s = []
    while governor.next_s < 1.0:
        now_s = governor.next_s
        while at_s < now_s - 1e-9:  # 1 ms at a time, as time invariant of the clock
            share = PI.points_hz[running] / PI.points_hz[-1]
            util += (1 - util) * (1 - 0.5 ** (0.001 * share / 0.032))
            at_s += 0.001
        governor.look(now_s, running=running)
        wanted_hz = 1.25 * util * PI.points_hz[-1]
        assert PI.points_hz[governor.point] == next((hz for hz in PI.points_hz if hz >= wanted_hz), PI.points_hz[-1])
        running = governor.point
        looks_s.append(now_s)
    assert running == PI.top
    # 0.8 of full utilisation takes 2.3 half-lives, longer because the clock is low at first.
    assert 0.032 * 2.3 < looks_s[-1] < 0.150


def test_util_est_remembers_a_thread_that_slept() -> None:
    governor = Schedutil(PI.points_hz)
    governor.load(0.0, is_busy=True, running=PI.top)
    governor.load(2.0, is_busy=False, running=PI.top)
    for _ in range(100):
        if governor.next_s < NEVER:
            governor.look(governor.next_s, running=PI.top)
    assert governor.point == 0
    governor.load(10.0, is_busy=True, running=0)
    governor.look(governor.next_s, running=0)
    assert governor.point == PI.top


@pytest.mark.parametrize(("make", "within_s"), [(Ondemand, 0.03), (Conservative, 0.5)])
def test_sampling_governors_go_up_under_load_and_down_without(
    make: type[Ondemand | Conservative], within_s: float
) -> None:
    governor = make(PI.points_hz)
    governor.load(0.005, is_busy=True, running=0)
    while governor.next_s < NEVER:
        now_s = governor.next_s
        governor.look(now_s, running=governor.point)
    assert governor.point == PI.top
    assert now_s <= within_s
    governor.load(1.0, is_busy=False, running=PI.top)
    while governor.next_s < NEVER:
        governor.look(governor.next_s, running=governor.point)
    assert governor.point == 0


def test_heat_nears_what_the_power_sustains() -> None:
    chip = Chip(PI, 25.0)
    for _ in range(2000):
        chip.warm(5.0, 1.0)
    assert chip.die_c == pytest.approx(25 + 5 * (PI.thermal.die_k_per_w + PI.thermal.sink_k_per_w))


def test_the_kernel_throttles_a_board_that_is_too_hot() -> None:
    trace = _trace(*(_one(n_output=500, arrival_s=1.0 + i) for i in range(20)), span_s=200.0)
    result = Simulation(PI, trace, KernelDriver(Fixed(PI.top)), name="hot", ambient_c=60.0).run()
    assert result.throttled_s > 10
    assert result.max_c < PI.thermal.trip_c + 5


def test_the_oracle_is_in_time_and_takes_less_than_any_governor(board: Board) -> None:
    trace = traces.poisson(2, rate_hz=0.08, span_s=300.0)
    performance = simulator.run(board, trace, Fixed(board.top), name="performance")
    kept = oracle.rules(performance, performance, ttft_slo_s=1.0, tpot_slo_s=0.1)
    best = oracle.per_phase(board, trace, kept, performance)
    static = oracle.best_static(board, trace, kept, performance)
    assert kept.allow(best)
    assert best.soc_j_token <= static.soc_j_token * 1.005
    assert static.soc_j_token <= performance.soc_j_token
    schedutil = simulator.run(board, trace, Schedutil(board.points_hz), name="schedutil")
    assert best.soc_j_token < schedutil.soc_j_token
    assert best.n_tokens == performance.n_tokens


def test_no_clock_takes_less_than_the_ceiling_that_bars_are_held_against(board: Board) -> None:
    trace = traces.poisson(2, rate_hz=0.16, span_s=300.0)
    least = oracle.without_deadlines(board, trace)
    fixed = [simulator.run(board, trace, Fixed(i), name="fixed") for i in range(board.top + 1)]
    done = [result for result in fixed if not result.n_unfinished]
    assert least.n_unfinished == 0
    assert least.soc_j_token <= min(result.soc_j_token for result in done) * 1.005
    if board.name != "x86-mini-pc":
        # The lowest clock is the cheapest for each step, and joins the most of them.
        assert least.soc_j_token == pytest.approx(fixed[0].soc_j_token)


def test_traces_are_the_same_for_the_same_seed_and_have_their_rate() -> None:
    assert traces.bursts(5, span_s=500.0) == traces.bursts(5, span_s=500.0)
    n = sum(len(traces.poisson(seed, rate_hz=0.08, span_s=1000.0).requests) for seed in range(20))
    assert n == pytest.approx(1600, abs=4 * math.sqrt(1600))


def test_a_frame_shares_the_cores_and_is_late_when_the_clock_is_low() -> None:
    trace = traces.mixed(1, span_s=100.0)
    fast = simulator.run(PI, trace, Fixed(PI.top), name="performance")
    assert fast.n_frames == pytest.approx(1000, abs=2)
    assert fast.n_late_frames == 0
    assert fast.n_unfinished == 0


def test_switches_are_counted_in_any_second() -> None:
    assert most_in_a_second([]) == 0
    assert most_in_a_second([0.0, 0.9, 1.0, 1.8, 1.85]) == 4


# -- threads, and answers decoded together -------------------------------------------------------------------------


class _Advised:
    """The highest clock, and advice from a moment on."""

    def __init__(self, board: Board, advice: Advice, from_s: float = 0.0) -> None:
        self.point, self.next_s, self._advice = board.top, from_s, advice

    def begin(self, sim: Simulation) -> None:
        self._sim = sim

    def load(self, now_s: float, *, is_busy: bool) -> None:
        pass

    def arrived(self, now_s: float) -> None:
        pass

    def changed(self, now_s: float) -> None:
        pass

    def look(self, now_s: float) -> None:
        self._sim.advise(self._advice)
        self.next_s = NEVER


def _advised(board: Board, trace: Trace, advice: Advice, from_s: float = 0.0) -> simulator.Result:
    return Simulation(board, trace, _Advised(board, advice, from_s), name="advised").run()


def test_advice_of_all_cores_changes_nothing(board: Board) -> None:
    trace = traces.poisson(1, rate_hz=0.1, span_s=100.0)
    advice = Advice(n_prefill_threads=board.n_cores, n_decode_threads=board.n_cores, max_batch=8)
    assert _advised(board, trace, advice).soc_j == pytest.approx(_advised(board, trace, Advice()).soc_j)


def test_fewer_threads_compute_longer_wait_hardly_longer_and_take_fewer_watts(board: Board) -> None:
    half = board.n_cores // 2
    assert board.computing(board.n_cores) == board.waiting(board.n_cores) == 1
    assert board.computing(half) == pytest.approx(2, rel=0.05)
    assert 1 < board.waiting(half) < 1.25
    assert board.waiting(1) > 1.5
    whole_w, fewer_w = board.watts(board.top, 0.3, 0.7, 50.0), board.watts(board.top, 0.3, 0.7, 50.0, half)
    assert fewer_w[0] < whole_w[0]
    assert fewer_w[1] < whole_w[1]
    # Half of the cores never take less than half of what all do: the rest of the chip is there as before.
    assert fewer_w[0] > whole_w[0] / 2


def test_decoding_on_half_of_the_threads_takes_fewer_joules_and_loses_no_request(board: Board) -> None:
    trace = traces.poisson(1, rate_hz=0.05, span_s=200.0)
    whole = _advised(board, trace, Advice())
    half = _advised(board, trace, Advice(n_decode_threads=board.n_cores // 2))
    assert half.decode_j < whole.decode_j
    assert (half.n_requests, half.n_tokens) == (whole.n_requests, whole.n_tokens)
    assert max(half.tpot_s) > max(whole.tpot_s)


def test_threads_change_between_two_steps_of_an_answer() -> None:
    trace = _trace(_one(n_output=200))
    whole, half = (_advised(PI, trace, Advice(n_decode_threads=n)).tpot_s[0] for n in (4, 2))
    both = _advised(PI, trace, Advice(n_decode_threads=2), from_s=5.0).tpot_s[0]
    assert whole < both < half


def test_a_batch_of_one_answers_one_after_the_other() -> None:
    trace = _trace(_one(), _one(arrival_s=1.1))
    result = _advised(PI, trace, Advice(max_batch=1))
    together = _advised(PI, trace, Advice())
    assert result.n_requests == 2
    assert max(result.ttft_s) > max(together.ttft_s) + 1.0
    assert max(result.tpot_s) < max(together.tpot_s)


def test_a_calibration_with_threads_foretells_the_board(board: Board) -> None:
    model = board.calibration(with_threads=True)
    assert model.threads is not None
    assert model.threads.has_power
    n_most = board.n_cores
    for n in model.threads.counts:
        on = levels.on_threads(model, n, n)
        for i in (0, board.top // 3, board.top):
            compute_s, stall_s = board.step(1, 0, n_kv=100)
            compute_s, stall_s = compute_s * board.slowness[i] * board.computing(n), stall_s * board.waiting(n)
            assert on.levels[i].decode_s == pytest.approx(compute_s + stall_s, rel=0.04)
            watts = board.watts(i, compute_s, stall_s, 50.0, n)
            shown_w = watts[0] if board.meter.boundary == "soc" else watts[1]
            assert on.levels[i].decode_w == pytest.approx(shown_w, rel=0.08)
    assert model.threads.n_most == n_most
    assert board.calibration().threads is None
