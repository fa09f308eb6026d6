"""MODELLED (plant A): joules per token under edge_rt's clock policy against Linux' governors and two oracles.

No watt here is measured. Three boards, whose constants are plausible and not calibrated (tests/plants/profiles), run
traces of requests in virtual time; the policy is the product's own decide(), fed with late hints and noisy sensors. A
seed is one trace, the same for all governors; savings are taken per seed, their 95 % intervals by bootstrap over seeds.

Beside what is saved stands what can be: the per-phase oracle's saving, and that of clocks that heed no deadline, which
is the ceiling of any choice of clocks. A bar beyond it is said to be so; it counts as missed all the same.

Bars, each on the unfavourable end of its interval: against schedutil ≥ 25 % less J/token of the chip, ≥ 12 % of the
board at 0.08 and 0.16 requests/s and ≥ 6 % at 0.03; against performance ≥ 40 % and ≥ 16 % (the board's at 0.08 and
0.16); ≤ 1 point more late first tokens than performance; 95 of 100 answers within the time per token; within 5 % of the
per-phase oracle; never above a cap for longer than a control period; ≤ 5 switches in any second.

--board NAME and --load R restrict it; --ambient C; --all adds bursts, a day, frames of a CNN, long prompts, 45 °C.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edge_rt.power.state import Limits
from tests.plants import board_model, oracle, simulator, traces
from tests.plants.board_model import Board
from tests.plants.governors import Conservative, Fixed, Governor, Ondemand, Schedutil
from tests.plants.policy_driver import PolicyDriver
from tests.plants.simulator import Result, Simulation
from tests.plants.traces import Trace

N_SEEDS = 20
LOADS_HZ = (0.03, 0.08, 0.16)
LIMITS = Limits(ttft_slo_s=1.0, tpot_slo_s=0.1)
_SPAN_S = 1000.0
_N_BOOTSTRAP = 2000
_N_OTHER_SEEDS = 5
_GOVERNORS: dict[str, Callable[[Board], Governor]] = {
    "performance": lambda board: Fixed(board.top),
    "powersave": lambda _: Fixed(0),
    "ondemand": lambda board: Ondemand(board.points_hz),
    "conservative": lambda board: Conservative(board.points_hz),
    "schedutil": lambda board: Schedutil(board.points_hz),
}
OURS = "edge_rt"
ORACLE, FREE = "per-phase oracle", "without deadlines"


def ours(board: Board, trace: Trace, *, seed: int, limits: Limits = LIMITS, ambient_c: float = 25.0) -> Result:
    """Run the product's policy, calibrated with errors of 2 % on the board as it is warm."""
    driver = PolicyDriver(board.calibration(error=0.02, seed=seed), limits, seed=seed)
    sim = Simulation(board, trace, driver, name=OURS, ambient_c=ambient_c, cap_w=limits.max_w)
    result = sim.run()
    driver.finish()
    return result


@dataclass(kw_only=True)
class Cell:
    """All governors on one board and kind of trace: results by governor, one a seed."""

    board: str
    trace: str
    results: dict[str, list[Result]] = field(default_factory=dict)

    def ratios(self, name: str, other: str, of: str) -> list[float]:
        pairs = zip(self.results[name], self.results[other], strict=True)
        return [getattr(a, of) / getattr(b, of) for a, b in pairs]

    def excess(self, name: str) -> list[float]:
        """Give the points of first tokens that are late and were not under performance."""
        pairs = zip(self.results[name], self.results["performance"], strict=True)
        return [100 * (a.late_first(LIMITS.ttft_slo_s) - b.late_first(LIMITS.ttft_slo_s)) for a, b in pairs]


