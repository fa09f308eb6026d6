"""A whole modelled board as a tree of kernel files: its clocks, sensors and physics, and what a test may do to it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from tests.plants.boards import PROFILES, Clock
from tests.plants.frequency import Device, Policy
from tests.plants.kernel import Attribute, Fault, Link, Node, Tree, fail, kstrtoul
from tests.plants.physics import Physics
from tests.plants.sensors import Battery, Rapl, ina226, ina3221, proc, text, thermal

_CPU = "sys/devices/system/cpu"
POLICIES = f"{_CPU}/cpufreq"


class Board:
    """A board; clock gives seconds. Not safe for threads: its server holds a lock."""

    def __init__(self, profile: str, clock: Callable[[], float] = time.monotonic, hwmon_number: int = 1) -> None:
        self.profile = PROFILES[profile]
        self.clocks: dict[str, Policy | Device] = {}
        self.physics = Physics(self.profile, clock, self.hz)
        self.tree = Tree(self._tick)
        self.rapl = Rapl(self.physics) if self.profile.sensor == "rapl" else None
        self.battery = Battery(self.physics.power_w) if self.profile.has_battery else None
        for each in self.profile.clocks:
            self._make(each)
        self._add_cpus()
        self._add_sensors(hwmon_number)

    def hz(self, name: str) -> float:
        """Give what a clock runs at: as asked for, or less under RAPL's cap."""
        found = self.clocks[name]
        hz = found.khz * 1e3 if isinstance(found, Policy) else float(found.hz)
        if self.rapl is None or not isinstance(found, Policy):
            return hz
        allowed_w = (self.rapl.limit_uw * 1e-6 - self.physics.rest_w()) / len(self.clocks)
        share = self.physics.busy[name] * self.physics.activity[name]
        while hz > found.lowest_khz * 1e3 and self.physics.dynamic_w(name, hz, share) > allowed_w:
            hz -= 100e6
        return max(hz, found.lowest_khz * 1e3)

    # -- what a test does to it ---------------------------------------------------------------------------------------

    def load(self, busy: float, name: str = "", activity: float = 1.0) -> None:
        """Keep the CPUs busy from now on, 0..1, or one clock by name; activity as physics has it."""
        self._tick()
        for each in [name] if name else [clock.name for clock in self.profile.clocks if clock.cpus]:
            self.physics.busy[each] = min(1.0, max(0.0, busy))
            self.physics.activity[each] = activity

    def recreate(self, name: str, low_khz: int, high_khz: int) -> None:
        """Remove a policy's driver and let it come back with other limits, its defaults and its files' modes."""
        self._tick()
        clock = next(each for each in self.profile.clocks if each.name == name)
        for path in [path for path in self.tree.nodes if path.startswith(f"{POLICIES}/{name}/")]:
            del self.tree.nodes[path]
        self._make(clock, (low_khz, high_khz))

    def set_counter(self, zone: str, value_uj: int) -> None:
        """Let a RAPL counter stand elsewhere: 0 is a reset, near its range comes a wrap."""
        self._tick()
        assert self.rapl is not None
        self.rapl.zones[zone][1].set(value_uj)

    def set(self, **values: float) -> None:
        """Set temperature_c, ambient_c, cooling, is_discharging or percent."""
        self._tick()
        for name, value in values.items():
            owner = self.battery if name in ("is_discharging", "percent") else self.physics
            if not hasattr(owner, name):
                raise AttributeError(name)
            setattr(owner, name, value)

    def run_program(self, pid: int, name: str) -> None:
        """Let a process of this name be seen in /proc."""
        self.tree.add({f"proc/{pid}/comm": text(name), f"proc/{pid}/cmdline": Attribute(lambda: f"/usr/bin/{name}\0")})

    def state(self) -> dict[str, Any]:
        """Tell the truth, which no sensor need agree with."""
        self._tick()
        return {
            "now_s": self.physics.now_s,
            "power_w": self.physics.power_w(),
            "energy_j": dict(self.physics.energy_j),
            "temperature_c": self.physics.temperature_c,
            "cooling": self.physics.cooling,
            "hz": {name: self.hz(name) for name in self.clocks},
            "limits": {name: list(found.limits) for name, found in self.clocks.items()},
        }

    def add_fault(self, **values: Any) -> None:
        self.tree.faults.append(Fault(**values))

    # -- how it is built ----------------------------------------------------------------------------------------------

    def _tick(self) -> float:
        self.physics.advance()
        return self.physics.now_s

    def _make(self, clock: Clock, limits_khz: tuple[int, int] | None = None) -> None:
        if not clock.cpus:
            at = f"sys/devices/platform/{clock.name}/devfreq/{clock.name}"
            self.clocks[clock.name] = Device(clock, lambda: self.physics.busy[clock.name])
            self.tree.add({f"sys/class/devfreq/{clock.name}": Link(at), **self.clocks[clock.name].nodes(at)})
            return

        def thermal_khz() -> int:
            top = len(clock.points) - 1
            return round(clock.points[max(0, top - int(self.physics.cooling))][0] / 1e3)

        policy = Policy(self.profile, clock, thermal_khz, lambda: self.physics.busy[clock.name], limits_khz=limits_khz)
        self.clocks[clock.name] = policy
        self.tree.add(policy.nodes(f"{POLICIES}/{clock.name}"))

    def _add_cpus(self) -> None:
        nodes: dict[str, Node] = {}
        highest_hz = max(each.points[-1][0] for each in self.profile.clocks if each.cpus)
        all_cpus = f"0-{self.profile.n_cpus - 1}"
        for name in ("present", "possible"):
            nodes[f"{_CPU}/{name}"] = text(all_cpus)
        nodes[f"{_CPU}/online"] = Attribute(lambda: f"{self._online()}\n")
        for clock in (each for each in self.profile.clocks if each.cpus):
            for cpu in clock.cpus:
                at = f"{_CPU}/cpu{cpu}"
                nodes[f"{at}/cpufreq"] = Link(f"{POLICIES}/{clock.name}")
                nodes[f"{at}/cpu_capacity"] = text(round(1024 * clock.points[-1][0] / highest_hz))
                nodes[f"{at}/topology/thread_siblings_list"] = text(cpu)
                nodes[f"{at}/topology/physical_package_id"] = text(0)
                if cpu:  # the first CPU cannot be taken off line
                    nodes[f"{at}/online"] = self._switch(clock.name, cpu)
        if not self.profile.has_table:
            nodes[f"{_CPU}/intel_pstate/status"] = text("active")
            nodes[f"{_CPU}/intel_pstate/no_turbo"] = Attribute(lambda: "0\n", lambda _: None, 0o644)
        self.tree.add(nodes)

    def _switch(self, policy_name: str, cpu: int) -> Attribute:
        def policy() -> Policy:
            found = self.clocks[policy_name]
            assert isinstance(found, Policy)
            return found

        def store(written: str) -> None:
            value = kstrtoul(written)
            if value > 1:
                fail("EINVAL")
            (policy().online.add if value else policy().online.discard)(cpu)

        return Attribute(lambda: f"{int(cpu in policy().online)}\n", store, 0o644)

    def _online(self) -> str:
        return ",".join(
            str(cpu) for found in self.clocks.values() if isinstance(found, Policy) for cpu in sorted(found.online)
        )

    def _add_sensors(self, number: int) -> None:
        power_w = self.physics.power_w
        if self.rapl is not None:
            self.tree.add(self.rapl.nodes())
            at = f"sys/devices/platform/coretemp.0/hwmon/hwmon{number}"
            self.tree.add(
                {
                    f"sys/class/hwmon/hwmon{number}": Link(at),
                    f"{at}/name": text("coretemp"),
                    f"{at}/temp1_label": text("Package id 0"),
                    f"{at}/temp1_input": Attribute(lambda: f"{round(self.physics.temperature_c) * 1000}\n"),
                }
            )
        elif self.profile.sensor == "ina3221":
            self.tree.add(ina3221(self.profile.rails, power_w, number))
        else:
            self.tree.add(ina226(self.profile.rails[0], power_w, number))
        if self.battery is not None:
            self.tree.add(self.battery.nodes())
        if self.profile.board_file:
            self.tree.add({"etc/edge_rt/boards/own.toml": Attribute(lambda: self.profile.board_file)})
        self.tree.add(thermal(self.profile, self.physics))
        self.tree.add(proc(self.profile, self.physics, str(uuid.uuid4())))
