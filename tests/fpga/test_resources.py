"""What the engine takes of a chip, as yosys counts it, does not grow unnoticed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hw.fpga.sim.build import CONFIGS
from hw.fpga.synth import CHIPS, GROWTH, RECORD, count, synthesise

ROOT = Path(__file__).resolve().parents[2]
REPORT = """
     BUFG                            1
     DSP48E1                        76
     FDRE                         5695
     LUT6                         1320
     RAM32M                        120
     RAM64M                          2
     RAMB18E1                        8
     RAMB36E1                       12
     SRL16E                        332

   Estimated number of LCs:       3967
"""


def test_memories_made_of_luts_are_counted_as_luts():
    assert count(REPORT) == {"luts": 3967 + 4 * 122 + 332, "dsps": 76, "bram36": 16, "registers": 5695}


def test_a_report_without_an_estimate_is_refused():
    with pytest.raises(RuntimeError, match="no estimate"):
        count("     LUT6   3")


def test_every_configuration_is_recorded_and_fits_its_chip():
    recorded = json.loads(RECORD.read_text())
    assert set(recorded) == set(CONFIGS)
    for name, found in recorded.items():
        for key, size in CHIPS[name.split("-")[0]].items():
            assert found[key] <= size, (name, key)


def test_the_bars_of_the_small_chip_hold():
    recorded = json.loads(RECORD.read_text())
    assert recorded["z2-gemv"]["luts"] <= 4_500
    for key, size in CHIPS["z2"].items():
        assert recorded["z2-gemm"][key] <= 0.6 * size, key


@pytest.mark.parametrize("module", ["synth", "regmap"])
def test_asked_for_help_nothing_is_done(module):
    asked = [sys.executable, "-m", f"hw.fpga.{module}", "--help"]
    done = subprocess.run(asked, cwd=ROOT, env=os.environ | {"PATH": ""}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0][:30]) == (0, f"usage: python -m hw.fpga.{module}"[:30])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("yosys") is None, reason="needs yosys: apt-get install yosys")
@pytest.mark.parametrize("name", list(CONFIGS) if "RTL_RUNS" in os.environ else ["z2-gemv"])
def test_nothing_has_grown_by_more_than_a_twentieth(name):
    recorded = json.loads(RECORD.read_text())[name]
    found = synthesise(CONFIGS[name])
    for key in CHIPS[name.split("-")[0]]:
        assert found[key] <= GROWTH * recorded[key], f"{key}: `python -m hw.fpga.synth --record {name}` if it must be"
