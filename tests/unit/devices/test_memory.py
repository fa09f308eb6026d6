from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest

from edge_rt.devices import memory
from edge_rt.devices.sysfs import SysfsRoot

Plant = Callable[[Mapping[str, str]], SysfsRoot]
MIB = 2**20


def test_without_a_limit_memavailable_counts(raspberry_pi_5: SysfsRoot) -> None:
    found = memory.read(raspberry_pi_5)
    assert found.total_bytes.value == 8_255_000 * 1024
    assert found.swap_total_bytes.value == 204_800 * 1024
    assert found.cgroup is None
    assert memory.available_bytes(raspberry_pi_5).value == 7_000_000 * 1024


def test_a_containers_headroom_counts_its_page_cache_as_free(container: SysfsRoot) -> None:
    limit = memory.read(container).cgroup
    assert limit is not None
    assert limit.limit_bytes == 512 * MIB
    assert limit.headroom_bytes == (512 - 400 + 300) * MIB
    available = memory.available_bytes(container)
    assert available.value == limit.headroom_bytes
    assert available.source == "/sys/fs/cgroup/memory.max"


def test_the_limit_max_is_no_limit(plant: Plant, container: SysfsRoot) -> None:
    assert memory.read(plant({"sys/fs/cgroup/memory.max": "max\n"})).cgroup is None


def test_the_tightest_ancestor_binds(plant: Plant) -> None:
    root = plant(
        {
            "proc/meminfo": "MemAvailable: 9000000 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/a/b/memory.max": f"{900 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.current": f"{100 * MIB}\n",
            "sys/fs/cgroup/a/memory.max": f"{1000 * MIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{990 * MIB}\n",
        }
    )
    assert memory.available_bytes(root).value == 10 * MIB


def test_version_1_limit_and_its_way_to_say_none(plant: Plant) -> None:
    tree = {
        "proc/meminfo": "MemAvailable: 9000000 kB\n",
        "proc/self/cgroup": "4:memory:/box\n0::/\n",
        "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{300 * MIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{200 * MIB}\n",
        "sys/fs/cgroup/memory/box/memory.stat": f"cache 5\ntotal_inactive_file {50 * MIB}\ntotal_active_file 0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{900 * MIB}\n",
    }
    assert memory.available_bytes(plant(tree)).value == 150 * MIB


def test_usage_above_the_limit_leaves_nothing(plant: Plant, container: SysfsRoot) -> None:
    root = plant({"sys/fs/cgroup/memory.current": f"{900 * MIB}\n"})
    assert memory.available_bytes(root).value == 0


def test_an_unreadable_meminfo_is_unknown_and_not_zero(plant: Plant) -> None:
    reading = memory.available_bytes(plant({}))
    assert reading.value is None
    assert "/proc/meminfo" in reading.source
    assert memory.available_bytes(plant({"proc/meminfo": "MemTotal: 5 kB\n"})).reason == "has no MemAvailable"


def test_rss_of_this_process() -> None:
    rss = memory.process_rss_bytes().value
    assert rss is not None
    assert rss > MIB


FAULTS = """
import resource, sys
import pytest

from edge_rt.devices import memory
memory.keep_freed(int(sys.argv[1]))
def touch():
    first = bytes(200_000)
    second = first + b"x"
    return len(second)
for _ in range(20):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_memory_that_is_kept_costs_no_page_faults() -> None:
    def faults(max_bytes: int) -> int:
        command = [sys.executable, "-c", FAULTS, str(max_bytes)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults(128 * 1024) > 1000  # glibc's own thresholds
    assert faults(8 * 2**20) < 100
