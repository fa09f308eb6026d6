"""Captured-style /proc and /sys trees of the machines edge_rt meets, cut to the files it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edge_rt.devices.sysfs import SysfsRoot

Plant = Callable[[Mapping[str, str]], SysfsRoot]

_CPU = "sys/devices/system/cpu"
_CGROUP2 = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
}
_MEMINFO = (
    "MemTotal:       {0} kB\nMemFree:  100000 kB\nMemAvailable:   {1} kB\n"
    "SwapTotal:      {2} kB\nSwapFree:      {2} kB\n"
)

X86_FLAGS = "fpu sse2 ssse3 fma f16c avx avx2 bmi2"
ARM_A76 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Write a tree of files below tmp_path; calling it again adds to the tree."""

    def write(files: Mapping[str, str]) -> SysfsRoot:
        for path, text in files.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return SysfsRoot(tmp_path)

    return write


def _x86_cpuinfo(n_cpus: int, name: str, flags: str) -> str:
    return "".join(f"processor\t: {i}\nmodel name\t: {name}\nflags\t\t: {flags}\n\n" for i in range(n_cpus))


def _arm_cpuinfo(parts: list[int], features: str) -> str:
    blocks = [
        f"processor\t: {i}\nBogoMIPS\t: 48.00\nFeatures\t: {features}\n"
        f"CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: {part:#x}\n\n"
        for i, part in enumerate(parts)
    ]
    return "".join(blocks) + "Revision\t: d04170\nModel\t\t: a board\n"


