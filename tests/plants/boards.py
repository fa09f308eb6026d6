"""Three boards as data: a Raspberry Pi 5's class, a Jetson Orin Nano's class, and an x86 mini-PC with a battery.

The constants are plausible, not calibrated: every watt that comes of them is modelled. Points, drivers, file names and
labels are those the real machines show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What has one clock.

    name     a cpufreq policy ("policy0") or a devfreq device
    cpus     of a policy; empty for devfreq
    points   (Hz, V), ascending
    farads   switched per cycle with all of it busy, so that its dynamic power is farads * V² * Hz * busy
    """

    name: str
    points: tuple[tuple[float, float], ...]
    farads: float
    cpus: tuple[int, ...] = ()

    def volts(self, hz: float) -> float:
        """Interpolate the supply voltage; constant outside the points."""
        last_hz, last_v = self.points[0]
        for point_hz, point_v in self.points:
            if hz <= point_hz:
                span_hz = point_hz - last_hz
                return point_v if not span_hz else last_v + (point_v - last_v) * max(0.0, hz - last_hz) / span_hz
            last_hz, last_v = point_hz, point_v
        return last_v


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """One channel of a power sensor: which part of the board's power it sees, at which voltage."""

    label: str
    part: Literal["board", "soc", "clocks", "rest"]
    volts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A board.

    static_w      of the chip at 25 °C; grows by leak_per_k for each kelvin
    memory_w      of the chip's memory with all CPUs busy
    base_w        what the board takes beside the chip
    k_per_w, j_per_k  the chip's one thermal resistance and capacity, to ambient_c
    passive_c     where the kernel begins to lower clocks
    sensor        what measures power: an INA3221, an INA226 (the first rail alone), RAPL
    compatible    the device tree's names
    board_file    what the owner has put into /etc/edge_rt/boards; "": nothing
    """

    name: str
    model: str
    driver: str
    has_table: bool
    governors: tuple[str, ...]
    governor: str
    clocks: tuple[Clock, ...]
    static_w: float
    memory_w: float
    base_w: float
    leak_per_k: float = 0.008
    k_per_w: float = 6.0
    j_per_k: float = 12.0
    ambient_c: float = 25.0
    passive_c: float = 80.0
    zone: str = "cpu-thermal"
    compatible: tuple[str, ...] = ()
    board_file: str = ""
    rails: tuple[Rail, ...] = ()
    sensor: Literal["ina3221", "ina226", "rapl"] = "ina226"
    has_battery: bool = False

    @property
    def n_cpus(self) -> int:
        return sum(len(clock.cpus) for clock in self.clocks)


_KERNEL_GOVERNORS = ("conservative", "ondemand", "userspace", "powersave", "performance", "schedutil")
_MHZ = 1e6

PI_5 = Profile(
    name="pi_5",
    model="Raspberry Pi 5 Model B Rev 1.0",
    driver="cpufreq-dt",
    has_table=True,
    governors=_KERNEL_GOVERNORS,
    governor="ondemand",
    # The real board's points end at 1500 MHz; older ones of its family go down to 600, where the curve is interesting.
    clocks=(
        Clock(
            name="policy0",
            cpus=(0, 1, 2, 3),
            points=(
                (600 * _MHZ, 0.72),
                (1000 * _MHZ, 0.75),
                (1500 * _MHZ, 0.80),
                (2000 * _MHZ, 0.90),
                (2400 * _MHZ, 1.0),
            ),
            farads=2.1e-9,
        ),
    ),
    static_w=0.55,
    memory_w=0.5,
    base_w=1.9,
    compatible=("raspberrypi,5-model-b", "brcm,bcm2712"),
    board_file="""name = "Raspberry Pi 5 with an INA226 in its supply"
source = "whoever soldered it in"
board = ["5V"]

[match]
compatible = ["raspberrypi,5-model-b"]

[[rail]]
name = "5V"
chip = "ina226"
device = "1-0040"
number = 1
shunt_ohm = 0.002
""",
    rails=(Rail(label="5V", part="board", volts=5.1),),
    sensor="ina226",
)

ORIN_NANO = Profile(
    name="orin_nano",
    model="NVIDIA Jetson Orin Nano Developer Kit",
    driver="tegra194",
    has_table=True,
    governors=_KERNEL_GOVERNORS,
    governor="schedutil",
    clocks=(
        Clock(
            name="policy0",
            cpus=(0, 1, 2, 3),
            points=((729.6 * _MHZ, 0.65), (1036.8 * _MHZ, 0.71), (1267.2 * _MHZ, 0.78), (1510.4 * _MHZ, 0.88)),
            farads=2.4e-9,
        ),
        Clock(
            name="policy4",
            cpus=(4, 5),
            points=((729.6 * _MHZ, 0.65), (1036.8 * _MHZ, 0.71), (1267.2 * _MHZ, 0.78), (1510.4 * _MHZ, 0.88)),
            farads=1.2e-9,
        ),
        Clock(
            name="17000000.gpu",
            points=((306 * _MHZ, 0.62), (408 * _MHZ, 0.66), (510 * _MHZ, 0.72), (624.75 * _MHZ, 0.80)),
            farads=9e-9,
        ),
    ),
    static_w=1.2,
    memory_w=0.9,
    base_w=2.4,
    k_per_w=4.0,
    j_per_k=25.0,
    passive_c=95.0,
    compatible=("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
    rails=(
        Rail(label="VDD_IN", part="board", volts=5.0),
        Rail(label="VDD_CPU_GPU_CV", part="clocks", volts=5.0),
        Rail(label="VDD_SOC", part="rest", volts=5.0),
    ),
    sensor="ina3221",
)

X86 = Profile(
    name="x86",
    model="a mini-PC",
    driver="intel_pstate",
    has_table=False,
    governors=("performance", "powersave"),
    governor="powersave",
    clocks=tuple(
        Clock(
            name=f"policy{cpu}",
            cpus=(cpu,),
            points=((400 * _MHZ, 0.65), (1400 * _MHZ, 0.75), (2400 * _MHZ, 0.95), (3400 * _MHZ, 1.2)),
            farads=1.1e-9,
        )
        for cpu in range(4)
    ),
    static_w=2.0,
    memory_w=1.5,
    base_w=5.0,
    k_per_w=2.5,
    j_per_k=60.0,
    passive_c=95.0,
    zone="x86_pkg_temp",
    sensor="rapl",
    has_battery=True,
)

PROFILES = {profile.name: profile for profile in (PI_5, ORIN_NANO, X86)}
