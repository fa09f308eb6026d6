"""Readings through descriptors that are kept: which sensors are read, and which no longer."""

from __future__ import annotations

from pathlib import Path

from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.devices.watch import REFIND_S, HeatWatch

ZONE = "sys/class/thermal/thermal_zone0"


def test_a_sensor_that_is_silent_while_sensors_are_looked_for_is_heard_again_at_once(tmp_path: Path) -> None:
    (tmp_path / ZONE).mkdir(parents=True)
    (tmp_path / ZONE / "type").write_text("cpu-thermal\n")
    temp = tmp_path / ZONE / "temp"
    watch = HeatWatch(SysfsRoot(tmp_path), KernelFiles(str(tmp_path)))

    def read(text: str, now_s: float) -> float | None:
        temp.write_text(f"{text}\n")
        return watch.read(now_s).value

    assert read("45000", 0.0) == 45.0
    assert read("-273000", REFIND_S) is None
    assert read("79500", REFIND_S + 0.25) == 79.5
    assert read("0", 2 * REFIND_S) is None
    assert read("0", 3 * REFIND_S) is None  # twice: it may be gone, and its number another's
    assert read("79500", 3 * REFIND_S + 0.25) is None
    assert read("79500", 4 * REFIND_S) == 79.5
