"""Slow sensors: a clock that moves when one takes its time, and readers beside the loop that a test lets go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge_rt.devices.base import Reading, known
from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.devices.meters import Boundary, Quality, Sample
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.sensing import HeatReader, PowerReader
from edge_rt.power.source import SLOW_S, Source, Took
from tests.patience import until
from tests.unit.power.tree import machine


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Sensor:
    """Counts its readings, each of which takes some time."""

    clock: Clock
    takes_s: float = 0.2
    n_reads: int = 0
    is_closed: bool = False
    error: Exception | None = None

    def read(self, now_s: float) -> int:
        self.clock.now_s += self.takes_s
        self.n_reads += 1
        if self.error is not None:
            raise self.error
        return self.n_reads

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Helper:
    """Reads when a test says so."""

    read: Callable[[float], int]
    close: Callable[[], None]
    clock: Callable[[], float]
    n_asked: int = 0
    has_left: bool = False
    found: Took[int] | None = None

    def ask(self) -> None:
        self.n_asked += 1

    def leave(self) -> None:
        self.has_left = True

    def go_on(self, begun_s: float, ended_s: float) -> None:
        self.found = Took(self.read(begun_s), begun_s, ended_s)

    def collect(self) -> Took[int] | None:
        found, self.found = self.found, None
        return found


@dataclass
class Scene:
    clock: Clock = field(default_factory=Clock)
    helpers: list[Helper] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sensor = Sensor(self.clock)
        self.source = Source(
            self.sensor.read, 0.1, self.clock, close=self.sensor.close, beside=lambda *what: self._helper(*what)
        )

    def _helper(self, *what: Callable[..., object]) -> Helper:
        self.helpers.append(Helper(*what))  # type: ignore[arg-type]
        return self.helpers[-1]

    def look(self, at_s: float) -> Took[int] | None:
        self.clock.now_s = max(self.clock.now_s, at_s)
        return self.source.poll(self.clock.now_s)


def test_what_is_quick_is_read_in_the_loop_whenever_it_is_due() -> None:
    scene = Scene()
    scene.sensor.takes_s = 0.0001
    found = [scene.look(i / 20) for i in range(20)]
    assert [took.value for took in found if took] == list(range(1, 11))
    assert not scene.helpers
    scene.source.close()
    assert scene.sensor.is_closed


def test_one_slow_reading_may_be_chance() -> None:
    scene = Scene()
    for i in range(10):
        scene.sensor.takes_s = SLOW_S * 2 if i % 2 else 0.0
        scene.look(float(i))
    assert not scene.source.is_slow


def test_what_is_slow_holds_up_two_looks_and_no_more() -> None:
    scene = Scene()
    assert scene.look(0.0) == Took(1, 0.0, 0.2)
    assert scene.look(0.2) == Took(2, 0.2, 0.4)
    assert scene.source.is_slow
    assert [scene.look(0.4 + i / 20) for i in range(4)] == [None] * 4
    (helper,) = scene.helpers
    assert helper.n_asked == 1
    helper.go_on(0.4, 0.6)
    assert scene.look(0.65) == Took(3, 0.4, 0.6)
    assert (helper.n_asked, scene.source.read_s) == (2, pytest.approx(0.2))
    scene.source.close()
    assert scene.sensor.is_closed


def test_what_is_quick_again_for_long_is_read_in_the_loop_again() -> None:
    scene = Scene()
    scene.look(0.0)
    scene.look(0.2)
    scene.sensor.takes_s = 0.001
    (helper,) = scene.helpers
    n_looks = 0
    while scene.source.is_slow:
        scene.look(scene.clock.now_s + 0.1)
        helper.go_on(scene.clock.now_s, scene.clock.now_s + 0.001)
        n_looks += 1
    assert helper.has_left
    assert n_looks > 20
    assert not scene.sensor.is_closed
    n_reads = scene.sensor.n_reads
    assert scene.look(scene.clock.now_s + 0.2) is not None
    assert scene.sensor.n_reads == n_reads + 1
    scene.source.close()
    assert scene.sensor.is_closed


def test_a_sensor_that_hangs_is_late_and_asked_no_more() -> None:
    scene = Scene()
    scene.look(0.0)
    scene.look(0.2)
    scene.look(0.4)
    assert [scene.look(at_s) for at_s in (0.9, 1.5, 60.0)] == [None] * 3
    assert scene.helpers[0].n_asked == 1
    assert not scene.source.is_late(0.9, 3)
    assert scene.source.is_late(1.1, 3)


def test_without_a_clock_nothing_is_slow() -> None:
    scene = Scene()
    source = Source(scene.sensor.read, 0.1, None)
    assert [took is not None for took in (source.poll(i / 4) for i in range(5))] == [True] * 5
    assert not source.is_slow


def test_a_thread_reads_beside_the_loop_and_closes_at_the_end() -> None:
    gate, closed = threading.Semaphore(0), threading.Event()
    clock = Clock()

    def read(now_s: float) -> str:
        if threading.current_thread() is not threading.main_thread():
            gate.acquire()
        clock.now_s += 1.0
        return threading.current_thread().name

    source = Source(read, 0.1, clock, close=closed.set)
    for _ in range(2):
        took = source.poll(clock.now_s)
        assert took is not None
        assert took.value == threading.main_thread().name
    clock.now_s += 1.0
    assert source.poll(clock.now_s) is None  # the thread waits, the loop does not
    gate.release()
    assert until(lambda: source.poll(clock.now_s)).value == "slow sensor"
    source.close()
    gate.release()
    assert until(closed.is_set)


def test_what_reading_raises_in_a_thread_is_raised_in_the_loop() -> None:
    clock = Clock()
    sensor = Sensor(clock)
    source = Source(sensor.read, 0.1, clock)
    source.poll(0.0)
    source.poll(1.0)
    sensor.error = RuntimeError("nobody foresaw it")
    source.poll(2.0)
    with pytest.raises(RuntimeError, match="nobody foresaw it"):
        until(lambda: source.poll(3.0))
    sensor.error = None
    assert until(lambda: source.poll(4.0)).value == 4  # one error is not the end of it
    source.close()


# Meters and temperatures.


class SlowMeter:
    name = "slow"
    boundary: Boundary = "board"
    quality: Quality = "measured"
    interval_s = 0.1

    def __init__(self, clock: Clock, gate: threading.Semaphore) -> None:
        self._clock, self._gate = clock, gate

    def read(self, now_s: float) -> Reading[Sample]:
        if threading.current_thread() is not threading.main_thread():
            self._gate.acquire()
        self._clock.now_s += 0.2
        return known(Sample(power_w=5.0), "m")

    def close(self) -> None: ...


def test_a_slow_meters_watts_are_as_old_as_they_tell_and_unknown_once_it_hangs() -> None:
    clock, gate = Clock(), threading.Semaphore(0)
    reader = PowerReader(SlowMeter(clock, gate), clock)
    for _ in range(2):
        assert reader.read(clock.now_s).power_w == 5.0
    found = reader.read(clock.now_s)  # asks
    assert (found.power_w, found.age_s) == (5.0, pytest.approx(0.1))
    gate.release()
    found = until(lambda: found if (found := reader.read(clock.now_s)).age_s < 0.15 and clock.now_s > 0.5 else None)
    assert found.age_s == pytest.approx(0.1)  # from the middle of its reading
    clock.now_s += 0.3
    assert reader.read(clock.now_s).power_w == 5.0
    clock.now_s += 0.7
    found = reader.read(clock.now_s)
    assert (found.power_w, found.age_s > 1.0) == (None, True)
    reader.source.close()
    gate.release(2)


class SlowFiles(KernelFiles):
    """Files of which one lies behind a slow bus."""

    def __init__(self, root: Path, path: str, clock: Clock, gate: threading.Event) -> None:
        super().__init__(str(root))
        self._path, self._clock, self._gate = path, clock, gate

    def watch(self, path: str) -> str:
        if path == self._path:
            if threading.current_thread() is not threading.main_thread():
                self._gate.wait()
            self._clock.now_s += 0.2
        return super().watch(path)


def test_quick_sensors_go_on_telling_the_heat_beside_a_slow_one(tmp_path: Path) -> None:
    zone0, zone1 = (f"sys/class/thermal/thermal_zone{i}" for i in (0, 1))
    machine(tmp_path, {f"{zone1}/type": "soc-thermal", f"{zone1}/temp": "47000"})
    clock, gate = Clock(), threading.Event()
    heat = HeatReader(SysfsRoot(tmp_path), clock, lambda: SlowFiles(tmp_path, f"{zone1}/temp", clock, gate))
    for at_s in (0.0, 1.0):
        clock.now_s = max(clock.now_s, at_s)
        assert heat.read(clock.now_s) == 51.0
    assert heat.source.is_slow
    (tmp_path / f"{zone0}/temp").write_text("63000\n")
    clock.now_s += 1.0
    assert heat.read(clock.now_s) == 63.0  # at once, from the loop
    (tmp_path / f"{zone1}/temp").write_text("71000\n")
    gate.set()
    clock.now_s += 0.3
    assert until(lambda: heat.read(clock.now_s) == 71.0)
    assert heat.age_s(clock.now_s) < 1.0
    heat.close()
