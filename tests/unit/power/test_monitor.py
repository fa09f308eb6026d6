from __future__ import annotations

import threading

import pytest

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.meters import Boundary, Quality, Sample
from edge_rt.power.monitor import IDLE_S, EnergyMonitor, Unmeasured
from edge_rt.tensor_types import TensorTimings
from edge_rt.types import Timings
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S


def text(prefill_s: float, decode_s: float) -> Timings:
    return Timings(
        queue_s=0.0,
        prefill_s=prefill_s,
        prefill_tokens=1,
        decode_s=decode_s,
        decode_tokens=1,
        ttft_s=prefill_s,
        prefill_engine_s=prefill_s,
        decode_engine_s=decode_s,
    )


def tensors(compute_s: float) -> TensorTimings:
    return TensorTimings(queue_s=0.0, compute_s=compute_s, batch_size=1, engine_s=compute_s)


class FakeMeter:
    """Draws watts; read_s is how long a read takes."""

    name = "fake"
    boundary: Boundary = "board"
    quality: Quality = "measured"
    interval_s = 0.01

    def __init__(self, clock: FakeClock, *, read_s: float = 0.0) -> None:
        self.clock, self.read_s = clock, read_s
        self.watts: float | None = 2.0
        self.n_reads = 0
        self.closed_by: str | None = None
        self.read_by: set[str] = set()
        self.fault: Exception | None = None

    def read(self, now_s: float) -> Reading[Sample]:
        self.n_reads += 1
        self.read_by.add(threading.current_thread().name)
        if self.fault is not None:
            raise self.fault
        self.clock.advance(self.read_s)
        return unknown("fake", "pulled out") if self.watts is None else known(Sample(power_w=self.watts), "fake")

    def close(self) -> None:
        self.closed_by = threading.current_thread().name


def make(read_s: float = 0.0) -> tuple[EnergyMonitor, FakeMeter, FakeClock]:
    clock = FakeClock()
    meter = FakeMeter(clock, read_s=read_s)
    return EnergyMonitor(meter, clock=clock), meter, clock


def run(monitor: EnergyMonitor, clock: FakeClock, seconds: float) -> int:
    """Let the monitor do what its thread does; give how often it read."""
    end_s, n_ticks = clock() + seconds, 0
    while clock() < end_s - 1e-9:
        clock.advance(min(monitor.tick(), end_s - clock()))
        n_ticks += 1
    return n_ticks


def test_it_reads_seldom_while_idle_and_often_while_something_runs() -> None:
    monitor, _, clock = make()
    assert run(monitor, clock, 10.0) == 10
    answer = monitor.begin("m")
    assert run(monitor, clock, 10.0) == pytest.approx(200, abs=2)
    monitor.abandon(answer)
    assert run(monitor, clock, 11.0) < 40  # it lingers for a second


