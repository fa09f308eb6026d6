"""A board's sensor files in kernel units: RAPL, INA chips, thermal zones, batteries, and some of /proc."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.plants.boards import Profile, Rail
from tests.plants.kernel import Attribute, Link, Node, kstrtoul
from tests.plants.physics import Physics

RAPL_UNIT_UJ = 61.03515625  # the counter's step; it has 32 bits
RAPL_RANGE_UJ = 262_143_328_850
_TICK_HZ = 100
_INA3221_STEP_MV, _INA3221_STEP_MA = 8, 8
_SHUNT_UOHM = {"ina3221": 5000, "ina226": 2000}


def text(value: object) -> Attribute:
    return Attribute(lambda: f"{value}\n")


class Counter:
    """A RAPL counter over one part's energy: quantised, and starting again at 0 after range_uj."""

    def __init__(self, energy_j: Callable[[], float], range_uj: int = RAPL_RANGE_UJ) -> None:
        self._energy_j, self.range_uj = energy_j, range_uj
        self._offset_uj = 0.0

    @property
    def value_uj(self) -> int:
        steps = int((self._energy_j() * 1e6 + self._offset_uj) / RAPL_UNIT_UJ)
        return int(steps * RAPL_UNIT_UJ) % (self.range_uj + 1)

    def set(self, value_uj: int) -> None:
        """Let it stand at value_uj now: at 0 after a reset, near range_uj before a wrap."""
        self._offset_uj = value_uj + RAPL_UNIT_UJ / 2 - self._energy_j() * 1e6


