"""MODELLED boards: watts, times and temperatures by the constants of profiles/*.toml. None of them was calibrated.

Power of the chip: V² g(T) leaks, C V² f of each core by what it does, and the uncore. A step of the engine waits for
memory for a part that no clock changes, and computes for a part that does. Heat: a small mass, the die, on a large one.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from edge_rt.engine.threads import candidates
from edge_rt.power import levels
from edge_rt.power.calibration import CalibratedDomain, Calibration, Phase, Point, ThreadPoint
from edge_rt.power.state import Domain

PROFILES = Path(__file__).parent / "profiles"
NAMES = ("pi5_class", "orin_nano_class", "x86_mini_pc")


@dataclass(frozen=True, kw_only=True)
class PowerModel:
    core_w_per_ghz_v2: float
    stall_activity: float
    leak_w_per_v2: float
    leak_doubles_c: float
    idle_leak_share: float
    uncore_idle_w: float
    uncore_busy_w: float
    dram_idle_w: float
    dram_busy_w: float
    rest_w: float
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    decode_stall_s: float
    decode_row_stall_s: float
    decode_row_s: float
    prefill_row_stall_s: float
    prefill_row_s: float
    kv_stall_s_per_1k: float
    frame_s: float
    n_full_threads: float
    serial_share: float


@dataclass(frozen=True, kw_only=True)
class ThermalModel:
    die_k_per_w: float
    die_s: float
    sink_k_per_w: float
    sink_s: float
    trip_c: float


@dataclass(frozen=True, kw_only=True)
class MeterModel:
    boundary: Literal["soc", "board"]
    interval_s: float
    noise: float
    offset_w: float


@dataclass(frozen=True, kw_only=True)
class Board:
    name: str
    domain_name: str
    n_cores: int
    transition_s: float
    points: tuple[tuple[float, float], ...]  # Hz, V
    power: PowerModel
    work: WorkModel
    thermal: ThermalModel
    meter: MeterModel

    @cached_property
    def points_hz(self) -> tuple[float, ...]:
        return tuple(hz for hz, _ in self.points)

    @cached_property
    def slowness(self) -> tuple[float, ...]:
        """How much longer computing takes at each point than at the highest."""
        return tuple(self.points_hz[-1] / hz for hz in self.points_hz)

    @property
    def top(self) -> int:
        return len(self.points) - 1

    @cached_property
    def domain(self) -> Domain:
        return Domain(name=self.domain_name, kind="cpu", points_hz=self.points_hz, n_cpus=self.n_cores)

    @cached_property
    def _dynamic_w(self) -> tuple[float, ...]:
        return tuple(self.power.core_w_per_ghz_v2 * v * v * hz / 1e9 * self.n_cores for hz, v in self.points)

    @cached_property
    def _leak_w(self) -> tuple[float, ...]:
        return tuple(self.power.leak_w_per_v2 * v * v for _, v in self.points)

    def computing(self, n_threads: int) -> float:
        """How much longer computing takes on n_threads than on all cores: Amdahl's law."""
        serial = self.work.serial_share
        return serial + (1 - serial) * self.n_cores / n_threads

    def waiting(self, n_threads: int) -> float:
        """How much longer waiting for memory takes on n_threads than on all cores: few do not fill its bandwidth."""
        full = self.work.n_full_threads
        return float(((1 + (full / n_threads) ** 4) / (1 + (full / self.n_cores) ** 4)) ** 0.25)

    def watts(
        self, point: int, compute_s: float, stall_s: float, die_c: float, n_threads: int = 0
    ) -> tuple[float, float]:
        """Give the chip's and the board's power while work computes and stalls in these proportions; 0, 0: idle.

        compute_s is as long as it takes at this point, both as long as they take on n_threads; 0: on all cores. Cores
        without a thread take no dynamic power.
        """
        n_threads = n_threads or self.n_cores
        power = self.power
        leak_w = self._leak_w[point] * 2.0 ** ((die_c - 50.0) / power.leak_doubles_c)
        whole_s = compute_s + stall_s
        if whole_s <= 0:
            soc_w = leak_w * power.idle_leak_share + power.uncore_idle_w
            dram_w = power.dram_idle_w
        else:
            activity = (compute_s + power.stall_activity * stall_s) / whole_s
            busy_w = self._dynamic_w[point] * activity
            # The same bytes are read, however long it takes.
            reading_s = stall_s
            if n_threads != self.n_cores:
                busy_w *= n_threads / self.n_cores
                reading_s /= self.waiting(n_threads)
            soc_w = leak_w + power.uncore_busy_w + busy_w
            dram_w = power.dram_idle_w + power.dram_busy_w * reading_s / whole_s
        return soc_w, (soc_w + dram_w + power.rest_w) / power.efficiency

    def step(self, n_decode: int, n_prefill: int, *, n_kv: float = 0.0) -> tuple[float, float]:
        """Give a step's seconds of computing at the highest clock, and of waiting for memory."""
        work = self.work
        compute_s = n_decode * work.decode_row_s + n_prefill * work.prefill_row_s
        stall_s = work.decode_stall_s + n_decode * work.decode_row_stall_s + n_prefill * work.prefill_row_stall_s
        return compute_s, stall_s + work.kv_stall_s_per_1k * n_kv / 1000

    def calibration(
        self, *, die_c: float = 50.0, error: float = 0.0, seed: int = 0, with_threads: bool = False
    ) -> levels.Model:
        """Give what `edge_rt power calibrate` would find here; error is the relative deviation of its readings.

        with_threads  fewer threads and more streams too, at three clocks
        """
        rng = random.Random(seed)

        def read(value: float) -> float:
            return value * (1 + rng.gauss(0.0, error)) if error else value

        n_rows = 128
        points = []
        for i, hz in enumerate(self.points_hz):
            slow = self.slowness[i]
            p_c, p_s = self.step(0, n_rows)
            d_c, d_s = self.step(1, 0, n_kv=100)
            points.append(
                Point(
                    max_hz=hz,
                    prefill_s_per_token=read((p_c * slow + p_s) / n_rows),
                    decode_s_per_token=read(d_c * slow + d_s),
                    prefill_w=read(self._metered(self.watts(i, p_c * slow, p_s, die_c))),
                    decode_w=read(self._metered(self.watts(i, d_c * slow, d_s, die_c))),
                )
            )
        found = Calibration(
            board=self.name,
            made_at="2026-11-30T08:00:00Z",
            boundary=self.meter.boundary,
            quality="measured",
            idle_w=read(self._metered(self.watts(0, 0.0, 0.0, 40.0))),
            domains=(CalibratedDomain(name=self.domain_name, points=tuple(points)),),
            threads=tuple(self._thread_points(read, die_c)) if with_threads else (),
        )
        model = levels.calibrated([self.domain], found)
        assert model is not None
        return model

    def _thread_points(self, read: Callable[[float], float], die_c: float) -> Iterator[ThreadPoint]:
        n_rows = 128
        for i in (0, self.top // 2, self.top):
            for n in candidates(self.n_cores):
                for phase, n_streams in (("prefill", 1), ("decode", 1), ("decode", 4)):
                    if n_streams > 1 and n not in (1, self.n_cores):
                        continue
                    rows = (0, n_rows) if phase == "prefill" else (n_streams, 0)
                    compute_s, stall_s = self.step(*rows, n_kv=0 if phase == "prefill" else 100 * n_streams)
                    compute_s *= self.slowness[i] * self.computing(n)
                    stall_s *= self.waiting(n)
                    yield ThreadPoint(
                        phase=cast("Phase", phase),
                        max_hz=self.points_hz[i],
                        n_threads=n,
                        n_streams=n_streams,
                        s_per_token=read((compute_s + stall_s) / (n_rows if phase == "prefill" else 1)),
                        power_w=read(self._metered(self.watts(i, compute_s, stall_s, die_c, n))),
                    )

    def _metered(self, watts: tuple[float, float]) -> float:
        return watts[0] if self.meter.boundary == "soc" else watts[1]


class Chip:
    """The temperatures, as time passes."""

    def __init__(self, board: Board, ambient_c: float) -> None:
        self._thermal = board.thermal
        self._ambient_c = ambient_c
        idle_w = board.watts(0, 0.0, 0.0, ambient_c + 10)[0]
        self.sink_c = ambient_c + idle_w * self._thermal.sink_k_per_w
        self.die_c = self.sink_c + idle_w * self._thermal.die_k_per_w

    def warm(self, soc_w: float, passed_s: float) -> None:
        """Let passed_s go by at this power, which must not be long beside die_s unless nothing changes."""
        thermal = self._thermal
        goal_c = self._ambient_c + soc_w * thermal.sink_k_per_w
        self.sink_c = goal_c + (self.sink_c - goal_c) * math.exp(-passed_s / thermal.sink_s)
        goal_c = self.sink_c + soc_w * thermal.die_k_per_w
        self.die_c = goal_c + (self.die_c - goal_c) * math.exp(-passed_s / thermal.die_s)


def without_clocks(model: levels.Model) -> levels.Model:
    """Give what is known of a board at its highest clock where nobody can set it, as levels.fixed does."""
    return replace(model, levels=(replace(model.levels[-1], max_hz={}),))


def load(name: str) -> Board:
    """Read a profile by its file's name."""
    found: dict[str, Any] = tomllib.loads((PROFILES / f"{name}.toml").read_text(encoding="utf-8"))
    return Board(
        name=found["name"],
        domain_name=found["domain"],
        n_cores=found["n_cores"],
        transition_s=found["transition_s"],
        points=tuple((hz, volts) for hz, volts in found["points"]),
        power=PowerModel(**found["power"]),
        work=WorkModel(**found["work"]),
        thermal=ThermalModel(**found["thermal"]),
        meter=MeterModel(**found["meter"]),
    )
