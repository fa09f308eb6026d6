"""Ours in the simulator: the product's own decide(), fed with hints and sensors as they would be, above schedutil.

Hints are those of edge_rt.power.workload: the front process tells of arrivals, first tokens and ends, estimates prompts
by their length and does not count them down. They come late, the meter averages, lags and is noisy, the thermometer is
coarse, and a new clock takes its time. The kernel's governor goes on working below the limit that decide() sets, as it
does where powerd writes scaling_max_freq.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from edge_rt.power import policy
from edge_rt.power.learning import Memory
from edge_rt.power.levels import Model
from edge_rt.power.state import HINT_S, Advice, Decision, Hint, Limits, Observation, Power, Work
from tests.plants.governors import NEVER, Governor, Schedutil
from tests.plants.simulator import PERIOD_S, Simulation, most_in_a_second

HINT_LAG_S = 0.002
ADVICE_LAG_S = 0.004  # from powerd over the daemon to the engine, which takes it up after its step
_HINT_EVERY_S = 0.5
_SETTLE_S, _IDLE_S = 0.05, 0.1  # an end is told a little later, because another request may follow
_IDLE_PERIOD_S = 1.0

FaultKind = Literal["meter stale", "meter absent", "meter jumps", "heat absent", "heat jumps", "hints lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    start_s: float
    end_s: float


class PolicyDriver:
    """decide() at 20 Hz while there is work, at 1 Hz without, and at each hint."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        *,
        seed: int,
        faults: Sequence[Fault] = (),
        on_battery: bool | None = None,
        has_meter: bool = True,
        kernel: Governor | None = None,
        takes_advice: bool = True,
    ) -> None:
        self._model, self._limits, self._takes_advice = model, limits, takes_advice
        self._told: deque[tuple[float, Advice]] = deque()
        self.advised_s: list[float] = []
        self._rng = random.Random(f"sensors {seed}")
        self._faults, self._on_battery, self._has_meter = tuple(faults), on_battery, has_meter
        self._kernel_or_none = kernel
        self._memory = Memory()
        self._hints: deque[tuple[float, Hint]] = deque()
        self._hint: Hint | None = None
        self._sent_s, self._settle_s = 0.0, NEVER
        self._sent_as: tuple[object, ...] = ("idle", 0, 0, None)
        self._pending: tuple[float, int] | None = None
        self._tick_s = 0.0
        self._sampled_s, self._sampled_j, self._sample_w = 0.0, 0.0, None
        self._looked_s = self._looked_busy_s = 0.0
        self.switches_s: list[float] = []
        self.decisions: list[tuple[float, Decision]] = []
        self.keeps_decisions = False
        self.point = 0
        self.next_s = 0.0

    _sample_w: float | None

    def begin(self, sim: Simulation) -> None:
        self._sim = sim
        self._kernel = self._kernel_or_none or Schedutil(sim.board.points_hz)
        self._cap = sim.board.top
        self._point_of = {hz: i for i, hz in enumerate(sim.board.points_hz)}
        self.point = min(self._kernel.point, self._cap)

    def load(self, now_s: float, *, is_busy: bool) -> None:
        self._kernel.load(now_s, is_busy=is_busy, running=self._sim.point)
        self._plan()

    def arrived(self, now_s: float) -> None:
        self._send(now_s)

    def changed(self, now_s: float) -> None:
        sim = self._sim
        told = (sim.work, sim.n_waiting, len(sim.running), sim.frame_due_s)
        if told == self._sent_as:
            return
        if sim.work == "prefill" or self._sent_as[0] == "prefill":
            self._send(now_s)
        elif self._settle_s == NEVER:
            self._settle_s = now_s + (_SETTLE_S if sim.running else _IDLE_S)
            self._plan()

    def look(self, now_s: float) -> None:
        sim = self._sim
        if self._kernel.next_s <= now_s:
            self._kernel.look(now_s, running=sim.point)
        if self._pending is not None and self._pending[0] <= now_s:
            self._cap, self._pending = self._pending[1], None
        while self._told and self._told[0][0] <= now_s:
            sim.advise(self._told.popleft()[1])
        if self._settle_s <= now_s:
            self._send(now_s)
        while self._hints and self._hints[0][0] <= now_s:
            self._hint = self._hints.popleft()[1]
            self._decide(now_s)
        if self._tick_s <= now_s:
            if sim.work != "idle" and now_s - self._sent_s >= _HINT_EVERY_S:
                self._send(now_s)
            self._decide(now_s)
            self._tick_s = now_s + (PERIOD_S if sim.work != "idle" or sim.n_waiting else _IDLE_PERIOD_S)
        self.point = min(self._kernel.point, self._cap)
        self._plan()

    def finish(self) -> None:
        result = self._sim.result
        result.n_switches = len(self.switches_s)
        result.most_switches_1s = most_in_a_second(self.switches_s)

    def _plan(self) -> None:
        next_s = min(self._kernel.next_s, self._tick_s, self._settle_s)
        if self._hints:
            next_s = min(next_s, self._hints[0][0])
        if self._pending is not None:
            next_s = min(next_s, self._pending[0])
        if self._told:
            next_s = min(next_s, self._told[0][0])
        self.next_s = next_s

    def _send(self, now_s: float) -> None:
        sim = self._sim
        prompts = sim.prompts()
        slo_s = self._limits.ttft_slo_s
        left_s = prompts[0][1].arrival_s + slo_s - now_s if prompts else None
        n_prompt = 0
        if prompts:
            # By its length, until the engine begins with it and says how many tokens it computes.
            first = prompts[0][1]
            has_begun = any(s.request is first for s in sim.running)
            n_prompt = first.n_prompt if has_begun else max(round(first.n_prompt * first.told_factor), 1)
        if sim.frame_due_s is not None and not prompts:
            left_s = sim.frame_due_s - now_s
        self._sent_s, self._settle_s = now_s, NEVER
        self._sent_as = (sim.work, sim.n_waiting, len(sim.running), sim.frame_due_s)
        hint = Hint(
            work=cast("Work", sim.work),
            n_waiting=sim.n_waiting,
            n_running=len(sim.running),
            n_prompt_tokens=n_prompt,
            ttft_left_s=left_s,
            tpot_s=sim.tpot_s,
            max_threads=sim.board.n_cores if self._takes_advice else 0,
            max_batch=sim.n_parallel if self._takes_advice else 0,
            sent_s=now_s,
        )
        if not self._has_fault("hints lost", now_s):
            self._hints.append((now_s + HINT_LAG_S, hint))
        if sim.work != "idle" or sim.n_waiting:
            self._tick_s = min(self._tick_s, now_s + PERIOD_S)
        self._plan()

    def _decide(self, now_s: float) -> None:
        sim = self._sim
        passed_s = now_s - self._looked_s
        used = (sim.busy_s - self._looked_busy_s) / passed_s if passed_s > 0.02 else None
        if passed_s > 0.02:
            self._looked_s, self._looked_busy_s = now_s, sim.busy_s
        hint = self._hint
        if hint is not None and now_s - hint.sent_s > HINT_S:
            hint = None
        observation = Observation(
            now_s=now_s,
            hint=hint,
            power=self._power(now_s),
            temperature_c=self._temperature(now_s),
            throttled=sim.limit < sim.board.top,
            utilisation=used,
            is_on_battery=self._on_battery,
            max_hz={sim.board.domain_name: sim.board.points_hz[self._cap]},
            advice=self._told[-1][1] if self._told else sim.advice,
        )
        decision, self._memory = policy.decide(observation, self._limits, self._model, self._memory)
        if self.keeps_decisions:
            self.decisions.append((now_s, decision))
        wanted = self._point_of[decision.max_hz.get(sim.board.domain_name, sim.board.points_hz[-1])]
        present = self._cap if self._pending is None else self._pending[1]
        if self._takes_advice and decision.advice != observation.advice:
            self._told.append((now_s + ADVICE_LAG_S, decision.advice))
            self.advised_s.append(now_s)
            self._plan()
        if wanted != present:
            self._pending = (now_s + sim.board.transition_s, wanted)
            self.switches_s.append(now_s)

    def _power(self, now_s: float) -> Power | None:
        meter, result = self._sim.board.meter, self._sim.result
        if not self._has_meter or self._has_fault("meter absent", now_s):
            return None
        if now_s - self._sampled_s >= meter.interval_s and not self._has_fault("meter stale", now_s):
            total_j = result.soc_j if meter.boundary == "soc" else result.board_j
            watts = (total_j - self._sampled_j) / (now_s - self._sampled_s)
            self._sample_w = max(watts * (1 + self._rng.gauss(0.0, meter.noise)) + meter.offset_w, 0.0)
            self._sampled_s, self._sampled_j = now_s, total_j
        watts_or_none = self._sample_w
        if watts_or_none is not None and self._has_fault("meter jumps", now_s):
            watts_or_none *= self._rng.choice((0.0, 0.2, 1.0, 5.0, 1000.0))
        return Power(power_w=watts_or_none, boundary=meter.boundary, quality="measured", age_s=now_s - self._sampled_s)

    def _temperature(self, now_s: float) -> float | None:
        if self._has_fault("heat absent", now_s):
            return None
        die_c = self._sim.chip.die_c + self._rng.gauss(0.0, 0.3)
        if self._has_fault("heat jumps", now_s):
            die_c += self._rng.choice((-40.0, 0.0, 0.0, 40.0))
        return round(die_c * 2) / 2

    def _has_fault(self, kind: FaultKind, now_s: float) -> bool:
        return any(fault.kind == kind and fault.start_s <= now_s < fault.end_s for fault in self._faults)