def play(
    board: Board, name: str, make: Callable[[int], Trace], n_seeds: int, *, ambient_c: float, with_oracles: bool
) -> Cell:
    """Run everybody on the same traces."""
    cell = Cell(board=board.name, trace=name)
    for seed in range(n_seeds):
        trace = make(seed)
        for governor, build in _GOVERNORS.items():
            found = simulator.run(board, trace, build(board), name=governor, ambient_c=ambient_c)
            cell.results.setdefault(governor, []).append(found)
        cell.results.setdefault(OURS, []).append(ours(board, trace, seed=seed, ambient_c=ambient_c))
        if with_oracles:
            performance, judged = cell.results["performance"][-1], cell.results[OURS][-1]
            kept = oracle.rules(performance, judged, ttft_slo_s=LIMITS.ttft_slo_s, tpot_slo_s=LIMITS.tpot_slo_s)
            static = oracle.best_static(board, trace, kept, performance, ambient_c=ambient_c)
            best = oracle.per_phase(board, trace, kept, performance, ambient_c=ambient_c)
            cell.results.setdefault("best static clock", []).append(static)
            # Whatever knows more than the policy could also do what the policy did.
            cell.results.setdefault(ORACLE, []).append(min(best, judged, key=lambda one: one.soc_j))
            free = oracle.without_deadlines(board, trace, ambient_c=ambient_c)
            cell.results.setdefault(FREE, []).append(free)
    return cell


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Give the mean and its 95 % bootstrap interval."""
    rng = random.Random(1)
    n = len(samples)
    means = sorted(sum(rng.choices(samples, k=n)) / n for _ in range(_N_BOOTSTRAP))
    return sum(samples) / n, means[int(0.025 * _N_BOOTSTRAP)], means[int(0.975 * _N_BOOTSTRAP) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """J/token relative to another governor's that must not be above at_most, on the interval's high end.

    ours, oracle, free  mean and high end
    """

    other: str
    of: str
    at_most: float
    ours: tuple[float, float]
    oracle: tuple[float, float]
    free: tuple[float, float]

    @property
    def boundary(self) -> str:
        return "SoC" if self.of == "soc_j_token" else "board"

    @property
    def verdict(self) -> str:
        # Whoever takes no less than the ceiling on any seed has no lower high end than it.
        if self.ours[1] <= self.at_most:
            return "holds"
        if self.free[1] > self.at_most:
            return f"ceiling {_percent(self.free[1])}, beyond any choice of clocks on this profile"
        if self.oracle[1] > self.at_most:
            return f"beyond the oracle's {_percent(self.oracle[1])}"
        return "missed"


def bars(cell: Cell, rate_hz: float) -> list[Bar]:
    """Hold the savings of a cell against their bars, with the ceiling of each."""
    is_seldom = rate_hz < 0.05
    wanted = [
        ("schedutil", "soc_j_token", 0.75),
        ("schedutil", "board_j_token", 0.94 if is_seldom else 0.88),
        ("performance", "soc_j_token", 0.60),
    ]
    if not is_seldom:
        wanted.append(("performance", "board_j_token", 0.84))
    found = []
    for other, of, at_most in wanted:
        # The fewest of all on a seed: what was chosen by the chip's joules may not be the best by the board's.
        lists = [cell.ratios(name, other, of) for name in cell.results]
        fewest = [min(ratios) for ratios in zip(*lists, strict=True)]
        ours, best, free = (
            interval(cell.ratios(OURS, other, of)),
            interval(cell.ratios(ORACLE, other, of)),
            interval(fewest),
        )
        found.append(
            Bar(
                other=other,
                of=of,
                at_most=at_most,
                ours=(ours[0], ours[2]),
                oracle=(best[0], best[2]),
                free=(free[0], free[2]),
            )
        )
    return found


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def ceilings(cells: Sequence[tuple[Cell, float]]) -> str:
    """Draw what is saved, what can be, and what has to be: means, and the interval's high end in brackets."""
    rows = [["board", "trace", "J/token of", "against", "bar", "edge_rt", "oracle", "ceiling of clocks", "verdict"]]
    for cell, rate_hz in cells:
        for bar in bars(cell, rate_hz):
            rows.append([cell.board, cell.trace, bar.boundary, bar.other, _percent(bar.at_most)])
            rows[-1] += [f"{_percent(mean)} [{_percent(high)}]" for mean, high in (bar.ours, bar.oracle, bar.free)]
            rows[-1].append(bar.verdict)
    return harness.draw(rows, n_names=4)


