from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edge_rt.config import Power
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from edge_rt.power.calibration import write
from edge_rt.power.meter import Chosen, LateMeter, extra_meters, meter_name, open_meter
from edge_rt.power.monitor import EnergyMonitor
from tests.device_trees import Plant, plant
from tests.fakes import FakeClock
from tests.faulty_root import FaultyRoot
from tests.unit.power.test_calibration import FOUND
from tests.unit.power.test_monitor import FakeMeter

__all__ = ["plant"]

RAPL = {
    "sys/class/powercap/intel-rapl:0/name": "package-0",
    "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850",
    "sys/class/powercap/intel-rapl:0/energy_uj": "123456",
}
STAT = {"proc/stat": "cpu  10 0 0 90 0 0 0 0 0 0\n"}


@pytest.fixture
def table(tmp_path: Path) -> str:
    file = tmp_path / "power.json"
    write(file, FOUND)
    return str(file)


def test_a_sensor_comes_before_a_model(plant: Plant, table: str) -> None:
    chosen = open_meter(Power(model_file=table), root=plant(RAPL | STAT))
    assert chosen.meter is not None
    assert (chosen.meter.name, chosen.meter.quality) == ("rapl package-0", "measured")
    assert chosen.idle_w is None  # the table's is the board's


def test_the_model_stands_in_where_no_sensor_is(plant: Plant, table: str) -> None:
    chosen = open_meter(Power(model_file=table), root=plant(STAT))
    assert chosen.meter is not None
    assert (chosen.meter.name, chosen.meter.quality, chosen.idle_w) == ("model of Board 5", "modelled", 2.7)


def test_the_model_can_be_asked_for(plant: Plant, table: str) -> None:
    chosen = open_meter(Power(meter="model", model_file=table), root=plant(RAPL | STAT))
    assert chosen.meter is not None
    assert chosen.meter.quality == "modelled"


def test_without_any_there_is_a_reason(tmp_path: Path) -> None:
    chosen = open_meter(Power(model_file=str(tmp_path / "none.json")), root=SysfsRoot(tmp_path))
    assert chosen.meter is None
    assert "no RAPL counter" in chosen.reason
    assert chosen.monitor() is None
    assert open_meter(Power(meter="none"), root=SysfsRoot(tmp_path)).reason == "power.meter is none"


def test_a_serial_meter_is_opened(tmp_path: Path) -> None:
    settings = Power(meter="serial:/dev/edge-rt-nothing:lines", model_file=str(tmp_path / "none.json"))
    chosen = open_meter(settings)
    assert chosen.meter is not None
    chosen.meter.close()
    assert chosen.meter.name == meter_name(settings) == "lines /dev/edge-rt-nothing"
    (extra,) = extra_meters(settings)
    extra.close()
    assert extra.name == meter_name(settings)


@pytest.mark.parametrize("meter", ["serial:x", "serial:/dev/x:um25", "model", "ina3221 VDD"])
def test_what_is_no_meter_is_refused(tmp_path: Path, meter: str) -> None:
    settings = Power(meter=meter, model_file=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError) as caught:
        open_meter(settings, origin="the file", root=SysfsRoot(tmp_path))
    assert (caught.value.key, caught.value.origin) == ("power.meter", "the file")
    assert meter_name(settings) == meter


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "power.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="version"):
        open_meter(Power(model_file=str(file)), root=SysfsRoot(tmp_path))


def test_the_table_is_a_meter_beside_the_others(table: str, tmp_path: Path) -> None:
    settings = Power(meter="model", model_file=table)
    assert [meter.name for meter in extra_meters(settings, root=SysfsRoot(tmp_path))] == [meter_name(settings)]


def test_a_meter_that_only_powerd_may_read_may_come(plant: Plant, tmp_path: Path) -> None:
    root = plant(RAPL)
    faulty = FaultyRoot(tmp_path, {"sys/class/powercap/intel-rapl:0/energy_uj": errno.EACCES})
    settings = Power(socket_path=str(tmp_path / "p"), model_file=str(tmp_path / "none"))
    chosen = open_meter(settings, root=faulty)
    assert (chosen.meter, chosen.may_come) == (None, True)
    assert "only root" in chosen.reason
    assert not open_meter(settings, root=SysfsRoot(tmp_path / "nothing")).may_come
    assert open_meter(settings, root=root).meter is not None


def test_a_late_meter_is_looked_for_now_and_then(plant: Plant, tmp_path: Path) -> None:
    found = [Chosen(None, "powerd is away"), Chosen(None, "powerd is away still")]
    settings = Power(model_file=str(tmp_path / "none"))
    late = LateMeter(lambda: found.pop(0) if found else open_meter(settings, root=plant(RAPL)), "powerd was away")
    assert late.read(0.0).reason == "powerd is away"
    assert late.read(5.0).reason == "powerd is away"
    assert late.read(10.0).reason == "powerd is away still"
    assert late.name == "no meter yet"
    assert late.read(20.0).value is not None
    assert (late.name, late.boundary, late.interval_s) == ("rapl package-0", "soc", 0.05)
    late.close()


def test_who_measures_is_told_by_its_name_once_it_is_found() -> None:
    clock = FakeClock()
    late = LateMeter(lambda: Chosen(FakeMeter(clock)), "away")
    monitor = EnergyMonitor(late, clock=clock)
    assert monitor.now().source == "no meter yet"
    clock.advance(monitor.tick())
    assert (monitor.now().source, monitor.now().power_w) == ("fake", 2.0)
