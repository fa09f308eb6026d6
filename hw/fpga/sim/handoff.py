"""Write the hand-off of a simulated board: the .hwh that pynq reads, and a .bit that stands for the bitstream.

The .bit has a true header and, in place of a bitstream, the names of what it stands for, the build and the hash of its
.hwh. pynq keeps what it read of a .hwh under the hash of the .bit alone, so two hand-offs must not share one .bit.
"""

from __future__ import annotations

import hashlib
import struct
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from hw.fpga.sim.build import Config, source_hash

# As vivado/build.tcl names them, so that a script for the board runs here unchanged.
DESIGN = ENGINE = "e4"
ENGINE_TYPE = "edge-rt:ip:e4_top:1.0"
PS = "ps"
ENGINE_RANGE = 0x1000
_REGMAP = Path(__file__).resolve().parent.parent / "regmap.toml"
_BEGINNING = "edge_rt simulated hand-off, no bitstream"
_ACCESS = {"ro": "read-only", "rw": "read-write", "w1c": "read-write"}


class HandoffError(ValueError):
    """A .bit is not one of ours, or not of this .hwh or engine; the text says which."""


@dataclass(frozen=True, slots=True)
class Board:
    """What a hand-off says of a board: its processor, where the engine's registers lie, and its clocks."""

    name: str
    arch: str  # as the kernel names it
    family: str
    part: str
    ps_type: str
    ps_version: str
    ps_port: str
    engine_at: int
    clock_mhz: float  # of the programmable logic's clock 0
    divisors: tuple[int, int]

    def parameters(self) -> dict[str, str]:
        """Give the processing system's parameters that pynq reads."""
        found: dict[str, str] = {}
        for i in range(4):
            on, first, second = (1, *self.divisors) if i == 0 else (0, 10, 1)
            if self.ps_type == "processing_system7":
                found[f"PCW_FPGA_FCLK{i}_ENABLE"] = str(on)
                found[f"PCW_FCLK{i}_PERIPHERAL_DIVISOR0"] = str(first)
                found[f"PCW_FCLK{i}_PERIPHERAL_DIVISOR1"] = str(second)
                found[f"PCW_FCLK{i}_PERIPHERAL_CLKSRC"] = "IO PLL"
                found[f"PCW_ACT_FPGA{i}_PERIPHERAL_FREQMHZ"] = f"{self.clock_mhz if on else 10.0:.6f}"
            else:
                found[f"PSU__FPGA_PL{i}_ENABLE"] = str(on)
                found[f"PSU__CRL_APB__PL{i}_REF_CTRL__DIVISOR0"] = str(first)
                found[f"PSU__CRL_APB__PL{i}_REF_CTRL__DIVISOR1"] = str(second)
                found[f"PSU__CRL_APB__PL{i}_REF_CTRL__SRCSEL"] = "IOPLL"
                found[f"PSU__CRL_APB__PL{i}_REF_CTRL__ACT_FREQMHZ"] = f"{self.clock_mhz if on else 100.0:.6f}"
        if self.ps_type == "zynq_ultra_ps_e":
            found["C_MAXIGP0_DATA_WIDTH"] = "32"
            found |= {f"C_SAXIGP{port}_DATA_WIDTH": "128" for port in (2, 3, 4, 5)}
        return found


