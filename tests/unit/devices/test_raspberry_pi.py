from __future__ import annotations

import queue
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices import raspberry_pi
from edge_rt.devices.meters import Sample
from edge_rt.devices.raspberry_pi import PmicMeter, Run, rails_w, throttle

AMPERES = {"3V7_WL_SW": 0.09, "3V3_SYS": 0.08, "1V8_SYS": 0.15, "DDR_VDD2": 0.01, "1V1_SYS": 0.2, "VDD_CORE": 1.5}
VOLTS = {"3V7_WL_SW": 3.7, "3V3_SYS": 3.3, "1V8_SYS": 1.8, "DDR_VDD2": 1.1, "1V1_SYS": 1.1, "VDD_CORE": 0.8}
SUM_W = sum(AMPERES[rail] * VOLTS[rail] for rail in AMPERES)

NEW = "".join(f" {rail}_A current({i})={a:.8f}A\n" for i, (rail, a) in enumerate(AMPERES.items()))
NEW += "".join(f" {rail}_V volt({i + 8})={v:.8f}V\n" for i, (rail, v) in enumerate(VOLTS.items()))
NEW += "     EXT5V_V volt(24)=5.06788000V\n      BATT_V volt(25)=3.01110800V\n"
OLD = "".join(f"{rail}_V={v:.4f}V\n" for rail, v in VOLTS.items())
OLD += "".join(f"{rail}_A={a:.4f}A\n" for rail, a in AMPERES.items()) + "EXT5V_V=5.0678V\n"


def answers(text: str | BaseException) -> Run:
    def call(arguments: tuple[str, ...]) -> str:
        if isinstance(text, BaseException):
            raise text
        return text

    return call


@pytest.mark.parametrize("text", [NEW, OLD], ids=["new", "old"])
def test_both_formats_give_each_rails_watts(text: str) -> None:
    found = rails_w(text)
    assert found.keys() == AMPERES.keys()  # the supply and the clock's battery have no current
    assert sum(found.values()) == pytest.approx(SUM_W)


def test_the_board_is_derived_by_the_line_of_its_file() -> None:
    meter = PmicMeter(1.1451, 0.5879, answers(NEW))
    assert (meter.boundary, meter.quality) == ("board", "derived")
    sample = meter.read(0.0).value
    assert sample is not None
    assert sample.power_w == pytest.approx(1.1451 * SUM_W + 0.5879)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (FileNotFoundError(2, "No such file"), "not installed"),
        (PermissionError(13, "Permission denied"), "may not be run"),
        (OSError(8, "Exec format error"), "Exec format error"),
        (subprocess.TimeoutExpired("vcgencmd", 1.0), "no answer in 1 s"),
        (subprocess.CalledProcessError(255, "vcgencmd"), "group video"),
        ('error=1 error_msg="Command not registered"', "Command not registered"),
        ("", "told of 0 rails"),
        ("VDD_CORE_A current(7)=1.5A\nVDD_CORE_V volt(15)=0.8V", "told of 1 rails"),
        (NEW.replace("_A current", "_A -current"), "told of 0 rails"),
        ("\x00\xff" * 1000, "told of 0 rails"),
    ],
)
def test_what_the_program_does_not_tell_is_unknown(answer: str | BaseException, words: str) -> None:
    reading = PmicMeter(1.0, 0.0, answers(answer)).read(0.0)
    assert reading.value is None
    assert words in reading.reason


def test_later_readings_do_not_wait_and_tell_their_age() -> None:
    answer, started = [NEW], []
    meter = PmicMeter(1.0, 0.0, lambda arguments: answer[0], started.append)
    assert meter.read(10.0).value == Sample(power_w=pytest.approx(SUM_W))
    assert meter.read(10.5).value == Sample(power_w=pytest.approx(SUM_W), age_s=0.5)
    assert started == []
    answer[0] = NEW.replace("VDD_CORE_A current(5)=1.50000000A", "VDD_CORE_A current(5)=2.50000000A")
    assert meter.read(11.0).value == Sample(power_w=pytest.approx(SUM_W), age_s=1.0)
    assert meter.read(11.5).value == Sample(power_w=pytest.approx(SUM_W), age_s=1.5)
    (work,) = started  # one at a time, however long it takes
    work()
    assert meter.read(11.6).value == Sample(power_w=pytest.approx(SUM_W + 0.8), age_s=pytest.approx(0.6))
    answer[0] = ""
    meter.read(12.0)
    started[1]()
    assert "told of 0 rails" in meter.read(12.1).reason


def test_a_program_that_never_ends_makes_the_last_answer_stale() -> None:
    meter = PmicMeter(1.0, 0.0, answers(NEW), lambda work: None)
    meter.read(0.0)
    assert meter.read(3.0).value == Sample(power_w=pytest.approx(SUM_W), age_s=3.0)
    assert meter.read(3.1).reason == "no answer for 3 s"


def test_a_thread_of_its_own_asks_again() -> None:
    asked: queue.Queue[str] = queue.Queue()

    def call(arguments: tuple[str, ...]) -> str:
        asked.put(threading.current_thread().name)
        return NEW

    meter = PmicMeter(1.0, 0.0, call)
    meter.read(0.0)
    meter.read(1.0)
    assert asked.get(timeout=10) == threading.current_thread().name
    assert asked.get(timeout=10) != threading.current_thread().name


def test_a_rail_that_cannot_be_is_left_out() -> None:
    assert rails_w("VDD_CORE_A current(7)=999999A\nVDD_CORE_V volt(15)=0.8V\n") == {}
    assert rails_w("VDD_CORE_A current(7)=nanA\nVDD_CORE_V volt(15)=0.8V\n") == {}


@given(st.text(max_size=2000))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert all(0 <= w < 200 for w in rails_w(text).values())


def test_throttling_is_told_by_bits_for_now_and_since_boot() -> None:
    state = throttle(answers("throttled=0x50005\n")).value
    assert state is not None
    assert state.active == ("under-voltage", "throttled")
    assert state.past == ("under-voltage", "throttled")
    calm = throttle(answers("throttled=0x80000")).value
    assert calm is not None
    assert (calm.active, calm.past) == ((), ("soft temperature limit",))


@pytest.mark.parametrize("answer", ["", "throttled=", "throttled=0xzz", "throttled=0x123456789", "0x0", "throttled=5"])
def test_an_answer_that_is_none_is_unknown(answer: str) -> None:
    reading = throttle(answers(answer))
    assert reading.value is None
    assert reading.reason


def test_a_real_program_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vcgencmd"
    program.write_text("#!/bin/sh\necho \"throttled=0x2 $*\" | cut -d' ' -f1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    state = throttle(raspberry_pi.run).value
    assert state is not None
    assert state.active == ("frequency capped",)
