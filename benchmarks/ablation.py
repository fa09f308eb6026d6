"""MODELLED joules of one request, by what saves them: 4-bit weights, pruning, the answer cache, the clock policy.

    python benchmarks/ablation.py [--quick] [--check] [--json FILE]

One table on one plant: every factor alone and together, on the three boards of tests/plants. Watts are modelled; what a
factor does to the work is measured where edge_rt can be measured here:

- 4-bit weights (Q4_1) and pruning: CPU-seconds per token of the native engine on this machine, one thread, on models of
  random weights that no cache holds; F16 and unpruned is 1. Pruned: 18 of 24 layers, 3,072 of 4,096 columns in the
  feed-forward. That pruned weights answer as well is not shown here: it takes training.
- The cache: the share of requests that benchmarks/cache_semantic.py found answered from it on the QQP stream at 1.4 %
  wrong ones, 19.5 %; those cost nothing here. Another traffic has another share.
- The clock: edge_rt's decide() against the governor performance, in plant A.

The boards' work is that of 4-bit weights; the others' is scaled from it. 0.03 requests/s, which boards bear with F16
too. Bars are the claims the project began with: the clock saves 30 % of the chip's joules (with 4-bit weights: F16 has
no time to lose), the other three together 70 % above idling; no board takes 50 W; 95 of 100 answers come within 100 ms
a token with everything on.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bare
import harness
import synthetic
from subjects import fresh_prompt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import power

from tests.plants import board_model, simulator, traces
from tests.plants.board_model import Board
from tests.plants.governors import Fixed
from tests.plants.simulator import Result
from tests.plants.traces import Trace

FACTORS = ("4 bit", "pruned", "cache", "clock")
HIT_SHARE = 0.195  # docs/cache.md
_RATE_HZ = 0.03
_WHOLE = synthetic.Shape(name="0.4b", n_layers=24, n_embd=1024, n_heads=16, n_kv_heads=4, n_ff=4096, n_vocab=32_000)
_PRUNED = replace(_WHOLE, name="0.4b-pruned", n_layers=18, n_ff=3072)
_PROMPT, _TOKENS = 128, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU-seconds per token."""

    prefill_s: float
    decode_s: float


def measure(shape: synthetic.Shape, form: str, folder: Path, n_runs: int) -> Cost:
    """Measure the native engine on one thread; the least of n_runs, for neighbours only make it more."""
    path = folder / f"{shape.name}.{form}.gguf"
    synthetic.write(path, shape, form, progress=lambda _: None)
    try:
        model = bare.BareNative(path, 1, n_ctx=512, n_seqs=bare.N_STREAMS, n_ubatch=bare.N_BATCH, flash=-1)
        prefill, decode = [], []
        for _ in range(n_runs):
            prompt = fresh_prompt(_PROMPT, 30_000)
            begun_s = time.process_time()
            model.prefill_tps(prompt)
            prefill.append((time.process_time() - begun_s) / _PROMPT)
            begun_s = time.process_time()
            model.decode_tps(prompt[:1], _TOKENS)
            decode.append((time.process_time() - begun_s) / (_TOKENS + 1))
        return Cost(prefill_s=min(prefill), decode_s=min(decode))
    finally:
        path.unlink()


def scaled(board: Board, prefill: float, decode: float) -> Board:
    """Give the board with so many times the work of its own per token."""
    work = board.work
    return replace(
        board,
        work=replace(
            work,
            decode_stall_s=work.decode_stall_s * decode,
            decode_row_stall_s=work.decode_row_stall_s * decode,
            decode_row_s=work.decode_row_s * decode,
            prefill_row_stall_s=work.prefill_row_stall_s * prefill,
            prefill_row_s=work.prefill_row_s * prefill,
        ),
    )


def without_hits(trace: Trace, seed: int) -> Trace:
    """Take out what the cache answers; which requests those are is the same for everybody."""
    rng = random.Random(f"hits {seed}")
    return replace(trace, requests=tuple(one for one in trace.requests if rng.random() >= HIT_SHARE))


@dataclass(kw_only=True)
class Row:
    """One combination of factors on one board, over all seeds; joules per request, hits included."""

    factors: tuple[str, ...]
    soc_j: float
    above_idle_j: float
    board_j: float
    peak_w: float
    tpot_p95_s: float

    @property
    def name(self) -> str:
        return " + ".join(self.factors) or "none: F16, performance"


