"""powerd as a real process on the mounted boards: each fault of the menu, each way to end.

What must hold whatever fails: it does not crash, tells no watt that is wrong (unknown, never 0), and the user's own
limits are back at the end. The watts are modelled by tests/plants.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.plants.board import POLICIES
from tests.plants.boards import PROFILES
from tests.plants.fuse_board import FuseBoard, why_not
from tests.plants.powerd_process import Powerd

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]

Start = Callable[..., tuple[FuseBoard, Powerd]]
Limits = dict[str, list[int]]

MAX = f"{POLICIES}/policy0/scaling_max_freq"
MIN = f"{POLICIES}/policy0/scaling_min_freq"
OWN = {MIN: "1000000", MAX: "2000000"}  # what the user has set before


@pytest.fixture
def start(socket_dir: Path) -> Iterator[Start]:
    """Mount a board, set the user's own limits, keep it busy, and start a powerd that decodes on it."""
    with ExitStack() as stack:

        def begin(profile: str = "pi_5", **settings: Any) -> tuple[FuseBoard, Powerd]:
            board = stack.enter_context(FuseBoard(profile, socket_dir / "root"))
            if profile == "pi_5":
                for path in (MAX, MIN):
                    board.write(path, OWN[path])
            board.tell("load", busy=0.7)
            powerd = stack.enter_context(Powerd(board.root, socket_dir, **settings))
            powerd.work("decode")
            return board, powerd

        yield begin


def is_acting(status: Mapping[str, Any]) -> bool:
    return bool(status["state"] == "acting" and status["work"] == "decode" and status["n_writes"] > 0)


def exercise(powerd: Powerd, n: int = 3) -> list[Mapping[str, Any]]:
    """Change between prefill and decode, so that there is something to write; gives what it told meanwhile."""
    told = []
    for _ in range(n):
        for work in ("prefill", "decode"):
            powerd.work(work)
            powerd.until(lambda status, work=work: status["work"] == work)
            told.append(powerd.steps(4))
    return told


def no_wrong_watt(told: list[Mapping[str, Any]], profile: str = "pi_5") -> None:
    """A board never takes less than its base, nor more than all of it at its highest clock."""
    base_w = PROFILES[profile].base_w
    for status in told:
        assert status["power_w"] is None or base_w < status["power_w"] < 60.0, status


def limits(board: FuseBoard) -> Limits:
    found: Limits = board.tell("state")["limits"]
    return found


def full(profile: str) -> Limits:
    """Give the limits of a board that nobody has limited: kHz of policies, Hz of devices."""
    return {
        clock.name: [round(hz / (1e3 if clock.cpus else 1.0)) for hz, _ in (clock.points[0], clock.points[-1])]
        for clock in PROFILES[profile].clocks
    }


def is_as_before(board: FuseBoard) -> None:
    assert {path: board.read(path) for path in OWN} == OWN


def test_clocks_follow_the_work_and_are_given_back(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    told = exercise(powerd)
    no_wrong_watt(told)
    high = max(one["clocks"]["policy0"]["in_force_hz"] for one in told[::2])
    assert high == 2000e6  # the user's own limit, and not beyond
    powerd.until(lambda status: status["clocks"]["policy0"]["in_force_hz"] < high)  # down it goes a little later
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)
    assert not powerd.snapshot.exists()
    written = [int(text) for _, path, text, _ in board.tell("writes") if path == MAX]
    assert all(1_000_000 <= khz <= 2_000_000 for khz in written), written


@pytest.mark.parametrize("profile", ["orin_nano", "x86"])
def test_every_policy_of_a_board_is_given_back(start: Start, profile: str) -> None:
    board, powerd = start(profile)
    powerd.until(is_acting)
    no_wrong_watt(exercise(powerd), profile)
    powerd.until(lambda _: limits(board) != full(profile))  # down it goes a little later
    assert powerd.end(signal.SIGKILL) == -signal.SIGKILL
    assert powerd.restore() == 0
    assert limits(board) == full(profile)


