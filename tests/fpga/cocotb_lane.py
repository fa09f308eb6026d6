"""Run by Icarus through cocotb: one lane alone, with random gaps in what it is given and waits in what is taken."""

import os

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge

from edge_rt.backends.fpga_layout import Layout, pack_activations, pack_weights
from edge_rt.backends.fpga_numbers import encode_activations, encode_weights
from hw.fpga.model.golden import multiply

BEAT = int(os.environ["LANE_BEAT"])
N_VEC = int(os.environ["LANE_N_VEC"])
LOADERS = 2
X_DEPTH = 64
SUM_BITS = 52
INPUTS = (
    "clear", "x_ready", "n_groups", "group_log2", "block_log2", "asymmetric", "block_push", "block_row", "beat_push",
    "beat_data", "x_write", "record_write", "load_vec", "load_index", "load_data", "result_pop",
)  # fmt: skip


def beats(data):
    return [int.from_bytes(data[i : i + BEAT // 8].tobytes(), "little") for i in range(0, len(data), BEAT // 8)]


async def load(dut, x, layout):
    """Write the vectors as the ports' loaders do: vector v by loader v % LOADERS."""
    k = x.q.shape[1]
    vec_bits = N_VEC.bit_length()
    index_bits = X_DEPTH.bit_length()
    images = pack_activations(x, layout).reshape(len(x.q), -1)
    n_record_bytes = -(-(k // 32 * 4) // (BEAT // 8)) * (BEAT // 8)
    for v, image in enumerate(images):
        loader = v % LOADERS
        for part, span in ((dut.x_write, image[:k]), (dut.record_write, image[k : k + n_record_bytes])):
            for index, beat in enumerate(beats(span)):
                part.value = 1 << loader
                dut.load_vec.value = v << vec_bits * loader
                dut.load_index.value = index << index_bits * loader
                dut.load_data.value = beat << BEAT * loader
                await FallingEdge(dut.clk)
            part.value = 0


async def compute(dut, random, seed):
    group_log2, asymmetric = int(random.integers(3)), bool(random.integers(2))
    block_rows = int(random.choice([4, 8, 16]))
    unit = 32 << group_log2
    k = unit * int(random.integers(1, min(X_DEPTH * BEAT // 4, 512) // unit + 1))
    # All vectors: one never loaded is X here, where a chip has some number, and spoils its neighbour's product.
    n, m = int(random.integers(1, 20)), N_VEC
    layout = Layout(BEAT, block_rows)
    shape = (n, k // unit)
    zero = random.uniform(-8, 7.96, shape) if asymmetric else None
    q = random.integers(-8, 8, (n, k)).astype(np.int8)
    weights = encode_weights(q, random.uniform(0.01, 1, shape), zero, group_log2)
    x = encode_activations(random.standard_normal((m, k)) * np.exp(random.standard_normal((m, 1)) * 3))
    wanted = multiply(weights, x)
    stream = beats(pack_weights(weights, layout))
    rows = list(range(0, layout.n_blocks(n) * block_rows, block_rows))

    dut.x_ready.value = 0
    dut.n_groups.value = k // 32
    dut.group_log2.value = group_log2
    dut.block_log2.value = block_rows.bit_length() - 1
    dut.asymmetric.value = int(asymmetric)
    await load(dut, x, layout)
    dut.x_ready.value = 1

    gap, wait = random.choice([0.0, 0.3, 0.9], 2)
    n_results, waiting = 0, 0
    for _ in range(200 * (len(stream) + 100)):
        if n_results == layout.n_blocks(n) * block_rows:
            break
        dut.block_push.value = push = int(bool(rows) and not dut.block_full.value and random.random() >= gap)
        if push:
            dut.block_row.value = rows.pop(0)
        dut.beat_push.value = give = int(bool(stream) and waiting < 400 and random.random() >= gap)
        if give:
            dut.beat_data.value = stream.pop(0)
        take = int(dut.result_valid.value) and random.random() >= wait
        dut.result_pop.value = int(take)
        if take:
            row, sums = int(dut.result_row.value), int(dut.result_sums.value)
            for v in range(m if row < n else 0):
                found = sums >> SUM_BITS * v & (1 << SUM_BITS) - 1
                found -= (found >> SUM_BITS - 1) << SUM_BITS
                assert found == wanted[row, v], f"seed {seed}: row {row}, vector {v}: {found}, not {wanted[row, v]}"
            n_results += 1
        waiting += give - int(dut.beat_pop.value)
        await FallingEdge(dut.clk)
    assert n_results == layout.n_blocks(n) * block_rows, f"seed {seed}: {n_results} rows came"
    dut.block_push.value = dut.beat_push.value = dut.result_pop.value = 0
    await FallingEdge(dut.clk)


@cocotb.test()
async def random_blocks(dut):
    for name in INPUTS:
        getattr(dut, name).value = 0
    cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
    dut.clear.value = 1
    for _ in range(3):
        await FallingEdge(dut.clk)
    dut.clear.value = 0
    for seed in range(int(os.environ["LANE_RUNS"])):
        await compute(dut, np.random.default_rng(seed), seed)
