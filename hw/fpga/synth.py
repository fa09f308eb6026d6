"""Synthesise the engine with yosys for Xilinx 7, count what it takes, and compare with what is recorded.

Exits 1 where LUTs, DSPs or block RAM have grown by more than 5 %. LUTs are yosys' estimate of logic cells: neighbours
that one LUT6_2 can hold are counted once, as a placer would. Nothing here is timing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hw.fpga.sim.build import CONFIGS, Config, kept

_HERE = Path(__file__).resolve().parent
RECORD = _HERE / "resources.json"
GROWTH = 1.05
# What there is of each on the board's chip.
CHIPS = {
    "z2": {"luts": 53_200, "dsps": 220, "bram36": 140},
    "kv260": {"luts": 117_120, "dsps": 1_248, "bram36": 144},
}


def synthesise(config: Config) -> Mapping[str, float]:
    """Give luts, dsps, bram36 and registers. Raises RuntimeError with yosys' words where it fails.

    yosys' report is kept: the same version makes the same of the same sources.
    """
    yosys = shutil.which("yosys")
    if yosys is None:
        raise RuntimeError("yosys is not installed: apt-get install yosys")
    sources = " ".join(path.name for path in sorted((_HERE / "rtl").glob("*.sv")))
    family = "xcup" if config.name.startswith("kv260") else "xc7"
    parameters = " ".join(f"-set {name} {value}" for name, value in config.parameters.items())
    script = "; ".join(
        [
            f"read_verilog -sv -I. {sources}",
            f"chparam {parameters} e4_engine",
            f"synth_xilinx -family {family} -top e4_engine -flatten",
            "tee -q -o {report} stat -tech xilinx",
        ]
    )
    version = subprocess.run([yosys, "-V"], capture_output=True, text=True, check=True).stdout
    report = kept(config, script + version, ".stat")
    if not report.exists():
        report.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=report.parent) as work:
            made = Path(work) / "stat"
            command = [yosys, "-q", "-p", script.format(report=made)]
            done = subprocess.run(command, cwd=_HERE / "rtl", capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{config.name}: {(done.stderr or done.stdout)[-2000:]}")
            made.replace(report)
    return count(report.read_text())


def count(report: str) -> Mapping[str, float]:
    """Read yosys' statistics."""

    def cells(pattern: str) -> int:
        return sum(int(n) for n in re.findall(rf"^\s+(?:{pattern})\s+(\d+)$", report, re.MULTILINE))

    estimate = re.search(r"Estimated number of LCs:\s+(\d+)", report)
    if estimate is None:
        raise RuntimeError("yosys gave no estimate of logic cells")
    # Small memories take LUTs too: a RAM32M or RAM64M four, a shift register one.
    luts = int(estimate[1]) + 4 * cells("RAM32M|RAM64M") + cells(r"SRL\w+|SRLC\w+")
    return {
        "luts": luts,
        "dsps": cells(r"DSP48E[12]"),
        "bram36": cells("RAMB36E[12]") + cells("RAMB18E[12]") / 2,
        "registers": cells(r"FD\w+"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hw.fpga.synth", description=__doc__)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help=f"of {', '.join(CONFIGS)}; all without one")
    parser.add_argument("--record", action="store_true", help="Write down what was counted instead of comparing.")
    asked = parser.parse_args()
    if unknown := [name for name in asked.configs if name not in CONFIGS]:
        parser.error(f"there is no configuration {unknown[0]}; there are {', '.join(CONFIGS)}")
    names = asked.configs or list(CONFIGS)
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = False
    print(f"{'configuration':<14}{'LUTs':>9}{'DSPs':>7}{'BRAM36':>9}{'registers':>11}   of the chip")
    for name in names:
        found = synthesise(CONFIGS[name])
        chip = CHIPS[name.split("-")[0]]
        shares = ", ".join(f"{100 * found[key] / chip[key]:.0f} %" for key in chip)
        print(
            f"{name:<14}{found['luts']:>9.0f}{found['dsps']:>7.0f}{found['bram36']:>9.1f}"
            f"{found['registers']:>11.0f}   {shares}"
        )
        for key in chip:
            if name in recorded and found[key] > GROWTH * recorded[name][key]:
                print(f"{name}: {key} has grown from {recorded[name][key]} to {found[key]}, more than 5 %")
                failed = True
        if asked.record:
            recorded[name] = found
    if asked.record:
        RECORD.write_text(json.dumps(recorded, indent=2) + "\n")
        return 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
