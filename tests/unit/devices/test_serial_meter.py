"""A meter on a real serial port: pyserial on one end of a pseudo terminal, the test on the other."""

from __future__ import annotations

import os
import pty
import select
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from edge_rt.devices.base import Reading
from edge_rt.devices.meters import Sample
from edge_rt.devices.serial_meter import SerialMeter, Spec, open_serial, parse_spec
from tests import patience
from tests.patience import PATIENCE_S
from tests.unit.devices.test_tc66 import answer


@contextmanager
def plugged() -> Iterator[tuple[int, str]]:
    """Give the device's end of a port and the port's name."""
    device, port = pty.openpty()
    tty.setraw(port)
    name = os.ttyname(port)
    os.close(port)
    try:
        yield device, name
    finally:
        os.close(device)


def until(meter: SerialMeter, holds: Callable[[Reading[Sample]], bool]) -> Reading[Sample]:
    """Read until it holds; what comes from another thread and the kernel has no fake clock."""
    last = [meter.read(time.monotonic())]

    def look() -> Reading[Sample] | None:
        last[0] = meter.read(time.monotonic())
        return last[0] if holds(last[0]) else None

    found = patience.until(look, told=lambda: last[0])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("serial:/dev/ttyUSB0:lines", Spec("/dev/ttyUSB0", "lines")),
        (
            "serial:/dev/serial/by-id/usb-1a86_x-if00:lines@9600",
            Spec("/dev/serial/by-id/usb-1a86_x-if00", "lines", "9600"),
        ),
        ("serial:/dev/ttyACM0:tc66", Spec("/dev/ttyACM0", "tc66")),
        ("serial:/dev/ttyACM0:ppk2@5.1", Spec("/dev/ttyACM0", "ppk2", "5.1")),
    ],
)
def test_specifications(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "serial:",
        "serial:ttyUSB0:lines",
        "serial:/dev/ttyUSB0",
        "serial:/dev/ttyUSB0:um25c",
        "serial:/dev/ttyUSB0:lines@fast",
        "serial:/dev/ttyUSB0:lines@12",
        "serial:/dev/ttyUSB0:lines@1.5",
        "serial:/dev/ttyUSB0:tc66@5",
        "serial:/dev/ttyUSB0:ppk2",
        "serial:/dev/ttyUSB0:ppk2@12",
        "serial:socket://host:1:lines",
    ],
)
def test_wrong_specifications(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_spec(text)


def test_lines_on_a_real_port_and_their_mean() -> None:
    with plugged() as (device, port):
        meter = open_serial(f"serial:{port}:lines")
        try:
            # The dialogue begins when the port is open, and what was written before is lost.
            reading = until(meter, lambda r: r.value is not None or not os.write(device, b"V=5.0 I=0.5 P=2.5\n"))
            assert reading.value is not None
            assert reading.value.power_w == pytest.approx(2.5)
            assert reading.value.age_s < PATIENCE_S
            assert (meter.boundary, meter.quality, meter.name) == ("board", "measured", f"lines {port}")
            os.write(device, b"P=4\nP=6\n")
            until(meter, lambda r: r.value is not None and r.value.power_w in (4.0, 5.0, 6.0))
        finally:
            meter.close()


def test_zero_watts_are_unknown() -> None:
    """A meter that the board's current does not run through is no board that takes nothing."""
    with plugged() as (device, port):
        meter = open_serial(f"serial:{port}:lines")
        try:
            zero = "tells 0 W for a board that runs"
            reading = until(
                meter, lambda r: r.value is not None or r.reason == zero or not os.write(device, b"P=0.0\n")
            )
            assert (reading.value, reading.reason) == (None, zero)
        finally:
            meter.close()


def test_a_meter_that_is_unplugged_is_unknown_and_comes_back() -> None:
    with plugged() as (device, port):
        names = [port]
        meter = _with_name(names)
        _say(device, meter)
    try:
        gone = until(meter, lambda r: r.value is None and "silent" not in r.reason)
        assert gone.reason
        with plugged() as (device, port):
            names[0] = port
            _say(device, meter)
    finally:
        meter.close()


def _with_name(names: list[str]) -> SerialMeter:
    """Make a meter of lines whose port may be another one after it was plugged in again."""
    import serial

    from edge_rt.devices.serial_lines import LineDialogue

    return SerialMeter("lines", lambda: serial.Serial(names[0], 115200, timeout=0.05), LineDialogue)


def _say(device: int, meter: SerialMeter) -> None:
    until(meter, lambda r: r.value is not None or not os.write(device, b"P=1.5\n"))


def test_a_port_that_is_not_there_is_unknown_with_a_reason() -> None:
    meter = open_serial("serial:/dev/edge-rt-nothing:lines")
    try:
        assert until(meter, lambda r: "nothing yet" not in r.reason).reason == "is not plugged in"
    finally:
        meter.close()


class Scripted:
    """A dialogue that gives what the test puts there."""

    interval_s = 0.1
    quality = "measured"

    def __init__(self, watts: list[tuple[float, ...]], done: threading.Event) -> None:
        self._watts, self._done = watts, done

    def begin(self, port: object) -> None: ...

    def listen(self, port: object) -> tuple[float, ...]:
        if self._watts:
            return self._watts.pop(0)
        self._done.set()
        threading.Event().wait(0.005)
        return ()


class NoPort:
    def read(self, size: int = 1) -> bytes:
        return b""

    def write(self, data: bytes) -> int:
        return 0

    def close(self) -> None: ...


def test_a_value_ages_and_is_unknown_after_three_periods() -> None:
    done, now_s = threading.Event(), [100.0]
    script = [(1.0, 2.0), (6.0,)]
    meter = SerialMeter("m", NoPort, lambda: Scripted(script, done), clock=lambda: now_s[0])  # type: ignore[arg-type,return-value]
    try:
        assert done.wait(PATIENCE_S)
        fresh, again, late = meter.read(100.1), meter.read(100.25), meter.read(100.4)
    finally:
        meter.close()
    assert fresh.value == Sample(power_w=3.0, age_s=pytest.approx(0.1))
    assert again.value == Sample(power_w=3.0, age_s=pytest.approx(0.25))
    assert (late.value, late.reason) == (None, "silent for 0.4 s")


@contextmanager
def answering(device: int, reply: bytes) -> Iterator[None]:
    """Say reply whenever getva is asked, until the end."""
    done = threading.Event()

    def speak() -> None:
        asked = b""
        while not done.is_set():
            if select.select([device], [], [], 0.05)[0]:
                try:
                    asked += os.read(device, 64)
                except OSError:  # nobody has the port open
                    done.wait(0.05)
            if asked.endswith(b"getva"):
                asked = b""
                os.write(device, reply)

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def test_a_tc66_on_a_real_port_is_asked_and_answers() -> None:
    with plugged() as (device, port), answering(device, answer(5.1, 0.5, 2.55)):
        meter = open_serial(f"serial:{port}:tc66")
        try:
            reading = until(meter, lambda r: r.value is not None)
        finally:
            meter.close()
    assert reading.value is not None
    assert reading.value.power_w == pytest.approx(2.55)
    assert (meter.name, meter.quality, meter.interval_s) == (f"tc66 {port}", "measured", 0.1)


def test_another_device_than_a_tc66_is_unknown_with_a_reason() -> None:
    with plugged() as (device, port), answering(device, b"U" * 192):
        meter = open_serial(f"serial:{port}:tc66")
        try:
            reason = until(meter, lambda r: "nothing yet" not in r.reason).reason
        finally:
            meter.close()
    assert "not a TC66's: block 1 does not begin with pac1" in reason