def _figures(cell: Cell, rate_hz: float) -> list[harness.Figure]:
    where = f"{cell.board} {rate_hz:g}/s"
    figures = []
    for bar in bars(cell, rate_hz):
        note = f" ({bar.verdict})" if bar.verdict not in ("holds", "missed") else ""
        name = f"{where}: {bar.boundary} J/token ÷ {bar.other}{note}"
        figures.append(_figure(name, "ratio, high end", (bar.ours[1],), bar.at_most))
    for boundary, of in (("SoC", "soc_j_token"), ("board", "board_j_token")):
        high = interval(cell.ratios(OURS, ORACLE, of))[2]
        figures.append(_figure(f"{where}: {boundary} J/token ÷ {ORACLE}", "ratio, high end", (high,), 1.05))
    figures.append(
        _figure(f"{where}: late first tokens − performance", "points, high end", (interval(cell.excess(OURS))[2],), 1.0)
    )
    late = [100 * result.late_rest(LIMITS.tpot_slo_s) for result in cell.results[OURS]]
    figures.append(_figure(f"{where}: answers over the time per token", "%, high end", (interval(late)[2],), 5.0))
    most = max(result.most_switches_1s for result in cell.results[OURS])
    figures.append(_figure(f"{where}: switches in a second", "most", (float(most),), 5.0))
    return figures


def _figure(name: str, unit: str, samples: tuple[float, ...], at_most: float) -> harness.Figure:
    return harness.Figure(name=f"modelled: {name}", unit=unit, samples=samples, at_most=at_most)


def table(cells: Sequence[Cell]) -> str:
    """Draw what each governor takes, in the mean over seeds."""
    head = ["board", "trace", "governor", "SoC J/tok", "board J/tok", "SoC vs schedutil", "board vs schedutil"]
    head += ["ttft late", "ttft p95", "tpot p95", "mean W", "switches/s"]
    rows = [head]
    for cell in cells:
        for name, results in cell.results.items():
            n = len(results)
            ttft = sorted(s for result in results for s in result.ttft_s)
            tpot = sorted(s for result in results for s in result.tpot_s)
            late = sum(s > LIMITS.ttft_slo_s for s in ttft) / max(len(ttft), 1)
            soc, soc_low, soc_high = interval(cell.ratios(name, "schedutil", "soc_j_token"))
            board, board_low, board_high = interval(cell.ratios(name, "schedutil", "board_j_token"))
            rows.append(
                [
                    cell.board,
                    cell.trace,
                    name,
                    f"{sum(r.soc_j_token for r in results) / n:.3f}",
                    f"{sum(r.board_j_token for r in results) / n:.3f}",
                    f"{100 * (soc - 1):+.1f} % [{100 * (soc_low - 1):+.1f}, {100 * (soc_high - 1):+.1f}]",
                    f"{100 * (board - 1):+.1f} % [{100 * (board_low - 1):+.1f}, {100 * (board_high - 1):+.1f}]",
                    f"{100 * late:.1f} %",
                    f"{ttft[int(0.95 * len(ttft))]:.2f} s" if ttft else "",
                    f"{1000 * tpot[int(0.95 * len(tpot))]:.0f} ms" if tpot else "",
                    f"{sum(r.board_j / r.span_s for r in results) / n:.2f}",
                    f"{sum(r.n_switches / r.span_s for r in results) / n:.2f}",
                ]
            )
    return harness.draw(rows, n_names=3)


