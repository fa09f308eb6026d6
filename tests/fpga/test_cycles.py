"""The cycle model against the RTL's own counter. Simulated."""

import shutil

import pytest

from edge_rt.backends.fpga_cycles import Engine, Memory, job_cycles
from edge_rt.devices import fpga_regs as regs
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.engine import Setting
from hw.fpga.sim.rig import Rig
from hw.fpga.sim.ring import submit

pytestmark = pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator")

# rows, length, vectors, log2 of the group, latency in cycles, bytes per cycle of the memory
CASES = [
    ("z2-gemv", 192, 576, 1, 0, 40, None),
    ("z2-gemv", 576, 576, 1, 0, 40, 14),
    ("z2-gemv", 576, 1536, 1, 0, 80, None),
    ("z2-gemv", 1024, 2048, 1, 2, 80, None),
    ("z2-gemv", 1024, 2048, 1, 0, 80, 14),
    ("kv260-gemm", 192, 576, 1, 0, 40, None),
    ("kv260-gemm", 576, 576, 8, 0, 40, None),
    ("kv260-gemm", 2048, 2048, 1, 0, 80, 64),
    ("kv260-gemm", 2048, 2048, 8, 0, 80, 64),
    ("kv260-gemm", 1536, 576, 8, 0, 80, 64),
    ("kv260-gemm", 576, 1536, 5, 1, 60, None),
]


@pytest.mark.parametrize(("name", "n", "k", "m", "group_log2", "latency", "bytes_per_cycle"), CASES)
def test_the_model_is_within_two_per_cent_of_the_rtl(name, n, k, m, group_log2, latency, bytes_per_cycle):
    rig = Rig.random(name, [(n, k)], m, group_log2=group_log2)
    rig.engine.set(Setting.LATENCY_CYCLES, latency)
    rig.engine.set(Setting.MILLI_BYTES_PER_CYCLE, round(1000 * (bytes_per_cycle or 0)))
    submit(rig.engine, 0, rig.jobs)
    rig.engine.run(2_000_000)
    assert rig.matches() == [True]
    cycles = rig.engine.read64(regs.CYCLES_LO)
    config = CONFIGS[name]
    engine = Engine(config.beat_bits, config.n_ports, config.n_vectors)
    modelled = job_cycles(engine, Memory(latency, bytes_per_cycle), n_rows=n, k=k, n_vectors=m, group_log2=group_log2)
    assert modelled == pytest.approx(cycles, rel=0.02)
