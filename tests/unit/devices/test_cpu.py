from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from edge_rt.devices import cpu
from edge_rt.devices.sysfs import SysfsRoot

Plant = Callable[[Mapping[str, str]], SysfsRoot]


def _big(root: SysfsRoot) -> list[bool | None]:
    return [core.big for core in cpu.topology(root).cores]


def test_x86_server(x86_server: SysfsRoot) -> None:
    assert cpu.model(x86_server).value == "Intel(R) Xeon(R) Platinum 8480+"
    assert {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8"} <= cpu.features(x86_server)
    assert _big(x86_server) == [True] * 8
    usable = cpu.usable(x86_server, affinity=lambda: set(range(8)))
    assert usable.n_physical == 4
    assert usable.compute_cpus == (0, 1, 2, 3)
    assert cpu.governor(x86_server).value == "performance"
    assert cpu.pressure(x86_server).value == pytest.approx(0.125)


def test_hybrid_x86_takes_the_core_type_and_not_the_clock(x86_hybrid: SysfsRoot) -> None:
    topology = cpu.topology(x86_hybrid)
    assert [core.big for core in topology.cores] == [True] * 4 + [False] * 4
    assert "cpu_core" in topology.big_source
    assert cpu.usable(x86_hybrid, affinity=lambda: set(range(8))).compute_cpus == (0, 2)


def test_affinity_to_small_cores_only_uses_those(x86_hybrid: SysfsRoot) -> None:
    usable = cpu.usable(x86_hybrid, affinity=lambda: {5, 6})
    assert usable.cpus == (5, 6)
    assert usable.compute_cpus == (5, 6)


def test_a_lone_hyper_thread_counts_as_its_core(x86_hybrid: SysfsRoot) -> None:
    assert cpu.usable(x86_hybrid, affinity=lambda: {1, 2, 3}).compute_cpus == (1, 2)


def test_raspberry_pi_5(raspberry_pi_5: SysfsRoot) -> None:
    assert cpu.model(raspberry_pi_5).value == "4x Cortex-A76"
    assert cpu.board(raspberry_pi_5).value == "Raspberry Pi 5 Model B Rev 1.0"
    assert cpu.features(raspberry_pi_5) == {"neon", "fp16", "dotprod"}
    topology = cpu.topology(raspberry_pi_5)
    assert [core.big for core in topology.cores] == [True] * 4
    assert topology.cores[0].max_hz == pytest.approx(2.4e9)
    assert topology.cores[0].capacity is None
    assert cpu.pressure(raspberry_pi_5).value is None


def test_rk3588(rk3588: SysfsRoot) -> None:
    assert cpu.model(rk3588).value == "4x Cortex-A55 + 4x Cortex-A76"
    topology = cpu.topology(rk3588)
    assert [core.big for core in topology.cores] == [False] * 4 + [True] * 4
    assert topology.big_source == "cpu_capacity"
    assert cpu.usable(rk3588, affinity=lambda: set(range(8))).compute_cpus == (4, 5, 6, 7)
    assert cpu.governor(rk3588).value == "ondemand/performance"


def test_frequency_tells_clusters_apart_without_capacity(plant: Plant, rk3588: SysfsRoot) -> None:
    root = plant({f"sys/devices/system/cpu/cpu{i}/cpu_capacity": "\n" for i in range(8)})
    topology = cpu.topology(root)
    assert [core.big for core in topology.cores] == [False] * 4 + [True] * 4
    assert "max_freq" in topology.big_source


def test_a_core_without_any_figure_leaves_all_unknown(plant: Plant, rk3588: SysfsRoot) -> None:
    root = plant(
        {
            "sys/devices/system/cpu/cpu7/cpu_capacity": "\n",
            "sys/devices/system/cpu/cpu7/cpufreq/cpuinfo_max_freq": "\n",
        }
    )
    assert _big(root) == [None] * 8
    assert cpu.topology(root).big_source.startswith("unknown")


def test_offline_cores_are_listed_and_not_used(plant: Plant, rk3588: SysfsRoot) -> None:
    root = plant({"sys/devices/system/cpu/online": "0-3,6-7\n"})
    assert [core.online for core in cpu.topology(root).cores] == [True] * 4 + [False] * 2 + [True] * 2
    assert cpu.usable(root, affinity=lambda: set(range(8))).compute_cpus == (6, 7)


def test_a_feature_that_one_core_lacks_does_not_count(plant: Plant) -> None:
    root = plant(
        {"proc/cpuinfo": "processor: 0\nFeatures: asimd asimddp i8mm\n\nprocessor: 1\nFeatures: asimd asimddp\n\n"}
    )
    assert cpu.features(root) == {"neon", "dotprod"}


def test_an_unknown_arm_part_shows_its_numbers(plant: Plant) -> None:
    root = plant({"proc/cpuinfo": "processor: 0\nCPU implementer: 0x61\nCPU part: 0x22\n\n"})
    assert cpu.model(root).value == "1x implementer 0x61 part 0x22"


def test_container_without_sysfs(container: SysfsRoot) -> None:
    topology = cpu.topology(container)
    assert [core.id for core in topology.cores] == [0, 1, 2, 3]
    assert [core.big for core in topology.cores] == [None] * 4
    usable = cpu.usable(container, affinity=lambda: {0, 1, 2, 3})
    assert usable.quota_cores.value == pytest.approx(1.5)
    assert usable.compute_cpus == (0,)
    assert cpu.governor(container).value is None


def test_nothing_readable_still_gives_a_thread(plant: Plant) -> None:
    root = plant({})
    assert cpu.features(root) == frozenset()
    assert cpu.model(root).value is None
    assert cpu.usable(root, affinity=lambda: {3}).compute_cpus == (3,)


def test_quota_below_one_core_leaves_one_thread(plant: Plant, container: SysfsRoot) -> None:
    root = plant({"sys/fs/cgroup/cpu.max": "20000 100000\n"})
    assert cpu.quota_cores(root).value == pytest.approx(0.2)
    assert cpu.usable(root, affinity=lambda: {0, 1}).compute_cpus == (0,)


def test_an_ancestors_smaller_quota_binds(plant: Plant) -> None:
    root = plant(
        {
            "proc/self/cgroup": "0::/edge.slice/edge_rt.service\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/edge.slice/edge_rt.service/cpu.max": "max 100000\n",
            "sys/fs/cgroup/edge.slice/cpu.max": "300000 100000\n",
        }
    )
    reading = cpu.quota_cores(root)
    assert reading.value == pytest.approx(3.0)
    assert reading.source == "/sys/fs/cgroup/edge.slice/cpu.max"


def test_version_1_quota_in_a_container_without_a_cgroup_namespace(plant: Plant) -> None:
    root = plant(
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
            "proc/self/mountinfo": "33 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup c rw,cpu,cpuacct\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert cpu.quota_cores(root).value == pytest.approx(2.5)


def test_version_1_without_a_quota_says_so(plant: Plant) -> None:
    root = plant(
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    reading = cpu.quota_cores(root)
    assert reading.value is None
    assert reading.reason == "no quota is set"


def test_the_machine_running_the_tests_has_a_usable_core() -> None:
    assert len(cpu.usable_cores()) >= 1
    assert set(cpu.usable_cores()) <= {core.id for core in cpu.topology().cores}


@pytest.mark.parametrize(
    ("machine", "affinity", "n_threads", "expected"),
    [
        ("rk3588", range(8), 4, (4, 5, 6, 7)),
        ("rk3588", range(8), 1, (4, 5, 6, 7)),
        ("rk3588", range(8), 5, ()),  # they are meant to use small cores too
        ("rk3588", {1, 2, 5, 6}, 2, (5, 6)),
        ("rk3588", {1, 2, 5, 6}, 3, ()),
        ("rk3588", range(4), 2, ()),
        ("rk3588", range(4, 8), 2, ()),
        ("x86_hybrid", range(8), 2, (0, 1, 2, 3)),  # the hyper-threads of both big cores
        ("x86_hybrid", range(8), 3, ()),
        ("x86_server", range(8), 2, ()),
        ("raspberry_pi_5", range(4), 2, ()),
        ("container", range(4), 1, ()),
    ],
)
def test_compute_threads_keep_to_big_cores_where_there_are_small_ones(
    request: pytest.FixtureRequest, machine: str, affinity: set[int], n_threads: int, expected: tuple[int, ...]
) -> None:
    usable = cpu.usable(request.getfixturevalue(machine), affinity=lambda: set(affinity))
    assert usable.pinned(n_threads) == expected
