"""SIMULATED: run a language model with every matrix on the INT4 engine's RTL, and hold it to the golden model.

    python benchmarks/fpga_llm.py [--file GGUF] [--prompt TEXT] [--tokens N] [--config NAME] [--quick] [--check]

All linear layers of every token, the output's as two INT4 matrices among them, run through the RTL (Verilator) with one
start of the ring per product; the rest runs in numpy. Three things must hold: every sum is bit for bit what the golden
model makes of the bytes the descriptors point at; the tokens are those of the same model on the golden model alone;
the engine's cycles per token are within 2 % of edge_rt/backends/fpga_cycles.py. Projected tokens per second are at the
board's clock: no board ran, and the CPU's part and the starts are not in them. Some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import numpy as np
from quality import stored

from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.fpga_cycles import Engine, Memory, job_cycles
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_llama import FpgaLlama, read_llama
from edge_rt.backends.fpga_numbers import GROUP
from edge_rt.backends.fpga_products import FpgaProducts, Placement, place
from edge_rt.backends.llama_math import KvCache, LlamaMath
from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job
from hw.fpga.sim.build import CONFIGS, build
from hw.fpga.sim.engine import RtlEngine, Setting
from hw.fpga.sim.port import CheckedPort, GoldenPort

_N_CTX = 256
_LATENCY_CYCLES = 80


@dataclass(frozen=True, slots=True)
class Board:
    """A board's clock and memory, as its papers say; the configuration that its memory can feed."""

    name: str
    config: str
    clock_hz: float
    memory_bytes_s: float

    def memory(self) -> Memory:
        return Memory(_LATENCY_CYCLES, self.memory_bytes_s / self.clock_hz)


BOARDS = (Board("PYNQ-Z2", "z2-gemm", 1e9 / 7, 2.1e9), Board("KV260", "kv260-gemm", 300e6, 19.2e9))


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass on the RTL: its tokens, and the engine's cycles, counted and modelled."""

    n_tokens: int
    cycles: int
    modelled: float


def modelled_cycles(jobs: Sequence[Job], config: str, memory: Memory) -> float:
    built = CONFIGS[config]
    engine = Engine(built.beat_bits, built.n_ports, built.n_vectors)
    return sum(
        job_cycles(
            engine,
            memory,
            n_rows=job.n_blocks << job.block_log2,
            k=job.n_groups * GROUP,
            n_vectors=job.n_vectors,
            group_log2=job.group_log2,
            block_rows=1 << job.block_log2,
        )
        for job in jobs
    )


def generate(model: LlamaMath, kv: KvCache, prompt: Sequence[int], n_tokens: int) -> list[int]:
    """Decode greedily; one forward pass a token."""
    ids: list[int] = []
    todo = list(prompt)
    while len(ids) < n_tokens:
        todo = [int(model.forward(todo, kv)[0].argmax())]
        ids += todo
    return ids


def run_rtl(
    llama: FpgaLlama, placement: Placement, config: str, prompt: Sequence[int], n_tokens: int
) -> tuple[list[int], list[Step], CheckedPort]:
    board = next((b for b in BOARDS if b.config == config), BOARDS[1])
    engine = RtlEngine.open(build(CONFIGS[config]), placement.memory_bytes)
    engine.set(Setting.LATENCY_CYCLES, _LATENCY_CYCLES)
    engine.set(Setting.MILLI_BYTES_PER_CYCLE, round(1000 * board.memory_bytes_s / board.clock_hz))
    port = CheckedPort(engine, layout=placement.layout)
    products = FpgaProducts(port, placement, llama.matrices)
    model, kv = llama.with_linear(products.multiply), KvCache.of(llama.config, _N_CTX)
    ids: list[int] = []
    steps: list[Step] = []
    todo, cycles = list(prompt), engine.read64(regs.CYCLES_LO)
    while len(ids) < n_tokens:
        port.jobs.clear()
        n_fed = len(todo)
        todo = [int(model.forward(todo, kv)[0].argmax())]
        ids += todo
        now = engine.read64(regs.CYCLES_LO)
        steps.append(Step(n_fed, now - cycles, modelled_cycles(port.jobs, config, board.memory())))
        cycles = now
        line = f"{len(ids)}/{n_tokens}: {steps[-1].cycles:,} cycles, {port.n_wrong} of {port.n_sums:,} sums wrong, "
        print(f"{line}{cycles / port.rtl_s / 1000:.0f} kHz simulated", file=sys.stderr, flush=True)
    engine.close()
    return ids, steps, port


