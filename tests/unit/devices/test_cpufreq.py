from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.cpufreq import MAX_HZ, MIN_HZ, grid, policies, pstate
from edge_rt.devices.sysfs import SysfsRoot
from tests.device_trees import Plant, cpufreq_policy, plant_files
from tests.faulty_root import FaultyRoot

POLICY = "sys/devices/system/cpu/cpufreq/policy0"


def test_a_pi_has_one_policy_with_the_drivers_steps(raspberry_pi_5: SysfsRoot) -> None:
    (policy,) = policies(raspberry_pi_5)
    assert (policy.name, policy.cpus, policy.online_cpus) == ("policy0", (0, 1, 2, 3), (0, 1, 2, 3))
    assert policy.points_hz == (1.5e9, 1.6e9, 1.7e9, 1.8e9, 2.0e9, 2.4e9)
    assert not policy.is_grid
    assert (policy.min_hz.value, policy.max_hz.value, policy.cur_hz.value) == (1.5e9, 2.4e9, 2.4e9)
    assert (policy.driver.value, policy.governor.value) == ("cpufreq-dt", "ondemand")
    assert policy.governors == ("performance", "schedutil")
    assert policy.epp.value is None
    assert policy.epp.reason
    assert policy.boost.value is None
    assert policy.capacity is None


def test_big_little_has_a_policy_a_cluster_and_governors_directories_are_none(rk3588: SysfsRoot) -> None:
    found = policies(rk3588)
    assert [(p.name, p.cpus) for p in found] == [("policy0", (0, 1, 2, 3)), ("policy4", (4, 5)), ("policy6", (6, 7))]
    assert [p.capacity for p in found] == [pytest.approx(530 / 1024), 1.0, 1.0]


def test_policies_come_in_the_order_of_their_cpus(plant: Plant) -> None:
    for first in (16, 2, 0):
        root = plant(cpufreq_policy(first, f"{first}", floor=400000, ceiling=3000000))
    assert [p.name for p in policies(root)] == ["policy0", "policy2", "policy16"]


def test_what_only_looks_like_a_policy_is_none(plant: Plant) -> None:
    root = plant({f"{POLICY}x/scaling_governor": "a", "sys/devices/system/cpu/cpufreq/policy/scaling_governor": "a"})
    assert policies(root) == ()


def test_a_driver_without_steps_gets_a_grid(x86_laptop: SysfsRoot) -> None:
    policy = policies(x86_laptop)[0]
    assert policy.is_grid
    assert policy.points_hz[0] == 4e8
    assert policy.points_hz[-1] == 3.9e9
    assert all(hz % 1e8 == 0 for hz in policy.points_hz)
    assert policy.epp.value == "balance_performance"
    assert policy.epps == ("default", "performance", "balance_performance", "balance_power", "power")
    assert policy.boost.value is True
    assert "no_turbo" in policy.boost.source
    assert pstate(x86_laptop).value == "intel_pstate active"


def test_amd_has_a_policy_a_cpu_and_its_efficient_clock_is_a_step(amd_machine: SysfsRoot) -> None:
    found = policies(amd_machine)
    assert [p.cpus for p in found] == [(0,), (1,), (2,), (3,)]
    assert found[0].efficient_hz == 1.127e9
    assert 1.127e9 in found[0].points_hz
    assert found[0].points_hz[-1] == 5.137e9
    assert found[0].boost.value is True
    assert pstate(amd_machine).value == "amd_pstate active"


def test_a_machine_without_policies_has_none(bare_vm: SysfsRoot) -> None:
    assert policies(bare_vm) == ()
    assert pstate(bare_vm).value is None


def test_an_offline_cpu_is_related_and_not_affected(plant: Plant) -> None:
    (policy,) = policies(plant(cpufreq_policy(0, "0 1", floor=600000, ceiling=2400000, online="0")))
    assert (policy.cpus, policy.online_cpus) == ((0, 1), (0,))


