"""A machine's /sys and /proc as plain files: values can be read and written, but the kernel's own ways are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.unit.power.fake_kernel import BOOT, CPUFREQ, POINTS_KHZ

MAX = f"{CPUFREQ}/policy0/scaling_max_freq"


def machine(root: Path, more: Mapping[str, str] | None = None, *, n_policies: int = 1) -> None:
    """Write a board of n_policies clusters of two CPUs with a temperature sensor."""
    files = {
        "proc/sys/kernel/random/boot_id": BOOT,
        "proc/stat": "cpu 0 0 0 0 0 0 0 0\n" + "".join(f"cpu{i} 10 0 10 80 0 0 0 0\n" for i in range(2 * n_policies)),
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal",
        "sys/class/thermal/thermal_zone0/temp": "51000",
    }
    for i in range(n_policies):
        folder = f"{CPUFREQ}/policy{2 * i}"
        files |= {
            f"{folder}/scaling_max_freq": str(POINTS_KHZ[-1]),
            f"{folder}/scaling_min_freq": str(POINTS_KHZ[0]),
            f"{folder}/cpuinfo_max_freq": str(POINTS_KHZ[-1]),
            f"{folder}/cpuinfo_min_freq": str(POINTS_KHZ[0]),
            f"{folder}/scaling_available_frequencies": " ".join(map(str, POINTS_KHZ)),
            f"{folder}/scaling_driver": "cpufreq-dt",
            f"{folder}/scaling_governor": "schedutil",
            f"{folder}/related_cpus": f"{2 * i} {2 * i + 1}",
            f"{folder}/affected_cpus": f"{2 * i} {2 * i + 1}",
        }
    for path, text in (files | dict(more or {})).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")


def limits(root: Path) -> dict[str, str]:
    """Give every limit of the tree."""
    return {
        str(path.relative_to(root)): path.read_text().strip()
        for pattern in ("scaling_max_freq", "scaling_min_freq", "energy_performance_preference")
        for path in root.glob(f"{CPUFREQ}/policy*/{pattern}")
    }
