"""decide() in plant A, for minutes: what must hold whatever requests, sensors and weather do."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from edge_rt.power import levels
from edge_rt.power.policy import MAX_SWITCHES_HZ
from edge_rt.power.state import Limits
from tests.plants import board_model, simulator, traces
from tests.plants.board_model import Board
from tests.plants.governors import Fixed
from tests.plants.policy_driver import Fault, FaultKind, PolicyDriver
from tests.plants.simulator import Result, Simulation
from tests.plants.traces import Request, Trace

BOARDS = {name: board_model.load(name) for name in board_model.NAMES}
SPAN_S = 120.0
KINDS: tuple[FaultKind, ...] = (
    "meter stale",
    "meter absent",
    "meter jumps",
    "heat absent",
    "heat jumps",
    "hints lost",
)


def _play(
    board: Board,
    trace: Trace,
    limits: Limits,
    *,
    ambient_c: float = 25.0,
    model: levels.Model | None = None,
    faults: tuple[Fault, ...] = (),
    seed: int = 0,
    has_meter: bool = True,
) -> tuple[Result, PolicyDriver]:
    model = model or board.calibration(error=0.02, seed=seed)
    driver = PolicyDriver(model, limits, seed=seed, faults=faults, has_meter=has_meter)
    driver.keeps_decisions = True
    sim = Simulation(board, trace, driver, name="edge_rt", ambient_c=ambient_c, cap_w=limits.max_w)
    result = sim.run()
    driver.finish()
    return result, driver


@st.composite
def random_traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(0, 12))
    requests = sorted(
        (
            Request(
                arrival_s=draw(st.floats(0, SPAN_S)),
                n_prompt=draw(st.integers(1, 1500)),
                n_output=draw(st.integers(1, 300)),
                prefill_factor=draw(st.floats(0.7, 1.5)),
                decode_factor=draw(st.floats(0.7, 1.5)),
            )
            for _ in range(n)
        ),
        key=lambda request: request.arrival_s,
    )
    frames_hz = draw(st.sampled_from((0.0, 0.0, 10.0)))
    return Trace(name="random", span_s=SPAN_S, requests=tuple(requests), frames_hz=frames_hz)


faults = st.lists(
    st.builds(
        lambda kind, start_s, length_s: Fault(kind=kind, start_s=start_s, end_s=start_s + length_s),
        st.sampled_from(KINDS),
        st.floats(0, SPAN_S),
        st.floats(0.1, 60.0),
    ),
    max_size=4,
).map(tuple)
# No shrinking: a case is a minute of events, and each smaller one would be another.
few = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@few
@given(
    st.sampled_from(board_model.NAMES),
    random_traces(),
    faults,
    st.floats(0, 60),
    st.floats(0.0, 1.0),
    st.integers(0, 1000),
)
def test_a_cap_is_never_exceeded_beyond_a_control_period(
    name: str, trace: Trace, faults: tuple[Fault, ...], ambient_c: float, share: float, seed: int
) -> None:
    board = BOARDS[name]
    model = board.calibration(error=0.02, seed=seed)
    # From what the lowest clock takes at its worst to what the highest does: below that no clock can help.
    cap_w = model.levels[0].worst_w + share * (model.levels[-1].worst_w - model.levels[0].worst_w)
    limits = Limits(max_w=cap_w)
    result, driver = _play(board, trace, limits, ambient_c=ambient_c, model=model, faults=faults, seed=seed)
    assert result.n_violations == 0, result.longest_above_s
    assert result.most_switches_1s <= MAX_SWITCHES_HZ
    allowed = set(board.points_hz)
    assert {hz for _, decision in driver.decisions for hz in decision.max_hz.values()} <= allowed


@few
@given(st.sampled_from(board_model.NAMES), random_traces(), faults, st.floats(0, 60), st.integers(0, 1000))
def test_without_a_calibration_everything_is_served_and_the_clock_is_seldom_changed(
    name: str, trace: Trace, faults: tuple[Fault, ...], ambient_c: float, seed: int
) -> None:
    board = BOARDS[name]
    model = levels.generic([board.domain], boundary=board.meter.boundary)
    result, _ = _play(board, trace, Limits(), ambient_c=ambient_c, model=model, faults=faults, seed=seed)
    assert result.most_switches_1s <= MAX_SWITCHES_HZ
    assert result.n_requests + result.n_unfinished == len(trace.requests)


@pytest.mark.parametrize("name", board_model.NAMES)
def test_the_same_run_gives_the_same_decisions(name: str) -> None:
    trace = traces.bursts(1, span_s=SPAN_S)
    runs = [_play(BOARDS[name], trace, Limits(), seed=3)[1].decisions for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", board_model.NAMES)
@pytest.mark.parametrize("is_calibrated", [True, False])
def test_steady_decoding_settles_at_one_clock(name: str, is_calibrated: bool) -> None:
    board = BOARDS[name]
    trace = Trace(name="steady", span_s=SPAN_S, requests=(Request(arrival_s=1.0, n_prompt=60, n_output=2000),))
    model = None if is_calibrated else levels.generic([board.domain], boundary=board.meter.boundary)
    _, driver = _play(board, trace, Limits(), model=model)
    assert sum(20.0 < at_s < 70.0 for at_s in driver.switches_s) <= 1


@pytest.mark.parametrize("name", board_model.NAMES)
def test_a_cap_that_binds_makes_no_limit_cycle(name: str) -> None:
    board = BOARDS[name]
    model = board.calibration()
    cap_w = 0.5 * (model.levels[0].worst_w + model.levels[-1].worst_w)
    requests = tuple(Request(arrival_s=1.0 + i / 10, n_prompt=200, n_output=400) for i in range(24))
    trace = Trace(name="load", span_s=300.0, requests=requests)
    result, driver = _play(board, trace, Limits(max_w=cap_w), ambient_c=45.0)
    assert result.n_violations == 0
    assert sum(at_s > 30.0 for at_s in driver.switches_s) < 60


@pytest.mark.parametrize("name", board_model.NAMES)
def test_a_hot_day_stays_below_the_limit_without_swinging(name: str) -> None:
    board = BOARDS[name]
    requests = tuple(Request(arrival_s=1.0 + i, n_prompt=200, n_output=400) for i in range(60))
    trace = Trace(name="load", span_s=600.0, requests=requests)
    result, driver = _play(board, trace, Limits(max_c=80.0), ambient_c=45.0)
    performance = simulator.run(board, trace, Fixed(board.top), name="performance", ambient_c=45.0)
    assert result.max_c < 81.0
    assert performance.max_c > result.max_c
    assert len(driver.switches_s) < 200


@pytest.mark.parametrize("name", board_model.NAMES)
def test_first_tokens_come_as_in_time_as_at_the_highest_clock_and_for_less(name: str) -> None:
    board = BOARDS[name]
    late = late_fast = 0
    for seed in range(4):
        trace = traces.poisson(seed, rate_hz=0.08, span_s=400.0)
        result, _ = _play(board, trace, Limits(), seed=seed)
        fast = simulator.run(board, trace, Fixed(board.top), name="performance")
        late += sum(s > 1.0 for s in result.ttft_s)
        late_fast += sum(s > 1.0 for s in fast.ttft_s)
        assert result.n_tokens == fast.n_tokens
        assert result.soc_j < 0.8 * fast.soc_j
        assert result.late_rest(0.1) <= 0.05
    assert late <= late_fast + 2