BOARDS = {
    board.name: board
    for board in (
        Board(
            "kv260", "aarch64", "zynquplus", "xck26-sfvc784-2LV-c", "zynq_ultra_ps_e", "3.5", "M_AXI_HPM0_FPD",
            0xA000_0000, 299.997, (5, 1),
        ),
        Board(
            "z2", "armv7l", "zynq", "xc7z020clg400-1", "processing_system7", "5.5", "M_AXI_GP0",
            0x4000_0000, 142.857143, (7, 1),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the data of a .bit says: for which engine it stands, and the hash of the .hwh it was written with."""

    config_name: str
    build: str  # what the engine's BUILD register says, eight hex digits
    hwh_sha256: str

    def text(self) -> str:
        return "\n".join((_BEGINNING, self.config_name, self.build, self.hwh_sha256, ""))

    @classmethod
    def of(cls, data: bytes) -> Handoff:
        """Find it in a .bit or in what pynq made of one. Raises HandoffError where it is not there."""
        start = data.find(_BEGINNING.encode())
        lines = data[start:].rstrip(b"\n").decode(errors="replace").split("\n") if start >= 0 else []
        if len(lines) != 4:
            raise HandoffError("this is not a simulated hand-off's .bit, and the simulated board runs no other")
        return cls(*lines[1:])


def write_handoff(folder: Path, config: Config, name: str = DESIGN) -> Path:
    """Write folder's NAME.bit and NAME.hwh for a configuration, whose name begins with its board's; give the .bit."""
    board = BOARDS[config.name.partition("-")[0]]
    hwh = ET.tostring(_system(board, name), encoding="utf-8", xml_declaration=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.hwh").write_bytes(hwh)
    says = Handoff(config.name, source_hash()[:8], hashlib.sha256(hwh).hexdigest())
    bit = folder / f"{name}.bit"
    bit.write_bytes(_bit(f"{name};UserID=0XFFFFFFFF;Version=simulated", board.part, says.text()))
    return bit


def check_pair(bit: Path) -> Path:
    """Give the .hwh beside a .bit. Raises HandoffError if it is not the one that the .bit was written with."""
    hwh = bit.with_suffix(".hwh")
    if hashlib.sha256(hwh.read_bytes()).hexdigest() != Handoff.of(bit.read_bytes()).hwh_sha256:
        raise HandoffError(f"{hwh} is not the file that {bit.name} was written with: write the hand-off again")
    return hwh


def _bit(design: str, part: str, says: str) -> bytes:
    """Frame text as the data of a .bit, padded with line ends to whole words."""
    data = says.encode()
    data += b"\n" * (-len(data) % 4)
    head = struct.pack(">h", 9) + bytes.fromhex("0ff00ff00ff00ff000") + struct.pack(">h", 1)
    for key, text in (("a", design), ("b", part), ("c", "2026/01/01"), ("d", "00:00:00")):
        head += key.encode() + struct.pack(">h", len(text) + 1) + text.encode() + b"\0"
    return head + b"e" + struct.pack(">i", len(data)) + data


def _system(board: Board, name: str) -> ET.Element:
    root = ET.Element("EDKSYSTEM", EDWVERSION="1.2", VIVADOVERSION="simulated")
    ET.SubElement(root, "SYSTEMINFO", ARCH=board.family, DEVICE=board.part, NAME=name)
    ET.SubElement(root, "EXTERNALPORTS")
    ET.SubElement(root, "EXTERNALINTERFACES")
    modules = ET.SubElement(root, "MODULES")
    vlnv = f"xilinx.com:ip:{board.ps_type}:{board.ps_version}"
    ps = _module(modules, PS, board.ps_type, vlnv, board.parameters())
    ps.set("IS_PL", "FALSE")
    _bus(ps, board.ps_port, "MASTER", 128)
    memory_map = ET.SubElement(ps, "MEMORYMAP")
    ET.SubElement(
        memory_map,
        "MEMRANGE",
        ADDRESSBLOCK="reg0",
        BASEVALUE=f"0x{board.engine_at:08X}",
        HIGHVALUE=f"0x{board.engine_at + ENGINE_RANGE - 1:08X}",
        INSTANCE=ENGINE,
        IS_DATA="TRUE",
        IS_INSTRUCTION="TRUE",
        MASTERBUSINTERFACE=board.ps_port,
        MEMTYPE="REGISTER",
        SLAVEBUSINTERFACE="s_axi",
    )
    engine = _module(modules, ENGINE, "e4_top", ENGINE_TYPE, {"C_S_AXI_DATA_WIDTH": "32"})
    _registers(engine)
    _bus(engine, "s_axi", "SLAVE", 32)
    return root


def _module(modules: ET.Element, instance: str, kind: str, vlnv: str, parameters: Mapping[str, str]) -> ET.Element:
    module = ET.SubElement(
        modules, "MODULE", FULLNAME=f"/{instance}", INSTANCE=instance, IS_PL="TRUE", MODTYPE=kind, VLNV=vlnv
    )
    block = ET.SubElement(module, "PARAMETERS")
    for name, value in parameters.items():
        ET.SubElement(block, "PARAMETER", NAME=name, VALUE=value)
    ET.SubElement(module, "PORTS")
    return module


def _bus(module: ET.Element, name: str, kind: str, width: int) -> None:
    buses = ET.SubElement(module, "BUSINTERFACES")
    bus = ET.SubElement(
        buses, "BUSINTERFACE", DATAWIDTH=str(width), NAME=name, TYPE=kind, VLNV="xilinx.com:interface:aximm:1.0"
    )
    ET.SubElement(bus, "PORTMAPS")


def _registers(engine: ET.Element) -> None:
    regmap: Mapping[str, Any] = tomllib.loads(_REGMAP.read_text())
    blocks = ET.SubElement(engine, "ADDRESSBLOCKS")
    block = ET.SubElement(
        blocks, "ADDRESSBLOCK", ACCESS="", INTERFACE="s_axi", NAME="reg0", RANGE=str(ENGINE_RANGE), USAGE="register"
    )
    registers = ET.SubElement(block, "REGISTERS")
    for register in regmap["register"]:
        access = _ACCESS[register["access"]]
        entry = ET.SubElement(registers, "REGISTER", NAME=register["name"])
        _properties(
            entry,
            DESCRIPTION=register["text"],
            ADDRESS_OFFSET=f"0x{register['offset']:02x}",
            SIZE="32",
            ACCESS=access,
            IS_ENABLED="true",
        )
        fields = ET.SubElement(entry, "FIELDS")
        for field in register.get("fields", ()):
            low, high = field["bits"]
            _properties(
                ET.SubElement(fields, "FIELD", NAME=field["name"]),
                DESCRIPTION=field["text"],
                BIT_OFFSET=str(low),
                BIT_WIDTH=str(high - low + 1),
                ACCESS=access,
            )


def _properties(owner: ET.Element, **values: str) -> None:
    for name, value in values.items():
        ET.SubElement(owner, "PROPERTY", NAME=name, VALUE=value)
