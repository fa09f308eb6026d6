"""A language model on the FPGA's engine beyond what every session promises: its faults and its RTL. Simulated."""

import shutil

import numpy as np
import pytest

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows, device_stats
from edge_rt.backends.fpga import FpgaBackend, SimulatedFpgaBackend, Source
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_llama import read_llama
from edge_rt.backends.fpga_products import FpgaProducts, place
from edge_rt.backends.llama_library import load_library
from edge_rt.backends.llama_math import KvCache
from edge_rt.backends.native_library import load_native
from edge_rt.devices import fpga_regs as regs
from edge_rt.devices import fpga_sim
from edge_rt.errors import BackendLoadError, BackendUnavailableError, DeviceMemoryError
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort
from tests import byte_model
from tests.fpga_sources import GoldenBoard, golden_source
from tests.gguf_files import tiny_llama

CONFIG = CONFIGS["kv260-gemm"]
OPTIONS = LoadOptions(n_ctx=128, n_seq_max=2, n_batch=64, n_threads=1)

try:
    load_native()
    load_library()
except BackendUnavailableError as exc:
    pytest.skip(exc.reason, allow_module_level=True)


@pytest.fixture
def file(tmp_path):
    return byte_model.write(tmp_path / "m.gguf")


def logits_of(session, ids, n):
    """Decode greedily, and give the logits of each step."""
    found, n_past = [], 0
    for _ in range(n):
        found.append(session.decode([SeqRows(0, n_past, ids[n_past:], True)])[0].copy())
        n_past = len(ids)
        ids = [*ids, int(found[-1].argmax())]
    return np.stack(found)


def run(file, board, n=5):
    session = FpgaBackend(golden_source(board)).load(file, OPTIONS)
    logits = logits_of(session, session.tokenize("Line 3 rose", special=False), n)
    return session, logits


def test_a_session_says_that_it_is_simulated_and_gives_its_board_back(file):
    board = GoldenBoard(CONFIG)
    session, _ = run(file, board)
    assert (session.info.backend, session.info.device, session.info.evidence) == ("fpga", "fpga-golden", "simulator")
    assert device_stats(session) == {
        "device_products_total": 5 * 9,
        "device_faults_total": 0,
        "device_fallbacks_total": 0,
        "device_fault": "",
    }
    session.close()
    session.close()
    assert board.n_closed == 1


class BrokenPort(GoldenPort):
    """Silent from its nth start on, for n_silent of them; a flip changes results instead."""

    n_starts, silent_from, n_silent, flips = 0, 20, 0, False

    def wait(self, limit_s):
        self.n_starts += 1
        is_hit = self.silent_from <= self.n_starts < self.silent_from + self.n_silent
        if is_hit and not self.flips:
            return False
        is_raised = super().wait(limit_s)
        if is_hit:
            self._ddr[self.results_at + 2] ^= 0x40
        return is_raised

    def _compute(self, job):
        super()._compute(job)
        self.results_at = job.results - self.base


@pytest.mark.parametrize("flips", [False, True], ids=["silent", "flips"])
@pytest.mark.parametrize("n_silent", [1, 2, 1000])
def test_a_fault_changes_no_bit_of_the_answer_and_is_counted(file, n_silent, flips):
    _, wanted = run(file, GoldenBoard(CONFIG))

    def broken(config, memory):
        port = BrokenPort(config, memory)
        port.n_silent, port.flips = n_silent, flips
        return port

    session, found = run(file, GoldenBoard(CONFIG, port=broken))
    counts, report = session.device_counts(), session.report()
    session.close()
    assert np.array_equal(found, wanted)
    assert counts.n_faults == {1: 1, 2: 2, 1000: 18}[n_silent]
    assert len(report.on_cpu) == {1: 0, 2: 1, 1000: 9}[n_silent]
    assert counts.n_products + counts.n_fallbacks == 5 * 9
    assert counts.last_fault


def test_a_model_that_the_engine_does_not_hold_is_refused_before_the_board_is_opened(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_llama(linear="F16").encode())
    file = ModelFile(model="tiny", variant="", path=path, quant="")

    def never():
        raise AssertionError("the board was opened")

    backend = FpgaBackend(Source("fpga", "device", never, never))
    assert "takes Q4_0, Q4_1, Q8_0, and blk.0.attn_q.weight is F16" in backend.supports(file, OPTIONS)
    with pytest.raises(BackendLoadError, match="F16"):
        backend.load(file, OPTIONS)


def test_a_board_whose_memory_does_not_suffice_is_given_back(file):
    class Small(GoldenBoard):
        def allocate(self, n_bytes):
            raise DeviceMemoryError(device="d", kind="CMA", need_bytes=n_bytes, free_bytes=1, remedy="r")

    board = Small(CONFIG)
    with pytest.raises(DeviceMemoryError) as caught:
        FpgaBackend(golden_source(board)).load(file, OPTIONS)
    assert board.n_closed == 1
    estimate = FpgaBackend(golden_source()).estimate(file, OPTIONS)
    assert 0 < estimate.weights_bytes - caught.value.need_bytes < 6e6  # of the vectors' and results' room


def test_another_build_is_refused_and_the_board_given_back(file):
    def other(config, memory):
        port = GoldenPort(config, memory)
        port.write(regs.BUILD, 7)
        return port

    board = GoldenBoard(CONFIG, port=other)
    with pytest.raises(Exception, match="build is 0x7"):
        FpgaBackend(golden_source(board)).load(file, OPTIONS)
    assert board.n_closed == 1


@pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator")
@pytest.mark.parametrize("name", ["kv260-gemm", "z2-gemv"])
def test_the_rtl_gives_every_bit_of_the_golden_models_logits(file, name):
    _, wanted = run(file, GoldenBoard(CONFIGS[name]))
    source = Source(fpga_sim.DEVICE_ID, "simulator", lambda: fpga_sim.look(name), lambda: fpga_sim.open_board(name))
    session = SimulatedFpgaBackend(source).load(file, OPTIONS)
    found = logits_of(session, session.tokenize("Line 3 rose", special=False), 5)
    report = session.report()
    session.close()
    assert np.array_equal(found, wanted)
    assert (report.n_products, report.n_on_cpu, report.n_faults) == (5 * 9, 0, 0)
    assert session.info.backend == "fpga_sim"


@pytest.mark.model
def test_greedy_tokens_of_the_default_model_are_those_of_the_golden_path(model_forms):
    if "q4_1" not in model_forms:
        pytest.skip("the default model in Q4_1 is not in the store; `edge_rt models pull` fetches it")
    file = ModelFile(model="m", variant="", path=model_forms["q4_1"], quant="")
    session = FpgaBackend(golden_source()).load(file, OPTIONS)
    ids = session.tokenize("The three primary colours are", special=False)
    found = [int(logits.argmax()) for logits in logits_of(session, ids, 4)]
    session.close()
    llama = read_llama(file)
    placement = place(llama.matrices, Layout(CONFIG.beat_bits), CONFIG.n_vectors)
    port = GoldenPort(CONFIG, np.zeros(placement.memory_bytes, np.uint8))
    model, kv = llama.with_linear(FpgaProducts(port, placement, llama.matrices).multiply), KvCache.of(llama.config, 64)
    wanted, todo = [], ids
    for _ in range(4):
        todo = [int(model.forward(todo, kv)[0].argmax())]
        wanted += todo
    assert found == wanted
