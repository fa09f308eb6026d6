"""A lane of the engine alone, in Icarus through cocotb: a second simulator, and stalls that no memory model makes."""

import importlib.util
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RTL = ROOT / "hw/fpga/rtl"

pytestmark = [
    pytest.mark.skipif(shutil.which("iverilog") is None, reason="needs Icarus Verilog: apt-get install iverilog"),
    pytest.mark.skipif(importlib.util.find_spec("cocotb") is None, reason="needs cocotb: pip install cocotb"),
]

# A process of its own: cocotb's runner sets up the environment that the simulator's Python starts in.
RUN = """
import sys
from cocotb_tools.runner import get_runner
beat, n_vec, build, rtl = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4]
runner = get_runner("icarus")
runner.build(sources=[f"{rtl}/e4_{name}.sv" for name in ("lane", "dots", "scale", "fifo")], hdl_toplevel="e4_lane",
             parameters={"BEAT": beat, "N_VEC": n_vec, "LOADERS": 2, "X_DEPTH": 64}, build_args=["-g2012"],
             timescale=("1ns", "1ps"), build_dir=build)
runner.test(hdl_toplevel="e4_lane", test_module="tests.fpga.cocotb_lane", build_dir=build,
            results_xml=f"{build}/results.xml")
"""


@pytest.mark.parametrize(("beat", "n_vec"), [(64, 1), (64, 2), (128, 1), (128, 2)])
def test_random_blocks_with_random_stalls(beat, n_vec, tmp_path):
    environment = os.environ | {
        "LANE_BEAT": str(beat),
        "LANE_N_VEC": str(n_vec),
        "LANE_RUNS": "60" if "RTL_RUNS" in os.environ else "6",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(beat), str(n_vec), str(tmp_path), str(RTL)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    results = list(tmp_path.rglob("results.xml"))
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    cases = ET.parse(results[0]).getroot().findall(".//testcase")
    assert len(cases) == 1
    assert cases[0].find("failure") is None, done.stdout[-3000:]
