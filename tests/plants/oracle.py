"""MODELLED: what governors are held against that know more than any can.

Both are found in hindsight for each trace, among those that miss no more first tokens than `performance` plus one point
and keep the time per token for 95 of 100 answers.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.plants.board_model import Board
from tests.plants.governors import NEVER, Fixed
from tests.plants.simulator import (
    MAX_STALL_S,
    MAX_STEP_S,
    N_BATCH,
    KernelDriver,
    Result,
    Segment,
    Simulation,
)
from tests.plants.traces import Trace

_HOT_C = 50.0


class PhaseOracle:
    """A clock for every step, set without delay and without error, by the board's own equations.

    It knows each request's prompt when it comes, how long every step will take at every clock, and every deadline. As
    the product, it races with what is late. shift_one, shift_many move its clock of decoding, of one answer and of
    several, off the point of fewest joules: what slower answers do to those that follow, only trying shows.
    """

    def __init__(self, board: Board, *, ttft_slo_s: float, shift_one: int = 0, shift_many: int = 0) -> None:
        self._board, self._slo_s = board, ttft_slo_s
        self._shift_one, self._shift_many = shift_one, shift_many
        self._idle_w = board.watts(0, 0.0, 0.0, _HOT_C)[0]
        self.point = 0
        self.next_s = NEVER

    def begin(self, sim: Simulation) -> None:
        self._sim = sim

    def load(self, now_s: float, *, is_busy: bool) -> None:
        pass

    def look(self, now_s: float) -> None:
        pass

    def arrived(self, now_s: float) -> None:
        self._choose(now_s)

    def changed(self, now_s: float) -> None:
        self._choose(now_s)

    def _choose(self, now_s: float) -> None:
        sim = self._sim
        segment = sim.segment
        if sim.prompts():
            self.point = self._for_prompts(now_s)
        elif segment is not None:
            self.point = self._for_decode(segment)
        else:
            self.point = 0
        if sim.frame_due_s is not None:
            self.point = max(self.point, self._for_frame(now_s))

    def _cost_j(self, point: int, compute_s: float, stall_s: float) -> float:
        compute_s *= self._board.slowness[point]
        watts = self._board.watts(point, compute_s, stall_s, _HOT_C)[0]
        return (watts - self._idle_w) * (compute_s + stall_s)

    def _cheapest(self, compute_s: float, stall_s: float, fits: Callable[[int], bool]) -> int:
        points = sorted(range(self._board.top + 1), key=lambda i: self._cost_j(i, compute_s, stall_s))
        return next((i for i in points if fits(i)), self._board.top)

    def _for_decode(self, segment: Segment) -> int:
        best = self._cheapest(segment.compute_s, segment.stall_s, lambda _: True)
        shift = self._shift_one if segment.n_decode == 1 else self._shift_many
        return min(max(best + shift, 0), self._board.top)

    def _for_frame(self, now_s: float) -> int:
        sim, slow = self._sim, self._board.slowness
        share = 2.0 if sim.running else 1.0
        left_s = (sim.frame_due_s or now_s) - now_s
        frame_s = self._board.work.frame_s
        return self._cheapest(frame_s, 0.0, lambda i: frame_s * slow[i] * share <= left_s)

    def _for_prompts(self, now_s: float) -> int:
        sim, board = self._sim, self._board
        work = board.work
        decoding = [s for s in sim.running if not s.prompt_left]
        d_c, d_s = board.step(len(decoding), 0)
        if sim.n_waiting and len(sim.running) >= sim.n_parallel:
            return board.top
        segment = sim.segment

        def fits(point: int) -> bool:
            slow = board.slowness[point]
            at_s = now_s
            if segment is not None:
                n_left = max(segment.n_steps - segment.done, 0.0) if segment.n_prefill else 1 - segment.done % 1
                at_s += n_left * (segment.compute_s * slow + segment.stall_s)
            in_step = dict.fromkeys(()) if segment is None else {id(s.request): n for s, n in segment.rows if n > 1}
            for left, request in sim.prompts():
                n = left - (in_step.get(id(request)) or 0)
                row_s = (work.prefill_row_s * slow + work.prefill_row_stall_s) * request.prefill_factor
                n_rows = max(16, min(N_BATCH, int((MAX_STALL_S if decoding else MAX_STEP_S) / row_s)))
                n_steps = -(-n // n_rows) if n > 0 else 0
                step_s = d_c * slow + d_s if decoding else work.decode_stall_s
                at_s += n * row_s + n_steps * step_s
                if at_s > request.arrival_s + self._slo_s:
                    return False
            return True

        return self._cheapest(work.prefill_row_s, work.prefill_row_stall_s, fits)


def is_allowed(result: Result, performance: Result, *, ttft_slo_s: float, tpot_slo_s: float) -> bool:
    """Tell whether the objectives hold as they must for everybody."""
    in_time = result.late_first(ttft_slo_s) <= performance.late_first(ttft_slo_s) + 0.01
    return in_time and result.late_rest(tpot_slo_s) <= max(0.05, performance.late_rest(tpot_slo_s))


def per_phase(
    board: Board, trace: Trace, performance: Result, *, ttft_slo_s: float, tpot_slo_s: float, ambient_c: float = 25.0
) -> Result:
    """Find the best clock per phase in hindsight: the shifts are searched one after the other."""

    def play(one: int, many: int) -> Result:
        oracle = PhaseOracle(board, ttft_slo_s=ttft_slo_s, shift_one=one, shift_many=many)
        return Simulation(board, trace, oracle, name="per-phase oracle", ambient_c=ambient_c).run()

    best, best_shifts = play(0, 0), (0, 0)
    for shifts in ((-1, 0), (1, 0), (2, 0), (0, -1), (0, 1), (0, 2)):
        found = play(*shifts)
        if not is_allowed(found, performance, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s):
            continue
        was = is_allowed(best, performance, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
        if not was or found.soc_j_token < best.soc_j_token:
            best, best_shifts = found, shifts
    if all(best_shifts) or best_shifts == (0, 0):
        return best
    found = play(best_shifts[0] or -1, best_shifts[1] or -1)
    if (
        is_allowed(found, performance, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
        and found.soc_j_token < best.soc_j_token
    ):
        return found
    return best


def best_static(
    board: Board, trace: Trace, performance: Result, *, ttft_slo_s: float, tpot_slo_s: float, ambient_c: float = 25.0
) -> Result:
    """Find the one clock that takes the fewest joules and keeps the objectives; the highest if none does."""
    best = performance
    for point in range(board.top):
        driver = KernelDriver(Fixed(point))
        found = Simulation(board, trace, driver, name="best static", ambient_c=ambient_c).run()
        allowed = is_allowed(found, performance, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
        if allowed and found.soc_j_token < best.soc_j_token:
            best = found
    return best
