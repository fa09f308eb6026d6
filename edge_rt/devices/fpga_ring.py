"""Hand chains of jobs to an INT4 engine through its ring of descriptors, and wait for them with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job, Status
from edge_rt.errors import BackendStepError

RING_LOG2 = 6
RING_BYTES = regs.DESCRIPTOR_BYTES << RING_LOG2
_DONE, _STOPPED = 1, 2
_TIMEOUT_CYCLES = 1_000_000  # without any progress; a refresh of DDR memory takes some hundreds
_MAX_BURSTS = 8


class EnginePort(Protocol):
    """The way to one engine: its registers, and memory that both sides see.

    memory  UINT8; the engine knows its first byte by the address base. What the CPU writes reaches the engine after
            flush, and what the engine writes the CPU after invalidate; both take the first byte and their number.
    """

    @property
    def memory(self) -> NDArray[np.uint8]: ...
    @property
    def base(self) -> int: ...
    def read(self, offset: int) -> int: ...
    def write(self, offset: int, value: int) -> None: ...
    def flush(self, at: int, n_bytes: int) -> None: ...
    def invalidate(self, at: int, n_bytes: int) -> None: ...
    def wait(self) -> bool:
        """Wait for the engine's interrupt; False if the port's deadline has passed without one."""
        ...


@dataclass(frozen=True, slots=True)
class Caps:
    """What the bitstream says it was built as."""

    beat_bits: int
    n_ports: int
    n_vectors: int
    k_max: int
    version: int

    @classmethod
    def of(cls, value: int) -> Caps:
        def field(name: tuple[int, int]) -> int:
            return value >> name[0] & name[1]

        return cls(
            beat_bits=8 * field(regs.CAPS_BEAT_BYTES),
            n_ports=field(regs.CAPS_PORTS),
            n_vectors=field(regs.CAPS_VECTORS),
            k_max=1 << field(regs.CAPS_K_MAX_LOG2),
            version=field(regs.CAPS_VERSION),
        )


class Ring:
    """A ring of 64 descriptors at a byte of the port's memory. One thread owns it, and the engine."""

    def __init__(self, port: EnginePort, at: int) -> None:
        self._port, self._at = port, at
        if port.read(regs.ID) != regs.ENGINE_ID:
            raise BackendStepError(reason=f"register ID reads 0x{port.read(regs.ID):08X}: this is no INT4 engine")
        self.caps = Caps.of(port.read(regs.CAPS))
        if self.caps.version != regs.MAP_VERSION:
            reason = f"the bitstream has register map {self.caps.version}, this version of edge_rt {regs.MAP_VERSION}"
            raise BackendStepError(reason=reason)
        address = port.base + at
        for register, value in (
            (regs.RING_LO, address & 0xFFFFFFFF),
            (regs.RING_HI, address >> 32),
            (regs.RING_LOG2, RING_LOG2),
            (regs.TIMEOUT, _TIMEOUT_CYCLES),
            (regs.MAX_BURSTS, _MAX_BURSTS),
            (regs.IRQ_ENABLE, _DONE | _STOPPED),
        ):
            port.write(register, value)
        self._tail = port.read(regs.HEAD)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run up to 64 jobs with one start. Raises BackendStepError with what the engine says of itself."""
        if not 0 < len(jobs) <= 1 << RING_LOG2:
            raise ValueError(f"a chain of {len(jobs)} jobs; the ring holds {1 << RING_LOG2}")
        port = self._port
        for i, job in enumerate(jobs):
            at = self._at + regs.DESCRIPTOR_BYTES * ((self._tail + i) % (1 << RING_LOG2))
            port.memory[at : at + regs.DESCRIPTOR_BYTES] = replace(job, irq=i == len(jobs) - 1).descriptor()
            port.flush(at, regs.DESCRIPTOR_BYTES)
        self._tail = self._tail + len(jobs) & 0xFFFF
        port.write(regs.IRQ_STATUS, _DONE | _STOPPED)
        port.write(regs.TAIL, self._tail)
        is_raised = port.wait()
        if not is_raised or port.read(regs.IRQ_STATUS) & _STOPPED or port.read(regs.HEAD) != self._tail:
            raise BackendStepError(reason=self._describe(is_raised))

    def _describe(self, is_raised: bool) -> str:
        port = self._port
        status = Status.of(port.read(regs.STATUS))
        what = [
            name
            for name, is_set in (
                ("memory refused a read", status.read_error),
                ("memory refused a write", status.write_error),
                ("memory fell silent", status.timed_out),
                (f"a descriptor was refused for {regs.CONFIG_CAUSES.get(status.cause)}", status.bad_config),
                ("it was aborted", status.aborted),
                ("the deadline passed", not is_raised),
            )
            if is_set
        ]
        address = port.read(regs.ERR_ADDR_LO) | port.read(regs.ERR_ADDR_HI) << 32
        return (
            f"the FPGA's engine did not finish: {', '.join(what) or 'it stopped early'}; STATUS 0x"
            f"{port.read(regs.STATUS):08X}, port {status.port}, address 0x{address:X}, job {port.read(regs.TAG)}, "
            f"{self._tail - port.read(regs.HEAD) & 0xFFFF} jobs left"
        )
