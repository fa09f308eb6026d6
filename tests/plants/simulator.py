"""MODELLED: a board, the engine and a governor in virtual time, from event to event. Nothing here is measured.

The engine works as edge_rt's: requests join and leave between steps; every running answer gets its row, prompts share
what engine.max_stall_s leaves them beside running answers, 1.5 s without; at most n_parallel at a time. Time goes from
one event to the next: arrivals, ends of steps, looks of a governor. Decoding steps between two events are one event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edge_rt.power.state import Advice
from tests.plants.board_model import Board, Chip
from tests.plants.governors import NEVER, Governor
from tests.plants.traces import Request, Trace

MAX_STALL_S, MAX_STEP_S, N_BATCH = 0.15, 1.5, 512
DISPATCH_S = 0.003  # from the socket to the engine
DRAIN_S = 60.0  # after the last arrival, the same for all
PERIOD_S = 0.05  # one control period
_MIN_ROWS = 16
_WARM_S, _HOT_WARM_S = 1.0, 0.1


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine."""

    request: Request
    prompt_left: int
    output_left: int
    first_s: float = NEVER
    last_s: float = NEVER
    n_done: int = 0

    def due_s(self, slo_s: float) -> float:
        return self.request.arrival_s + slo_s


@dataclass(slots=True)
class Segment:
    """n_steps equal steps; compute_s is that of one at the highest clock, on n_threads."""

    compute_s: float
    stall_s: float
    n_steps: int
    rows: list[tuple[Running, int]]
    n_decode: int
    n_prefill: int
    prefill_share: float
    n_threads: int = 0  # 0: all cores
    done: float = 0.0


@dataclass(kw_only=True)
class Result:
    """What came out. Joules and watts are modelled; misses are shares of requests."""

    name: str
    n_requests: int = 0
    n_tokens: int = 0
    n_prompt_tokens: int = 0
    soc_j: float = 0.0
    board_j: float = 0.0
    prefill_j: float = 0.0  # of the chip
    decode_j: float = 0.0
    idle_j: float = 0.0
    span_s: float = 0.0
    peak_w: float = 0.0  # at the meter's boundary
    peak_board_w: float = 0.0
    above_cap_ws: float = 0.0
    longest_above_s: float = 0.0
    n_violations: int = 0
    n_switches: int = 0
    most_switches_1s: int = 0
    max_c: float = 0.0
    throttled_s: float = 0.0
    n_unfinished: int = 0
    n_frames: int = 0
    n_late_frames: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    at_point_s: list[float] = field(default_factory=list)

    @property
    def soc_j_token(self) -> float:
        return self.soc_j / max(self.n_tokens, 1)

    @property
    def board_j_token(self) -> float:
        return self.board_j / max(self.n_tokens, 1)

    def late_first(self, slo_s: float) -> float:
        return sum(s > slo_s for s in self.ttft_s) / max(len(self.ttft_s), 1)

    def late_rest(self, slo_s: float) -> float:
        return sum(s > slo_s for s in self.tpot_s) / max(len(self.tpot_s), 1)


class Driver(Protocol):
    """What sets the clock. point is in force as soon as it is set; delays are the driver's own."""

    point: int
    next_s: float

    def begin(self, sim: Simulation) -> None: ...

    def load(self, now_s: float, *, is_busy: bool) -> None: ...

    def arrived(self, now_s: float) -> None: ...

    def changed(self, now_s: float) -> None:
        """Hear that another kind of step begins."""
        ...

    def look(self, now_s: float) -> None: ...


