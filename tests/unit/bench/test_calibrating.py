from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.null import NullSession
from edge_rt.bench.calibrating import Calibrator, Domain, MeterWatts, Plan, TypedWatts, planned_s, thinned
from edge_rt.bench.metering import Metering
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import PowerUnknownError
from edge_rt.power.meter import Chosen
from tests.fakes import FakeClock
from tests.unit.power.test_monitor import FakeMeter

FILE = ModelFile(model="null", variant="", path=Path("null"), quant="none")


class Board:
    """A machine with one clock: prefill is as fast as it, decode waits for memory half of the time."""

    def __init__(self, root: Path) -> None:
        self.clock, self.hz, self.set_hz, self.root = FakeClock(), 2e9, list[float](), root
        self.running = "idle"
        self.busy_s = 0.0
        (root / "proc").mkdir()
        self.account()

    def account(self) -> None:
        """Two CPUs, one of which computes."""
        all_ticks = 200 * (self.clock() - 1000.0)
        text = f"cpu {round(100 * self.busy_s)} 0 0 {round(all_ticks - 100 * self.busy_s)} 0 0 0 0 0 0\n"
        (self.root / "proc/stat").write_text(text)

    def set(self, domain: str, max_hz: float) -> None:
        assert domain == "policy0"
        self.hz = max_hz
        self.set_hz.append(max_hz)

    def spend(self, seconds: float, *, busy: bool) -> None:
        self.clock.advance(seconds)
        self.busy_s += seconds if busy else 0.0
        self.account()


class Session(NullSession):
    board: Board

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        n_rows = sum(len(rows.token_ids) for rows in batch)
        self.board.running = "prefill" if n_rows > 1 else "decode"
        work_s = n_rows * 1e6 / self.board.hz
        self.board.spend(work_s if n_rows > 1 else 0.02 + work_s * 10, busy=True)
        return super().decode(batch)


