"""MODELLED: what governors are held against that know more than any can.

Both are found in hindsight for each trace, among those that miss no more first tokens than `performance` plus one point
(or than whoever is held against them, so that nobody comes near them by missing more) and keep the time per token for
95 of 100 answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
_N_ALLOWED = 4


class PhaseOracle:
    """A clock for every step, set without delay and without error, by the board's own equations.

    It knows each request's prompt when it comes, how long every step will take at every clock, and every deadline. As
    the product, it races with what is late. shift_one, shift_many move its clock of decoding, of one answer and of
    several, off the point of fewest joules, and races makes it race for every prompt: what slower steps do to those
    that follow, only trying shows.
    """

    def __init__(
        self, board: Board, *, ttft_slo_s: float, shift_one: int = 0, shift_many: int = 0, races: bool = False
    ) -> None:
        self._board, self._slo_s = board, ttft_slo_s
        self._shift_one, self._shift_many, self._races = shift_one, shift_many, races
        self._idle_w = board.watts(0, 0.0, 0.0, _HOT_C)[0]
        self._orders: dict[tuple[float, float], list[int]] = {}
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
        key = (round(compute_s, 4), round(stall_s, 3))
        points = self._orders.get(key)
        if points is None:
            points = sorted(range(self._board.top + 1), key=lambda i: self._cost_j(i, compute_s, stall_s))
            self._orders[key] = points
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
        if self._races or (sim.n_waiting and len(sim.running) >= sim.n_parallel):
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


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What an oracle has to keep: late_first is the share of late first tokens that it may have."""

    ttft_slo_s: float
    tpot_slo_s: float
    late_first: float
    late_rest: float

    def allow(self, result: Result) -> bool:
        in_time = result.late_first(self.ttft_slo_s) <= self.late_first + 1e-9
        return in_time and result.late_rest(self.tpot_slo_s) <= self.late_rest + 1e-9


def rules(performance: Result, judged: Result, *, ttft_slo_s: float, tpot_slo_s: float) -> Rules:
    """Allow what performance misses and a little more, or what the judged one misses."""
    return Rules(
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
        late_first=max(performance.late_first(ttft_slo_s) + 0.01, judged.late_first(ttft_slo_s)),
        late_rest=max(performance.late_rest(tpot_slo_s), 0.05),
    )


def per_phase(board: Board, trace: Trace, kept: Rules, fallback: Result, *, ambient_c: float = 25.0) -> Result:
    """Find the best clock per phase in hindsight; fallback if nothing keeps the rules."""

    def play(one: int, many: int, races: bool) -> Result:
        driver = PhaseOracle(board, ttft_slo_s=kept.ttft_slo_s, shift_one=one, shift_many=many, races=races)
        return Simulation(board, trace, driver, name="per-phase oracle", ambient_c=ambient_c).run()

    # The fewest joules come first, more or less: so the first that is allowed is followed by a few at most.
    ways = [(one, many, races) for one in range(3) for many in range(3) for races in (False, True)]
    ways += [(shift, shift, True) for shift in range(3, board.top + 1, 2)]
    ways.sort(key=lambda way: (way[0] + way[1], way[2]))
    allowed: list[Result] = []
    for way in ways:
        found = play(*way)
        if kept.allow(found):
            allowed.append(found)
        if len(allowed) == _N_ALLOWED:
            break
    return min(allowed, key=lambda result: result.soc_j, default=fallback)


def without_deadlines(board: Board, trace: Trace, *, ambient_c: float = 25.0) -> Result:
    """Give the fewest joules that clocks alone can take: every step at its cheapest clock or below, none too late.

    A slower clock makes requests overlap more, so their tokens share more steps. Where the lowest clock is the cheapest
    too, as on the two ARM boards, no choice of clocks takes less. Elsewhere it is the least that was found.
    """
    found = []
    for shift in (-1, 0):
        driver = PhaseOracle(board, ttft_slo_s=NEVER, shift_one=shift, shift_many=shift)
        found.append(Simulation(board, trace, driver, name="without deadlines", ambient_c=ambient_c).run())
    return min(found, key=lambda result: result.soc_j)


def best_static(board: Board, trace: Trace, kept: Rules, fallback: Result, *, ambient_c: float = 25.0) -> Result:
    """Find the one clock that takes the fewest joules and keeps the rules."""
    found = [
        Simulation(board, trace, KernelDriver(Fixed(point)), name="best static", ambient_c=ambient_c).run()
        for point in range(board.top)
    ]
    return min([result for result in found if kept.allow(result)], key=lambda result: result.soc_j, default=fallback)
