"""cpufreq policies and devfreq devices with the kernel's semantics, in its units (kHz; Hz for devfreq).

A limit that is written is a request. What is in force is the least of all maxima asked for (by the file, by the thermal
framework) and no minimum above it; both are brought silently within the driver's limits and, where it has a table, onto
its points. A request outlives what hides it: once the thermal framework lets go, the old maximum is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tests.plants.boards import Clock, Profile
from tests.plants.kernel import Attribute, Node, fail, kstrtoul, scan_number, scan_word

EPP = ("default", "performance", "balance_performance", "balance_power", "power")


class Policy:
    """One cpufreq policy. thermal_khz gives the thermal framework's maximum; busy its CPUs' load, 0..1."""

    def __init__(
        self,
        profile: Profile,
        clock: Clock,
        thermal_khz: Callable[[], int],
        busy: Callable[[], float],
        *,
        limits_khz: tuple[int, int] | None = None,
    ) -> None:
        self.clock, self.driver = clock, profile.driver
        self._governors, self._thermal_khz, self._busy = profile.governors, thermal_khz, busy
        self.online = set(clock.cpus)
        table = [round(hz / 1e3) for hz, _ in clock.points]
        self.lowest_khz, self.highest_khz = limits_khz or (table[0], table[-1])
        self.table = [khz for khz in table if self.lowest_khz <= khz <= self.highest_khz] if profile.has_table else []
        self.governor = profile.governor
        self.epp = "balance_performance"
        self._asked_min, self._asked_max = self.lowest_khz, self.highest_khz
        self._setspeed = self.highest_khz
        self.is_active_mode = not profile.has_table  # intel_pstate and amd_pstate choose the clock themselves

    @property
    def limits(self) -> tuple[int, int]:
        """Give the minimum and maximum in force, in kHz."""
        high = self._within(min(self._asked_max, self._thermal_khz()))
        low = min(self._within(self._asked_min), high)
        if self.table:
            low = min((khz for khz in self.table if khz >= low), default=self.table[-1])
            high = max((khz for khz in self.table if khz <= high), default=self.table[0])
            low = min(low, high)
        return low, high

    @property
    def khz(self) -> int:
        """Give what the CPUs run at."""
        low, high = self.limits
        if self.governor == "userspace":
            return self._target(self._setspeed)
        if self.governor == "performance":
            return high
        if self.governor == "powersave" and not self.is_active_mode:
            return low
        # What follows the load: 1.25 times what is used of the highest clock, rounded up to a point.
        return self._target(round(1.25 * self._busy() * self.highest_khz))

    def _within(self, khz: int) -> int:
        return min(max(khz, self.lowest_khz), self.highest_khz)

    def _target(self, khz: int) -> int:
        low, high = self.limits
        khz = min(max(khz, low), high)
        return next((point for point in self.table if point >= khz), khz)

    def nodes(self, at: str) -> dict[str, Node]:
        """Give the policy's directory."""

        def file(show: Callable[[], object], store: Callable[[str], None] | None = None, mode: int = 0) -> Attribute:
            def shown() -> str:
                self._need_cpus()
                return f"{show()}\n"

            def stored(text: str) -> None:
                self._need_cpus()
                assert store is not None
                store(text)

            return Attribute(shown, stored if store else None, mode or (0o644 if store else 0o444))

        def ids(cpus: set[int] | tuple[int, ...]) -> str:
            return " ".join(str(cpu) for cpu in sorted(cpus))

        found: dict[str, Node] = {
            "affected_cpus": file(lambda: ids(self.online)),
            "related_cpus": file(lambda: ids(self.clock.cpus)),
            "cpuinfo_min_freq": file(lambda: self.lowest_khz),
            "cpuinfo_max_freq": file(lambda: self.highest_khz),
            "cpuinfo_transition_latency": file(lambda: 0 if self.is_active_mode else 100000),
            "scaling_driver": file(lambda: self.driver),
            "scaling_available_governors": file(lambda: " ".join(self._governors)),
            "scaling_governor": file(lambda: self.governor, self._store_governor),
            "scaling_min_freq": file(lambda: self.limits[0], self._store_min),
            "scaling_max_freq": file(lambda: self.limits[1], self._store_max),
            "scaling_cur_freq": file(lambda: self.khz),
            "scaling_setspeed": file(self._show_setspeed, self._store_setspeed),
        }
        if self.table:
            found["scaling_available_frequencies"] = file(lambda: " ".join(str(khz) for khz in self.table) + " ")
            found["cpuinfo_cur_freq"] = file(lambda: self.khz, mode=0o400)
        else:
            found["energy_performance_preference"] = file(lambda: self.epp, self._store_epp)
            found["energy_performance_available_preferences"] = file(lambda: " ".join(EPP) + " ")
        return {f"{at}/{name}": node for name, node in found.items()}

    def _need_cpus(self) -> None:
        if not self.online:
            fail("EBUSY")

    def _store_governor(self, text: str) -> None:
        name = scan_word(text)
        if name not in self._governors:
            fail("EINVAL")
        if name == "userspace" and self.governor != "userspace":
            self._setspeed = self.khz
        self.governor = name
        if name == "performance" and self.is_active_mode:
            self.epp = "performance"

    def _store_min(self, text: str) -> None:
        self._asked_min = _s32(kstrtoul(text))

    def _store_max(self, text: str) -> None:
        self._asked_max = _s32(kstrtoul(text))

    def _show_setspeed(self) -> object:
        return self._setspeed if self.governor == "userspace" else "<unsupported>"

    def _store_setspeed(self, text: str) -> None:
        if self.governor != "userspace":
            fail("EINVAL")
        self._setspeed = self._target(scan_number(text))

    def _store_epp(self, text: str) -> None:
        name = text.strip()
        if name not in EPP:
            fail("EINVAL")
        if self.governor == "performance" and name != "performance":
            fail("EBUSY")
        self.epp = name


