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
    """Write a tree of files below tmp_path; calling it again adds to the tree. "link:X" makes a link to X."""

    def write(files: Mapping[str, str]) -> SysfsRoot:
        plant_files(tmp_path, files)
        return SysfsRoot(tmp_path)

    return write


def plant_files(top: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        target = top / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("link:"):
            target.symlink_to(text.removeprefix("link:"))
        else:
            target.write_text(text)


def cpufreq_policy(
    first: int,
    cpus: str,
    *,
    khz: str = "",
    floor: int,
    ceiling: int,
    governor: str = "schedutil",
    driver: str = "cpufreq-dt",
    online: str | None = None,
) -> dict[str, str]:
    """Make the files of one policy. khz is scaling_available_frequencies, "" for a driver that has none."""
    policy = f"{_CPU}/cpufreq/policy{first}"
    files = {
        f"{policy}/related_cpus": f"{cpus}\n",
        f"{policy}/affected_cpus": f"{cpus if online is None else online}\n",
        f"{policy}/scaling_driver": f"{driver}\n",
        f"{policy}/scaling_governor": f"{governor}\n",
        f"{policy}/scaling_available_governors": "performance schedutil \n",
        f"{policy}/scaling_min_freq": f"{floor}\n",
        f"{policy}/scaling_max_freq": f"{ceiling}\n",
        f"{policy}/scaling_cur_freq": f"{ceiling}\n",
        f"{policy}/cpuinfo_min_freq": f"{floor}\n",
        f"{policy}/cpuinfo_max_freq": f"{ceiling}\n",
    }
    if khz:
        files[f"{policy}/scaling_available_frequencies"] = f"{khz} \n"
    return files


def ina3221(
    number: int, device: str, rails: Mapping[int, tuple[str, int, int]], *, shunt_uohm: int = 5000
) -> dict[str, str]:
    """Make the files of an INA3221 with rails by channel: label, mV, mA. Mainline's, of Linux 6.6."""
    chip = f"sys/class/hwmon/hwmon{number}"
    files = {
        f"{chip}/name": "ina3221\n",
        f"{chip}/device": f"link:../../../devices/platform/bus@0/c240000.i2c/i2c-1/{device}",
        f"{chip}/in7_label": "sum of shunt voltages\n",
        f"{chip}/in7_input": "760\n",
        f"{chip}/curr4_input": "9999\n",
    }
    for channel, (label, millivolts, milliamperes) in rails.items():
        files |= {
            f"{chip}/in{channel}_label": f"{label}\n",
            f"{chip}/in{channel}_enable": "1\n",
            f"{chip}/in{channel}_input": f"{millivolts}\n",
            f"{chip}/in{channel + 3}_input": "200\n",
            f"{chip}/curr{channel}_input": f"{milliamperes}\n",
            f"{chip}/shunt{channel}_resistor": f"{shunt_uohm}\n",
        }
    return files


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
    files["proc/device-tree/compatible"] = "raspberrypi,5-model-b\0brcm,bcm2712\0"
    files |= cpufreq_policy(
        0, "0 1 2 3", khz="1500000 1600000 1700000 1800000 2000000 2400000", floor=1500000, ceiling=2400000
    )
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
    files["proc/device-tree/model"] = "Radxa ROCK 5B\0"
    files["proc/device-tree/compatible"] = "radxa,rock-5b\0rockchip,rk3588\0"
    files[f"{_CPU}/online"] = "0-7\n"
    files |= cpufreq_policy(
        0, "0 1 2 3", khz="408000 1008000 1800000", floor=408000, ceiling=1800000, governor="ondemand"
    )
    for first in (4, 6):
        files |= cpufreq_policy(
            first,
            f"{first} {first + 1}",
            khz="408000 1200000 2400000",
            floor=408000,
            ceiling=2400000,
            governor="performance",
        )
    # A governor's own directory stands beside the policies.
    files[f"{_CPU}/cpufreq/ondemand/up_threshold"] = "80\n"
    for name, hz in (("fdab0000.npu", "300000000 400000000 1000000000"), ("dmc", "528000000 2112000000")):
        device = f"sys/class/devfreq/{name}"
        files |= {
            f"{device}/governor": "rknpu_ondemand\n",
            f"{device}/available_governors": "rknpu_ondemand userspace performance simple_ondemand\n",
            f"{device}/available_frequencies": f"{hz}\n",
            f"{device}/cur_freq": f"{hz.split()[0]}\n",
            f"{device}/min_freq": f"{hz.split()[0]}\n",
            f"{device}/max_freq": f"{hz.split()[-1]}\n",
            f"{device}/load": f"45@{hz.split()[0]}Hz\n",
        }
    files["sys/class/devfreq/fdee0000.hdmirx/cur_freq"] = "100000000\n"
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


@pytest.fixture
def orin_nano(plant: Plant) -> SysfsRoot:
    """A Jetson Orin Nano kit: six Cortex-A78AE in two clusters, the module's INA3221, a USB-C port."""
    files = dict(_CGROUP2)
    files["proc/cpuinfo"] = _arm_cpuinfo([0xD42] * 6, ARM_A76)
    files["proc/meminfo"] = _MEMINFO.format(7_800_000, 6_000_000, 0)
    files["proc/device-tree/model"] = "NVIDIA Jetson Orin Nano Developer Kit\0"
    files["proc/device-tree/compatible"] = "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0"
    files[f"{_CPU}/online"] = "0-5\n"
    for first, cpus in ((0, "0 1 2 3"), (4, "4 5")):
        files |= cpufreq_policy(
            first, cpus, khz="115200 729600 1510400", floor=115200, ceiling=1510400, driver="tegra194"
        )
    files |= ina3221(
        3, "1-0040", {1: ("VDD_IN", 5016, 1200), 2: ("VDD_CPU_GPU_CV", 5016, 400), 3: ("VDD_SOC", 5008, 280)}
    )
    gpu = "sys/class/devfreq/17000000.gpu"
    files |= {
        f"{gpu}/governor": "nvhost_podgov\n",
        f"{gpu}/available_frequencies": "306000000 408000000 624750000\n",
        f"{gpu}/cur_freq": "306000000\n",
        f"{gpu}/min_freq": "306000000\n",
        f"{gpu}/max_freq": "624750000\n",
        "sys/class/devfreq/15340000.vic/cur_freq": "115200000\n",
        "sys/class/power_supply/ucsi-source-psy-1-00081/type": "USB\n",
        "sys/class/power_supply/ucsi-source-psy-1-00081/voltage_now": "5000000\n",
        "sys/class/power_supply/ucsi-source-psy-1-00081/current_now": "3000000\n",
        "sys/class/hwmon/hwmon4/name": "ucsi_source_psy_1_00081\n",
        "sys/class/hwmon/hwmon4/device": "link:../../power_supply/ucsi-source-psy-1-00081",
        "sys/class/hwmon/hwmon4/in1_input": "5000\n",
        "sys/class/hwmon/hwmon4/curr1_input": "3000\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "48500\n",
    }
    return plant(files)


@pytest.fixture
def x86_laptop(plant: Plant) -> SysfsRoot:
    """An Intel laptop on battery: intel_pstate in active mode; package, core and psys counters; the package again."""
    files = dict(_CGROUP2)
    files["proc/cpuinfo"] = _x86_cpuinfo(4, "Intel(R) Core(TM) i5-8265U", X86_FLAGS)
    files["proc/meminfo"] = _MEMINFO.format(16_000_000, 9_000_000, 8_000_000)
    files["sys/class/dmi/id/sys_vendor"] = "LENOVO\n"
    files["sys/class/dmi/id/product_name"] = "20N2\n"
    files[f"{_CPU}/online"] = "0-3\n"
    files[f"{_CPU}/intel_pstate/status"] = "active\n"
    files[f"{_CPU}/intel_pstate/no_turbo"] = "0\n"
    for i in range(4):
        files |= cpufreq_policy(i, f"{i}", floor=400000, ceiling=3900000, governor="powersave", driver="intel_pstate")
        policy = f"{_CPU}/cpufreq/policy{i}"
        files[f"{policy}/energy_performance_preference"] = "balance_performance\n"
        files[f"{policy}/energy_performance_available_preferences"] = (
            "default performance balance_performance balance_power power \n"
        )
    for path, name, uj in (
        ("intel-rapl:0", "package-0", 5_000_000),
        ("intel-rapl:0:0", "core", 2_000_000),
        ("intel-rapl:1", "psys", 9_000_000),
        ("intel-rapl-mmio:0", "package-0", 5_000_000),
    ):
        zone = f"sys/class/powercap/{path}"
        files |= {
            f"{zone}/name": f"{name}\n",
            f"{zone}/energy_uj": f"{uj}\n",
            f"{zone}/max_energy_range_uj": "262143328850\n",
            f"{zone}/constraint_0_max_power_uw": "15000000\n",
            f"{zone}/constraint_1_power_limit_uw": "44000000\n",
        }
    supply = "sys/class/power_supply/BAT0"
    files |= {
        f"{supply}/type": "Battery\n",
        f"{supply}/status": "Discharging\n",
        f"{supply}/capacity": "64\n",
        f"{supply}/power_now": "7350000\n",
        f"{supply}/voltage_now": "15500000\n",
        "sys/class/power_supply/AC/type": "Mains\n",
        "sys/class/power_supply/AC/online": "0\n",
        "sys/class/hwmon/hwmon2/name": "BAT0\n",
        "sys/class/hwmon/hwmon2/device": "link:../../power_supply/BAT0",
        "sys/class/hwmon/hwmon2/power1_input": "7350000\n",
    }
    return plant(files)


@pytest.fixture
def amd_machine(plant: Plant) -> SysfsRoot:
    """An AMD mini PC: amd-pstate in active mode with a policy a CPU, a package counter without limits."""
    files = dict(_CGROUP2)
    files["proc/cpuinfo"] = _x86_cpuinfo(4, "AMD Ryzen 7 8845HS", X86_FLAGS)
    files["proc/meminfo"] = _MEMINFO.format(32_000_000, 30_000_000, 0)
    files[f"{_CPU}/online"] = "0-3\n"
    files[f"{_CPU}/amd_pstate/status"] = "active\n"
    for i in range(4):
        files |= cpufreq_policy(i, f"{i}", floor=400000, ceiling=5137000, governor="powersave", driver="amd-pstate-epp")
        policy = f"{_CPU}/cpufreq/policy{i}"
        files[f"{policy}/amd_pstate_lowest_nonlinear_freq"] = "1127000\n"
        files[f"{policy}/energy_performance_preference"] = "balance_power\n"
        files[f"{policy}/boost"] = "1\n"
    for path, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core")):
        zone = f"sys/class/powercap/{path}"
        files |= {
            f"{zone}/name": f"{name}\n",
            f"{zone}/energy_uj": "1000000\n",
            f"{zone}/max_energy_range_uj": "65532610987\n",
        }
    return plant(files)


@pytest.fixture
def bare_vm(plant: Plant) -> SysfsRoot:
    """A virtual machine: no policy, counter, chip, zone or supply, but the directories are there."""
    return plant(
        {
            **_CGROUP2,
            "proc/cpuinfo": _x86_cpuinfo(2, "AMD EPYC", X86_FLAGS),
            "proc/meminfo": _MEMINFO.format(8_000_000, 6_000_000, 0),
            f"{_CPU}/online": "0-1\n",
            f"{_CPU}/cpufreq/boost": "0\n",
            "sys/class/dmi/id/sys_vendor": "QEMU\n",
            "sys/class/dmi/id/product_name": "Standard PC (Q35 + ICH9, 2009)\n",
        }
    )
