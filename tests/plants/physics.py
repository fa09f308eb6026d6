"""The power, heat and energy of a modelled board over an injected clock. Every watt here is modelled, none measured."""

from __future__ import annotations

from collections.abc import Callable

from tests.plants.boards import Profile

_STEP_S = 0.05  # the thermal governor looks this often
_MAX_STEPS = 2000  # a span of hours takes longer steps
_HYSTERESIS_K = 2.0
_COOLING_PERIOD_S = 0.25

PARTS = ("board", "soc", "clocks", "rest")


class Physics:
    """Integrates a board's power; what its clocks run at is asked of `hz` at each step.

    busy     of each clock by its name, 0..1: the share of its time that governors see it at work
    activity of each, 0..1: how much of that it switches; less where it waits for memory
    cooling  the thermal governor's state, 0 to max_cooling: how many steps down it wants the CPUs' clocks
    """

    def __init__(self, profile: Profile, clock: Callable[[], float], hz: Callable[[str], float]) -> None:
        self.profile = profile
        self._clock, self._hz = clock, hz
        self._now_s = clock()
        self.busy = {each.name: 0.0 for each in profile.clocks}
        self.activity = dict.fromkeys(self.busy, 1.0)
        self.ambient_c = profile.ambient_c
        self.temperature_c = profile.ambient_c + 10.0
        self.cooling = 0
        self.max_cooling = max(len(each.points) for each in profile.clocks) - 1
        self._cooled_s = self._now_s
        self.energy_j = dict.fromkeys(PARTS, 0.0)
        self.busy_s = dict.fromkeys(self.busy, 0.0)
        self.idle_s = dict.fromkeys(self.busy, 0.0)

    @property
    def now_s(self) -> float:
        return self._now_s

    def dynamic_w(self, name: str, hz: float, busy: float) -> float:
        """Give the switching power of one clock domain."""
        clock = next(each for each in self.profile.clocks if each.name == name)
        return clock.farads * clock.volts(hz) ** 2 * hz * busy

    def rest_w(self) -> float:
        """Give the chip's power beside its clocks': static, which grows with heat, and memory's."""
        profile = self.profile
        cpus = [each for each in profile.clocks if each.cpus]
        load = sum(len(each.cpus) * self.busy[each.name] for each in cpus) / max(1, profile.n_cpus)
        static_w = profile.static_w * max(0.2, 1.0 + profile.leak_per_k * (self.temperature_c - 25.0))
        return static_w + profile.memory_w * load

    def power_w(self) -> dict[str, float]:
        """Give the power of each part as it is now."""
        active = {name: busy * self.activity[name] for name, busy in self.busy.items()}
        clocks_w = sum(self.dynamic_w(name, self._hz(name), share) for name, share in active.items())
        rest_w = self.rest_w()
        return {
            "clocks": clocks_w,
            "rest": rest_w,
            "soc": clocks_w + rest_w,
            "board": clocks_w + rest_w + self.profile.base_w,
        }

    def advance(self) -> None:
        """Bring energy, temperature and the thermal governor up to now."""
        now_s = self._clock()
        step_s = max(_STEP_S, (now_s - self._now_s) / _MAX_STEPS)
        while self._now_s < now_s:
            self._step(min(step_s, now_s - self._now_s))

    def _step(self, span_s: float) -> None:
        power_w = self.power_w()
        for part, value_w in power_w.items():
            self.energy_j[part] += value_w * span_s
        for name, busy in self.busy.items():
            self.busy_s[name] += busy * span_s
            self.idle_s[name] += (1.0 - busy) * span_s
        # The exact answer of the one resistance and capacity, so that long steps are stable.
        settled_c = self.ambient_c + power_w["soc"] * self.profile.k_per_w
        share = min(1.0, span_s / (self.profile.k_per_w * self.profile.j_per_k))
        self.temperature_c += (settled_c - self.temperature_c) * share
        self._now_s += span_s
        if self._now_s - self._cooled_s >= _COOLING_PERIOD_S:
            self._cooled_s = self._now_s
            if self.temperature_c >= self.profile.passive_c:
                self.cooling = min(self.max_cooling, self.cooling + 1)
            elif self.temperature_c < self.profile.passive_c - _HYSTERESIS_K:
                self.cooling = max(0, self.cooling - 1)
