"""Hand jobs to a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence

from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job, Status
from hw.fpga.sim.engine import RtlEngine


def submit(
    engine: RtlEngine, ring_offset: int, jobs: Sequence[Job], *, max_bursts: int = 8, timeout_cycles: int = 100_000
) -> None:
    """Write the jobs into a ring of their own, from the engine's place in it on, and start the engine."""
    log2 = (len(jobs) - 1).bit_length()
    head = engine.read(regs.HEAD)
    for i, job in enumerate(jobs):
        at = ring_offset + regs.DESCRIPTOR_BYTES * ((head + i) % (1 << log2))
        engine.memory[at : at + regs.DESCRIPTOR_BYTES] = job.descriptor()
    address = engine.base + ring_offset
    engine.write(regs.RING_LO, address & 0xFFFFFFFF)
    engine.write(regs.RING_HI, address >> 32)
    engine.write(regs.RING_LOG2, log2)
    engine.write(regs.TIMEOUT, timeout_cycles)
    engine.write(regs.MAX_BURSTS, max_bursts)
    engine.write(regs.IRQ_STATUS, 3)
    engine.write(regs.IRQ_ENABLE, 3)
    engine.write(regs.TAIL, head + len(jobs) & 0xFFFF)


def status(engine: RtlEngine) -> Status:
    return Status.of(engine.read(regs.STATUS))


def reset(engine: RtlEngine, max_cycles: int = 10_000) -> bool:
    """Ask for RESET and wait for it; False while memory owes beats."""
    engine.write(regs.CTRL, 2)
    for _ in range(max_cycles // 10):
        if engine.read(regs.CTRL) == 0:
            return True
        engine.run(10)
    return False
