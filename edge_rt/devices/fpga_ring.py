"""Hand chains of jobs to an INT4 engine through its ring of descriptors, and wait for them with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job, Status
from edge_rt.errors import DeviceFaultError, DeviceMismatchError, DeviceTimeoutError

RING_LOG2 = 6
RING_BYTES = regs.DESCRIPTOR_BYTES << RING_LOG2
OTHER_BITSTREAM = "build the bitstream from this version's hw/fpga"
_GROUP = 32  # weights; N_GROUPS counts them
_MAX_GROUPS = regs.DESCRIPTOR_FIELDS["N_GROUPS"][2]
_DONE, _STOPPED = 1, 2
_TIMEOUT_CYCLES = 1_000_000  # without any progress; a refresh of DDR memory takes some hundreds
_MAX_BURSTS = 8
_RESET = 1 << regs.CTRL_RESET[0]
_RESET_PAUSE_S = 1e-4
_MAX_RESET_PAUSES = 500


class EnginePort(Protocol):
    """The way to one engine: its registers, and memory that both sides see.

    memory  UINT8; the engine knows its first byte by the address base. What the CPU writes reaches the engine after
            flush, and what the engine writes the CPU after invalidate; both take the first byte and their number.

    Every method may raise OSError where the engine cannot be reached. A simulator counts seconds by its own clock.
    """

    @property
    def memory(self) -> NDArray[np.uint8]: ...
    @property
    def base(self) -> int: ...
    def read(self, offset: int) -> int: ...
    def write(self, offset: int, value: int) -> None: ...
    def flush(self, at: int, n_bytes: int) -> None: ...
    def invalidate(self, at: int, n_bytes: int) -> None: ...
    def wait(self, limit_s: float) -> bool:
        """Wait for the engine's interrupt; False if it was not raised within limit_s."""
        ...

    def pause(self, seconds: float) -> None:
        """Give the engine time."""
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

    @property
    def are_possible(self) -> bool:
        """Say whether the RTL can be built so: what is read from a bus may be anything."""
        fits = self.beat_bits in (64, 128) and self.n_ports > 0 and self.n_vectors in (1, 2, 4, 6, 8)
        return fits and _GROUP <= self.k_max <= _GROUP * _MAX_GROUPS


class Registers(Protocol):
    """The part of an EnginePort that a bitstream can be known by."""

    def read(self, offset: int) -> int: ...


def identify(registers: Registers, device: str) -> Caps:
    """Say what engine this is. Raises DeviceMismatchError for none, and for another than this version's."""
    engine_id, value = registers.read(regs.ID), registers.read(regs.CAPS)
    caps = Caps.of(value)
    for what, found, wanted in (
        ("register ID", engine_id, regs.ENGINE_ID),
        ("register map", caps.version, regs.MAP_VERSION),
        ("build", registers.read(regs.BUILD), regs.BUILD_HASH),
    ):
        if found != wanted:
            raise DeviceMismatchError(
                device=device, what=what, found=f"0x{found:X}", wanted=f"0x{wanted:X}", remedy=OTHER_BITSTREAM
            )
    if not caps.are_possible:
        wanted_caps = "ports of 64 or 128 bits, one or more, and up to eight vectors"
        raise DeviceMismatchError(
            device=device, what="register CAPS", found=f"0x{value:X}", wanted=wanted_caps, remedy=OTHER_BITSTREAM
        )
    return caps


def descriptors(jobs: Sequence[Job]) -> NDArray[np.uint8]:
    """Write jobs as a chain that raises one interrupt, at its end: UINT8 [64 * jobs]."""
    return np.concatenate([replace(job, irq=i == len(jobs) - 1).descriptor() for i, job in enumerate(jobs)])