def capped(board: Board, n_seeds: int, span_s: float) -> list[harness.Figure]:
    """Hold a cap halfway between the lowest and the highest clock's power, in bursts, at 25 and 45 °C."""
    model = board.calibration()
    cap_w = (model.levels[0].worst_w + model.levels[-1].worst_w) / 2
    limits = Limits(max_w=cap_w, ttft_slo_s=LIMITS.ttft_slo_s, tpot_slo_s=LIMITS.tpot_slo_s)
    longest_s, n_violations, most = 0.0, 0, 0
    for seed in range(n_seeds):
        for ambient_c in (25.0, 45.0):
            result = ours(board, traces.bursts(seed, span_s=span_s), seed=seed, limits=limits, ambient_c=ambient_c)
            longest_s = max(longest_s, result.longest_above_s)
            n_violations += result.n_violations
            most = max(most, result.most_switches_1s)
    where = f"{board.name}, cap {cap_w:.1f} W"
    return [
        _figure(f"{where}: times above it beyond a control period", "number", (float(n_violations),), 0.0),
        _figure(f"{where}: longest time above it", "s", (longest_s,), simulator.PERIOD_S),
        _figure(f"{where}: switches in a second", "most", (float(most),), 5.0),
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--board", choices=board_model.NAMES, action="append", help="only this one")
    parser.add_argument("--load", type=float, action="append", help="only this rate in requests/s")
    parser.add_argument("--ambient", type=float, default=25.0, metavar="C")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="the other traces too, without bars")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=_options)
    own = arguments.own
    n_seeds = own.seeds or arguments.pairs(N_SEEDS, quick=3)
    span_s = _SPAN_S / 4 if arguments.quick else _SPAN_S
    cells: list[Cell] = []
    judged: list[tuple[Cell, float]] = []
    figures: list[harness.Figure] = []
    start_s = time.monotonic()
    for name in own.board or board_model.NAMES:
        board = board_model.load(name)
        for rate_hz in own.load or LOADS_HZ:

            def make(seed: int, rate_hz: float = rate_hz) -> Trace:
                return traces.poisson(seed, rate_hz=rate_hz, span_s=span_s)

            cell = play(board, f"{rate_hz:g}/s", make, n_seeds, ambient_c=own.ambient, with_oracles=True)
            cells.append(cell)
            judged.append((cell, rate_hz))
            figures += _figures(cell, rate_hz)
            print(f"{board.name} {rate_hz:g}/s: {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
        figures += capped(board, n_seeds, span_s)
        if own.all:
            cells += others(board, min(n_seeds, _N_OTHER_SEEDS), span_s, own.ambient)
    print("modelled (plant A): boards with plausible constants, not calibrated; no watt is measured\n")
    print(table(cells) + "\n")
    print(ceilings(judged) + "\n")
    harness.finish(arguments, figures=figures, extra={"boundary": "modelled (plant A)", "cells": _records(cells)})


def others(board: Board, n_seeds: int, span_s: float, ambient_c: float) -> list[Cell]:
    kinds: dict[str, Callable[[int], Trace]] = {
        "bursts": lambda seed: traces.bursts(seed, span_s=span_s),
        "a day": lambda seed: traces.diurnal(seed, span_s=span_s),
        "frames 10/s + 0.03/s": lambda seed: traces.mixed(seed, span_s=span_s),
        "long prompts": lambda seed: traces.long_context(seed, span_s=span_s),
    }
    cells = [play(board, name, make, n_seeds, ambient_c=ambient_c, with_oracles=False) for name, make in kinds.items()]
    hot = play(
        board,
        "0.08/s at 45 °C",
        lambda seed: traces.poisson(seed, rate_hz=0.08, span_s=span_s),
        n_seeds,
        ambient_c=45.0,
        with_oracles=False,
    )
    return [*cells, hot]


def _records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "board": cell.board,
            "trace": cell.trace,
            "results": {name: [asdict(result) for result in results] for name, results in cell.results.items()},
        }
        for cell in cells
    ]


if __name__ == "__main__":
    main()
