"""Advice in plant A, for minutes: what must hold whatever requests, sensors and weather do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.power.policy import MAX_SWITCHES_HZ
from edge_rt.power.state import Advice, Limits
from tests.plants import board_model, simulator, traces
from tests.plants.board_model import Board
from tests.plants.governors import Fixed
from tests.plants.policy_driver import Fault, PolicyDriver
from tests.plants.simulator import Result, Simulation
from tests.plants.traces import Request, Trace
from tests.unit.power.test_policy_over_time import BOARDS, SPAN_S, faults, few, random_traces


def _play(
    board: Board,
    trace: Trace,
    limits: Limits,
    *,
    ambient_c: float = 25.0,
    faults: tuple[Fault, ...] = (),
    seed: int = 0,
    has_clocks: bool = True,
) -> tuple[Result, PolicyDriver]:
    model = board.calibration(error=0.02, seed=seed, with_threads=True)
    if not has_clocks:
        model = board_model.without_clocks(model)
    driver = PolicyDriver(model, limits, seed=seed, faults=faults, kernel=None if has_clocks else Fixed(board.top))
    driver.keeps_decisions = True
    sim = Simulation(board, trace, driver, name="edge_rt", ambient_c=ambient_c, cap_w=limits.max_w)
    result = sim.run()
    driver.finish()
    return result, driver


@few
@given(
    st.sampled_from(board_model.NAMES),
    random_traces(),
    faults,
    st.floats(0, 60),
    st.floats(0.0, 1.0),
    st.integers(0, 1000),
)
def test_with_advice_too_a_cap_is_never_exceeded_beyond_a_control_period(
    name: str, trace: Trace, faults: tuple[Fault, ...], ambient_c: float, share: float, seed: int
) -> None:
    board = BOARDS[name]
    model = board.calibration(error=0.02, seed=seed)
    cap_w = model.levels[0].worst_w + share * (model.levels[-1].worst_w - model.levels[0].worst_w)
    result, driver = _play(board, trace, Limits(max_w=cap_w), ambient_c=ambient_c, faults=faults, seed=seed)
    assert result.n_violations == 0, result.longest_above_s
    assert result.most_switches_1s <= MAX_SWITCHES_HZ
    assert result.n_requests + result.n_unfinished == len(trace.requests)
    counts = (None, *range(1, board.n_cores + 1))
    for _, decision in driver.decisions:
        advice = decision.advice
        assert advice.n_prefill_threads in counts
        assert advice.n_decode_threads in counts
        assert advice.max_batch is None or 1 <= advice.max_batch <= 8
    # Threads change every half second at most, as answers do; a cap that is given or taken away comes on top.
    assert len(driver.advised_s) <= 4 * (SPAN_S + simulator.DRAIN_S)


@few
@given(st.sampled_from(board_model.NAMES), random_traces(), faults, st.integers(0, 1000))
def test_without_clocks_threads_alone_serve_everything(
    name: str, trace: Trace, faults: tuple[Fault, ...], seed: int
) -> None:
    board = BOARDS[name]
    result, driver = _play(board, trace, Limits(), faults=faults, seed=seed, has_clocks=False)
    assert result.n_requests + result.n_unfinished == len(trace.requests)
    assert not driver.switches_s


@pytest.mark.parametrize("name", board_model.NAMES)
@pytest.mark.parametrize("has_clocks", [True, False])
def test_steady_decoding_settles_at_one_number_of_threads(name: str, has_clocks: bool) -> None:
    trace = Trace(name="steady", span_s=SPAN_S, requests=(Request(arrival_s=1.0, n_prompt=60, n_output=2000),))
    _, driver = _play(BOARDS[name], trace, Limits(), has_clocks=has_clocks)
    assert sum(at_s > 10.0 for at_s in driver.advised_s) <= 1


@pytest.mark.parametrize("name", board_model.NAMES)
def test_a_load_that_presses_on_the_time_per_token_makes_no_limit_cycle(name: str) -> None:
    board = BOARDS[name]
    compute_s, stall_s = board.step(3, 0, n_kv=600)
    limits = Limits(tpot_slo_s=(compute_s + stall_s) * 1.05, ttft_slo_s=60.0)
    requests = tuple(Request(arrival_s=1.0 + i / 10, n_prompt=50, n_output=300) for i in range(24))
    result, driver = _play(board, Trace(name="load", span_s=300.0, requests=requests), limits)
    assert result.n_requests == 24
    assert sum(at_s > 20.0 for at_s in driver.advised_s) < 40
    batches = {decision.advice.max_batch for at_s, decision in driver.decisions if at_s > 10.0}
    assert batches <= {2, 3, 4, 5}


@pytest.mark.parametrize("name", board_model.NAMES)
def test_threads_alone_take_fewer_joules_where_nobody_can_set_a_clock(name: str) -> None:
    board = BOARDS[name]
    trace = traces.poisson(2, rate_hz=0.08, span_s=400.0)
    result, _ = _play(board, trace, Limits(), has_clocks=False)
    fast = simulator.run(board, trace, Fixed(board.top), name="performance")
    assert result.n_tokens == fast.n_tokens
    assert result.decode_j < 0.95 * fast.decode_j
    assert result.late_rest(0.1) <= 0.05
    assert result.late_first(1.0) <= fast.late_first(1.0) + 0.03


def test_with_a_cap_below_the_lowest_clock_threads_keep_it_once_they_are_taken_up() -> None:
    board = BOARDS["pi5_class"]
    model = board.calibration(with_threads=True)
    cap_w = model.levels[0].worst_w * 0.85
    requests = tuple(Request(arrival_s=1.0 + 4 * i, n_prompt=100, n_output=40) for i in range(20))
    trace = Trace(name="steady", span_s=100.0, requests=requests)
    result, driver = _play(board, trace, Limits(max_w=cap_w))
    unadvised = PolicyDriver(board.calibration(), Limits(max_w=cap_w), seed=0)
    plain = Simulation(board, trace, unadvised, name="clocks alone", cap_w=cap_w).run()
    assert plain.above_cap_ws > 0
    assert result.above_cap_ws < 0.05 * plain.above_cap_ws
    assert any(decision.advice != Advice() for _, decision in driver.decisions)
