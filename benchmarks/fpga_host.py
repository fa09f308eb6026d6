"""What the CPU adds to each product and token on the FPGA's engine: microseconds on this machine, without an engine.

    python benchmarks/fpga_host.py [--quick] [--check] [--json FILE]

The engine is a port that answers at once, with right results in its memory, so that the host is left: vectors rounded
and laid out, a chain of descriptors, the start, results turned into products and held to their total. Measured in turns
for the shapes of SmolLM2-135M's matrices, one vector: in C, and its rival in numpy. A third figure is the rest of a
token's step, the native engine's norms, RoPE and attention after 100 tokens, with products that are zeros. A board's
cores are several times slower than a server's; the engine's time is what the cycle model says, projected.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import numpy as np
from quality import stored

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.fpga_cycles import Engine, Memory, job_cycles
from edge_rt.backends.fpga_host import Host, NativeHost, NumpyHost
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_llama import GgufMatrices
from edge_rt.backends.fpga_products import FpgaProducts, place
from edge_rt.backends.native import NativeSession
from edge_rt.backends.native_config import read_config
from edge_rt.backends.native_library import load_native
from edge_rt.devices import cpu
from edge_rt.devices import fpga_regs as regs
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort

_CONFIG = CONFIGS["kv260-gemm"]
_CLOCK_HZ, _MEMORY_BYTES_S = 300e6, 19.2e9
_N_PAST = 100
_US = 1e6


@dataclass(slots=True)
class InstantPort(GoldenPort):
    """The golden model until is_instant; from then on the last results stand for all."""

    is_instant: bool = field(default=False)

    def flush(self, at: int, n_bytes: int) -> None:
        if not self.is_instant:
            GoldenPort.flush(self, at, n_bytes)

    def invalidate(self, at: int, n_bytes: int) -> None:
        if not self.is_instant:
            GoldenPort.invalidate(self, at, n_bytes)

    def wait(self, limit_s: float) -> bool:
        if not self.is_instant:
            return GoldenPort.wait(self, limit_s)
        self._registers[regs.HEAD] = self._registers[regs.TAIL]
        self._registers[regs.IRQ_STATUS] = 1
        return True


def timed(call: Callable[[], object], n: int) -> float:
    """Give the median of n calls, in seconds."""
    samples = []
    for _ in range(n):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return float(np.median(samples))


def products_s(matrices: GgufMatrices, host: Host, n: int) -> dict[str, float]:
    """Measure a layer's four products and the output's, one vector each."""
    found = {}
    for name in ("blk.0.attn_qkv", "blk.0.attn_output", "blk.0.ffn_gate_up", "blk.0.ffn_down", "output"):
        some = {name: matrices[name]}
        placement = place(some, Layout(_CONFIG.beat_bits), _CONFIG.n_vectors)
        port = InstantPort(_CONFIG, np.zeros(placement.memory_bytes, np.uint8))
        products = FpgaProducts(port, placement, some, host=host)
        x = np.random.default_rng(1).standard_normal((1, some[name].k)).astype(np.float32)
        products.multiply(name, x)
        port.is_instant = True
        found[name] = timed(lambda products=products, name=name, x=x: products.multiply(name, x), n)
    return found


def token_s(products: dict[str, float], n_layers: int) -> float:
    return sum(seconds * (1 if name == "output" else n_layers) for name, seconds in products.items())


def engine_s(matrices: GgufMatrices) -> float:
    """Project the engine's time of a token: the cycle model at the board's clock."""
    engine = Engine(_CONFIG.beat_bits, _CONFIG.n_ports, _CONFIG.n_vectors)
    memory = Memory(80, _MEMORY_BYTES_S / _CLOCK_HZ)
    cycles = sum(
        job_cycles(
            engine, memory, n_rows=piece.weights.n_rows, k=matrix.k, n_vectors=1, group_log2=piece.weights.group_log2
        )
        for matrix in matrices.values()
        for piece in matrix.pieces
    )
    return cycles / _CLOCK_HZ


def rest_s(file: ModelFile, n: int) -> float:
    """Measure a step of one token without its products, after some others."""
    rows = {name: matrix.n_rows for name, matrix in GgufMatrices(file).items()}
    session = NativeSession(
        load_native(),
        file,
        file.header,
        read_config(file.model, str(file.path), file.header),
        LoadOptions(n_ctx=512, n_seq_max=1, n_batch=128, n_threads=1),
        cpu.usable(),
        multiply=lambda name, x: np.zeros((len(x), rows[name]), np.float32),
    )
    session.decode([SeqRows(0, 0, [1] * _N_PAST, False)])

    def step() -> None:
        session.decode([SeqRows(0, _N_PAST, [1], True)])
        session.seq_trim(0, _N_PAST)

    found = timed(step, n)
    session.close()
    return found


def main() -> None:
    arguments = harness.parse(__doc__)
    path = stored(["q4_1"])["q4_1"]
    file = ModelFile(model=path.stem, variant="", path=path, quant="")
    matrices = GgufMatrices(file)
    n, n_rounds = (50, 2) if arguments.quick else (300, 5)
    n_layers = file.header.n_layers
    in_c: list[float] = []
    in_numpy: list[float] = []
    rest: list[float] = []
    for _ in range(n_rounds):
        in_c.append(token_s(products_s(matrices, NativeHost(load_native()), n), n_layers))
        in_numpy.append(token_s(products_s(matrices, NumpyHost(), n), n_layers))
        rest.append(rest_s(file, n // 2))
    engine = engine_s(matrices)
    n_products = 4 * n_layers + 1
    shown = [
        ["", "ms a token", "us a product"],
        ["products, in C", f"{np.median(in_c) * 1e3:.2f}", f"{np.median(in_c) / n_products * _US:.1f}"],
        ["products, in numpy", f"{np.median(in_numpy) * 1e3:.2f}", f"{np.median(in_numpy) / n_products * _US:.1f}"],
        ["the rest of a step", f"{np.median(rest) * 1e3:.2f}", ""],
        ["the engine of a KV260, projected", f"{engine * 1e3:.2f}", f"{engine / n_products * _US:.1f}"],
    ]
    print(harness.draw(shown, n_names=1), end="\n\n")
    total = float(np.median(in_c) + np.median(rest) + engine)
    print(f"projected with this machine's cores: {1 / total:.0f} t/s, of {1 / engine:.0f} by the engine alone\n")
    share = [c / numpy for c, numpy in zip(in_c, in_numpy, strict=True)]
    harness.finish(
        arguments,
        figures=[harness.Figure(name="host's part in C by that in numpy", unit="", samples=tuple(share), at_most=0.4)],
    )


if __name__ == "__main__":
    main()
