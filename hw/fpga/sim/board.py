"""A simulated board around the engine: its memory with a cache that nothing keeps coherent, its registers by address.

What a program writes stays in its own copy of a buffer until it is flushed, and what the engine writes is not seen
until it is invalidated, as on a board whose ports do not snoop. A new buffer's memory holds rubbish, so that what was
forgotten shows in the results. Everything here is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_rt.devices import fpga_regs as regs
from hw.fpga.sim.build import CONFIGS, build
from hw.fpga.sim.engine import BusError, RtlEngine, Setting
from hw.fpga.sim.handoff import BOARDS, ENGINE_RANGE, Board, Handoff, HandoffError

PAGE_BYTES = 4096
RUBBISH = 0xA5
LABEL = "simulated: the engine's RTL in Verilator on a modelled board; no figure of it is a speed"
# No board has these: the modelled memory's settings, a word each, to be written only. So faults can be planted over the
# network as well.
SETTINGS_AT = 0x9F00_0000

# Clocks as the boards' first-stage loaders leave them, and the switches of port widths.
_CRL, _CRF, _SLCR = 0xFF5E_0000, 0xFD1A_0000, 0xF800_0000
_PS_START = {
    "aarch64": {
        _CRL + 0x20: 0x0001_5A00,  # IOPLL: 33.333 MHz x 90 / 2
        _CRL + 0x30: 0x0001_5A00,  # RPLL
        **{_CRL + 0xC0 + 4 * i: 0x0101_0F00 for i in range(4)},  # PL clocks: IOPLL / 15
        _CRF + 0x20: 0x0001_5000,  # APLL: x 80 / 2
        _CRF + 0x2C: 0x0001_4800,  # DPLL: x 72 / 2
        _CRF + 0x38: 0x0001_5A00,  # VPLL
        _CRF + 0x60: 0x0300_0100,  # the cores': APLL / 1
        0xFD61_5000: 0,
        0xFF41_9000: 0,
        **{at + part: 0 for at in (*range(0xFD36_0000, 0xFD3C_0000, 0x1_0000), 0xFF9B_0000) for part in (0, 0x14)},
    },
    "armv7l": {
        _SLCR + 0x100: 26 << 12,  # ARM PLL: 50 MHz x 26
        _SLCR + 0x104: 21 << 12,  # DDR PLL
        _SLCR + 0x108: 20 << 12,  # IO PLL
        _SLCR + 0x120: 2 << 8,  # the cores': ARM PLL / 2
        **{_SLCR + 0x170 + 0x10 * i: 1 << 20 | 10 << 8 for i in range(4)},  # PL clocks: IO PLL / 10
    },
}


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of the board's memory, by address."""

    address: int
    n_bytes: int


@dataclass(slots=True)
class SimulatedBoard:
    """One board with one engine. Each access to a register lets the engine run for cycles_per_access cycles."""

    board: Board
    config_name: str
    engine: RtlEngine
    cycles_per_access: int = 64
    _ps: dict[int, int] = field(default_factory=dict)
    _regions: list[Region] = field(default_factory=list)

    @classmethod
    def open(cls, config_name: str, memory_bytes: int = 16 << 20) -> SimulatedBoard:
        """Compile the configuration if need be, and give its board with an idle engine."""
        board = BOARDS[config_name.partition("-")[0]]
        engine = RtlEngine.open(build(CONFIGS[config_name]), memory_bytes)
        return cls(board, config_name, engine, _ps=dict(_PS_START[board.arch]))

    def load(self, bitstream: bytes) -> None:
        """Begin with a fresh engine, as after a load of its bitstream. Raises HandoffError if that is another's."""
        handoff = Handoff.of(bitstream)
        named, own = (handoff.config_name, handoff.build), (self.config_name, f"{self.engine.read(regs.BUILD):08x}")
        if named != own:
            raise HandoffError(
                f"the .bit stands for {named[0]}, build {named[1]}; the engine is {own[0]}, build {own[1]}"
            )
        self.engine.restart()

    def read(self, address: int) -> int:
        """Read a register, four bytes. Raises BusError where there is none."""
        if self._is_engine(address):
            self.engine.step(self.cycles_per_access)
            return self.engine.read(address - self.board.engine_at)
        return self._ps[self._ps_register(address)]

    def write(self, address: int, value: int) -> None:
        """Write a register, four bytes. Raises BusError where there is none."""
        if self._is_engine(address):
            self.engine.write(address - self.board.engine_at, value)
            self.engine.step(self.cycles_per_access)
        elif 0 <= address - SETTINGS_AT < 4 * len(Setting):
            self.engine.set(Setting((address - SETTINGS_AT) // 4), value)
        else:
            self._ps[self._ps_register(address)] = value

    def allocate(self, n_bytes: int) -> Region:
        """Reserve whole pages of memory and fill them with rubbish. Raises MemoryError when none are left."""
        start, end = self.engine.base, self.engine.base + len(self.engine.memory)
        at = start + PAGE_BYTES  # nothing lies at the very start: a pointer that was never set must not work
        for region in self._regions:
            if at + n_bytes <= region.address:
                break
            at = region.address + -(-region.n_bytes // PAGE_BYTES) * PAGE_BYTES
        if at + n_bytes > end:
            raise MemoryError(f"{n_bytes} bytes of the simulated board's {end - start}: there is no such gap")
        region = Region(at, max(n_bytes, 1))
        self._regions = sorted([*self._regions, region], key=lambda each: each.address)
        self.memory(region)[:] = RUBBISH
        return region

    def free(self, region: Region) -> None:
        self._regions.remove(region)

    def memory(self, region: Region, offset: int = 0, n_bytes: int | None = None) -> NDArray[np.uint8]:
        """Give a region's bytes as the engine sees them, or part of them. Raises ValueError beyond its end."""
        n_bytes = region.n_bytes - offset if n_bytes is None else n_bytes
        if offset < 0 or n_bytes < 0 or offset + n_bytes > region.n_bytes:
            raise ValueError(f"bytes {offset} to {offset + n_bytes} of a buffer of {region.n_bytes}")
        at = region.address - self.engine.base + offset
        return self.engine.memory[at : at + n_bytes]

    def _is_engine(self, address: int) -> bool:
        return 0 <= address - self.board.engine_at < ENGINE_RANGE

    def _ps_register(self, address: int) -> int:
        if address not in self._ps:
            raise BusError(f"the simulated {self.board.name} has no register at 0x{address:08X}")
        return address