def test_boost_clocks_are_steps_only_while_boost_is_on(plant: Plant) -> None:
    files = cpufreq_policy(0, "0", khz="1000000 2000000", floor=1000000, ceiling=2500000)
    files |= {f"{POLICY}/scaling_boost_frequencies": "2500000 ", "sys/devices/system/cpu/cpufreq/boost": "0"}
    root = plant(files)
    assert policies(root)[0].points_hz == (1e9, 2e9)
    plant({"sys/devices/system/cpu/cpufreq/boost": "1"})
    assert policies(root)[0].points_hz == (1e9, 2e9, 2.5e9)


def test_the_last_request_stands_in_for_a_clock_that_is_not_told(plant: Plant) -> None:
    files = cpufreq_policy(0, "0", floor=600000, ceiling=2400000)
    files |= {f"{POLICY}/scaling_cur_freq": "<unknown>", f"{POLICY}/cpuinfo_cur_freq": "1800000"}
    (policy,) = policies(plant(files))
    assert policy.cur_hz.value == 1.8e9
    assert policy.cur_hz.source.endswith("cpuinfo_cur_freq")


@pytest.mark.parametrize("raw", ["0", "-1", "99999999999999999999", "nan", "", "4294967295000", "\x00\x01"])
def test_a_clock_that_cannot_be_is_unknown(plant: Plant, raw: str) -> None:
    files = cpufreq_policy(0, "0", floor=600000, ceiling=2400000)
    files |= {f"{POLICY}/{name}": raw for name in ("scaling_cur_freq", "cpuinfo_cur_freq", "cpuinfo_max_freq")}
    (policy,) = policies(plant(files))
    for reading in (policy.cur_hz, policy.ceiling_hz):
        assert reading.value is None
        assert reading.reason
    assert policy.points_hz == ()  # no grid up to a limit that is not known


def test_junk_among_the_steps_is_left_out(plant: Plant) -> None:
    files = cpufreq_policy(0, "0", khz="x 600000 600000 -5 0 1e6 2400000 " + "9" * 30, floor=600000, ceiling=2400000)
    (policy,) = policies(plant(files))
    assert policy.points_hz == (6e8, 2.4e9)


def test_names_that_would_move_the_cursor_are_unknown(plant: Plant) -> None:
    files = cpufreq_policy(0, "0", floor=600000, ceiling=2400000, governor="\x1b[2Jschedutil")
    files[f"{POLICY}/scaling_available_governors"] = "ok \x1b[31mred " + "x" * 500
    (policy,) = policies(plant(files))
    assert policy.governor.value is None
    assert policy.governors == ("ok",)


@pytest.mark.parametrize("fault", [errno.ENODEV, errno.ENOENT, errno.EBUSY, errno.EIO, errno.ENOTCONN])
def test_a_policy_that_goes_away_while_it_is_read_is_unknown(tmp_path: Path, fault: int) -> None:
    files = cpufreq_policy(0, "0", khz="600000 2400000", floor=600000, ceiling=2400000)
    plant_files(tmp_path, files)
    (policy,) = policies(FaultyRoot(tmp_path, dict.fromkeys(files, fault)))
    assert (policy.cpus, policy.points_hz) == ((), ())
    for reading in (policy.min_hz, policy.max_hz, policy.cur_hz, policy.driver, policy.governor):
        assert reading.value is None
        assert reading.reason


@given(st.floats(MIN_HZ, MAX_HZ), st.floats(MIN_HZ, MAX_HZ))
def test_a_grid_holds_its_ends_ascends_and_is_short(a: float, b: float) -> None:
    floor_hz, ceiling_hz = min(a, b), max(a, b)
    points = grid(floor_hz, ceiling_hz)
    assert (points[0], points[-1]) == (floor_hz, ceiling_hz)
    assert list(points) == sorted(set(points))
    assert len(points) <= 34
