"""Write the engine's register map from regmap.toml: for its RTL, for the driver, for people.

The driver's part holds the hash of the RTL too, so run it after any change of hw/fpga/rtl.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hw.fpga.sim.build import source_hash

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_NOTE = "made from hw/fpga/regmap.toml by `python -m hw.fpga.regmap`"


def render() -> Mapping[Path, str]:
    """Make the text of every generated file."""
    regmap = tomllib.loads((_HERE / "regmap.toml").read_text())
    _check(regmap)
    rtl = {_HERE / "rtl" / "e4_regs.svh": "\n".join(_verilog(regmap)) + "\n"}
    build = int(source_hash(rtl)[:8], 16)
    return {
        **rtl,
        _ROOT / "edge_rt" / "devices" / "fpga_regs.py": "\n".join(_python(regmap, build)) + "\n",
        _ROOT / "docs" / "fpga-registers.md": "\n".join(_page(regmap)) + "\n",
    }


def _check(regmap: Mapping[str, Any]) -> None:
    offsets = [register["offset"] for register in regmap["register"]]
    assert offsets == list(range(0, 4 * len(offsets), 4)), "registers follow each other, four bytes apart"
    for owner in regmap["register"]:
        _check_bits(owner["name"], [field["bits"] for field in owner.get("fields", ())])
    for word in range(regmap["descriptor"]["bytes"] // 4):
        _check_bits(f"word {word}", [f["bits"] for f in regmap["descriptor"]["field"] if f["word"] == word])


def _check_bits(owner: str, spans: list[list[int]]) -> None:
    used = [bit for low, high in spans for bit in range(low, high + 1)]
    assert len(used) == len(set(used)), f"{owner}: fields overlap"
    assert all(0 <= bit < 32 for bit in used), f"{owner}: a field leaves the word"


def _verilog(regmap: Mapping[str, Any]) -> Iterator[str]:
    yield f"// {_NOTE}"
    yield f"localparam [31:0] ENGINE_ID = 32'h{regmap['id']:08x};"
    yield f"localparam [4:0] MAP_VERSION = 5'd{regmap['version']};"
    for register in regmap["register"]:
        yield f"localparam [7:0] R_{register['name']} = 8'h{register['offset']:02x};"
    yield f"localparam [15:0] DESCRIPTOR_MAGIC = 16'h{regmap['descriptor']['magic']:04x};"
    used = [0] * (regmap["descriptor"]["bytes"] // 4)
    for field in regmap["descriptor"]["field"]:
        low, high = field["bits"]
        base = 32 * field["word"]
        used[field["word"]] |= (1 << (high + 1)) - (1 << low)
        yield f"localparam D_{field['name']} = {base + low}, D_{field['name']}_W = {high - low + 1};"
    words = "_".join(f"{word:08x}" for word in reversed(used))
    yield f"localparam [{32 * len(used) - 1}:0] D_USED = {32 * len(used)}'h{words};"
    for cause in regmap["cause"]:
        yield f"localparam [3:0] CAUSE_{cause['name']} = 4'd{cause['value']};"


def _python(regmap: Mapping[str, Any], build: int) -> Iterator[str]:
    yield f'"""The INT4 engine\'s registers and descriptors: {_NOTE}."""'
    yield ""
    yield "from typing import Final"
    yield ""
    yield f"ENGINE_ID: Final = 0x{regmap['id']:08X}"
    yield f"MAP_VERSION: Final = {regmap['version']}"
    yield "# What BUILD reads in a bitstream of this tree's RTL: the first 32 bits of its sources' SHA-256"
    yield f"BUILD_HASH: Final = 0x{build:08X}"
    yield ""
    yield "# Offsets, bytes"
    for register in regmap["register"]:
        yield f"{register['name']}: Final = 0x{register['offset']:02X}"
    yield ""
    yield "# Fields of registers: the lowest bit, and a mask before the shift"
    for register in regmap["register"]:
        for field in register.get("fields", ()):
            low, high = field["bits"]
            name = f"{register['name']}_{field['name']}"
            yield f"{name}: Final = ({low}, 0x{(1 << (high - low + 1)) - 1:X})"
    yield ""
    descriptor = regmap["descriptor"]
    yield f"DESCRIPTOR_BYTES: Final = {descriptor['bytes']}"
    yield f"DESCRIPTOR_MAGIC: Final = 0x{descriptor['magic']:04X}"
    yield "# Fields of descriptors: the word, its lowest bit, and a mask before the shift"
    yield "DESCRIPTOR_FIELDS: Final = {"
    for field in descriptor["field"]:
        low, high = field["bits"]
        yield f'    "{field["name"]}": ({field["word"]}, {low}, 0x{(1 << (high - low + 1)) - 1:X}),'
    yield "}"
    yield ""
    yield "# What STATUS.ERR_CAUSE says"
    yield "CONFIG_CAUSES: Final = {"
    for cause in regmap["cause"]:
        yield f'    {cause["value"]}: "{cause["text"]}",'
    yield "}"


def _page(regmap: Mapping[str, Any]) -> Iterator[str]:
    yield "# The FPGA engine's registers"
    yield ""
    yield f"This page is {_NOTE}."
    yield ""
    yield "All registers have 32 bits. Reading changes nothing. An address that is no register answers SLVERR."
    yield ""
    yield "| offset | name | access | |"
    yield "|---|---|---|---|"
    for register in regmap["register"]:
        yield f"| 0x{register['offset']:02X} | `{register['name']}` | {register['access']} | {register['text']} |"
        for field in register.get("fields", ()):
            yield f"| | · {field['name']} | {_bits(field)} | {field['text']} |"
    yield ""
    yield "## Descriptors"
    yield ""
    yield f"{regmap['descriptor']['bytes']} bytes each. {regmap['descriptor']['text']}."
    yield ""
    yield "| word | bits | name | |"
    yield "|---|---|---|---|"
    for field in regmap["descriptor"]["field"]:
        yield f"| {field['word']} | {_bits(field)} | `{field['name']}` | {field['text']} |"
    yield ""
    yield "## What `ERR_CAUSE` says"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for cause in regmap["cause"]:
        yield f"| {cause['value']} | {cause['text']} |"


def _bits(field: Mapping[str, Any]) -> str:
    low, high = field["bits"]
    return f"{high}:{low}" if high != low else str(low)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hw.fpga.regmap", description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit 1 where something is out of date.")
    asked = parser.parse_args()
    stale = [path for path, text in render().items() if not path.exists() or path.read_text() != text]
    if asked.check:
        for path in stale:
            print(f"{path.relative_to(_ROOT)} is not what regmap.toml and the RTL say: run `python -m hw.fpga.regmap`")
        return 1 if stale else 0
    for path in stale:
        path.write_text(render()[path])
        print(path.relative_to(_ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
