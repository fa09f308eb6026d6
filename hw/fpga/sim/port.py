"""Engines in simulation as the driver sees them: the RTL, and its golden model behind the same registers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_layout import Layout, unpack_activations, unpack_weights
from edge_rt.backends.fpga_numbers import GROUP, Weights
from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job
from hw.fpga.model.golden import multiply
from hw.fpga.sim.build import Config
from hw.fpga.sim.engine import RtlEngine


@dataclass(slots=True)
class RtlPort:
    """The RTL on its modelled memory, which has no caches; a second is clock_hz of its cycles."""

    engine: RtlEngine
    clock_hz: float = 300e6

    @property
    def memory(self) -> NDArray[np.uint8]:
        return self.engine.memory

    @property
    def base(self) -> int:
        return self.engine.base

    def read(self, offset: int) -> int:
        return self.engine.read(offset)

    def write(self, offset: int, value: int) -> None:
        self.engine.write(offset, value)

    def flush(self, at: int, n_bytes: int) -> None:
        """Nothing to do: the CPU's memory is the engine's."""

    def invalidate(self, at: int, n_bytes: int) -> None:
        """Nothing to do: the CPU's memory is the engine's."""

    def wait(self, limit_s: float) -> bool:
        self.engine.run(int(limit_s * self.clock_hz))
        return self.engine.read(regs.IRQ_STATUS) != 0

    def pause(self, seconds: float) -> None:
        self.engine.step(int(seconds * self.clock_hz))


@dataclass(slots=True)
class CheckedPort(RtlPort):
    """Compares what the RTL wrote with the golden model, job by job, from the bytes in memory.

    jobs are those seen so far, n_wrong of n_sums sums were other bits than the golden model's, rtl_s is the time that
    the simulation took.
    """

    layout: Layout = field(default_factory=lambda: Layout(128))
    jobs: list[Job] = field(default_factory=list)
    n_sums: int = 0
    n_wrong: int = 0
    rtl_s: float = 0.0
    _unpacked: dict[int, Weights] = field(default_factory=dict)

    def wait(self, limit_s: float) -> bool:
        head, tail = self.read(regs.HEAD), self.read(regs.TAIL)
        started = time.perf_counter()
        is_raised = RtlPort.wait(self, limit_s)
        self.rtl_s += time.perf_counter() - started
        ring = (self.read(regs.RING_LO) | self.read(regs.RING_HI) << 32) - self.base
        for i in range(tail - head & 0xFFFF):
            at = ring + regs.DESCRIPTOR_BYTES * ((head + i) % (1 << self.read(regs.RING_LOG2)))
            job = Job.of(self.memory[at : at + regs.DESCRIPTOR_BYTES])
            if job is None:
                raise RuntimeError("the ring holds no descriptor where the engine was told of one")
            self.jobs.append(job)
            self._compare(job)
        return is_raised

    def _compare(self, job: Job) -> None:
        wanted = golden_sums(job, self.memory, self.base, self.layout, self._unpacked).astype(np.float32)
        n_places = self.layout.result_places(job.n_vectors)
        at = job.results - self.base
        found = self.memory[at : at + len(wanted) * n_places * 4].view("<f4").reshape(-1, n_places)
        self.n_sums += wanted.size
        self.n_wrong += int((found[:, : job.n_vectors].view(np.uint32) != wanted.view(np.uint32)).sum())


@dataclass(slots=True)
class GoldenPort:
    """The golden model behind a ring of descriptors and a strict cache: only flush and invalidate move bytes.

    What is written to an address that held weights before is not noticed.
    """

    config: Config
    memory: NDArray[np.uint8]
    base: int = 0x1000_0000
    _ddr: NDArray[np.uint8] = field(init=False)
    _registers: dict[int, int] = field(init=False)
    _unpacked: dict[int, Weights] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self._ddr = np.zeros_like(self.memory)
        caps = 0
        for place, value in (
            (regs.CAPS_BEAT_BYTES, config.beat_bits // 8),
            (regs.CAPS_PORTS, config.n_ports),
            (regs.CAPS_VECTORS, config.n_vectors),
            (regs.CAPS_K_MAX_LOG2, config.k_max.bit_length() - 1),
            (regs.CAPS_ADDR_BITS, config.addr_bits),
            (regs.CAPS_VERSION, regs.MAP_VERSION),
        ):
            caps |= value << place[0]
        self._registers = {regs.ID: regs.ENGINE_ID, regs.CAPS: caps, regs.BUILD: regs.BUILD_HASH}

    def read(self, offset: int) -> int:
        return self._registers.get(offset, 0)

    def write(self, offset: int, value: int) -> None:
        if offset == regs.IRQ_STATUS:
            value = self.read(offset) & ~value
        if offset == regs.CTRL and value & 1 << regs.CTRL_RESET[0]:
            self._registers |= dict.fromkeys((regs.HEAD, regs.TAIL, regs.STATUS, regs.IRQ_STATUS), 0)
            value = 0
        self._registers[offset] = value

    def flush(self, at: int, n_bytes: int) -> None:
        self._ddr[at : at + n_bytes] = self.memory[at : at + n_bytes]

    def invalidate(self, at: int, n_bytes: int) -> None:
        self.memory[at : at + n_bytes] = self._ddr[at : at + n_bytes]

    def pause(self, seconds: float) -> None:
        """Nothing to do: it computes as soon as it is waited for."""

    def wait(self, limit_s: float) -> bool:  # noqa: ARG002  it takes no time of its own
        ring = (self.read(regs.RING_LO) | self.read(regs.RING_HI) << 32) - self.base
        while (head := self.read(regs.HEAD)) != self.read(regs.TAIL):
            at = ring + regs.DESCRIPTOR_BYTES * (head % (1 << self.read(regs.RING_LOG2)))
            job = Job.of(self._ddr[at : at + regs.DESCRIPTOR_BYTES])
            if job is None:
                self._registers[regs.STATUS] = 1 << regs.STATUS_ERR_CONFIG[0] | 1 << regs.STATUS_ERR_CAUSE[0]
                self._registers[regs.IRQ_STATUS] = 2
                return True
            self._compute(job)
            self._registers[regs.HEAD] = head + 1 & 0xFFFF
            self._registers[regs.IRQ_STATUS] = self.read(regs.IRQ_STATUS) | int(job.irq)
        return self.read(regs.IRQ_STATUS) != 0

    def _compute(self, job: Job) -> None:
        layout = Layout(self.config.beat_bits, 1 << job.block_log2)
        sums = golden_sums(job, self._ddr, self.base, layout, self._unpacked)
        n_rows, n_places = len(sums), layout.result_places(job.n_vectors)
        at = job.results - self.base
        results = self._ddr[at : at + n_rows * n_places * 4].view("<f4").reshape(n_rows, n_places)
        results[:, : job.n_vectors] = sums.astype(np.float32)


def golden_sums(
    job: Job, memory: NDArray[np.uint8], base: int, layout: Layout, unpacked: dict[int, Weights]
) -> NDArray[np.int64]:
    """Compute what a job must give, from the very bytes it points at: INT64 [rows of its blocks, vectors].

    unpacked keeps matrices by their address, for jobs whose weights do not change.
    """
    k, n_rows = job.n_groups * GROUP, job.n_blocks * layout.block_rows

    def at(address: int, n_bytes: int) -> NDArray[np.uint8]:
        return memory[address - base : address - base + n_bytes]

    if (weights := unpacked.get(job.weights)) is None:
        data = at(job.weights, layout.weight_bytes(n_rows, k, job.group_log2))
        weights = unpack_weights(data, np.ones(n_rows), k, job.group_log2, job.asymmetric, layout)
        unpacked[job.weights] = weights
    x = unpack_activations(at(job.activations, job.n_vectors * layout.vector_bytes(k)), k, layout)
    return multiply(weights, x)
