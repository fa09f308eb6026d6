from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.serial_lines import MAX_LINE_BYTES, LineDialogue, power_w
from edge_rt.devices.serial_meter import MeterProtocolError
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("line", "watts"),
    [
        ("V=5.12 I=0.734 P=3.758", 3.758),
        ("P=3.758", 3.758),
        ("W=0", 0.0),
        ("V=5,I=0.5", 2.5),
        ("V=5;  I=0.5\r", 2.5),
        ("U=5 A=.5", 2.5),
        ("mV=5120 mA=734 mW=3758", 3.758),
        ("3.758", 3.758),
        ("5.12,0.734", 5.12 * 0.734),
        ("5.12 0.734 3.758", 3.758),
        ("5.12, -0.002", 0.0),  # a shunt's offset
        ("# INA219 at 0x40", None),
        ("   ", None),
    ],
)
def test_lines(line: str, watts: float | None) -> None:
    assert power_w(line) == (None if watts is None else pytest.approx(watts))


@pytest.mark.parametrize(
    "line",
    [
        "V=5.12",
        "I=1",
        "V=5 V=5 I=1",
        "V=5 mV=5000 I=1",
        "V=nan I=1",
        "V=inf I=1",
        "V=1e3 I=1",
        "V=0x10 I=1",
        "V=5 I=1 P=9",  # a wrong shunt
        "V=5 I=-1",  # the wrong way round
        "V=-5 I=-1",
        "V=500 I=1",
        "V=5 I=1000",
        "P=99999",
        "1,2,3,4",
        "V = 5 I = 1",
        "hello",
        "٣",  # a digit, and not ASCII
        "5.12,,3",
        "1" * 40,
    ],
)
def test_lines_that_are_no_samples(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        power_w(line)


def test_the_first_line_may_be_a_part_of_one() -> None:
    assert LineDialogue().feed(b"34 P=9.0\nP=1.5\nP=2.5\nP=3") == (1.5, 2.5)


def test_lines_come_in_pieces() -> None:
    dialogue = LineDialogue()
    assert dialogue.feed(b"\nP=1") == ()
    assert dialogue.feed(b".25\r") == ()
    assert dialogue.feed(b"\n") == (1.25,)


def test_a_few_bad_lines_are_passed_over_and_many_are_another_device() -> None:
    dialogue = LineDialogue()
    dialogue.feed(b"\n")
    for _ in range(5):
        assert dialogue.feed(b"boom\n" * 10 + b"P=1\n") == (1.0,)
    with pytest.raises(MeterProtocolError, match="'boom'"):
        dialogue.feed(b"boom\n" * 20)


def test_a_line_without_end_takes_no_memory() -> None:
    dialogue = LineDialogue()
    dialogue.feed(b"\n")
    for _ in range(1000):
        assert dialogue.feed(b"9" * MAX_LINE_BYTES) == ()
    assert len(dialogue._buffer) <= 2 * MAX_LINE_BYTES
    assert dialogue.feed(b"9\nP=1\n") == (1.0,)


def test_the_time_between_lines_shows() -> None:
    clock = FakeClock()
    dialogue = LineDialogue(clock=clock)
    dialogue.feed(b"\n")
    for _ in range(60):
        clock.advance(0.2)
        dialogue.feed(b"P=1\nP=1\n")
    assert dialogue.interval_s == pytest.approx(0.1, abs=0.01)


@given(st.lists(st.binary(max_size=200), max_size=30))
def test_any_bytes_are_samples_or_refused(pieces: list[bytes]) -> None:
    dialogue = LineDialogue()
    try:
        for piece in pieces:
            assert all(0 <= watts <= 5000 for watts in dialogue.feed(piece))
    except MeterProtocolError:
        pass