def test_in_a_dry_run_nothing_is_written(start: Start) -> None:
    board, powerd = start(enabled=False)
    n_writes = len(board.tell("writes"))
    exercise(powerd)
    assert powerd.status()["state"] == "dry-run"
    assert powerd.end(signal.SIGTERM) == 0
    assert len(board.tell("writes")) == n_writes


# -- faults of what is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EBUSY", "EIO", "ENODATA", "EPERM", "EROFS", "EINVAL", "EAGAIN", "ENXIO", "ENODEV"])
def test_a_limit_that_cannot_be_written_stops_nothing(start: Start, name: str) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("add_fault", pattern=MAX, on="write", errno_name=name)
    told = exercise(powerd)
    no_wrong_watt(told)
    assert any(name in fault for status in told for fault in status["faults"]), told[-1]
    assert powerd.process is not None
    assert powerd.process.poll() is None
    board.tell("clear_faults")
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


def test_what_cannot_be_given_back_is_kept_until_it_can(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("add_fault", pattern=MAX, on="write", errno_name="EBUSY")
    assert powerd.end(signal.SIGTERM) == 1
    assert powerd.snapshot.exists()
    assert powerd.restore() == 1
    board.tell("clear_faults")
    assert powerd.restore() == 0
    is_as_before(board)
    assert not powerd.snapshot.exists()


def test_a_fault_that_passes_is_got_over(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("add_fault", pattern=MAX, on="write", errno_name="EBUSY", n_left=2)
    exercise(powerd, 2)
    powerd.until(lambda status: status["n_faults"] == 0 and is_acting(status))
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


@pytest.mark.parametrize("fault", [{"max_bytes": 3}, {"is_ignored": True}, {"late_s": 0.08}, {"delay_s": 0.2}])
def test_a_write_that_is_cut_ignored_late_or_slow(start: Start, fault: dict[str, Any]) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("add_fault", pattern=MAX, on="write", **fault)
    told = exercise(powerd)
    no_wrong_watt(told)
    assert told[-1]["state"] == "acting", told[-1]
    board.tell("clear_faults")
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


@pytest.mark.parametrize("text", ["", "99999999999999999999"])
def test_a_limit_that_reads_as_garbage(start: Start, text: str) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("add_fault", pattern=f"{POLICIES}/*", text=text)
    no_wrong_watt(exercise(powerd))
    board.tell("clear_faults")
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


def test_it_gives_way_to_another_program_that_insists(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("add_fault", pattern=MAX, on="write", revert_to="1500000", revert_s=0.03)
    for _ in range(12):
        exercise(powerd, 1)
        if powerd.status()["state"] == "stopped":
            break
    status = powerd.status()
    assert status["state"] == "stopped", status
    assert "another program" in status["stopped_by"]
    n_writes = len(board.tell("writes"))
    exercise(powerd)
    assert len(board.tell("writes")) == n_writes
    board.tell("clear_faults")
    powerd.end(signal.SIGTERM)


def test_beside_another_power_manager_it_does_not_begin(start: Start, socket_dir: Path) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    assert powerd.end(signal.SIGTERM) == 0
    board.tell("run_program", pid=4242, name="tuned")
    n_writes = len(board.tell("writes"))
    powerd.start()
    exercise(powerd, 1)
    assert "tuned" in powerd.status()["stopped_by"]
    assert powerd.end(signal.SIGTERM) == 0
    assert len(board.tell("writes")) == n_writes
    is_as_before(board)


def test_the_kernels_own_cooling_is_not_fought(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("set", ambient_c=95.0, temperature_c=90.0, cooling=4)
    powerd.until(lambda status: status["throttled"])
    n_writes = len(board.tell("writes"))
    told = exercise(powerd, 2)
    assert told[-1]["state"] == "acting"
    assert len(board.tell("writes")) - n_writes <= 8  # one for each change of the work, and none again and again
    board.tell("set", ambient_c=20.0, temperature_c=40.0, cooling=0)
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


def test_what_the_kernel_holds_down_at_the_end_is_free_once_it_is_cool(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("set", ambient_c=95.0, temperature_c=90.0, cooling=4)
    powerd.end(signal.SIGTERM)
    powerd.restore()
    board.tell("set", ambient_c=20.0, temperature_c=40.0, cooling=0)
    powerd.restore()
    is_as_before(board)


# -- devices that go and come -----------------------------------------------------------------------------------------


def test_a_policy_that_goes_and_comes_back(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("unplug", top=f"{POLICIES}/policy0")
    powerd.until(lambda status: not status["clocks"] or status["clocks"]["policy0"]["in_force_hz"] is None)
    no_wrong_watt([powerd.steps(10)])
    board.tell("plug", top=f"{POLICIES}/policy0")
    powerd.until(lambda status: status["clocks"].get("policy0", {}).get("in_force_hz") is not None)
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


def test_a_policy_that_is_gone_for_good_is_nobodys_to_give_back(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("unplug", top=f"{POLICIES}/policy0")
    powerd.steps(5)
    assert powerd.end(signal.SIGTERM) == 0
    assert not powerd.snapshot.exists()


def test_a_driver_made_anew_keeps_its_own_limits(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.tell("recreate", name="policy0", low_khz=1_000_000, high_khz=1_500_000)
    no_wrong_watt(exercise(powerd))
    assert powerd.end(signal.SIGTERM) == 0
    assert (board.read(MIN), board.read(MAX)) == ("1000000", "1500000")


def test_cpus_that_go_off_line_take_their_policy_along(start: Start) -> None:
    board, powerd = start("orin_nano")
    powerd.until(is_acting)
    for cpu in (4, 5):
        board.write(f"sys/devices/system/cpu/cpu{cpu}/online", "0")
    no_wrong_watt(exercise(powerd), "orin_nano")
    for cpu in (4, 5):
        board.write(f"sys/devices/system/cpu/cpu{cpu}/online", "1")
    powerd.steps(5)
    assert powerd.end(signal.SIGTERM) == 0
    assert limits(board) == full("orin_nano")


def test_the_whole_board_goes(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    board.kill()
    status = powerd.until(lambda status: status["power_w"] is None and status["temperature_c"] is None)
    assert status["n_faults"] > 0
    assert "ENOTCONN" in status["faults"][0]
    powerd.steps(10)
    assert powerd.end(signal.SIGTERM) == 1
    assert powerd.snapshot.exists()  # for when it is there again


# -- sensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["pi_5", "orin_nano", "x86"])
def test_a_meter_that_fails_tells_nothing(start: Start, profile: str) -> None:
    board, powerd = start(profile)
    told = [powerd.until(lambda status: status["power_w"] is not None and is_acting(status))]
    errors = ("EIO", "ENODATA", "EPERM", "EAGAIN")
    faults = [{"errno_name": name} for name in errors] + [{"text": text} for text in ("", "garbage", "-5000000")]
    for fault in faults:
        for pattern in ("*/hwmon/*_input", "*/energy_uj"):
            board.tell("add_fault", pattern=pattern, **fault)
        powerd.until(lambda status: told.append(status) or status["power_w"] is None)
        told.append(powerd.steps(8))
        assert told[-1]["power_w"] is None, fault
        board.tell("clear_faults")
        powerd.until(lambda status: told.append(status) or status["power_w"] is not None)
    no_wrong_watt(told, profile)
    assert powerd.end(signal.SIGTERM) == 0


def test_a_counter_that_stands_still_is_stale(start: Start) -> None:
    board, powerd = start("x86")
    told = [powerd.until(lambda status: status["power_w"] is not None)]
    board.tell("add_fault", pattern="*/energy_uj", is_frozen=True)
    powerd.until(lambda status: told.append(status) or status["power_w"] is None)
    no_wrong_watt(told, "x86")


@pytest.mark.parametrize("value_uj", [0, 262_142_000_000], ids=["reset", "wrap"])
def test_a_counter_that_starts_again_makes_no_peak(start: Start, value_uj: int) -> None:
    board, powerd = start("x86")
    powerd.until(lambda status: status["power_w"] is not None)
    board.tell("set_counter", zone="intel-rapl:1", value_uj=value_uj)
    told: list[Mapping[str, Any]] = []
    first = powerd.status()["n_steps"]
    powerd.until(lambda status: told.append(status) or status["n_steps"] > first + 40)
    no_wrong_watt(told, "x86")
    assert told[-1]["power_w"] is not None


def test_a_chip_under_another_number_is_found_at_a_reload(start: Start) -> None:
    board, powerd = start()
    powerd.until(lambda status: status["power_w"] is not None)
    chip = "sys/devices/platform/soc/fe804000.i2c/i2c-1/1-0040/hwmon/hwmon1"
    board.tell("unplug", top=chip)
    powerd.until(lambda status: status["power_w"] is None)
    board.tell("plug", top=chip, as_top=chip.replace("hwmon1", "hwmon3"))
    assert powerd.process is not None
    powerd.process.send_signal(signal.SIGHUP)
    no_wrong_watt([powerd.until(lambda status: status["power_w"] is not None)])
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


def test_slow_sensors_do_not_keep_it_from_its_work(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    for pattern in ("*/power1_input", "*/temp"):
        board.tell("add_fault", pattern=pattern, delay_s=0.2)
    no_wrong_watt(exercise(powerd, 1))
    started_s = time.monotonic()
    assert powerd.end(signal.SIGTERM) == 0
    assert time.monotonic() - started_s < 10.0
    is_as_before(board)


@pytest.mark.parametrize("fault", [{"errno_name": "ENODATA"}, {"text": "0\n"}, {"text": "-274000\n"}], ids=str)
def test_without_a_temperature_it_is_unknown(start: Start, fault: dict[str, Any]) -> None:
    board, powerd = start()
    powerd.until(lambda status: status["temperature_c"] is not None)
    board.tell("add_fault", pattern="*/temp", **fault)
    powerd.until(lambda status: status["temperature_c"] is None)
    assert exercise(powerd, 1)[-1]["temperature_c"] is None
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["prefill", "decode", "idle"])
def test_after_sigkill_the_limits_come_back(start: Start, work: str) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    powerd.work(work)
    powerd.until(lambda status: status["work"] == work)
    assert powerd.end(signal.SIGKILL) == -signal.SIGKILL
    assert powerd.restore() == 0
    is_as_before(board)
    assert not powerd.snapshot.exists()
    assert powerd.restore() == 0  # once more changes nothing
    is_as_before(board)


def test_stopped_and_then_killed_as_by_a_watchdog(start: Start) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    assert powerd.process is not None
    powerd.process.send_signal(signal.SIGSTOP)
    assert powerd.end(signal.SIGKILL) == -signal.SIGKILL
    assert powerd.restore() == 0
    is_as_before(board)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_end_gives_everything_back(start: Start, number: signal.Signals) -> None:
    board, powerd = start()
    powerd.until(is_acting)
    assert powerd.end(number) == 0
    is_as_before(board)
    assert not powerd.snapshot.exists()


def test_the_first_snapshot_wins_over_several_lives(start: Start) -> None:
    board, powerd = start()
    for _ in range(4):
        powerd.until(is_acting)
        exercise(powerd, 1)
        assert powerd.end(signal.SIGKILL) == -signal.SIGKILL
        powerd.start()
    powerd.until(is_acting)
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)


def test_slow_sensors_are_read_beside_the_loop_and_tell_their_age(start: Start) -> None:
    board, powerd = start(enabled=True)
    powerd.until(is_acting)
    board.tell("add_fault", pattern="*/temp", delay_s=0.2)
    board.tell("add_fault", pattern="*/hwmon*/*_input", delay_s=0.2)
    found = powerd.until(lambda status: {"power", "heat"} <= status["slow_sensors"].keys())
    assert all(one["read_s"] >= 0.2 for one in found["slow_sensors"].values()), found
    told = exercise(powerd)
    no_wrong_watt(told)
    assert any(one["power_w"] is not None and one["power_age_s"] >= 0.1 for one in told), told
    assert any(one["temperature_c"] is not None for one in told), told
    assert powerd.end(signal.SIGTERM) == 0
    is_as_before(board)
