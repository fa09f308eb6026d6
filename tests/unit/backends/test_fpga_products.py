"""Products through a ring, on the golden model behind a strict cache; where Verilator is, on the RTL. Simulated."""

import shutil

import numpy as np
import pytest

from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import Activations, encode_activations, encode_weights, to_products
from edge_rt.backends.fpga_pack import Matrix, fuse
from edge_rt.backends.fpga_products import FpgaProducts, place
from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job
from edge_rt.errors import DeviceFaultError, DeviceMismatchError
from hw.fpga.model.golden import multiply
from hw.fpga.sim.build import CONFIGS, build
from hw.fpga.sim.engine import RtlEngine, Setting
from hw.fpga.sim.port import CheckedPort, GoldenPort, RtlPort

needs_verilator = pytest.mark.skipif(
    shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator"
)


def random_weights(n, k, asymmetric, seed):
    random = np.random.default_rng(seed)
    zero = random.uniform(-8, 7.7, (n, k // 32)) if asymmetric else None
    q = random.integers(-8, 8, (n, k)).astype(np.int8)
    return encode_weights(q, random.uniform(0.01, 1, (n, k // 32)), zero)


def some_matrices():
    """A plain matrix, one that is a sum, and one of rows of both kinds."""
    plain = Matrix.of(random_weights(30, 128, asymmetric=True, seed=1))
    total = Matrix.of(random_weights(21, 192, False, 2), random_weights(21, 192, True, 3))
    return {"plain": plain, "sum": total, "mixed": fuse([plain, Matrix.of(random_weights(9, 128, False, 4))])}


def wanted(matrix, x, n_vectors):
    out = np.zeros((len(x), matrix.n_rows), np.float32)
    for first in range(0, len(x), n_vectors):
        encoded = encode_activations(x[first : first + n_vectors])
        for piece in matrix.pieces:
            sums = multiply(piece.weights, encoded).astype(np.float32)
            rows = slice(piece.first_row, piece.end_row)
            out[first : first + n_vectors, rows] += to_products(sums, piece.weights.row_unit, encoded)
    return out


def golden_port(config_name, matrices, **changes):
    config = CONFIGS[config_name]
    placement = place(matrices, Layout(config.beat_bits), config.n_vectors)
    return GoldenPort(config, np.zeros(placement.memory_bytes, np.uint8), **changes), placement


def check_all(port, placement, matrices):
    products = FpgaProducts(port, placement, matrices)
    random = np.random.default_rng(5)
    for m in (1, 8, 3, 70):
        for name, matrix in matrices.items():
            x = random.standard_normal((m, matrix.k)).astype(np.float32)
            assert np.array_equal(products.multiply(name, x), wanted(matrix, x, placement.n_vectors)), (name, m)


@pytest.mark.parametrize("config_name", list(CONFIGS))
def test_products_are_the_golden_models(config_name):
    matrices = some_matrices()
    check_all(*golden_port(config_name, matrices), matrices)


def test_whole_numbers_lose_nothing():
    """INT8 in units of 1, -128 among them, times INT4 with one scale: what a quantised convolution needs."""
    random = np.random.default_rng(9)
    q_w = random.integers(-8, 8, (5, 96)).astype(np.int8)
    matrices = {"whole": Matrix.of(encode_weights(q_w, np.full((5, 3), 0.25), None))}
    q_x = random.integers(-128, 128, (70, 96)).astype(np.int8)
    q_x[0] = -128
    x = Activations(q_x, np.zeros((70, 3), np.uint8), np.zeros((70, 3), np.uint8), np.full(70, 1 / 16))
    port, placement = golden_port("kv260-gemm", matrices)
    found = FpgaProducts(port, placement, matrices).multiply("whole", x)
    np.testing.assert_allclose(found, 0.25 * (q_x.astype(int) @ q_w.T.astype(int)), rtol=2e-7)


@needs_verilator
@pytest.mark.parametrize("config_name", ["z2-gemv", "kv260-gemm"])
def test_products_on_the_rtl_are_the_golden_models(config_name):
    matrices, config = some_matrices(), CONFIGS[config_name]
    placement = place(matrices, Layout(config.beat_bits), config.n_vectors)
    engine = RtlEngine.open(build(config), placement.memory_bytes)
    check_all(RtlPort(engine), placement, matrices)
    engine.close()


@needs_verilator
def test_a_port_that_checks_counts_each_wrong_sum():
    matrices, config = {"plain": some_matrices()["plain"]}, CONFIGS["kv260-gemm"]
    placement = place(matrices, Layout(config.beat_bits), config.n_vectors)
    engine = RtlEngine.open(build(config), placement.memory_bytes)
    port = CheckedPort(engine, layout=placement.layout)
    products, x = FpgaProducts(port, placement, matrices), np.ones((3, 128), np.float32)
    right = products.multiply("plain", x)
    assert (port.n_sums, port.n_wrong, len(port.jobs)) == (32 * 3, 0, 1)
    # The golden model has read the weights already; the RTL reads them again, one weight of row 2 another by then.
    row_bytes = placement.layout.row_bytes(128, 0)
    engine.memory[placement.matrices["plain"].spots[0].at + 2 * row_bytes + 20] ^= 4
    with pytest.raises(DeviceFaultError, match="does not add up"):
        products.multiply("plain", x)
    assert (port.n_sums, port.n_wrong) == (2 * 32 * 3, 3)
    assert right.shape == (3, 30)
    engine.close()


@needs_verilator
def test_an_engine_that_stops_says_why():
    matrices, config = some_matrices(), CONFIGS["z2-gemv"]
    placement = place(matrices, Layout(config.beat_bits), config.n_vectors)
    engine = RtlEngine.open(build(config), placement.memory_bytes)
    products = FpgaProducts(RtlPort(engine), placement, matrices)
    bad = engine.base + placement.matrices["sum"].spots[1].at
    engine.set(Setting.READ_ERROR_FROM, bad)
    engine.set(Setting.READ_ERROR_TO, bad + 1)
    with pytest.raises(DeviceFaultError, match="memory refused a read; STATUS 0x") as caught:
        products.multiply("sum", np.ones((1, 192), np.float32))
    assert (caught.value.address, caught.value.n_left, caught.value.job) == (bad, 1, 1)
    assert caught.value.cycles > 0
    engine.close()


class ForgetfulPort(GoldenPort):
    """Leaves out one flush or invalidate: the nth from now on."""

    drop, nth = "", 0

    def flush(self, at, n_bytes):
        if not self._is_dropped("flush"):
            super().flush(at, n_bytes)

    def invalidate(self, at, n_bytes):
        if not self._is_dropped("invalidate"):
            super().invalidate(at, n_bytes)

    def _is_dropped(self, what):
        self.nth -= what == self.drop
        return what == self.drop and self.nth == -1


@pytest.mark.parametrize(("drop", "nth"), [("flush", 0), ("flush", 1), ("invalidate", 0)])
def test_a_missing_flush_or_invalidate_does_not_pass(drop, nth):
    """The strict cache shows each: vectors not flushed, descriptor not flushed, results not invalidated."""
    matrices = {"plain": some_matrices()["plain"]}
    config = CONFIGS["z2-gemv"]
    placement = place(matrices, Layout(config.beat_bits), config.n_vectors)
    port = ForgetfulPort(config, np.zeros(placement.memory_bytes, np.uint8))
    products = FpgaProducts(port, placement, matrices)
    x = np.ones((1, 128), np.float32)
    port.drop, port.nth = drop, nth
    says = "a descriptor was refused for the word 0" if (drop, nth) == ("flush", 1) else "does not add up"
    with pytest.raises(DeviceFaultError, match=says):
        products.multiply("plain", x)


def test_an_engine_that_does_not_fit_is_refused():
    matrices = some_matrices()
    port, placement = golden_port("kv260-gemm", matrices)
    port.write(regs.CAPS, port.read(regs.CAPS) & ~(15 << regs.CAPS_VECTORS[0]) | 1 << regs.CAPS_VECTORS[0])
    with pytest.raises(DeviceMismatchError, match="vectors is 1, needed is 8"):
        FpgaProducts(port, placement, matrices)
    port, placement = golden_port("kv260-gemm", matrices)
    port.memory = port.memory[:-4096]
    with pytest.raises(DeviceMismatchError, match="bytes of memory"):
        FpgaProducts(port, placement, matrices)
    port.write(regs.BUILD, 0x1234)
    with pytest.raises(DeviceMismatchError, match=f"build is 0x1234, needed is 0x{regs.BUILD_HASH:X}"):
        FpgaProducts(port, placement, matrices)
    port.write(regs.CAPS, regs.MAP_VERSION + 1 << regs.CAPS_VERSION[0])
    with pytest.raises(DeviceMismatchError, match=f"register map is 0x{regs.MAP_VERSION + 1:X}"):
        FpgaProducts(port, placement, matrices)
    port.write(regs.ID, 0)
    with pytest.raises(DeviceMismatchError, match="register ID is 0x0, needed is 0x45344731; build the bitstream"):
        FpgaProducts(port, placement, matrices)


def test_a_descriptor_is_read_back_as_it_was():
    job = Job(1 << 37, 0x1234_5000, 0x80, 77, 18, 8, 2, 3, asymmetric=True, tag=0xFFFFFFFF, irq=True)
    assert Job.of(job.descriptor()) == job
    assert Job.of(np.zeros(64, np.uint8)) is None
