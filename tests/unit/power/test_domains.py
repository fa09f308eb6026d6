from __future__ import annotations

import pytest

from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.domains import domains
from tests.device_trees import amd_machine, bare_vm, cpufreq_policy, orin_nano, plant, raspberry_pi_5, rk3588

__all__ = ["amd_machine", "bare_vm", "orin_nano", "plant", "raspberry_pi_5", "rk3588"]


def test_a_rockchip_has_three_clusters_npu_and_memory(rk3588: SysfsRoot) -> None:
    found = domains(rk3588)
    assert [(d.name, d.kind, d.n_cpus) for d in found] == [
        ("policy0", "cpu", 4),
        ("policy4", "cpu", 2),
        ("policy6", "cpu", 2),
        ("dmc", "memory", 0),
        ("fdab0000.npu", "npu", 0),
    ]
    assert [d.capacity for d in found[:3]] == [pytest.approx(0.5176, abs=1e-4), 1.0, 1.0]
    assert found[0].points_hz == (4.08e8, 1.008e9, 1.8e9)


def test_an_orin_has_its_clusters_and_gpu_and_not_its_video_engine(orin_nano: SysfsRoot) -> None:
    assert [d.name for d in domains(orin_nano)] == ["policy0", "policy4", "17000000.gpu"]


def test_amd_has_a_domain_a_cpu(amd_machine: SysfsRoot) -> None:
    assert [(d.name, d.n_cpus, d.capacity) for d in domains(amd_machine)] == [(f"policy{i}", 1, 1.0) for i in range(4)]


def test_a_machine_without_clocks_has_no_domain(bare_vm: SysfsRoot) -> None:
    assert domains(bare_vm) == ()


def test_one_clock_is_none_to_choose_from(plant: object, raspberry_pi_5: SysfsRoot) -> None:
    assert [len(d.points_hz) for d in domains(raspberry_pi_5)] == [6]
    plant(cpufreq_policy(0, "0 1 2 3", khz="1500000", floor=1500000, ceiling=1500000))  # type: ignore[operator]
    assert domains(raspberry_pi_5) == ()