@pytest.fixture
def x86_server(plant: Plant) -> SysfsRoot:
    """Two packages of two cores with hyper-threads, AVX-512 and AMX, RAPL with dram, throttle counters."""
    flags = f"{X86_FLAGS} avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx_vnni amx_tile amx_int8 amx_bf16"
    files = dict(_CGROUP2)
    files["proc/cpuinfo"] = _x86_cpuinfo(8, "Intel(R) Xeon(R) Platinum 8480+", flags)
    files["proc/meminfo"] = _MEMINFO.format(131_072_000, 120_000_000, 0)
    files["proc/pressure/cpu"] = (
        "some avg10=12.50 avg60=3.00 avg300=1.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    files[f"{_CPU}/online"] = "0-7\n"
    files[f"{_CPU}/cpufreq/policy0/scaling_governor"] = "performance\n"
    for i in range(8):
        package = i % 4 // 2
        files[f"{_CPU}/cpu{i}/topology/thread_siblings_list"] = f"{i % 4},{i % 4 + 4}\n"
        files[f"{_CPU}/cpu{i}/topology/physical_package_id"] = f"{package}\n"
        files[f"{_CPU}/cpu{i}/cpufreq/cpuinfo_max_freq"] = "3800000\n"
        files[f"{_CPU}/cpu{i}/thermal_throttle/core_throttle_count"] = "1\n"
        files[f"{_CPU}/cpu{i}/thermal_throttle/package_throttle_count"] = f"{10 + package}\n"
    for package in (0, 1):
        zone = f"sys/class/powercap/intel-rapl:{package}"
        for path, name in ((zone, f"package-{package}"), (f"{zone}:0", "dram"), (f"{zone}:1", "core")):
            files[f"{path}/name"] = f"{name}\n"
            files[f"{path}/energy_uj"] = f"{1_000_000 * (package + 1)}\n"
            files[f"{path}/max_energy_range_uj"] = "262143328850\n"
    files["sys/class/powercap/intel-rapl-mmio:0/name"] = "package-0\n"
    files["sys/class/powercap/intel-rapl-mmio:0/energy_uj"] = "7000000\n"
    files["sys/class/powercap/intel-rapl-mmio:0/max_energy_range_uj"] = "262143328850\n"
    files["sys/class/thermal/thermal_zone0/type"] = "acpitz\n"
    files["sys/class/thermal/thermal_zone0/temp"] = "99000\n"
    files["sys/class/thermal/thermal_zone1/type"] = "x86_pkg_temp\n"
    files["sys/class/thermal/thermal_zone1/temp"] = "55000\n"
    files["sys/class/hwmon/hwmon0/name"] = "coretemp\n"
    files["sys/class/hwmon/hwmon0/temp1_input"] = "57500\n"
    files["sys/class/hwmon/hwmon0/temp1_label"] = "Package id 0\n"
    files["sys/class/hwmon/hwmon0/temp1_max"] = "82000\n"
    files["sys/class/hwmon/hwmon1/name"] = "nvme\n"
    files["sys/class/hwmon/hwmon1/temp1_input"] = "90000\n"
    return plant(files)


@pytest.fixture
def x86_hybrid(plant: Plant) -> SysfsRoot:
    """Two P cores with hyper-threads (cpu0-3) and four E cores (cpu4-7)."""
    files = dict(_CGROUP2)
    files["proc/cpuinfo"] = _x86_cpuinfo(8, "13th Gen Intel(R) Core(TM) i5-1335U", f"{X86_FLAGS} avx_vnni")
    files["proc/meminfo"] = _MEMINFO.format(16_000_000, 9_000_000, 8_000_000)
    files[f"{_CPU}/online"] = "0-7\n"
    files["sys/devices/cpu_core/cpus"] = "0-3\n"
    files["sys/devices/cpu_atom/cpus"] = "4-7\n"
    for i in range(8):
        files[f"{_CPU}/cpu{i}/topology/thread_siblings_list"] = (
            f"{i // 2 * 2}-{i // 2 * 2 + 1}\n" if i < 4 else f"{i}\n"
        )
        # A favoured P core clocks higher than the other: no reason to call the other small.
        files[f"{_CPU}/cpu{i}/cpufreq/cpuinfo_max_freq"] = (
            "4600000" if i < 2 else "4400000" if i < 4 else "3400000"
        ) + "\n"
    files["sys/class/powercap/intel-rapl:0/name"] = "psys\n"
    files["sys/class/thermal/cooling_device0/type"] = "Fan\n"
    files["sys/class/thermal/cooling_device0/cur_state"] = "3\n"
    files["sys/class/thermal/cooling_device1/type"] = "Processor\n"
    files["sys/class/thermal/cooling_device1/cur_state"] = "0\n"
    return plant(files)


@pytest.fixture
def raspberry_pi_5(plant: Plant) -> SysfsRoot:
    files = dict(_CGROUP2)
    files["proc/cpuinfo"] = _arm_cpuinfo([0xD0B] * 4, ARM_A76)
    files["proc/meminfo"] = _MEMINFO.format(8_255_000, 7_000_000, 204_800)
    files["proc/device-tree/model"] = "Raspberry Pi 5 Model B Rev 1.0\0"
    files[f"{_CPU}/online"] = "0-3\n"
    files[f"{_CPU}/cpufreq/policy0/scaling_governor"] = "ondemand\n"
    for i in range(4):
        files[f"{_CPU}/cpu{i}/cpufreq/cpuinfo_max_freq"] = "2400000\n"
        files[f"{_CPU}/cpu{i}/topology/thread_siblings_list"] = f"{i}\n"
    files["sys/class/thermal/thermal_zone0/type"] = "cpu-thermal\n"
    files["sys/class/thermal/thermal_zone0/temp"] = "61750\n"
    files["sys/class/thermal/thermal_zone0/trip_point_0_type"] = "critical\n"
    files["sys/class/thermal/thermal_zone0/trip_point_0_temp"] = "110000\n"
    files["sys/class/thermal/thermal_zone0/trip_point_1_type"] = "passive\n"
    files["sys/class/thermal/thermal_zone0/trip_point_1_temp"] = "80000\n"
    files["sys/devices/platform/soc/soc:firmware/get_throttled"] = "50005\n"
    files["sys/class/hwmon/hwmon2/name"] = "rpi_volt\n"
    files["sys/class/hwmon/hwmon2/in0_lcrit_alarm"] = "1\n"
    return plant(files)


@pytest.fixture
def rk3588(plant: Plant) -> SysfsRoot:
    """Four Cortex-A55 (cpu0-3) and four Cortex-A76 (cpu4-7)."""
    files = dict(_CGROUP2)
    files["proc/cpuinfo"] = _arm_cpuinfo([0xD05] * 4 + [0xD0B] * 4, ARM_A76)
    files["proc/meminfo"] = _MEMINFO.format(16_000_000, 14_000_000, 0)
    files[f"{_CPU}/online"] = "0-7\n"
    files[f"{_CPU}/cpufreq/policy0/scaling_governor"] = "ondemand\n"
    files[f"{_CPU}/cpufreq/policy4/scaling_governor"] = "performance\n"
    for i in range(8):
        files[f"{_CPU}/cpu{i}/cpu_capacity"] = ("530" if i < 4 else "1024") + "\n"
        files[f"{_CPU}/cpu{i}/cpufreq/cpuinfo_max_freq"] = ("1800000" if i < 4 else "2400000") + "\n"
        files[f"{_CPU}/cpu{i}/topology/thread_siblings_list"] = f"{i}\n"
    for i, name in enumerate(("soc-thermal", "bigcore0-thermal", "npu-thermal")):
        files[f"sys/class/thermal/thermal_zone{i}/type"] = f"{name}\n"
        files[f"sys/class/thermal/thermal_zone{i}/temp"] = f"{40000 + 1000 * i}\n"
    files["sys/class/thermal/cooling_device1/type"] = "cpufreq-cpu4\n"
    files["sys/class/thermal/cooling_device1/cur_state"] = "2\n"
    return plant(files)


@pytest.fixture
def container(plant: Plant) -> SysfsRoot:
    """A container that sees /proc but no sysfs, with a quota of 1.5 cores and 512 MiB of memory."""
    return plant(
        {
            **_CGROUP2,
            "proc/cpuinfo": _x86_cpuinfo(4, "AMD EPYC", X86_FLAGS),
            "proc/meminfo": _MEMINFO.format(16_000_000, 12_000_000, 0),
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": f"{512 * 2**20}\n",
            "sys/fs/cgroup/memory.current": f"{400 * 2**20}\n",
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {200 * 2**20}\nactive_file {100 * 2**20}\n",
        }
    )