class Rapl:
    """The package with its core and dram parts, the platform zone, the same package again behind mmio, and its cap."""

    def __init__(self, physics: Physics) -> None:
        energy_j = physics.energy_j
        package = Counter(lambda: energy_j["soc"])
        self.limit_uw, self.window_us = 28_000_000, 27_983_872
        self.zones = {
            "intel-rapl:0": ("package-0", package),
            "intel-rapl:0:0": ("core", Counter(lambda: energy_j["clocks"])),
            "intel-rapl:1": ("psys", Counter(lambda: energy_j["board"])),
            "intel-rapl-mmio:0": ("package-0", package),
        }

    def nodes(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for zone, (name, counter) in self.zones.items():
            parents = zone.rsplit(":", 1)[0] + "/" if zone.count(":") > 1 else ""
            at = f"sys/devices/virtual/powercap/{zone.partition(':')[0]}/{parents}{zone}"
            found[f"sys/class/powercap/{zone}"] = Link(at)
            found[f"{at}/name"] = text(name)
            found[f"{at}/enabled"] = text(1)
            found[f"{at}/max_energy_range_uj"] = text(counter.range_uj)
            found[f"{at}/energy_uj"] = Attribute(lambda counter=counter: f"{counter.value_uj}\n", mode=0o400)
            if zone == "intel-rapl:0":
                found[f"{at}/constraint_0_name"] = text("long_term")
                found[f"{at}/constraint_0_max_power_uw"] = text(28_000_000)
                found[f"{at}/constraint_0_time_window_us"] = text(self.window_us)
                found[f"{at}/constraint_0_power_limit_uw"] = Attribute(
                    lambda: f"{self.limit_uw}\n", self._store_limit, 0o644
                )
        return found

    def _store_limit(self, written: str) -> None:
        # The register holds eighths of a watt.
        self.limit_uw = kstrtoul(written) // 125_000 * 125_000


def ina3221(rails: tuple[Rail, ...], power_w: Callable[[], Mapping[str, float]], number: int) -> dict[str, Node]:
    """Give a Jetson's chip: volts and amperes by channel, no watts."""
    at = f"sys/devices/platform/bus@0/c240000.i2c/i2c-1/1-0040/hwmon/hwmon{number}"
    found: dict[str, Node] = {
        f"sys/class/hwmon/hwmon{number}": Link(at),
        "sys/bus/i2c/drivers/ina3221/1-0040": Link(at.partition("/hwmon/")[0]),
        f"{at}/device": Link(at.partition("/hwmon/")[0]),
        f"{at}/name": text("ina3221"),
    }
    for channel, rail in enumerate(rails, 1):
        found[f"{at}/in{channel}_label"] = text(rail.label)
        found[f"{at}/in{channel}_enable"] = Attribute(lambda: "1\n", lambda _: None, 0o644)
        found[f"{at}/in{channel}_input"] = Attribute(lambda rail=rail: f"{_step(rail.volts * 1e3, _INA3221_STEP_MV)}\n")
        found[f"{at}/curr{channel}_input"] = Attribute(
            lambda rail=rail: f"{_step(power_w()[rail.part] / rail.volts * 1e3, _INA3221_STEP_MA)}\n"
        )
        found[f"{at}/shunt{channel}_resistor"] = text(_SHUNT_UOHM["ina3221"])
    return found


def ina226(rail: Rail, power_w: Callable[[], Mapping[str, float]], number: int) -> dict[str, Node]:
    """Give a chip of the ina2xx driver, as one puts it into a board's supply."""
    at = f"sys/devices/platform/soc/fe804000.i2c/i2c-1/1-0040/hwmon/hwmon{number}"
    return {
        f"sys/class/hwmon/hwmon{number}": Link(at),
        f"{at}/device": Link(at.partition("/hwmon/")[0]),
        f"{at}/name": text("ina226"),
        f"{at}/shunt_resistor": text(_SHUNT_UOHM["ina226"]),
        f"{at}/update_interval": text(2),
        f"{at}/in1_input": Attribute(lambda: f"{round(rail.volts * 1e3)}\n"),
        f"{at}/curr1_input": Attribute(lambda: f"{round(power_w()[rail.part] / rail.volts * 1e3)}\n"),
        f"{at}/power1_input": Attribute(lambda: f"{_step(power_w()[rail.part] * 1e6, 25_000)}\n"),
    }


def thermal(profile: Profile, physics: Physics) -> dict[str, Node]:
    """Give the chip's zone with its trip points, and the cooling device that lowers the CPUs' clocks."""
    zone = "sys/devices/virtual/thermal/thermal_zone0"
    cooling = "sys/devices/virtual/thermal/cooling_device0"
    critical_c = profile.passive_c + 30.0
    return {
        "sys/class/thermal/thermal_zone0": Link(zone),
        "sys/class/thermal/cooling_device0": Link(cooling),
        f"{zone}/type": text(profile.zone),
        f"{zone}/policy": text("step_wise"),
        f"{zone}/temp": Attribute(lambda: f"{round(physics.temperature_c * 1e3)}\n"),
        f"{zone}/trip_point_0_type": text("critical"),
        f"{zone}/trip_point_0_temp": text(round(critical_c * 1e3)),
        f"{zone}/trip_point_1_type": text("passive"),
        f"{zone}/trip_point_1_temp": text(round(profile.passive_c * 1e3)),
        f"{cooling}/type": text("cpufreq-cpu0" if profile.has_table else "Processor"),
        f"{cooling}/cur_state": Attribute(lambda: f"{int(physics.cooling)}\n"),
        f"{cooling}/max_state": text(physics.max_cooling),
    }


class Battery:
    """A battery and the mains beside it; the status follows is_discharging."""

    def __init__(self, power_w: Callable[[], Mapping[str, float]]) -> None:
        self.is_discharging, self.percent = False, 80
        self._power_w = power_w

    def nodes(self) -> dict[str, Node]:
        at = "sys/devices/LNXSYSTM:00/LNXSYBUS:00/PNP0C0A:00/power_supply/BAT0"
        mains = "sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0003:00/power_supply/AC"
        return {
            "sys/class/power_supply/BAT0": Link(at),
            "sys/class/power_supply/AC": Link(mains),
            f"{at}/type": text("Battery"),
            f"{at}/status": Attribute(lambda: "Discharging\n" if self.is_discharging else "Full\n"),
            f"{at}/capacity": Attribute(lambda: f"{self.percent}\n"),
            f"{at}/voltage_now": text(11_400_000),
            f"{at}/power_now": Attribute(
                lambda: f"{round(self._power_w()['board'] * 1e6) if self.is_discharging else 0}\n"
            ),
            f"{at}/energy_now": Attribute(lambda: f"{self.percent * 500_000}\n"),
            f"{at}/energy_full": text(50_000_000),
            f"{mains}/type": text("Mains"),
            f"{mains}/online": Attribute(lambda: f"{0 if self.is_discharging else 1}\n"),
        }


def proc(profile: Profile, physics: Physics, boot_id: str) -> dict[str, Node]:
    """Give what is read of /proc: files without a size, as the kernel shows them."""
    found: dict[str, Node] = {
        "proc/stat": Attribute(lambda: _stat(profile, physics)),
        "proc/uptime": Attribute(lambda: f"{physics.now_s:.2f} 0.00\n"),
        "proc/loadavg": Attribute(lambda: "0.00 0.00 0.00 1/80 100\n"),
        "proc/cpuinfo": Attribute(lambda: "".join(f"processor\t: {i}\n\n" for i in range(profile.n_cpus))),
        "proc/meminfo": Attribute(lambda: "MemTotal: 8255000 kB\nMemFree: 6000000 kB\nMemAvailable: 7000000 kB\n"),
        "proc/sys/kernel/random/boot_id": Attribute(lambda: f"{boot_id}\n"),
    }
    if profile.compatible:
        found["proc/device-tree/model"] = Attribute(lambda: f"{profile.model}\0")
        found["proc/device-tree/compatible"] = Attribute(lambda: "".join(f"{name}\0" for name in profile.compatible))
    for node in found.values():
        assert isinstance(node, Attribute)
        node.size = 0
    return found


def _stat(profile: Profile, physics: Physics) -> str:
    rows, totals = [], [0, 0]
    for clock in profile.clocks:
        ticks = [round(span_s[clock.name] * _TICK_HZ) for span_s in (physics.busy_s, physics.idle_s)]
        for cpu in clock.cpus:
            rows.append(f"cpu{cpu} {ticks[0]} 0 0 {ticks[1]} 0 0 0 0 0 0")
            totals = [total + tick for total, tick in zip(totals, ticks, strict=True)]
    return "\n".join([f"cpu  {totals[0]} 0 0 {totals[1]} 0 0 0 0 0 0", *rows, "btime 1700000000", ""])


def _step(value: float, step: int) -> int:
    return round(value / step) * step
