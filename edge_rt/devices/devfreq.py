"""Clocks of what is no CPU: NPU, GPU and memory, from /sys/class/devfreq, which counts in Hz.

Names are the device tree's ("fdab0000.npu", "17000000.gpu", "dmc") and differ between chips of one family, so nothing
here knows a name by heart: the kind is told by the words in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.cpufreq import clock_list, hertz
from edge_rt.devices.sysfs import SysfsRoot

PLACE = "sys/class/devfreq"

Kind = Literal["gpu", "npu", "memory", "other"]

_WORDS: dict[str, Kind] = {
    **dict.fromkeys(("gpu", "mali", "kgsl", "v3d", "ga10b", "gv11b", "gp10b", "gm20b", "gb10b", "panfrost"), "gpu"),
    **dict.fromkeys(("npu", "rknpu", "vip", "ethosu", "tpu", "nna", "apu"), "npu"),
    **dict.fromkeys(("dmc", "ddr", "ddrc", "dram", "emc", "memory", "mif", "mbus"), "memory"),
}
# A word beside these makes it something else: Adreno's bus monitor is no GPU.
_NOT = frozenset({"busmon", "thermal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device with a clock of its own, as it is now.

    path       its directory, without a leading slash
    min_hz, max_hz  asked for and in force
    points_hz  ascending; empty: the driver lists none
    load       share of the time it was busy, 0..1, where the vendor's kernel tells it
    """

    name: str
    path: str
    kind: Kind
    governor: Reading[str]
    governors: tuple[str, ...]
    min_hz: Reading[float]
    max_hz: Reading[float]
    cur_hz: Reading[float]
    points_hz: tuple[float, ...]
    load: Reading[float]


def devices(root: SysfsRoot | None = None) -> tuple[Device, ...]:
    """Read all devices; empty where the kernel scales no other clock than the CPU's."""
    root = root or SysfsRoot()
    return tuple(_device(root, path) for path in root.paths(f"{PLACE}/*") if _is_name(path))


def kind_of(*names: str) -> Kind:
    """Tell a device's kind by the words of its names: without the address, split at what is no letter or digit."""
    for name in names:
        words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
        if _NOT & set(words):
            return "other"
        for word in words:
            if word in _WORDS:
                return _WORDS[word]
    return "other"


def _device(root: SysfsRoot, path: str) -> Device:
    name = path.rpartition("/")[2]
    return Device(
        name=name,
        path=path,
        # Jetson's older kernels name the GPU after the chip's design; its node is called gpu all the same.
        kind=kind_of(name, root.name(f"{path}/device/of_node/name").value or ""),
        governor=root.name(f"{path}/governor"),
        governors=tuple(w for w in (root.text(f"{path}/available_governors").value or "").split() if w.isprintable()),
        min_hz=hertz(root.scaled(f"{path}/min_freq", 1.0)),
        max_hz=hertz(root.scaled(f"{path}/max_freq", 1.0)),
        cur_hz=hertz(root.scaled(f"{path}/cur_freq", 1.0)),
        points_hz=clock_list(root.text(f"{path}/available_frequencies").value or "", 1.0),
        load=_load(root, path),
    )


def _load(root: SysfsRoot, path: str) -> Reading[float]:
    """Read Rockchip's "45@300000000Hz"; mainline has no such file."""
    text = root.text(f"{path}/load")
    if text.value is None:
        return unknown(text.source, text.reason)
    match = re.match(r"(\d{1,3})(@|$)", text.value, re.ASCII)
    if match is None or int(match[1]) > 100:
        return unknown(text.source, f"holds {text.value[:40]!r}, not a load in per cent")
    return known(int(match[1]) / 100, text.source)


def _is_name(path: str) -> bool:
    name = path.rpartition("/")[2]
    return 0 < len(name) <= 80 and name.isprintable()