class KernelDriver:
    """A governor of the kernel alone."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self.point, self.next_s = governor.point, governor.next_s

    def begin(self, sim: Simulation) -> None:
        self._sim = sim

    def load(self, now_s: float, *, is_busy: bool) -> None:
        self._governor.load(now_s, is_busy=is_busy, running=self._sim.point)
        self.next_s = self._governor.next_s

    def arrived(self, now_s: float) -> None:
        pass

    def changed(self, now_s: float) -> None:
        pass

    def look(self, now_s: float) -> None:
        self._governor.look(now_s, running=self._sim.point)
        self.point, self.next_s = self._governor.point, self._governor.next_s


class Simulation:
    """One run. Use run()."""

    def __init__(
        self,
        board: Board,
        trace: Trace,
        driver: Driver,
        *,
        name: str,
        ambient_c: float = 25.0,
        cap_w: float = 0.0,
        n_parallel: int = 8,
    ) -> None:
        self.board, self.trace, self.driver = board, trace, driver
        self.cap_w, self.n_parallel = cap_w, n_parallel
        self.chip = Chip(board, ambient_c)
        self.now_s = 0.0
        self.result = Result(name=name, at_point_s=[0.0] * len(board.points))
        self.incoming: deque[Request] = deque()  # with the daemon, not yet with the engine
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.segment: Segment | None = None
        self.advice = Advice()
        self.point = driver.point
        self.limit = board.top  # what heat leaves
        self.soc_w = self.board_w = 0.0
        self._tpot_s: float | None = None
        self.busy_s = 0.0
        self._row_s = board.work.prefill_row_s
        self._frame_left_s = 0.0  # at the highest clock
        self._frame_due_s = NEVER
        self._is_busy = False
        self._above_s = 0.0
        self._end_s = trace.span_s + DRAIN_S

    # -- what drivers may ask ----------------------------------------------------------------------------------------

    @property
    def work(self) -> str:
        if self._frame_left_s > 0 or self.n_waiting or any(s.prompt_left for s in self.running):
            return "prefill"
        return "decode" if self.running else "idle"

    @property
    def frame_due_s(self) -> float | None:
        return self._frame_due_s if self._frame_left_s > 0 else None

    @property
    def n_waiting(self) -> int:
        return len(self.waiting) + len(self.incoming)

    @property
    def tpot_s(self) -> float | None:
        """The moving average of the time per token, as the front process keeps it, up to now."""
        segment = self.segment
        if segment is None or not segment.n_decode or segment.n_prefill or segment.done < 1:
            return self._tpot_s
        return self._tpot_after(self.step_s(segment, self.point), int(segment.done))

    def _tpot_after(self, step_s: float, n_steps: int) -> float:
        weight = 1 - 0.7**n_steps
        return step_s if self._tpot_s is None else self._tpot_s + weight * (step_s - self._tpot_s)

    def prompts(self) -> list[tuple[int, Request]]:
        """List tokens left of each prompt that is not done, the oldest first."""
        inside = [(s.prompt_left, s.request) for s in self.running if s.prompt_left]
        queued = [(s.prompt_left, s.request) for s in self.waiting]
        return inside + queued + [(r.n_prompt, r) for r in self.incoming]

    def step_s(self, segment: Segment, point: int) -> float:
        return segment.compute_s * self.board.slowness[point] + segment.stall_s

    def advise(self, advice: Advice) -> None:
        """Take up what the engine does between two steps: its threads, and how many answers it decodes together."""
        if advice != self.advice:
            self.advice = advice
            self._cut_segment()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        requests = self.trace.requests
        frame_s = 1 / self.trace.frames_hz if self.trace.frames_hz else NEVER
        next_frame_s = frame_s
        at, n = 0, len(requests)
        warm_s = _WARM_S
        self.driver.begin(self)
        self._set_power()
        while self.now_s < self._end_s:
            arrival_s = requests[at].arrival_s if at < n else NEVER
            dispatch_s = self.incoming[0].arrival_s + DISPATCH_S if self.incoming else NEVER
            segment_s = self._segment_end_s()
            frame_end_s = self._frame_end_s()
            next_s = min(
                arrival_s,
                dispatch_s,
                segment_s,
                frame_end_s,
                next_frame_s,
                self.driver.next_s,
                warm_s,
                self._end_s,
            )
            self._pass_to(next_s)
            if frame_end_s <= next_s:
                self._end_frame()
            if next_frame_s <= next_s:
                next_frame_s = next_frame_s + frame_s if next_frame_s + frame_s < self.trace.span_s else NEVER
                self._begin_frame()
            if segment_s <= next_s:
                self._end_segment()
            if arrival_s <= next_s:
                self.incoming.append(requests[at])
                at += 1
                self.driver.arrived(next_s)
            if dispatch_s <= next_s:
                request = self.incoming.popleft()
                self.waiting.append(
                    Running(request=request, prompt_left=request.n_prompt, output_left=request.n_output)
                )
                self._cut_segment()
            if warm_s <= next_s:
                is_hot = self._throttle()
                warm_s = next_s + (_HOT_WARM_S if is_hot else _WARM_S)
            if self.segment is None:
                self._begin_segment()
            self._tell_load()
            if self.driver.next_s <= next_s:
                self.driver.look(next_s)
            self._set_power()
        return self._finished()

    def _segment_end_s(self) -> float:
        segment = self.segment
        if segment is None:
            return NEVER
        share = 2.0 if self._frame_left_s > 0 else 1.0
        left_s = (segment.n_steps - segment.done) * self.step_s(segment, self.point) * share
        return self.now_s + max(left_s, 0.0)

    def _frame_end_s(self) -> float:
        if self._frame_left_s <= 0:
            return NEVER
        share = 2.0 if self.segment is not None else 1.0
        return self.now_s + self._frame_left_s * self.board.slowness[self.point] * share

    def _pass_to(self, next_s: float) -> None:
        passed_s = next_s - self.now_s
        self.now_s = next_s
        if passed_s <= 0:
            return
        result, segment = self.result, self.segment
        soc_j = self.soc_w * passed_s
        result.soc_j += soc_j
        result.board_j += self.board_w * passed_s
        result.at_point_s[self.point] += passed_s
        share = 2.0 if segment is not None and self._frame_left_s > 0 else 1.0
        if segment is not None:
            segment.done += passed_s / (self.step_s(segment, self.point) * share)
            result.prefill_j += soc_j * segment.prefill_share
            result.decode_j += soc_j * (1 - segment.prefill_share)
        elif self._frame_left_s <= 0:
            result.idle_j += soc_j
        if self._frame_left_s > 0:
            self._frame_left_s = max(self._frame_left_s - passed_s / (self.board.slowness[self.point] * share), 0.0)
            if self._frame_left_s < 1e-9:
                self._frame_left_s = 1e-12  # its end is an event of its own
        if self._is_busy:
            self.busy_s += passed_s
        watts = self.soc_w if self.board.meter.boundary == "soc" else self.board_w
        if self.cap_w > 0 and watts > self.cap_w * (1 + 1e-9):
            result.above_cap_ws += (watts - self.cap_w) * passed_s
            before_s, self._above_s = self._above_s, self._above_s + passed_s
            result.longest_above_s = max(result.longest_above_s, self._above_s)
            result.n_violations += before_s <= PERIOD_S < self._above_s
        else:
            self._above_s = 0.0
        if self.limit < self.board.top:
            result.throttled_s += passed_s
        self.chip.warm(self.soc_w, passed_s)
        result.max_c = max(result.max_c, self.chip.die_c)

    def _set_power(self) -> None:
        self.point = min(self.driver.point, self.limit)
        compute_s = stall_s = 0.0
        slow = self.board.slowness[self.point]
        segment = self.segment
        if segment is not None:
            compute_s, stall_s = segment.compute_s * slow, segment.stall_s
        if self._frame_left_s > 0:
            compute_s += (compute_s + stall_s) or 1.0
        # A frame is computed by another process, on all cores.
        n_threads = segment.n_threads if segment is not None and self._frame_left_s <= 0 else 0
        self.soc_w, self.board_w = self.board.watts(self.point, compute_s, stall_s, self.chip.die_c, n_threads)
        watts = self.soc_w if self.board.meter.boundary == "soc" else self.board_w
        self.result.peak_w = max(self.result.peak_w, watts)
        self.result.peak_board_w = max(self.result.peak_board_w, self.board_w)

    def _tell_load(self) -> None:
        is_busy = self.segment is not None or self._frame_left_s > 0
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self.driver.load(self.now_s, is_busy=is_busy)

    def _throttle(self) -> bool:
        """The kernel's step_wise thermal governor: a step down at the trip, up again 5 °C below it."""
        die_c, trip_c = self.chip.die_c, self.board.thermal.trip_c
        if die_c >= trip_c:
            self.limit = max(0, min(self.limit, self.point) - 1)
        elif die_c < trip_c - 5 and self.limit < self.board.top:
            self.limit += 1
        return die_c >= trip_c - 8 or self.limit < self.board.top

    # -- the engine --------------------------------------------------------------------------------------------------

    def _begin_segment(self) -> None:
        while self.waiting and len(self.running) < min(self.advice.max_batch or self.n_parallel, self.n_parallel):
            self.running.append(self.waiting.popleft())
        if not self.running:
            self.driver.changed(self.now_s)
            return
        decoding = [s for s in self.running if not s.prompt_left]
        prompts = [s for s in self.running if s.prompt_left]
        n_kv = float(sum(s.request.n_prompt - s.prompt_left + s.n_done for s in self.running))
        n_decode = len(decoding)
        factor = sum(s.request.decode_factor for s in decoding) / n_decode if n_decode else 1.0
        if not prompts:
            n_steps = min(*(s.output_left for s in decoding), 64)
            compute_s, stall_s = self.board.step(n_decode, 0, n_kv=n_kv + n_decode * n_steps / 2)
            rows = [(s, 1) for s in decoding]
            self.segment = Segment(compute_s * factor, stall_s * factor, n_steps, rows, n_decode, 0, 0.0)
            self._slow_down(self.advice.n_decode_threads)
        else:
            limit_s = MAX_STALL_S if decoding else MAX_STEP_S
            room = max(_MIN_ROWS, min(N_BATCH - n_decode, int(limit_s / self._row_s)))
            rows = [(s, 1) for s in decoding]
            n_prefill, prefill_factor = 0, 0.0
            for prompt in prompts:
                n_rows = min(prompt.prompt_left, room - n_prefill)
                if n_rows > 0:
                    rows.append((prompt, n_rows))
                    prefill_factor += n_rows * prompt.request.prefill_factor
                    n_prefill += n_rows
            d_c, d_s = self.board.step(n_decode, 0, n_kv=n_kv)
            work = self.board.work
            p_c = prefill_factor * work.prefill_row_s
            p_s = prefill_factor * work.prefill_row_stall_s
            if not n_decode:
                d_c = 0.0
            share = (p_c + p_s) / (d_c + d_s + p_c + p_s)
            self.segment = Segment(d_c * factor + p_c, d_s * factor + p_s, 1, rows, n_decode, n_prefill, share)
            self._slow_down(self.advice.n_prefill_threads)
        self.driver.changed(self.now_s)

    def _slow_down(self, n_threads: int | None) -> None:
        """Let the segment that begins run on n_threads."""
        if n_threads is not None and n_threads < self.board.n_cores:
            segment = self.segment
            assert segment is not None
            segment.n_threads = n_threads
            segment.compute_s *= self.board.computing(n_threads)
            segment.stall_s *= self.board.waiting(n_threads)

    def _cut_segment(self) -> None:
        """Let a newcomer in at the next boundary between steps."""
        segment = self.segment
        if segment is not None and segment.n_steps > 1:
            segment.n_steps = max(math.ceil(segment.done - 1e-9), 1)

    def _end_segment(self) -> None:
        segment = self.segment
        assert segment is not None
        self.segment = None
        step_s = self.step_s(segment, self.point)
        if segment.n_decode:
            self._tpot_s = self._tpot_after(step_s, segment.n_steps)
        if segment.n_prefill:
            self._row_s += 0.3 * (step_s * segment.prefill_share / segment.n_prefill - self._row_s)
        for sequence, n_rows in segment.rows:
            if sequence.prompt_left:
                sequence.prompt_left -= n_rows
                if sequence.prompt_left:
                    continue
                sequence.first_s = sequence.last_s = self.now_s
                sequence.output_left -= 1
                sequence.n_done = 1
                self.result.n_tokens += 1
                self.result.ttft_s.append(self.now_s - sequence.request.arrival_s)
                self.result.n_prompt_tokens += sequence.request.n_prompt
            else:
                sequence.output_left -= segment.n_steps
                sequence.n_done += segment.n_steps
                sequence.last_s = self.now_s
                self.result.n_tokens += segment.n_steps
            if sequence.output_left <= 0:
                self.running.remove(sequence)
                self.result.n_requests += 1
                if sequence.n_done > 1:
                    self.result.tpot_s.append((sequence.last_s - sequence.first_s) / (sequence.n_done - 1))
        if not any(not s.prompt_left for s in self.running):
            self._tpot_s = None

    def _begin_frame(self) -> None:
        self.result.n_frames += 1
        if self._frame_left_s > 0:  # the last one is not done: this one is dropped
            self.result.n_late_frames += 1
            return
        self._frame_left_s = self.board.work.frame_s
        self._frame_due_s = self.now_s + 1 / self.trace.frames_hz
        self.driver.changed(self.now_s)

    def _end_frame(self) -> None:
        self._frame_left_s = 0.0
        self.result.n_late_frames += self.now_s > self._frame_due_s
        self.driver.changed(self.now_s)

    def _finished(self) -> Result:
        result = self.result
        result.span_s = self.now_s
        result.n_unfinished = len(self.running) + self.n_waiting
        return result


def run(board: Board, trace: Trace, governor: Governor, *, name: str, ambient_c: float = 25.0) -> Result:
    """Run a governor of the kernel over a trace."""
    return Simulation(board, trace, KernelDriver(governor), name=name, ambient_c=ambient_c).run()


def most_in_a_second(times_s: Sequence[float]) -> int:
    """Count the most switches that any one second saw."""
    most = start = 0
    for end, at_s in enumerate(times_s):
        while at_s - times_s[start] >= 1.0:
            start += 1
        most = max(most, end - start + 1)
    return most
