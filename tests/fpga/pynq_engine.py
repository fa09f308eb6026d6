"""The product's own driver on pynq: FpgaEngine over PynqPort on the simulated board; hw.fpga.sim.device runs it.

Runs in an environment that has pynq. Prints one line of JSON: for each case null, or how it failed. The board's memory
has a cache that only flush and invalidate move bytes through. Simulated.
"""

import json
import sys
import traceback

import numpy as np
from pynq import Device

from edge_rt.backends import fpga_cpu
from edge_rt.backends.fpga_engine import FpgaEngine
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import GROUP, encode_weights
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.backends.fpga_products import place
from edge_rt.devices import fpga
from edge_rt.errors import DeviceMemoryError, DeviceNotFoundError
from hw.fpga.sim.engine import Setting

BIT = sys.argv[1]


def random_matrix(n, k, seed):
    random = np.random.default_rng(seed)
    shape = n, k // GROUP
    q = random.integers(-8, 8, (n, k)).astype(np.int8)
    return Matrix.of(encode_weights(q, random.uniform(0.1, 1, shape), random.uniform(-8, 7.7, shape)))


MATRICES = {"a": random_matrix(50, 256, 1), "b": random_matrix(9, 512, 2)}


def raised(kind, call):
    try:
        call()
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")


class Bench:
    """A model of two matrices on the board."""

    now_s = 0.0

    def __enter__(self):
        self.board = fpga.open_board(BIT)
        placement = place(MATRICES, Layout(self.board.caps.beat_bits), self.board.caps.n_vectors)
        port = self.board.allocate(placement.memory_bytes)
        self.engine = FpgaEngine.load(port, MATRICES, placement, close=self.board.close, now=lambda: self.now_s)
        return self

    def __exit__(self, *_):
        self.engine.close()

    def set(self, setting, value):
        Device.active_device.board.engine.set(setting, value)

    def is_right(self, name, m=3):
        x = np.random.default_rng(m).standard_normal((m, MATRICES[name].k)).astype(np.float32)
        return np.array_equal(self.engine.multiply(name, x), fpga_cpu.multiply(MATRICES[name], x))


def case_a_look_finds_the_board_and_loads_nothing():
    before = Device.active_device.board.engine
    seen = fpga.look(BIT)
    assert not seen.missing, seen
    assert "simulated" in seen.detail
    assert Device.active_device.board.engine is before


def case_products_are_the_cpus_bit_for_bit():
    with Bench() as bench:
        for m in (1, 3, 8, 20):
            assert bench.is_right("a", m), m
            assert bench.is_right("b", m), m
        report = bench.engine.report()
        assert (report.n_products, report.n_on_cpu, report.n_faults) == (8, 0, 0), report


def case_silent_memory_is_an_error_with_status_and_the_cpu_answers():
    with Bench() as bench:
        bench.set(Setting.SILENT_AFTER_BEATS, 40)
        assert bench.is_right("a")
        report = bench.engine.report()
        assert (report.n_products, report.n_on_cpu, report.n_faults) == (0, 1, 1), report
        assert report.is_lost, report
        assert "STATUS 0x0000000" in report.last_fault, report.last_fault
        assert "3 jobs left" in report.last_fault, report.last_fault
        assert bench.is_right("b")  # nobody asks the engine meanwhile
        assert bench.engine.report().n_faults == 1
        bench.set(Setting.SILENT_AFTER_BEATS, 0)
        bench.now_s = 31.0
        assert bench.is_right("b")
        assert bench.is_right("a")
        report = bench.engine.report()
        assert (report.n_products, report.is_lost) == (2, False), report


def case_a_refused_read_is_tried_again_and_then_computed_on_the_cpu():
    with Bench() as bench:
        at = bench.engine._products._placement.matrices["a"].spots[0].at + bench.engine._products._port.base
        bench.set(Setting.READ_ERROR_FROM, at)
        bench.set(Setting.READ_ERROR_TO, at + 1)
        assert bench.is_right("a")
        assert bench.is_right("b")
        report = bench.engine.report()
        assert (report.n_products, report.n_on_cpu, report.n_faults, report.on_cpu) == (1, 1, 2, ("a",)), report
        assert "memory refused a read; STATUS 0x00000008, " in report.last_fault, report.last_fault
        assert f"address 0x{at:X}" in report.last_fault, report.last_fault


def case_a_flipped_bit_is_noticed_and_tried_again():
    with Bench() as bench:
        assert bench.is_right("a", 1)
        bench.set(Setting.FLIP_BEAT, 60)  # of the next product
        assert bench.is_right("a", 1)
        report = bench.engine.report()
        assert (report.n_products, report.n_on_cpu, report.n_faults, report.n_retried) == (2, 0, 1, 1), report
        assert "does not add up" in report.last_fault, report


def case_one_process_has_the_board_at_a_time():
    with Bench():
        error = raised(DeviceNotFoundError, lambda: fpga.open_board(BIT))
        assert error.reason == "another process has it", error
    with Bench() as bench:
        assert bench.is_right("a")


def case_too_little_memory_says_how_much_is_needed():
    board = fpga.open_board(BIT)
    error = raised(DeviceMemoryError, lambda: board.allocate(1 << 30))
    board.close()
    assert error.need_bytes == 1 << 30, error
    assert "cma=" in str(error), error


def main():
    found = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                case()
                found[name[len("case_") :]] = None
            except Exception:  # noqa: BLE001 - whatever it is, it is the case's result
                found[name[len("case_") :]] = traceback.format_exc()
    print(json.dumps(found))


main()
