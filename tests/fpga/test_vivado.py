"""build.tcl against stubs of Vivado's commands: its syntax, names, files and what it wires. No Vivado ran it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_rt.devices import fpga_regs as regs
from hw.fpga.sim.build import CONFIGS, source_hash
from hw.fpga.vivado.prepare import BOARDS, registers
from hw.fpga.wrapper import render

ROOT = Path(__file__).resolve().parents[2]
needs_tcl = pytest.mark.skipif(shutil.which("tclsh") is None, reason="needs tclsh: apt-get install tcl")


def build(board, out, slack="0.1"):
    (out / "e4_top.v").write_text(render(CONFIGS[BOARDS[board]]))
    (out / "registers.tcl").write_text(registers())
    return subprocess.run(
        ["tclsh", str(ROOT / "tests/fpga/vivado_stubs.tcl"), str(ROOT / "hw/fpga/vivado/build.tcl"), board, str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"STUB_SLACK": slack},
        check=False,
    )


@needs_tcl
@pytest.mark.parametrize("board", BOARDS)
def test_every_port_and_register_is_wired(board, tmp_path):
    done = build(board, tmp_path)
    assert done.returncode == 0, done.stderr
    config = CONFIGS[BOARDS[board]]
    wired = set(re.findall(r"CALL get_bd_intf_pins e4/(\w+)", done.stdout))
    assert wired == {"s_axi", *(f"m{p:02d}_axi" for p in range(config.n_ports))}
    for pin in ("e4/clk", "e4/resetn", "e4/irq"):
        assert f"CALL get_bd_pins {pin}" in done.stdout
    added = dict(re.findall(r"CALL set_property address_offset (0x\w+) (\w+)", done.stdout))
    assert len(re.findall(r"CALL ipx::add_register", done.stdout)) == len(added) == regs.GAP_HI // 4 + 1
    assert {path.name for path in tmp_path.iterdir()} >= {"e4.bit", "e4.hwh"}
    assert "write_hw_platform" in done.stdout


@needs_tcl
def test_a_build_that_misses_timing_fails(tmp_path):
    done = build("kv260", tmp_path, slack="-0.25")
    assert done.returncode == 1
    assert "timing is not met at 300 MHz: worst slack -0.25 ns" in done.stderr
    assert not (tmp_path / "e4.bit").exists()


@needs_tcl
def test_an_unknown_command_would_be_found(tmp_path):
    script = tmp_path / "bad.tcl"
    script.write_text("connect_bd_nett a b\n")
    stubs = str(ROOT / "tests/fpga/vivado_stubs.tcl")
    done = subprocess.run(
        ["tclsh", stubs, str(script)], capture_output=True, text=True, env=os.environ | {"STUB_SLACK": "0"}, check=False
    )
    assert done.returncode == 1
    assert "connect_bd_nett" in done.stderr


@needs_tcl
def test_what_is_missing_is_said(tmp_path):
    stubs, script = str(ROOT / "tests/fpga/vivado_stubs.tcl"), str(ROOT / "hw/fpga/vivado/build.tcl")
    for arguments, words in (
        (["kv260"], "usage:"),
        (["zcu104", str(tmp_path)], "no such board: zcu104; there are kv260 z2"),
        (["z2", str(tmp_path)], "run python -m hw.fpga.vivado.prepare z2"),
    ):
        done = subprocess.run(
            ["tclsh", stubs, script, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"STUB_SLACK": "0"},
            check=False,
        )
        assert done.returncode == 1
        assert words in done.stderr


@pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_wrapper_is_sound_verilog_and_carries_the_build(name, tmp_path):
    text = render(CONFIGS[name])
    assert f"32'h{source_hash()[:8]}" in text
    wrapper = tmp_path / "e4_top.v"
    wrapper.write_text(text)
    rtl = ROOT / "hw/fpga/rtl"
    done = subprocess.run(
        ["verilator", "--lint-only", "-Wno-fatal", f"-I{rtl}", "--top-module", "e4_top", str(wrapper)]
        + [str(path) for path in sorted(rtl.glob("*.sv"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Nothing of the wrapper's own is unconnected or of another width.
    assert not [line for line in done.stderr.splitlines() if "e4_top.v" in line and line.startswith("%")], done.stderr
