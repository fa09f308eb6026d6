from __future__ import annotations

import pytest

from edge_rt.devices.devfreq import devices, kind_of
from edge_rt.devices.sysfs import SysfsRoot
from tests.device_trees import Plant


def test_a_rockchip_has_npu_and_memory_in_hertz(rk3588: SysfsRoot) -> None:
    found = {device.name: device for device in devices(rk3588)}
    npu = found["fdab0000.npu"]
    assert npu.kind == "npu"
    assert npu.points_hz == (3e8, 4e8, 1e9)
    assert (npu.min_hz.value, npu.max_hz.value, npu.cur_hz.value) == (3e8, 1e9, 3e8)
    assert npu.governor.value == "rknpu_ondemand"
    assert "userspace" in npu.governors
    assert npu.load.value == pytest.approx(0.45)
    assert found["dmc"].kind == "memory"
    assert found["fdee0000.hdmirx"].kind == "other"


def test_an_orin_has_its_gpu(orin_nano: SysfsRoot) -> None:
    found = {device.name: device for device in devices(orin_nano)}
    assert (found["17000000.gpu"].kind, found["15340000.vic"].kind) == ("gpu", "other")
    assert found["17000000.gpu"].load.value is None
    assert found["17000000.gpu"].load.reason


def test_a_machine_without_devfreq_has_none(bare_vm: SysfsRoot) -> None:
    assert devices(bare_vm) == ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fdab0000.npu", "npu"),
        ("27700000.npu", "npu"),
        ("fde40000.npu", "npu"),
        ("fb000000.gpu", "gpu"),
        ("fb000000.gpu-mali", "gpu"),
        ("17000000.gpu", "gpu"),
        ("17000000.ga10b", "gpu"),
        ("17000000.gv11b", "gpu"),
        ("57000000.gpu", "gpu"),
        ("gpu-gpc-0", "gpu"),
        ("3d00000.qcom,kgsl-3d0", "gpu"),
        ("kgsl-busmon", "other"),
        ("dmc", "memory"),
        ("3d400000.memory-controller", "memory"),
        ("1c62000.dram-controller", "memory"),
        ("15340000.vic", "other"),
        ("", "other"),
        ("0000:00:0b.0", "other"),
    ],
)
def test_the_kind_is_told_by_the_words_of_the_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_nodes_name_helps_where_the_devices_does_not(plant: Plant) -> None:
    root = plant(
        {"sys/class/devfreq/1c40000.x/cur_freq": "1", "sys/class/devfreq/1c40000.x/device/of_node/name": "gpu\0"}
    )
    assert [device.kind for device in devices(root)] == ["gpu"]


@pytest.mark.parametrize("raw", ["101@1Hz", "-1@1Hz", "x", "", "1000", "\x00"])
def test_a_load_that_is_none_is_unknown(plant: Plant, raw: str) -> None:
    (device,) = devices(plant({"sys/class/devfreq/a.npu/load": raw}))
    assert device.load.value is None
    assert device.load.reason


@pytest.mark.parametrize("raw", ["0", "-300000000", "9" * 40, "nan"])
def test_a_clock_that_cannot_be_is_unknown(plant: Plant, raw: str) -> None:
    (device,) = devices(plant({"sys/class/devfreq/a.npu/cur_freq": raw}))
    assert device.cur_hz.value is None
    assert device.cur_hz.reason
    assert device.points_hz == ()
