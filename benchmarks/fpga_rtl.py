"""SIMULATED: how much of a modelled memory's rate the FPGA engine's RTL spends on weights and scales.

    python benchmarks/fpga_rtl.py [--quick] [--check] [--json FILE]

Rows of 2,048 weights in groups of 32, 80 cycles of latency, 8 bursts under way, a fair and a fixed arbiter: the share
lost, at most 2 and 3 %. Eight vectors in at most 1.05 x the cycles of one. The four products of a layer 2,048 wide with
one start: cycles in which no port received a weight, at most 3 %. Every result must be the golden model's, bit for bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness

from edge_rt.devices import fpga_regs as regs
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.engine import Setting
from hw.fpga.sim.rig import Rig
from hw.fpga.sim.ring import submit

_K = 2048
_LATENCY_CYCLES = 80
# configuration, rows, and bytes per cycle: 19.2 GB/s at 300 MHz, 2.1 GB/s at 142.857 MHz
_CASES = (("kv260-gemv", 2048, 64), ("z2-gemv", 1024, 14.7), ("kv260-gemm", 2048, 64), ("z2-gemm", 1024, 14.7))
_LAYER = ((3072, _K), (_K, _K), (11264, _K), (_K, 5632))


def run(name: str, shapes: tuple[tuple[int, int], ...], n_vectors: int, rate: float, *, fixed: bool) -> tuple[int, int]:
    """Give the busy cycles of one chain, and those in which no weight came. Exits where a result is wrong."""
    rig = Rig.random(name, shapes, n_vectors)
    engine = rig.engine
    engine.set(Setting.LATENCY_CYCLES, _LATENCY_CYCLES)
    engine.set(Setting.MILLI_BYTES_PER_CYCLE, round(1000 * rate))
    engine.set(Setting.FIXED_ARBITER, int(fixed))
    submit(engine, 0, rig.jobs)
    engine.run(50_000_000)
    if not all(rig.matches()):
        sys.exit(f"{name}, {n_vectors} vectors: a result is not the golden model's")
    found = engine.read64(regs.CYCLES_LO), engine.read64(regs.GAP_LO)
    engine.close()
    return found


def main() -> None:
    arguments = harness.parse(__doc__)
    figures = []

    def add(name: str, unit: str, value: float, at_most: float) -> None:
        figures.append(harness.Figure(name=name, unit=unit, samples=(value,), at_most=at_most))

    for name, n_rows, rate in _CASES[:2] if arguments.quick else _CASES:
        for fixed in (False, True):
            arbiter = "fixed" if fixed else "fair"
            cycles, _ = run(name, ((n_rows, _K),), 1, rate, fixed=fixed)
            lost = 100 * (1 - n_rows * _K * 4.5 / 8 / rate / cycles)
            add(f"{name}, {arbiter} arbiter: rate not spent on weights", "%", lost, 3 if fixed else 2)
            if CONFIGS[name].n_vectors == 8:
                eight, _ = run(name, ((n_rows, _K),), 8, rate, fixed=fixed)
                add(f"{name}, {arbiter} arbiter: 8 vectors by 1", "x cycles", eight / cycles, 1.05)
    for name, _, rate in _CASES[:1] if arguments.quick else _CASES[:2]:
        cycles, gaps = run(name, _LAYER, 1, rate, fixed=False)
        add(f"{name}, a layer in one chain: cycles without weights", "%", 100 * gaps / cycles, 3)
    print("SIMULATED: Verilator on a modelled memory without refresh and banks; no figure is a board's", end="\n\n")
    harness.finish(arguments, figures=figures)


if __name__ == "__main__":
    main()