class LongIdle(threading.Event):
    """Makes an idle period last longer than the test waits, however busy the machine is."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout if timeout is not None and timeout < IDLE_S else PATIENCE_S)


def test_an_answer_that_begins_just_after_an_idle_reading_is_measured_from_its_beginning() -> None:
    monitor, meter, _ = make()
    monitor._wake = LongIdle()
    monitor.start()
    with monitor._read:
        assert monitor._read.wait_for(lambda: meter.n_reads >= 1, PATIENCE_S)
    monitor.begin("m")  # no time has passed since
    with monitor._read:
        is_read = monitor._read.wait_for(lambda: meter.n_reads >= 2, PATIENCE_S / 2)
    monitor.close()
    assert is_read


def test_what_begins_while_the_meter_is_read_shortens_the_wait() -> None:
    monitor, meter, clock = make()

    class Begins(FakeMeter):
        def read(self, now_s: float) -> Reading[Sample]:
            monitor.begin("m")
            return super().read(now_s)

    monitor._meter = Begins(clock)
    assert monitor.tick() == 0.05
    assert meter.n_reads == 0


def test_a_slow_meter_is_read_no_faster_than_it_has_values() -> None:
    monitor, meter, clock = make()
    meter.interval_s = 0.5
    monitor = EnergyMonitor(meter, clock=clock)
    monitor.begin("m")
    assert run(monitor, clock, 10.0) == 20


def test_an_answer_gets_its_energy() -> None:
    monitor, meter, clock = make()
    run(monitor, clock, 10.0)
    answer = monitor.begin("m")
    meter.watts = 6.0
    run(monitor, clock, 3.0)
    energy = monitor.end(answer, text(1.0, 2.0))
    monitor.abandon(answer)
    assert energy is not None
    assert energy.total_j == pytest.approx(18.0, rel=0.03)
    assert energy.above_idle_j == pytest.approx(12.0, rel=0.03)
    assert energy.coverage > 0.95


def test_a_meter_that_is_pulled_out_is_unknown_with_its_reason_and_comes_back() -> None:
    monitor, meter, clock = make()
    run(monitor, clock, 5.0)
    assert monitor.now().power_w == 2.0
    meter.watts = None
    answer = monitor.begin("m")
    run(monitor, clock, 5.0)
    assert (monitor.now().power_w, monitor.now().reason) == (None, "fake: pulled out")
    assert monitor.end(answer, tensors(2.0)) is None
    meter.watts = 3.0
    run(monitor, clock, 1.0)
    assert (monitor.now().power_w, monitor.now().reason) == (3.0, "")
    assert 0.2 < monitor.now().coverage < 0.9


def test_before_the_first_value_all_is_unknown() -> None:
    monitor, _, _ = make()
    now = monitor.now()
    assert (now.power_w, now.idle_w, now.coverage) == (None, None, 0.0)
    assert now.reason == "nothing has been read yet"


def test_idle_power_is_not_learned_while_others_work() -> None:
    _, meter, clock = make()
    loads = [0.6]
    monitor = EnergyMonitor(meter, load=lambda: loads[0], clock=clock)
    meter.watts = 9.0
    run(monitor, clock, 20.0)
    assert monitor.now().idle_w is None
    loads[0], meter.watts = 0.02, 2.0
    run(monitor, clock, 20.0)
    assert monitor.now().idle_w == pytest.approx(2.0)


def test_a_known_idle_power_counts_until_it_is_learned() -> None:
    _, meter, clock = make()
    monitor = EnergyMonitor(meter, idle_w=1.5, clock=clock)
    assert monitor.now().idle_w == 1.5
    run(monitor, clock, 10.0)
    assert monitor.now().idle_w == pytest.approx(2.0)


def test_only_its_own_thread_reads_and_closes_the_meter() -> None:
    monitor, meter, _ = make()
    monitor.start()
    for _ in range(100):
        monitor.abandon(monitor.begin("m"))
        monitor.now()
    monitor.close()
    assert meter.read_by <= {"edge_rt-meter"}
    assert meter.closed_by == "edge_rt-meter"


def test_a_meter_that_breaks_down_does_not_break_its_users(caplog: pytest.LogCaptureFixture) -> None:
    monitor, meter, _ = make()
    meter.fault = RuntimeError("a defect")
    monitor.start()
    monitor.close()
    assert "a defect" in monitor.now().reason
    assert "is not read any more" in caplog.text
    answer = monitor.begin("m")
    assert monitor.end(answer, tensors(1.0)) is None


def test_an_answer_is_open_for_as_long_as_it_is_computed() -> None:
    monitor, meter, clock = make()
    run(monitor, clock, 10.0)
    meter.watts = 6.0
    with monitor.computing("m") as measured:
        assert monitor._account.is_busy
        run(monitor, clock, 2.0)
        energy = measured.energy(tensors(2.0))
    assert energy is not None
    assert (energy.prefill_j, energy.total_j) == (None, pytest.approx(12.0, rel=0.05))
    assert not monitor._account.is_busy


def test_without_a_meter_nothing_is_told() -> None:
    with Unmeasured().computing("m") as measured:
        assert measured.energy(text(1.0, 1.0)) is None


def test_a_mark_is_a_moment_at_which_the_meter_was_read() -> None:
    monitor, meter, _ = make()
    monitor.start()
    n_reads = meter.n_reads
    monitor.mark()
    assert meter.n_reads > n_reads
    monitor.close()
    monitor.mark()  # and waits for nobody who is gone
