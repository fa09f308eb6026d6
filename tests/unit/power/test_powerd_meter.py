from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.config import Power
from edge_rt.devices.meters import Sample
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import DaemonUnreachableError
from edge_rt.power.meter import extra_meters, open_meter
from edge_rt.power.powerd_meter import PowerdMeter
from tests.patience import POWERD_S, until
from tests.unit.power.test_powerd import started
from tests.unit.power.tree import machine

TOLD = {
    "type": "power",
    "meter": "rapl package-0",
    "boundary": "soc",
    "quality": "measured",
    "interval_s": 0.05,
    "power_w": 6.0,
    "energy_j": 100.0,
    "covered_s": 20.0,
    "at_s": 50.0,
    "reason": "",
}
BATTERY = {
    "sys/class/power_supply/BAT0/type": "Battery",
    "sys/class/power_supply/BAT0/status": "Discharging",
    "sys/class/power_supply/BAT0/capacity": "80",
    "sys/class/power_supply/BAT0/power_now": "7500000",
}


class FakePowerd:
    def __init__(self, **told: Any) -> None:
        self.told: Mapping[str, Any] = TOLD | told
        self.is_gone = False

    def __call__(self, path: str) -> Mapping[str, Any]:
        if self.is_gone:
            raise DaemonUnreachableError(address=path, reason="Connection refused", remedy="start it")
        return self.told


def test_it_passes_on_what_powerd_has_counted() -> None:
    powerd = FakePowerd()
    meter = PowerdMeter("p", ask=powerd)
    assert (meter.name, meter.boundary, meter.quality, meter.reason) == (
        "powerd's rapl package-0",
        "soc",
        "measured",
        "",
    )
    assert meter.read(50.1).value == Sample(energy_j=100.0, power_w=6.0, age_s=pytest.approx(0.1))
    powerd.told = TOLD | {"energy_j": 101.2, "covered_s": 20.2, "at_s": 50.2}
    assert meter.read(50.2).value == Sample(energy_j=101.2, power_w=6.0, age_s=0.0)


def test_a_time_in_which_its_meter_was_silent_is_unknown_once() -> None:
    powerd = FakePowerd()
    meter = PowerdMeter("p", ask=powerd)
    meter.read(50.0)
    powerd.told = TOLD | {"energy_j": 101.0, "covered_s": 20.2, "at_s": 55.0}
    assert meter.read(55.0).value is None
    powerd.told = TOLD | {"energy_j": 102.0, "covered_s": 20.4, "at_s": 55.2}
    assert meter.read(55.2).value is not None


def test_powerd_may_go_and_come_back() -> None:
    powerd = FakePowerd()
    meter = PowerdMeter("p", ask=powerd)
    powerd.is_gone = True
    assert "Connection refused" in meter.read(51.0).reason
    powerd.is_gone = False
    assert meter.read(52.0).value is not None


def test_a_meter_that_is_silent_now_tells_no_power() -> None:
    sample = PowerdMeter("p", ask=FakePowerd(reason="rapl: cannot be read")).read(50.0).value
    assert sample is not None
    assert (sample.energy_j, sample.power_w) == (100.0, None)


def test_without_powerd_or_its_meter_there_is_a_reason() -> None:
    powerd = FakePowerd()
    powerd.is_gone = True
    assert "Connection refused" in PowerdMeter("p", ask=powerd).reason
    assert "no RAPL" in PowerdMeter("p", ask=FakePowerd(meter=None, reason="no RAPL")).reason


anything = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text() | st.lists(st.none())


@given(st.dictionaries(st.sampled_from([*TOLD]), anything))
def test_whatever_it_says_is_a_sample_that_can_be_or_unknown(told: dict[str, Any]) -> None:
    meter = PowerdMeter("p", ask=FakePowerd(**told))
    for now_s in (50.0, 51.0):
        sample = meter.read(now_s).value
        if sample is not None:
            assert sample.energy_j is not None
            assert sample.energy_j >= 0
            assert sample.age_s >= 0
            assert sample.power_w is None or 0 <= sample.power_w <= 1e5


def test_a_real_powerd_is_a_meter_for_who_has_none(socket_dir: Path, tmp_path: Path) -> None:
    machine(socket_dir, BATTERY)
    with started(socket_dir) as powerd:
        powerd.heard("READY")
        settings = Power(socket_path=powerd.socket, model_file=str(tmp_path / "none"))
        chosen = open_meter(settings, root=SysfsRoot(tmp_path))
        assert chosen.meter is not None
        assert chosen.meter.name.startswith("powerd's ")
        assert (chosen.meter.boundary, chosen.meter.quality) == ("board", "measured")
        assert [one.name for one in extra_meters(settings, root=SysfsRoot(tmp_path))] == [chosen.meter.name]
        assert extra_meters(settings, root=SysfsRoot(socket_dir)) == ()  # who reads the same needs no powerd for it
        meter = chosen.meter

        def sample(least_j: float) -> Sample | None:
            found = meter.read(1e6).value
            return found if found is not None and found.power_w and (found.energy_j or 0.0) > least_j else None

        first = until(lambda: sample(-1.0), every_s=POWERD_S)
        assert first.power_w == pytest.approx(7.5)
        assert until(lambda: sample(first.energy_j or 0.0), every_s=POWERD_S).power_w == pytest.approx(7.5)
    assert chosen.meter.read(1e6).value is None