class Watts:
    """Tells power by what ran last."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.silent_while = ""

    def mark(self) -> float:
        return self.board.clock()

    def since(self, mark: float, what: str) -> Reading[float]:
        if what == self.silent_while:
            return unknown("meter", "gone")
        ghz = self.board.hz / 1e9
        return known({"idle": 2.0, "prefill": 2 + 2 * ghz, "decode": 2 + ghz}[what], "meter")


def calibrator(board: Board, watts: Watts | None = None) -> Calibrator:
    session = Session(FILE, LoadOptions(n_ctx=128, n_seq_max=1, n_batch=64))
    session.board = board
    return Calibrator(
        session,
        watts or Watts(board),
        Plan(phase_s=1.0, idle_s=2.0, n_prompt=100),
        clock=board,
        root=SysfsRoot(board.root),
        now=board.clock,
        sleep=lambda seconds: board.spend(seconds, busy=False),
    )


def test_each_clock_is_measured_from_the_highest_on(tmp_path: Path) -> None:
    board = Board(tmp_path)
    measuring = calibrator(board)
    assert measuring.idle_w() == 2.0
    found = measuring.domain(Domain("policy0", (5e8, 1e9, 2e9)))
    assert board.set_hz == [2e9, 1e9, 5e8]
    assert [point.max_hz for point in found.points] == [5e8, 1e9, 2e9]
    slow, _, fast = found.points
    assert slow.prefill_s_per_token == pytest.approx(4 * fast.prefill_s_per_token)
    assert slow.decode_s_per_token < 2 * fast.decode_s_per_token
    assert (slow.prefill_w, slow.decode_w, fast.prefill_w) == (3.0, 2.5, 6.0)
    assert measuring.utilisation == pytest.approx(0.5, abs=0.01)


def test_one_clock_alone_is_not_set(tmp_path: Path) -> None:
    board = Board(tmp_path)
    (point,) = calibrator(board).domain(Domain("policy0", (2e9,))).points
    assert (board.set_hz, point.max_hz) == ([], 2e9)


@pytest.mark.parametrize("what", ["idle", "prefill", "decode"])
def test_a_power_that_is_not_known_ends_it(tmp_path: Path, what: str) -> None:
    board = Board(tmp_path)
    watts = Watts(board)
    watts.silent_while = what
    measuring = calibrator(board, watts)
    with pytest.raises(PowerUnknownError, match="meter: gone"):
        _ = measuring.idle_w(), measuring.domain(Domain("policy0", (2e9,)))


def test_watts_that_are_typed_in_are_told_again() -> None:
    watts = TypedWatts(idle_w=2.0, active_w=6.0)
    assert watts.since(watts.mark(), "idle").value == 2.0
    assert watts.since(watts.mark(), "decode").value == 6.0


def test_watts_of_a_meter_are_its_means() -> None:
    meter = FakeMeter(FakeClock())
    with Metering(Chosen(meter)) as metering:
        watts = MeterWatts(metering)
        assert watts.since(watts.mark(), "idle").value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("n", "most", "left"), [(3, 8, (0, 1, 2)), (5, 3, (0, 2, 4)), (10, 2, (0, 9)), (10, 1, (9,)), (1, 4, (0,))]
)
def test_points_are_thinned_evenly(n: int, most: int, left: tuple[int, ...]) -> None:
    assert thinned(tuple(map(float, range(n))), most) == tuple(map(float, left))


# -- threads ---------------------------------------------------------------------------------------------------------


class Threaded(Session):
    """Prefill is divided among threads; decoding is fastest on two, and a further stream costs a tenth."""

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        n_rows = sum(len(rows.token_ids) for rows in batch)
        is_prefill = any(len(rows.token_ids) > 1 for rows in batch)
        self.seen.append((self.n_threads, [rows.seq_id for rows in batch], batch[0].start, n_rows))
        work_s = n_rows * 4e6 / self.board.hz / self.n_threads
        self.board.running = "prefill" if is_prefill else "decode"
        self.board.spend(work_s if is_prefill else (0.02 + 0.002 * n_rows) * max(1, 2 / self.n_threads), busy=True)
        return NullSession.decode(self, batch)

    seen: list[tuple[int, list[int], int, int]]


def threaded(board: Board, watts: Watts, n_seq_max: int = 4) -> tuple[Calibrator, Threaded]:
    session = Threaded(FILE, LoadOptions(n_ctx=512, n_seq_max=n_seq_max, n_batch=64))
    session.board, session.seen = board, []
    plan = Plan(phase_s=1.0, idle_s=2.0, thread_phase_s=0.5, n_prompt=100)
    made = Calibrator(
        session,
        watts,
        plan,
        clock=board,
        root=SysfsRoot(board.root),
        now=board.clock,
        sleep=lambda seconds: board.spend(seconds, busy=False),
    )
    return made, session


def test_each_number_of_threads_is_measured_at_each_clock(tmp_path: Path) -> None:
    board = Board(tmp_path)
    measuring, session = threaded(board, Watts(board))
    measuring.domain(Domain("policy0", (1e9, 2e9)))
    before = measuring.utilisation
    points = measuring.threads(Domain("policy0", (1e9, 2e9)), (1, 2, 4), idle_w=2.0, has_watts=True)
    assert board.set_hz[2:] == [2e9, 1e9]
    assert len(points) == len({(p.phase, p.max_hz, p.n_threads, p.n_streams) for p in points}) == 16
    found = {(p.phase, p.n_threads, p.n_streams): p for p in points if p.max_hz == 2e9}
    assert found["prefill", 1, 1].s_per_token == pytest.approx(4 * found["prefill", 4, 1].s_per_token)
    assert found["decode", 2, 1].s_per_token == pytest.approx(found["decode", 4, 1].s_per_token)
    assert found["decode", 1, 1].s_per_token == pytest.approx(2 * found["decode", 4, 1].s_per_token)
    assert found["decode", 4, 4].s_per_token == pytest.approx(0.028)
    assert {p.power_w for p in points if p.phase == "prefill"} == {4.0, 6.0}
    assert session.n_threads == 4
    assert measuring.utilisation == before


def test_streams_are_decoded_together_and_out_of_the_way_of_one_alone(tmp_path: Path) -> None:
    board = Board(tmp_path)
    measuring, session = threaded(board, Watts(board))
    measuring.threads(Domain("policy0", (2e9,)), (1, 2), idle_w=2.0, has_watts=True)
    assert [0, 1, 2, 3] in [seqs for _, seqs, _, n_rows in session.seen if n_rows == 4]
    starts = {start for _, seqs, start, _ in session.seen if len(seqs) == 4}
    assert starts == {63}


def test_a_model_with_few_sequences_is_measured_alone(tmp_path: Path) -> None:
    board = Board(tmp_path)
    measuring, _ = threaded(board, Watts(board), n_seq_max=2)
    points = measuring.threads(Domain("policy0", (2e9,)), (1, 2), idle_w=2.0, has_watts=True)
    assert {p.n_streams for p in points} == {1}


def test_watts_of_all_threads_are_noted_for_none(tmp_path: Path) -> None:
    board = Board(tmp_path)
    measuring, _ = threaded(board, Watts(board))
    points = measuring.threads(Domain("policy0", (2e9,)), (1, 2), idle_w=2.0, has_watts=False)
    assert {p.power_w for p in points} == {None}


def test_a_meters_noise_makes_no_file_that_cannot_be_read(tmp_path: Path) -> None:
    board = Board(tmp_path)
    measuring, _ = threaded(board, Watts(board))
    points = measuring.threads(Domain("policy0", (2e9,)), (1, 2), idle_w=5.0, has_watts=True)
    assert min(p.power_w or 0.0 for p in points) == 5.0


def test_all_threads_are_back_when_it_is_broken_off(tmp_path: Path) -> None:
    board = Board(tmp_path)
    watts = Watts(board)
    watts.silent_while = "decode"
    measuring, session = threaded(board, watts)
    session.set_threads(4)
    with pytest.raises(PowerUnknownError):
        measuring.threads(Domain("policy0", (2e9,)), (1, 2, 4), idle_w=2.0, has_watts=True)
    assert session.n_threads == 4


def test_the_time_it_takes_is_foretold(tmp_path: Path) -> None:
    board = Board(tmp_path)
    measuring, _ = threaded(board, Watts(board))
    domain, counts = Domain("policy0", (1e9, 2e9)), (1, 2, 4)
    plan = Plan(phase_s=1.0, idle_s=2.0, thread_phase_s=0.5, n_prompt=100)
    begun_s = board.clock()
    measuring.idle_w()
    measuring.domain(domain)
    measuring.threads(domain, counts, idle_w=2.0, has_watts=True)
    took_s = board.clock() - begun_s
    assert planned_s(plan, [domain], domain, counts) == pytest.approx(took_s, rel=0.3)
    assert planned_s(plan, [domain], None, counts) < 0.7 * took_s
