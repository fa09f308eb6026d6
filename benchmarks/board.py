"""MODELLED WATTS, REAL INFERENCE: a daemon's worker on a board whose clock powerd may set. No power is measured here.

The board is a FUSE file system (tests/plants) with the kernel's semantics, of a Raspberry Pi 5's class with points down
to 600 MHz. `edge_rt serve` runs smollm2-135m-instruct in q4_0 with one thread, which stands for all the board's cores:
it gets the share of a CPU that the board's clock stands for, by a control group's quota or, where there is none, by
stopping and continuing it. Its CPU time is fed back to the board, whose model gives watts, heat and joules, and
edge_rt's own meter reads them off the board's files. Tokens and seconds are real.

First each clock is held under a steady stream of requests: the J/token by clock has its least between the ends. From
that a calibration is written, as `edge_rt power calibrate` would. Then one trace of requests runs under the governor
performance, under a schedutil that reacts at once, under the same one below the cheapest clock of the sweep, and under
edge_rt's powerd with that calibration, in turns.

Bars: the meter agrees with the model within 2 %; the cheapest clock lies between the ends; on the trace powerd takes at
most 0.95 × performance's J/token of the board and at most 1.05 × that of the best fixed clock, which nobody knows
beforehand; at most one of 20 answers more than under performance begins later than wanted. How much there is to be
saved depends on the board's base power and on the load; benchmarks/power.py has that for three boards.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edge_rt import config
from edge_rt.bench.samples import quantile
from edge_rt.catalog.store import Store
from edge_rt.power import calibration
from tests.plants.board import POLICIES
from tests.plants.boards import PROFILES
from tests.plants.fuse_board import FuseBoard, why_not
from tests.plants.inference import MODEL, VARIANT, Run, loop
from tests.plants.powerd_process import Powerd

PROFILE = "pi_5"
GOVERNORS = ("performance", "schedutil", "best fixed", "powerd")
N_TOKENS = 128
MEAN_GAP_S = 1.2
METER_PERCENT = 2.0
MOST = {"performance": 0.95, "best fixed": 1.05}  # of powerd's J/token over each
MORE_MISSES = 0.05
TTFT_FACTOR, TPOT_FACTOR = 2.0, 1.5  # what is wanted, times what performance gives in the sweep


def sweep(store: Path, n_requests: int) -> list[Run]:
    """Hold each clock under a steady stream of requests."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="ert-") as name, loop(PROFILE, Path(name), store) as found:
        print(f"the worker's speed is held by: {found.quota}", file=sys.stderr)
        for hz, _ in PROFILES[PROFILE].clocks[0].points:
            found.set_governor("performance", round(hz / 1e3))
            found.run("warm-up", [0.0], seed=0, max_tokens=8, is_closed=True)
            run = found.run(f"{hz * 1e-9:.1f} GHz", [0.0] * n_requests, seed=1, max_tokens=N_TOKENS, is_closed=True)
            runs.append(run)
            say(run)
    return runs


def trace(
    store: Path, governor: str, gaps_s: Sequence[float], seed: int, cheapest_hz: float, settings: dict[str, Any]
) -> Run:
    """Run one trace under one governor."""
    with tempfile.TemporaryDirectory(prefix="ert-") as name, ExitStack() as stack:
        directory = Path(name)

        def begin(board: FuseBoard) -> None:
            kind = "performance" if governor == "performance" else "schedutil"
            board.write(f"{POLICIES}/policy0/scaling_governor", kind)
            if governor == "best fixed":
                board.write(f"{POLICIES}/policy0/scaling_max_freq", str(round(cheapest_hz / 1e3)))
            if governor == "powerd":
                powerd.append(stack.enter_context(Powerd(board.root, directory, **settings)))

        powerd: list[Powerd] = []
        found = stack.enter_context(loop(PROFILE, directory, store, begin))
        found.run("warm-up", [0.0], seed=0, max_tokens=8, is_closed=True)
        if powerd:
            powerd[0].until(lambda status: status["work"] is not None)
        run = found.run(governor, gaps_s, seed=seed, max_tokens=N_TOKENS, is_closed=False)
        say(run)
        return run


def calibrate(runs: Sequence[Run], idle_w: float, file: Path) -> None:
    """Write what the sweep has found in the form that powerd reads."""
    points = []
    for run, (hz, _) in zip(runs, PROFILES[PROFILE].clocks[0].points, strict=True):
        prefill = [answer.ttft_s / answer.n_prompt for answer in run.answers]
        power_w = run.board_j / run.span_s
        points.append(
            calibration.Point(
                max_hz=hz,
                prefill_s_per_token=quantile(prefill, 0.5),
                decode_s_per_token=quantile([answer.tpot_s for answer in run.answers], 0.5),
                prefill_w=power_w,
                decode_w=power_w,
            )
        )
    found = calibration.Calibration(
        board=PROFILES[PROFILE].name,
        made_at="2026-11-30T00:00:00Z",
        boundary="board",
        quality="modelled",
        idle_w=idle_w,
        domains=(calibration.CalibratedDomain(name="policy0", points=tuple(points)),),
        model=f"{MODEL}:{VARIANT}",
        meter="tests/plants",
    )
    calibration.write(file, found)


