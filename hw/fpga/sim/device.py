"""A simulated board as a device of the pynq package, which stays as it was published.

    python -m hw.fpga.sim.device CONFIGURATION FOLDER SCRIPT [ARGUMENT ...]

writes the configuration's hand-off into FOLDER and runs a script on it that knows pynq only. This module needs pynq.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pynq.buffer import PynqBuffer
from pynq.pl_server.device import Device
from pynqmetadata.frontends import Metadata
from pynqmetadata.views.runtime import RuntimeMetadataParser

from hw.fpga.sim.board import LABEL, Region, SimulatedBoard
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.handoff import check_pair, write_handoff


class SimulatedDevice(Device):
    """pynq's view of a SimulatedBoard: registers one by one, buffers that have to be flushed and invalidated."""

    _probe_priority_ = 30  # before what pynq finds by itself
    opened: ClassVar[list[SimulatedDevice]] = []

    @classmethod
    def _probe_(cls) -> list[SimulatedDevice]:
        return cls.opened

    def __init__(self, board: SimulatedBoard) -> None:
        super().__init__(f"simulated-{board.config_name}")
        self.board = board
        self.arch = board.board.arch
        self.name = f"{board.board.name} (simulated)"
        self.capabilities = {"REGISTER_RW": True}

    def read_registers(self, address: int, n_bytes: int) -> bytes:
        return b"".join(self.board.read(at).to_bytes(4, "little") for at in range(address, address + n_bytes, 4))

    def write_registers(self, address: int, data: bytes) -> None:
        for i in range(0, len(data), 4):
            self.board.write(address + i, int.from_bytes(data[i : i + 4], "little"))

    def get_bitfile_metadata(self, bitfile_name: str, partial: bool = False) -> Any:
        """Parse the .hwh beside a .bit. Raises HandoffError if they were not written together."""
        hwh = check_pair(Path(bitfile_name))
        assert not partial, "the overlay has no regions to load one by one"
        parser = RuntimeMetadataParser(Metadata(input=str(hwh)))
        parameters = parser.ip_dict[parser.ps_name]["parameters"]
        for i, clock in parser.clock_dict.items():
            # pynq 4.0.0 asks for a frequency that its parser does not find in a Zynq-7000's hand-off.
            if clock["enable"] and clock.get("frequency") is None:
                clock["frequency"] = float(parameters[f"PCW_ACT_FPGA{i}_PERIPHERAL_FREQMHZ"])
        return parser

    def download(self, bitstream: Any, parser: Any = None) -> None:
        self.board.load(Path(bitstream.bitfile_name).read_bytes())
        self.post_download(bitstream, parser)

    def gen_cache(self, bitstream: Any, parser: Any = None) -> None:
        """Keep nothing: what pynq keeps would be written into its own package."""

    def allocate(self, shape: Any, dtype: Any, cacheable: int = 1, **_: Any) -> PynqBuffer:
        """Give a buffer of zeros: a cached copy of memory, or with cacheable=0 memory itself. Raises MemoryError."""
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        region = self.board.allocate(n_bytes)
        own = {"device": self, "device_address": region.address, "bo": region, "coherent": not cacheable}
        memory = bytearray(n_bytes) if cacheable else self.board.memory(region, 0, n_bytes).data
        buffer = PynqBuffer(shape, dtype, buffer=memory, **own)
        if not cacheable:
            buffer[...] = 0
        # So pynq gives the region back with the buffer; without a pointer it would unmap it as on a board.
        buffer.memory, buffer.pointer, buffer.return_to = self, region, self
        return buffer

    def return_pointer(self, region: Region) -> None:
        self.board.free(region)

    def flush(self, region: Region, offset: int, virtual_address: int, n_bytes: int) -> None:
        memory = self.board.memory(region, offset, n_bytes)
        ctypes.memmove(memory.ctypes.data, virtual_address, n_bytes)

    def invalidate(self, region: Region, offset: int, virtual_address: int, n_bytes: int) -> None:
        memory = self.board.memory(region, offset, n_bytes)
        ctypes.memmove(virtual_address, memory.ctypes.data, n_bytes)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) < 3 or arguments[0] not in CONFIGS:
        sys.exit(f"usage: python -m hw.fpga.sim.device {'|'.join(CONFIGS)} FOLDER SCRIPT [ARGUMENT ...]")
    name, folder, script, *rest = arguments
    write_handoff(Path(folder), CONFIGS[name])
    SimulatedDevice.opened.append(SimulatedDevice(SimulatedBoard.open(name)))
    print(LABEL, file=sys.stderr)
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
