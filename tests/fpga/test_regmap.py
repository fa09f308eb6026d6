"""One source of the register map: what was generated from it is what is in the tree."""

import re
from pathlib import Path

from edge_rt.devices import fpga_regs
from hw.fpga.regmap import render
from hw.fpga.sim.build import source_hash
from hw.fpga.sim.engine import Setting

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_are_up_to_date():
    for path, text in render().items():
        assert path.read_text() == text, f"run `python -m hw.fpga.regmap`: {path.relative_to(ROOT)}"


def test_the_package_knows_the_hash_of_the_rtl_that_it_belongs_to():
    assert f"{fpga_regs.BUILD_HASH:08x}" == source_hash()[:8]


def test_other_rtl_has_another_hash():
    path = ROOT / "hw/fpga/rtl/e4_scale.sv"
    assert source_hash({path: path.read_text()}) == source_hash()
    assert source_hash({path: path.read_text() + "\n"}) != source_hash()


def test_the_simulators_settings_have_the_same_numbers_on_both_sides():
    source = (ROOT / "hw/fpga/sim/engine_sim.cpp").read_text()
    listed = re.search(r"enum Setting \{(.*?)\};", source, re.DOTALL)
    assert listed is not None
    assert len(re.findall(r"^\s*k\w+", listed[1], re.MULTILINE)) == len(Setting)