def idle_w() -> float:
    """Give what the board takes with nothing to do, at its lowest clock."""
    profile = PROFILES[PROFILE]
    return profile.base_w + profile.static_w


def cheapest_of(runs: Sequence[Run]) -> int:
    return min(range(len(runs)), key=lambda at: runs[at].board_j_per_token)


def say(run: Run) -> None:
    print(f"{run.name}: {run.tokens_hz:.1f} t/s, {run.board_j_per_token:.4f} J/token", file=sys.stderr, flush=True)


def misses(runs: Sequence[Run], slo_s: float) -> float:
    late = [answer.ttft_s > slo_s for run in runs for answer in run.answers]
    return sum(late) / len(late)


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    head = ["modelled watts, real inference", "t/s", "ttft p50 ms", "ttft p95 ms", "tpot p50 ms", "mean GHz"]
    rows = [[*head, "board W", "board J/token", "chip J/token", "meter off by %"]]
    for run in runs:
        ttft = [answer.ttft_s * 1e3 for answer in run.answers]
        tpot = [answer.tpot_s * 1e3 for answer in run.answers]
        rows.append(
            [
                run.name,
                f"{run.tokens_hz:.1f}",
                f"{quantile(ttft, 0.5):.0f}",
                f"{quantile(ttft, 0.95):.0f}",
                f"{quantile(tpot, 0.5):.1f}",
                f"{run.mean_hz * 1e-9:.2f}",
                f"{run.board_j / run.span_s:.2f}",
                f"{run.board_j_per_token:.4f}",
                f"{run.soc_j_per_token:.4f}",
                f"{100 * run.meter_error:.2f}",
            ]
        )
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only-sweep", action="store_true", help="hold each clock, compare no governors")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=add_options)
    if reason := why_not():
        sys.exit(f"no board can be mounted here: {reason}")
    store = Store.open(config.load().config.catalog).root
    held = sweep(store, arguments.pairs(8, quick=3))
    print(harness.draw(rows_of(held), n_names=1))
    cheapest = cheapest_of(held)
    figures = [
        harness.Figure(
            name="meter's joules against the model's",
            unit="%",
            samples=tuple(100 * run.meter_error for run in held),
            at_most=METER_PERCENT,
        ),
        harness.Figure(
            name="steps of the cheapest clock from the middle",
            unit="points",
            samples=(abs(cheapest - (len(held) - 1) / 2),),
            at_most=(len(held) - 1) / 2 - 1,
        ),
    ]
    runs: list[Run] = []
    if not arguments.own.only_sweep:
        runs = compare(arguments, store, held, figures)
    harness.finish(
        arguments,
        extra={"sweep": [asdict(run) for run in held], "runs": [asdict(run) for run in runs]},
        figures=figures,
    )


def compare(arguments: harness.Arguments, store: Path, held: Sequence[Run], figures: list[harness.Figure]) -> list[Run]:
    """Run traces under all governors in turns; add what comes of it to the figures."""
    top, cheapest_hz = held[-1], PROFILES[PROFILE].clocks[0].points[cheapest_of(held)][0]
    ttft_slo_s = TTFT_FACTOR * quantile([answer.ttft_s for answer in top.answers], 0.5)
    tpot_slo_s = TPOT_FACTOR * quantile([answer.tpot_s for answer in top.answers], 0.5)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="ert-") as name:
        file = Path(name) / "power.json"
        calibrate(held, idle_w(), file)
        settings = {"model_file": str(file), "ttft_slo_s": ttft_slo_s, "tpot_slo_s": tpot_slo_s}
        for seed in range(arguments.pairs(5, quick=1)):
            rng = random.Random(seed)
            gaps_s = [rng.expovariate(1.0 / MEAN_GAP_S) for _ in range(arguments.pairs(16, quick=6))]
            turns = GOVERNORS if seed % 2 == 0 else GOVERNORS[::-1]
            runs += [trace(store, governor, gaps_s, seed, cheapest_hz, settings) for governor in turns]
    by = {governor: [run for run in runs if run.name == governor] for governor in GOVERNORS}
    for governor in GOVERNORS:
        print(f"\n{governor}: begins later than {ttft_slo_s * 1e3:.0f} ms: {misses(by[governor], ttft_slo_s):.0%}")
        print(harness.draw(rows_of(by[governor]), n_names=1))
    for rival, most in MOST.items():
        pairs = zip(by["powerd"], by[rival], strict=True)
        figures.append(
            harness.Figure(
                name=f"powerd's J/token over that of {rival}, board",
                unit="",
                samples=tuple(a.board_j_per_token / b.board_j_per_token for a, b in pairs),
                at_most=most,
            )
        )
    more = misses(by["powerd"], ttft_slo_s) - misses(by["performance"], ttft_slo_s)
    figures.append(
        harness.Figure(
            name="more late first tokens than performance", unit="share", samples=(more,), at_most=MORE_MISSES
        )
    )
    return runs


if __name__ == "__main__":
    main()
