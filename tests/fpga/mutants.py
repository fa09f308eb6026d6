"""Plant faults in a copy of the engine's RTL and say which test notices each: python -m tests.fpga.mutants [WORD ...]

Each fault is one replaced text of one file. The copy is compiled for the configuration in which the fault matters most,
and tests/fpga/test_rtl.py runs on it as `make test` has it, but for the test of the build's hash, which would notice
all of them. Exits 1 where a fault went unnoticed. WORDs choose faults. Some minutes. Simulated.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900  # a hang is noticed too


@dataclass(frozen=True, slots=True)
class Mutant:
    """text of rtl/e4_FILE.sv, which must be there once, becomes other; config is where it is compiled."""

    what: str
    file: str
    text: str
    other: str
    config: str = "z2-gemv"


MUTANTS = (
    # Scales and zero points
    Mutant("z has no sign", "scale", "zx_1 <= z * minus_x", "zx_1 <= $signed({1'b0, z}) * minus_x"),
    Mutant("z has no sign, adders", "scale", "- (z[7] ? x <<< 1", "+ (z[7] ? x <<< 1", "z2-gemm"),
    Mutant("z is subtracted from nothing: of the other sign", "scale", "t <= zx_1 +", "t <= -zx_1 +"),
    Mutant(
        "z counts where weights are symmetric", "scale", "held_asymmetric ? held_field[7:0] : 8'd0", "held_field[7:0]"
    ),
    Mutant("sixteenths are eighths", "scale", "localparam Z_FRACTION = 4;", "localparam Z_FRACTION = 3;"),
    Mutant(
        "the sum of 32 times -128 overflows",
        "scale",
        "wire signed [13:0] minus_x = rec[13:0];",
        "wire signed [12:0] minus_x = rec[12:0];",
    ),
    Mutant("a bit of z lost, adders", "scale", "(z[2] ? x : 15'sd0)", "15'sd0", "z2-gemm"),
    Mutant(
        "the upper carry of t lost, adders",
        "scale",
        "reg signed [17:0] high_3;",
        "reg signed [15:0] high_3;",
        "z2-gemm",
    ),
    Mutant("the 26th bit is not added", "scale", "scaled[0] ? {p_m[S][11:4], 3'b0}", "1'b0 ? {p_m[S][11:4], 3'b0}"),
    Mutant("the 26th bit is added twice as large", "scale", "{p_m[S][11:4], 3'b0}", "{p_m[S][10:4], 4'b0}"),
    Mutant("scale of the group after", "scale", "p_m[n] <= p_m[n-1]", "p_m[n] <= p_m[n > 2 ? n-2 : 1]", "kv260-gemv"),
    Mutant("f of the group before", "scale", "{2'b01, p_f[T]}", "{2'b01, p_f[T+1]}"),
    Mutant("e of the group after", "scale", "<<< p_e[P];", "<<< p_e[P-1];", "kv260-gemv"),
    Mutant("a row begins with the sum of the last", "scale", "(p_first[STAGES] ? {SUM_BITS{1'b0}} : sum)", "sum"),
    Mutant(
        "two vectors take turns the wrong way round",
        "scale",
        "p_phase[STAGES] == (v >= UNITS)",
        "p_phase[STAGES] != (v >= UNITS)",
        "z2-gemm",
    ),
    Mutant("sums are two bits short", "engine", "localparam SUM_BITS = 52;", "localparam SUM_BITS = 50;"),
    # Products
    Mutant("the borrow between two vectors lost", "dots", "sum[33:17] + {16'b0, sum[16]}", "sum[33:17]", "z2-gemm"),
    Mutant("the sign of a weight lost, adders", "dots", "- (wi[3] ? wide <<< 3", "+ (wi[3] ? wide <<< 3", "z2-gemm"),
    Mutant(
        "the tree's last carry lost",
        "dots",
        "localparam PRODUCT_BITS = PAIRED ? 29 : 12;",
        "localparam PRODUCT_BITS = PAIRED ? 29 : 11;",
    ),
    Mutant("half a group missing", "lane", "first_half + beat_dots", "17'sd0 + beat_dots"),
    # Floats
    Mutant("ties rounded up", "float", "(|shifted_3[BITS-26:0] || shifted_3[BITS-24])", "1'b1"),
    Mutant("never rounded", "float", "truncated + {30'd0, round_up}", "truncated"),
    Mutant("the sign lost", "float", "float <= {sign_3,", "float <= {1'b0,"),
    # Rows and groups
    Mutant(
        "the last superblock of a row is taken for whole",
        "lane",
        "beat_n == last_beat || row_ends",
        "beat_n == last_beat",
    ),
    Mutant("a scale of groups of 128 counts for 32", "lane", "weight_n >> 1) >> group_log2", "weight_n >> 1)"),
    Mutant("results overrun their queue", "lane", "n_results < RESULTS", "n_results < 15"),
    Mutant("records of the group before", "lane", "tags[TRAVEL-1][GA-1:0]", "tags[TRAVEL][GA-1:0]", "kv260-gemv"),
    # Memory
    Mutant("a burst crosses its line", "reader", "5'd16 - {1'b0, addr[SIZE +: 4]}", "5'd16"),
    Mutant("more is asked for than there is room", "reader", "<= FIFO_DEPTH;", "<= 2 * FIFO_DEPTH;"),
    Mutant("what was offered is taken back", "reader", "arvalid = held || may", "arvalid = may && !held"),
    Mutant("bursts under way are not waited for", "reader", "idle = n_bursts == 0 && !held", "idle = !held"),
    Mutant("the second vector is the first", "loader", "vec <= vec + STEP", "vec <= vec", "z2-gemm"),
    Mutant(
        "a full queue says so only before its counters wrap",
        "fifo",
        "n_written == {~n_read[LOG], n_read[LOG-1:0]}",
        "n_written - n_read == DEPTH",
    ),
    # Order and faults
    Mutant("blocks overlap", "runner", "(ADDR'(block_beats) << SIZE)", "(ADDR'(block_beats - 1) << SIZE)"),
    Mutant(
        "two ports get one block",
        "runner",
        "if (block_wanted[p]) block_granted = {{(PORTS-1){1'b0}}, 1'b1} << p",
        "if (block_wanted[p]) block_granted[p] = 1'b1",
    ),
    Mutant("memory's debts are not waited for", "runner", "DRAIN: if (all_idle)", "DRAIN: if (1'b1)"),
    Mutant(
        "a job ends before its last row is written", "runner", "n_fours_left == 0 && writer_idle", "n_fours_left == 0"
    ),
    Mutant(
        "errors of reads are passed over",
        "engine",
        "weight_error[p] = weight_beat[p] && m_rresp[2*p + 1]",
        "weight_error[p] = 1'b0",
    ),
    Mutant(
        "errors of writes are passed over",
        "runner",
        "|load_error || write_error || timed_out",
        "|load_error || timed_out",
    ),
    Mutant("no timeout", "runner", "timeout != 0 && n_quiet == 0", "1'b0 && n_quiet == 0"),
    Mutant("head goes on without the ring's wrap", "runner", "(16'd1 << ring_log2) - 16'd1", "16'hFFFF"),
    Mutant("four rows leave before the fourth is there", "writer", "until_place == last_place", "until_place == 0"),
    Mutant("results of the lane beside", "writer", "bank[lane * BEATS + beat]", "bank[(lane ^ 1) * BEATS + beat]"),
    Mutant(
        "an interrupt cannot be cleared",
        "registers",
        "== R_IRQ_STATUS ? value[1:0] : 2'b00",
        "== R_IRQ_STATUS ? 2'b00 : 2'b00",
    ),
)


def copy(work: Path) -> None:
    """Copy what the tests run, so that nothing of the tree is touched."""
    for name in ("hw/fpga", "edge_rt", "tests/fpga"):
        shutil.copytree(_ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hw/__init__.py", "tests/__init__.py"):
        if (_ROOT / name).exists():
            shutil.copy(_ROOT / name, work / name)


def plant(mutant: Mutant, rtl: Path) -> None:
    path = rtl / f"e4_{mutant.file}.sv"
    before = path.read_text()
    if before.count(mutant.text) != 1:
        sys.exit(f"{mutant.what}: {path.name} has {mutant.text!r} {before.count(mutant.text)} times, not once")
    path.write_text(before.replace(mutant.text, mutant.other))


def noticed_by(mutant: Mutant, work: Path) -> list[str]:
    """Give the tests that fail, none where the fault is not noticed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not registers_say", "--no-header"]
    environment = os.environ | {"PYTHONPATH": str(work), "RTL_CONFIGS": mutant.config, "XDG_CACHE_HOME": str(work)}
    try:
        done = subprocess.run(
            [*command, "--maxfail=1", "tests/fpga/test_rtl.py"],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ["no end within the limit"]
    if done.returncode == -signal.SIGABRT:
        return ["the modelled memory's own check"]
    if "SimulatorBuildError" in done.stdout or done.returncode not in (0, 1):
        sys.exit(f"{mutant.what}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return re.findall(r"^FAILED \S*::test_(\S+)", done.stdout, re.MULTILINE)


def main() -> int:
    wanted = sys.argv[1:]
    mutants = [mutant for mutant in MUTANTS if not wanted or any(word in mutant.what for word in wanted)]
    n_unnoticed = 0
    for mutant in mutants:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            copy(work)
            plant(mutant, work / "hw/fpga/rtl")
            tests = noticed_by(mutant, work)
        n_unnoticed += not tests
        print(
            f"{mutant.config:<11} e4_{mutant.file}.sv: {mutant.what}: {', '.join(tests) or 'NOT NOTICED'}", flush=True
        )
    print(f"{len(mutants) - n_unnoticed} of {len(mutants)} faults noticed")
    return 1 if n_unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