def row(
    board: Board, factors: tuple[str, ...], costs: dict[tuple[str, bool], Cost], n_seeds: int, span_s: float
) -> Row:
    """Play all seeds with these factors."""
    base = costs["q4_1", False]
    cost = costs["q4_1" if "4 bit" in factors else "f16", "pruned" in factors]
    played = scaled(board, cost.prefill_s / base.prefill_s, cost.decode_s / base.decode_s)
    results: list[Result] = []
    n_requests = 0
    for seed in range(n_seeds):
        trace = traces.poisson(seed, rate_hz=_RATE_HZ, span_s=span_s)
        n_requests += len(trace.requests)
        if "cache" in factors:
            trace = without_hits(trace, seed)
        if "clock" in factors:
            results.append(power.ours(played, trace, seed=seed))
        else:
            results.append(simulator.run(played, trace, Fixed(board.top), name="performance"))
    # As much as the machine takes when nobody asks, at the lowest clock: what no factor can save.
    nobody = traces.Trace(name="nobody", span_s=span_s, requests=())
    idle_j = simulator.run(board, nobody, Fixed(0), name="idle").soc_j
    tpot = sorted(s for result in results for s in result.tpot_s)
    return Row(
        factors=factors,
        soc_j=sum(result.soc_j for result in results) / n_requests,
        above_idle_j=sum(result.soc_j - idle_j for result in results) / n_requests,
        board_j=sum(result.board_j for result in results) / n_requests,
        peak_w=max(result.peak_board_w for result in results),
        tpot_p95_s=tpot[int(0.95 * len(tpot))],
    )


def combinations() -> list[tuple[str, ...]]:
    """List the factors alone, the clock where there is time to lose, the three of the work together, and all."""
    return [(), *((factor,) for factor in FACTORS), ("4 bit", "clock"), FACTORS[:3], FACTORS]


def table(board: Board, rows: Sequence[Row]) -> str:
    """Draw what each combination takes, relative to none."""
    first = rows[0]
    head = ["board", "factors", "SoC J above idle", "", "SoC J", "", "board J", "", "board's peak W", "tpot p95"]
    lines = [head]
    for one in rows:
        cells = [board.name, one.name]
        for of in ("above_idle_j", "soc_j", "board_j"):
            value, whole = getattr(one, of), getattr(first, of)
            cells += [f"{value:.2f}", f"{100 * (value / whole - 1):+.0f} %"]
        lines.append([*cells, f"{one.peak_w:.1f}", f"{1000 * one.tpot_p95_s:.0f} ms"])
    return harness.draw(lines, n_names=2)


def main() -> None:
    arguments = harness.parse(__doc__)
    n_seeds = arguments.pairs(10, quick=2)
    span_s = 1000.0 if not arguments.quick else 250.0
    costs: dict[tuple[str, bool], Cost] = {}
    with tempfile.TemporaryDirectory(prefix="edge_rt-ablation-") as folder:
        for form, is_pruned in itertools.product(("q4_1", "f16"), (False, True)):
            shape = _PRUNED if is_pruned else _WHOLE
            costs[form, is_pruned] = measure(shape, form, Path(folder), arguments.pairs(5, quick=2))
    base = costs["f16", False]
    print("measured: CPU-seconds per token on one thread here, relative to F16, unpruned")
    lines = [["weights", "pruned", "prefill", "decode"]]
    for (form, is_pruned), cost in costs.items():
        ratios = [f"{cost.prefill_s / base.prefill_s:.3f}", f"{cost.decode_s / base.decode_s:.3f}"]
        lines.append([form, "yes" if is_pruned else "no", *ratios])
    print(harness.draw(lines, n_names=2) + "\n")
    print("modelled (plant A): joules per request; 19.5 % of cache hits as measured on the QQP stream\n")
    figures = []
    record = {}
    for name in board_model.NAMES:
        board = board_model.load(name)
        rows = [row(board, factors, costs, n_seeds, span_s) for factors in combinations()]
        print(table(board, rows) + "\n")
        record[board.name] = [one.__dict__ for one in rows]
        by_name = {one.factors: one for one in rows}
        clock = by_name["4 bit", "clock"].soc_j / by_name["4 bit",].soc_j
        work = by_name[FACTORS[:3]].above_idle_j / rows[0].above_idle_j
        last = by_name[FACTORS]
        for what, unit, value, at_most in (
            ("SoC J with the clock ÷ without, 4 bit", "ratio", clock, 0.7),
            ("4 bit + pruned + cache, SoC J above idle", "ratio", work, 0.3),
            ("the board's peak power with everything", "W", last.peak_w, 50.0),
            ("time per token, p95, with everything", "s", last.tpot_p95_s, 0.1),
        ):
            figures.append(
                harness.Figure(name=f"modelled: {board.name}: {what}", unit=unit, samples=(value,), at_most=at_most)
            )
    harness.finish(arguments, figures=figures, extra={"boundary": "modelled (plant A)", "rows": record})


if __name__ == "__main__":
    main()
