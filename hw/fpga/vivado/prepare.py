"""Write what build.tcl reads into a directory: the wrapper of the board's configuration and the list of registers.

python -m hw.fpga.vivado.prepare kv260|z2 DIRECTORY
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from hw.fpga.sim.build import CONFIGS
from hw.fpga.wrapper import render

_REGMAP = Path(__file__).resolve().parent.parent / "regmap.toml"
BOARDS = {"kv260": "kv260-gemm", "z2": "z2-gemm"}
_ACCESS = {"ro": "read-only", "rw": "read-write", "w1c": "read-write"}


def registers() -> str:
    """Give regmap.toml's registers as a Tcl list {name offset access text {{field low width text} ...}}."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "set registers {"
    for register in tomllib.loads(_REGMAP.read_text())["register"]:
        fields = " ".join(
            f"{{{field['name']} {field['bits'][0]} {field['bits'][1] - field['bits'][0] + 1} {{{field['text']}}}}}"
            for field in register.get("fields", ())
        )
        access = _ACCESS[register["access"]]
        yield f"    {{{register['name']} 0x{register['offset']:02X} {access} {{{register['text']}}} {{{fields}}}}}"
    yield "}"


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in BOARDS:
        print(__doc__, file=sys.stderr)
        return 2
    directory = Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "e4_top.v").write_text(render(CONFIGS[BOARDS[sys.argv[1]]]))
    (directory / "registers.tcl").write_text(registers())
    print(f"wrote e4_top.v and registers.tcl into {directory}; next:")
    print(f"vivado -mode batch -source hw/fpga/vivado/build.tcl -tclargs {sys.argv[1]} {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