class Device:
    """One devfreq device, in Hz; its governor follows the load between the two limits."""

    def __init__(self, clock: Clock, busy: Callable[[], float]) -> None:
        self.clock, self._busy = clock, busy
        self.table = [round(hz) for hz, _ in clock.points]
        self._asked = {"min": 0, "max": 0}  # 0: nothing is asked for

    @property
    def limits(self) -> tuple[int, int]:
        high = max(min(self._asked["max"] or self.table[-1], self.table[-1]), self.table[0])
        return min(max(self._asked["min"], self.table[0]), high), high

    @property
    def hz(self) -> int:
        low, high = self.limits
        wanted = min(max(1.25 * self._busy() * self.table[-1], low), high)
        points = [hz for hz in self.table if hz <= high]
        return next((hz for hz in points if hz >= wanted), points[-1])

    def nodes(self, at: str) -> dict[str, Node]:
        def store(which: Literal["min", "max"]) -> Callable[[str], None]:
            def stored(text: str) -> None:
                self._asked[which] = scan_number(text, 64)

            return stored

        found = {
            "governor": Attribute(lambda: "simple_ondemand\n"),
            "available_governors": Attribute(lambda: "userspace performance simple_ondemand\n"),
            "available_frequencies": Attribute(lambda: " ".join(str(hz) for hz in self.table) + "\n"),
            "cur_freq": Attribute(lambda: f"{self.hz}\n"),
            "min_freq": Attribute(lambda: f"{self.limits[0]}\n", store("min"), 0o644),
            "max_freq": Attribute(lambda: f"{self.limits[1]}\n", store("max"), 0o644),
        }
        return {f"{at}/{name}": node for name, node in found.items()}


def _s32(value: int) -> int:
    """Keep the low 32 bits as a signed number: the kernel's requests are int."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