class Ring:
    """A ring of 64 descriptors at a byte of the port's memory. One thread owns it, and the engine."""

    def __init__(self, port: EnginePort, at: int, device: str) -> None:
        self._port, self._at, self._device = port, at, device
        self.caps, self._tail = identify(port, device), 0
        # Whoever had the engine before may have died while it worked, and it works on.
        if not self.reset():
            raise self.fault("it does not stop what it was doing")

    def _begin(self) -> None:
        port, address = self._port, self._port.base + self._at
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

    def run(self, chain: NDArray[np.uint8], limit_s: float) -> None:
        """Run a chain of at most 64 jobs, as descriptors writes it, with one start.

        Raises DeviceTimeoutError where they are not done within limit_s, DeviceFaultError with what the engine says of
        itself where it stopped; reset must follow either.
        """
        port, size = self._port, regs.DESCRIPTOR_BYTES
        n_jobs = len(chain) // size
        if not 0 < n_jobs <= 1 << RING_LOG2:
            raise ValueError(f"a chain of {n_jobs} jobs; the ring holds {1 << RING_LOG2}")
        first = self._tail % (1 << RING_LOG2)
        n_here = min(n_jobs, (1 << RING_LOG2) - first)
        for place, part in ((first, chain[: n_here * size]), (0, chain[n_here * size :])):
            if len(part):
                at = self._at + place * size
                port.memory[at : at + len(part)] = part
                port.flush(at, len(part))
        self._tail = self._tail + n_jobs & 0xFFFF
        port.write(regs.IRQ_STATUS, _DONE | _STOPPED)
        port.write(regs.TAIL, self._tail)
        is_raised = port.wait(limit_s)
        if not is_raised or port.read(regs.IRQ_STATUS) & _STOPPED or port.read(regs.HEAD) != self._tail:
            self._fail(is_raised, limit_s)

    def reset(self) -> bool:
        """Stop the engine, wait for what memory owes it, and begin anew.

        False while memory still owes something, and while no such engine answers: logic without power or clock reads
        as zeros or ones.
        """
        port = self._port
        port.write(regs.CTRL, _RESET)
        for _ in range(_MAX_RESET_PAUSES):
            if port.read(regs.CTRL) == 0:
                if not self._is_there():
                    return False
                self._begin()
                return True
            port.pause(_RESET_PAUSE_S)
        return False

    def _is_there(self) -> bool:
        try:
            return identify(self._port, self._device) == self.caps
        except DeviceMismatchError:
            return False

    def busy_cycles(self) -> int:
        return self._wide(regs.CYCLES_LO, regs.CYCLES_HI)

    def fault(self, what: str) -> DeviceFaultError:
        """Describe the engine's state as the error of whoever finds something wrong."""
        port = self._port
        status = port.read(regs.STATUS)
        return DeviceFaultError(
            device=self._device,
            what=what,
            status=status,
            cycles=self.busy_cycles(),
            starved_cycles=self._wide(regs.STARVED_LO, regs.STARVED_HI),
            address=self._wide(regs.ERR_ADDR_LO, regs.ERR_ADDR_HI),
            port=Status.of(status).port,
            job=port.read(regs.TAG),
            n_left=self._tail - port.read(regs.HEAD) & 0xFFFF,
        )

    def _wide(self, low: int, high: int) -> int:
        upper = self._port.read(high)
        lower = self._port.read(low)
        again = self._port.read(high)
        return (again << 32 | self._port.read(low)) if again != upper else upper << 32 | lower

    def _fail(self, is_raised: bool, limit_s: float) -> NoReturn:
        status = Status.of(self._port.read(regs.STATUS))
        what = [
            name
            for name, is_set in (
                ("memory refused a read", status.read_error),
                ("memory refused a write", status.write_error),
                ("memory fell silent", status.timed_out),
                (f"a descriptor was refused for {regs.CONFIG_CAUSES.get(status.cause)}", status.bad_config),
                ("it was aborted", status.aborted),
            )
            if is_set
        ]
        fault = self.fault(", ".join(what) or "it stopped early")
        if is_raised or what:
            raise fault
        raise DeviceTimeoutError(
            device=fault.device,
            limit_s=limit_s,
            status=fault.status,
            cycles=fault.cycles,
            starved_cycles=fault.starved_cycles,
            address=fault.address,
            port=fault.port,
            job=fault.job,
            n_left=fault.n_left,
        )
