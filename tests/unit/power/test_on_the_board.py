"""powerd's actuators and restore on the modelled board, which does what a real acpi-cpufreq was seen to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.power.actuators import Actuators
from edge_rt.power.knob import Knob
from edge_rt.power.snapshot import Snapshot, boot_id, put_back
from edge_rt.power.state import Decision, Domain
from tests.fakes import FakeClock
from tests.plants.board import POLICIES, Board
from tests.plants.files import BoardFiles

MAX = f"{POLICIES}/policy0/scaling_max_freq"
MIN = f"{POLICIES}/policy0/scaling_min_freq"
POINTS_KHZ = (600_000, 1_000_000, 1_500_000, 2_000_000, 2_400_000)
DOMAIN = Domain(name="policy0", kind="cpu", points_hz=tuple(khz * 1e3 for khz in POINTS_KHZ), n_cpus=4)


def never() -> bool:
    return False


def test_a_limit_that_comes_into_force_late_is_ours_and_no_conflict(clock: FakeClock) -> None:
    board = Board("pi_5", clock)
    board.add_fault(pattern=MAX, on="write", late_s=0.05)
    knob = Knob(BoardFiles(board), MAX)
    for i in range(12):
        assert knob.look(clock(), never) == "same"
        assert knob.set("1000000" if i % 2 else "2400000", clock())
        clock.advance(1.0)
        assert not knob.is_contested(clock())


def test_a_limit_that_is_still_on_its_way_is_given_back_too(clock: FakeClock, tmp_path: Path) -> None:
    board = Board("pi_5", clock)
    files = BoardFiles(board)
    snapshot = Snapshot(str(tmp_path / "snapshot"), boot_id(files))
    actuators = Actuators(files, [DOMAIN], snapshot)
    actuators.look(clock())
    board.add_fault(pattern=MAX, on="write", late_s=0.05)
    actuators.apply(Decision(max_hz={"policy0": 600e6}, reason="decode"), clock())
    assert files.read(MAX) == "2400000"
    actuators.restore(clock.advance)
    clock.advance(1.0)
    assert files.read(MAX) == "2400000"


@pytest.mark.parametrize("wait_s", [0.0, 0.01, 0.2])
def test_restoring_waits_until_late_limits_are_in_force(clock: FakeClock, tmp_path: Path, wait_s: float) -> None:
    board = Board("pi_5", clock)
    files = BoardFiles(board)
    snapshot = Snapshot(str(tmp_path / "snapshot"), boot_id(files))
    actuators = Actuators(files, [DOMAIN], snapshot)
    actuators.look(clock())
    actuators.apply(Decision(max_hz={"policy0": 600e6}, reason="decode"), clock())
    assert files.read(MAX) == "600000"
    board.add_fault(pattern="*/scaling_m??_freq", on="write", late_s=0.05)
    clock.advance(wait_s)
    found = actuators.restore(clock.advance)
    assert all(one.is_done for one in found)
    assert files.read(MAX) == "2400000"


@given(
    own=st.tuples(st.sampled_from(POINTS_KHZ), st.sampled_from(POINTS_KHZ)),
    late_s=st.sampled_from([0.0, 0.002, 0.05]),
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.sampled_from(POINTS_KHZ)),
            st.tuples(st.just("errno"), st.sampled_from(["EBUSY", "EIO", "EAGAIN", "EPERM"])),
            st.tuples(st.just("clear"), st.just(0)),
            st.tuples(st.just("heat"), st.integers(0, 4)),
            st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.02, 1.0])),
        ),
        max_size=12,
    ),
)
def test_whatever_happens_in_between_the_users_limits_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    own: tuple[int, int],
    late_s: float,
    moves: list[tuple[str, int | str | float]],
) -> None:
    clock = FakeClock()
    board = Board("pi_5", clock)
    files = BoardFiles(board)
    for path, khz in zip((MIN, MAX), sorted(own), strict=True):
        files.write(path, str(khz))
    before = (files.read(MIN), files.read(MAX))
    snapshot = Snapshot(str(tmp_path_factory.mktemp("run") / "snapshot"), boot_id(files))
    actuators = Actuators(files, [DOMAIN], snapshot)
    for kind, value in moves:
        board.tree.faults.clear()
        if late_s:
            board.add_fault(pattern="*/scaling_m??_freq", on="write", late_s=late_s)
        actuators.look(clock())
        if kind == "set":
            points = {domain.name: domain.points_hz for domain in actuators.domains}
            wanted = [hz for hz in points.get("policy0", ()) if hz <= float(value) * 1e3] or list(points["policy0"][:1])
            actuators.apply(Decision(max_hz={"policy0": wanted[-1]}, reason="decode"), clock())
        elif kind == "errno":
            board.add_fault(pattern=MAX, on="write", errno_name=value)
            actuators.apply(Decision(max_hz={"policy0": DOMAIN.points_hz[0]}, reason="idle"), clock())
        elif kind == "heat":
            board.set(cooling=float(value))
        elif kind == "wait":
            clock.advance(float(value))
    # It dies here. The chip has cooled when the next process puts things right; what is late may still be on its way.
    board.tree.faults.clear()
    board.set(cooling=0)
    if late_s:
        board.add_fault(pattern="*/scaling_m??_freq", on="write", late_s=late_s)
    left = Snapshot(snapshot.file, boot_id(files))
    if left.load():
        assert all(one.is_done for one in put_back(files, list(left.values.values()), clock.advance))
    clock.advance(1.0)
    assert (files.read(MIN), files.read(MAX)) == before