def projections(llama: FpgaLlama, measured: Step, config: str) -> list[list[str]]:
    """Say what a token's cycles are at a board's clock, beside the time its bytes take of the whole bandwidth."""
    rows = []
    for board in BOARDS:
        layout = Layout(CONFIGS[board.config].beat_bits)
        placement = place(llama.matrices, layout, CONFIGS[board.config].n_vectors)
        jobs = [
            Job(0, 0, 0, spot.n_blocks, matrix.k // GROUP, 1, spot.group_log2, 2, spot.asymmetric)
            for matrix in placement.matrices.values()
            for spot in matrix.spots
        ]
        weights = sum(layout.weight_bytes(j.n_blocks << j.block_log2, j.n_groups * GROUP, j.group_log2) for j in jobs)
        is_measured = board.config == config
        cycles = measured.cycles if is_measured else modelled_cycles(jobs, board.config, board.memory())
        bound = board.memory_bytes_s / weights
        rows.append(
            [
                board.name,
                board.config,
                f"{cycles:,.0f}",
                "RTL" if is_measured else "cycle model",
                f"{weights / 1e6:.1f}",
                f"{board.clock_hz / cycles:.1f}",
                f"{bound:.1f}",
                f"{board.clock_hz / cycles / bound:.3f}",
            ]
        )
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, metavar="GGUF", help="this model instead of the default one in Q4_1")
    parser.add_argument("--prompt", default="The three primary colours are", metavar="TEXT", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="to generate (%(default)s)")
    parser.add_argument("--config", default="kv260-gemm", choices=list(CONFIGS), help="of the RTL (%(default)s)")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=add_options)
    own = arguments.own
    path = own.file or stored(["q4_1"])["q4_1"]
    file = ModelFile(model=path.stem, variant="", path=path, quant="")
    n_tokens = 2 if arguments.quick else own.tokens
    tokenizer = registry.get("native").load(file, LoadOptions(n_ctx=_N_CTX, n_seq_max=1, n_batch=64, n_ubatch=64))
    prompt = tokenizer.tokenize(own.prompt, special=False)
    llama, config = read_llama(file), CONFIGS[own.config]
    placement = place(llama.matrices, Layout(config.beat_bits), config.n_vectors)

    golden = GoldenPort(config, np.zeros(placement.memory_bytes, np.uint8))
    model = llama.with_linear(FpgaProducts(golden, placement, llama.matrices).multiply)
    wanted = generate(model, KvCache.of(llama.config, _N_CTX), prompt, n_tokens)
    del model, golden
    ids, steps, port = run_rtl(llama, placement, own.config, prompt, n_tokens)

    text = b"".join(tokenizer.piece(i) for i in ids).decode("utf-8", "replace")
    print(f"SIMULATED: {own.config}, {path.name}, {len(prompt)} + {n_tokens} tokens: {own.prompt!r} {text!r}\n")
    header = [
        "board",
        "configuration",
        "cycles a token",
        "from",
        "MB a token",
        "projected t/s",
        "bandwidth's bound",
        "share",
    ]
    print(harness.draw([header, *projections(llama, steps[-1], own.config)], n_names=2), end="\n\n")
    print(f"{port.n_sums:,} sums compared; engine memory {placement.memory_bytes / 1e6:.1f} MB", end="\n\n")
    n_other = sum(a != b for a, b in zip(ids, wanted, strict=True))
    off = max(100 * abs(step.modelled / step.cycles - 1) for step in steps)
    harness.finish(
        arguments,
        figures=[
            harness.Figure(name="tokens other than the golden model's", unit="", samples=(n_other,), at_most=0.0),
            harness.Figure(name="sums other than the golden model's", unit="", samples=(port.n_wrong,), at_most=0.0),
            harness.Figure(
                name="cycle model's distance from the RTL, worst step", unit="%", samples=(off,), at_most=2.0
            ),
        ],
    )


if __name__ == "__main__":
    main()
