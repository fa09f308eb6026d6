"""What a model would take of the engine: the jobs counted are those that the golden model gets, and all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from click.testing import CliRunner

from edge_rt.backends import fpga_onnx
from edge_rt.backends.base import TensorOptions
from edge_rt.backends.fpga_cycles import BOARDS, job_cycles
from edge_rt.backends.fpga_engine import FpgaEngine
from edge_rt.backends.fpga_onnx_cost import measure
from edge_rt.backends.fpga_onnx_plan import CPU, FPGA, Rule
from edge_rt.cli import main
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort
from tests.fpga_engines import golden_port
from tests.tensor_models import int4, quantised_conv, saved

ALL = Rule(min_intensity=0)
SHAPE = (1, 16, 20, 11)


class CountingPort(GoldenPort):
    """Counts starts and jobs."""

    n_starts = n_jobs = 0

    def wait(self, limit_s):
        self.n_starts += 1
        return GoldenPort.wait(self, limit_s)

    def _compute(self, job):
        self.n_jobs += 1
        GoldenPort._compute(self, job)


class Ticks:
    """A clock that is a second later each time it is looked at."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def two_pieces(group: int = 1):
    random = np.random.default_rng(0)
    weights = random.integers(-128, 128, (24, SHAPE[1] // group, 3, 3)).astype(np.int8)
    return quantised_conv(random, weights, shape=SHAPE, pads=[1, 1, 1, 1], group=group)


@pytest.mark.parametrize("group", [1, 2])
def test_jobs_are_counted_as_the_engine_gets_them(group: int, tmp_path: Path) -> None:
    file = saved(two_pieces(group), tmp_path / "conv.onnx")
    board = BOARDS["kv260"]
    cost = measure(file, TensorOptions(n_threads=1), board, ALL, now=Ticks())
    ports: list[CountingPort] = []

    def opener(matrices):
        golden = golden_port(matrices, "kv260-gemm")
        ports.append(CountingPort(golden.config, golden.memory))
        return FpgaEngine.load(ports[0], matrices)

    fpga_onnx.load(file, TensorOptions(n_threads=1), opener, ALL).run({"x": np.zeros(SHAPE, np.uint8)})
    (product,) = cost.products
    assert (product.n_jobs, cost.n_starts) == (ports[0].n_jobs, ports[0].n_starts)
    n_vectors = group * 20 * 11
    assert (product.label, product.kind, product.n_rows, product.k) == ("the one", "Conv", 24, 16 // group * 9)
    assert (product.n_vectors, product.n_macs) == (n_vectors, n_vectors * 24 // group * 16 // group * 9)
    # 220 vectors are 27 jobs of 8 and one of 4 for each of the two pieces.
    k, group_log2 = {1: (160, 0), 2: (96, 0)}[group]
    wanted = sum(
        n * job_cycles(board.engine, board.memory, n_rows=24 // group, k=k, n_vectors=m, group_log2=group_log2)
        for n, m in ((27, 8), (1, 4))
    )
    assert product.cycles == pytest.approx(2 * group * wanted)
    assert cost.engine_s == pytest.approx(product.cycles / 300e6)
    assert (cost.host_s, cost.cpu_s) == (1, 1)
    assert {part.provider for part in cost.placement} <= {FPGA, CPU}


def test_boards_are_configurations_that_there_are() -> None:
    for board, name in (("kv260", "kv260-gemm"), ("pynq-z2", "z2-gemm")):
        config, engine = CONFIGS[name], BOARDS[board].engine
        assert (engine.beat_bits, engine.n_ports, engine.n_vectors) == (
            config.beat_bits,
            config.n_ports,
            config.n_vectors,
        )


def test_the_command_says_what_is_projected_and_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "conv.onnx"
    saved(two_pieces(), path)
    said = CliRunner().invoke(main, ["fpga", "plan", str(path), "--board", "pynq-z2", "--intensity", "0"])
    assert said.exit_code == 0, said.output
    assert "projected for z2-gemm on a PYNQ-Z2; no board has run" in said.output
    for word in ("the one", "engine, projected", "CPU beside it, here", "onnxruntime alone, here"):
        assert word in said.output
    said = CliRunner().invoke(main, ["fpga", "plan", str(path), "--intensity", "0", "--json"])
    facts = json.loads(said.output)
    assert {name for name in facts if name.endswith("_s")} <= set(facts["evidence"])
    assert set(facts["products"][0]) & {"cycles", "engine_s"} <= set(facts["evidence"])
    assert facts["evidence"]["engine_s"] == "projected"
    said = CliRunner().invoke(main, ["fpga", "plan", str(path), "--intensity", "nan"])
    assert (said.exit_code, "nan is no number" in said.output) == (2, True)
    saved(int4(4), path)
    said = CliRunner().invoke(main, ["fpga", "plan", str(path), "--intensity", "900"])
    assert said.exit_code == 1
    assert "fewer than 900 multiplications per byte" in str(said.output) + str(said.exception)
