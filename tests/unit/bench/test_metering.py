from __future__ import annotations

import pytest

from edge_rt.bench.metering import Metering
from edge_rt.devices.base import Reading, known
from edge_rt.devices.meters import Boundary, Quality, Sample
from edge_rt.power.meter import Chosen


class CountingMeter:
    """A counter of 5 W by the machine's own clock, which the monitor's thread and the test share."""

    name, boundary, quality, interval_s = "counter", "soc", "measured", 0.01

    def __init__(self) -> None:
        self.is_closed = False

    def read(self, now_s: float) -> Reading[Sample]:
        return known(Sample(energy_j=5.0 * now_s), "counter")

    def close(self) -> None:
        self.is_closed = True


def counting(meter: CountingMeter) -> Metering:
    boundary: Boundary = "soc"
    quality: Quality = "measured"
    meter.boundary, meter.quality = boundary, quality
    return Metering(Chosen(meter))  # type: ignore[arg-type]


def test_a_stretch_has_the_energy_between_its_marks() -> None:
    meter = CountingMeter()
    with counting(meter) as metering:
        mark = metering.mark()
        for _ in range(10):
            metering.mark()
        assert metering.watts_since(mark).value == pytest.approx(
            5.0, rel=0.2
        )  # a thread may be held up between clock and counter
        assert (metering.source, metering.boundary, metering.quality) == ("counter", "soc", "measured")
        meter.interval_s = 0.01
    assert meter.is_closed
    assert metering.watts_since(mark).reason == "it is closed"


def test_a_stretch_shorter_than_the_meters_steps_is_unknown() -> None:
    meter = CountingMeter()
    meter.interval_s = 1000.0
    with counting(meter) as metering:
        mark = metering.mark()
        assert "too short" in metering.joules_since(mark).reason


def test_without_a_meter_there_is_its_reason() -> None:
    with Metering(Chosen(None, "no RAPL counter")) as metering:
        reading = metering.joules_since(metering.mark())
    assert (reading.value, reading.source, reading.reason) == (None, "no meter", "no RAPL counter")
    assert (metering.boundary, metering.quality) == (None, None)
