"""An engine that fails: every answer is right all the same, counted and told. The engine is the golden model."""

import logging

import numpy as np
import pytest

from edge_rt.backends import fpga_cpu
from edge_rt.backends.fpga_engine import FORGIVE_S, FpgaEngine, Guard
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import encode_activations, encode_weights
from edge_rt.backends.fpga_pack import Matrix, fuse
from edge_rt.backends.fpga_products import place
from edge_rt.devices import fpga_regs as regs
from edge_rt.errors import BackendStepError, DeviceFaultError, DeviceMemoryError, DeviceMismatchError
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort

CONFIG = CONFIGS["kv260-gemm"]


def random_weights(n, k, asymmetric, seed, group_log2=0):
    random = np.random.default_rng(seed)
    n_groups = k // (32 << group_log2)
    zero = random.uniform(-8, 7.7, (n, n_groups)) if asymmetric else None
    q = random.integers(-8, 8, (n, k)).astype(np.int8)
    return encode_weights(q, random.uniform(0.01, 1, (n, n_groups)), zero, group_log2)


MATRICES = {
    "a": Matrix.of(random_weights(30, 128, True, 1)),
    "b": Matrix.of(random_weights(21, 192, False, 2), random_weights(21, 192, True, 3)),
}


class FaultyPort(GoldenPort):
    """Fails in one way, n_faults times: silent does not answer, stuck does not even reset, gone has no registers."""

    how, n_faults, n_stuck = "", 0, 0

    def arm(self, how, n_faults):
        self.how, self.n_faults = how, n_faults

    def wait(self, limit_s):
        if self.n_faults > 0:
            self.n_faults -= 1
            if self.how in ("silent", "stuck"):
                return False
            if self.how == "stops":
                self._registers[regs.STATUS] = 1 << regs.STATUS_ERR_READ[0]
                self._registers[regs.IRQ_STATUS] = 2
                return True
        self._unpacked.clear()  # it reads weights each time, as an engine does
        return super().wait(limit_s)

    def write(self, offset, value):
        if self.how == "gone" and self.n_faults > 0:
            self.n_faults -= 1
            raise OSError("SLVERR")
        if self.how == "stuck" and offset == regs.CTRL and self.n_stuck > 0:
            self.n_stuck -= 1
            self._registers[regs.CTRL] = value
            return
        super().write(offset, value)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def opened(**changes):
    placement = place(MATRICES, Layout(CONFIG.beat_bits), CONFIG.n_vectors)
    port = FaultyPort(CONFIG, np.zeros(placement.memory_bytes, np.uint8))
    clock = Clock()
    return port, clock, FpgaEngine.load(port, MATRICES, now=clock, **changes)


def vectors(name, m=3):
    return np.random.default_rng(7).standard_normal((m, MATRICES[name].k)).astype(np.float32)


def check(engine, name, m=3):
    x = vectors(name, m)
    wanted = encode_activations(x).to_float() @ MATRICES[name].to_float().T
    np.testing.assert_allclose(engine.multiply(name, x), wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", list(MATRICES))
@pytest.mark.parametrize("m", [1, 9])
def test_the_cpu_computes_what_the_engine_does(name, m):
    _, _, engine = opened()
    x = vectors(name, m)
    on_engine, on_cpu = engine.multiply(name, x), fpga_cpu.multiply(MATRICES[name], x)
    assert engine.report().n_products == 1
    assert np.array_equal(on_cpu, on_engine)


@pytest.mark.parametrize("group_log2", [0, 1, 2])
def test_the_cpu_knows_all_groups_and_takes_matrices_of_many_rows(group_log2):
    parts = [
        Matrix.of(random_weights(n, 256, asymmetric, n, group_log2)) for n, asymmetric in ((1100, True), (7, False))
    ]
    matrix = fuse(parts)
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    wanted = encode_activations(x).to_float() @ matrix.to_float().T
    np.testing.assert_allclose(fpga_cpu.multiply(matrix, x), wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("how", ["silent", "stops", "gone"])
def test_one_fault_is_tried_again_on_the_engine(how, caplog):
    port, _, engine = opened()
    port.arm(how, 1)
    with caplog.at_level(logging.WARNING):
        check(engine, "a")
    report = engine.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults, report.n_retried) == (1, 0, 1, 1)
    assert report.on_cpu == ()
    assert report.last_fault
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("how", ["silent", "stops"])
def test_two_faults_send_that_matrix_to_the_cpu_and_no_other(how, caplog):
    port, _, engine = opened()
    port.arm(how, 2)
    with caplog.at_level(logging.WARNING):
        check(engine, "a")
        check(engine, "a")
        check(engine, "b")
    report = engine.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults) == (1, 2, 2)
    assert report.on_cpu == ("a",)
    assert not report.is_lost
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.matrix for record in errors] == ["a"]


def test_what_a_deadline_says_is_kept():
    port, _, engine = opened()
    port.arm("silent", 2)
    check(engine, "b")
    assert "was not done after 0.05" in engine.report().last_fault
    assert "STATUS 0x00000000" in engine.report().last_fault
    assert "job 0, 2 jobs left" in engine.report().last_fault


def test_an_engine_that_does_not_reset_is_left_alone_and_tried_again_later(caplog):
    port, clock, engine = opened()
    port.arm("stuck", 1)
    port.n_stuck = 2
    with caplog.at_level(logging.WARNING):
        check(engine, "a")
        check(engine, "b")
    report = engine.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults) == (0, 2, 1)
    assert report.is_lost
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    clock.now_s = 31.0  # still stuck: the next pause is twice as long
    check(engine, "b")
    clock.now_s = 90.0
    check(engine, "b")
    assert engine.report().n_products == 0
    clock.now_s = 91.5
    check(engine, "b")
    check(engine, "a")
    report = engine.report()
    assert (report.n_products, report.n_on_cpu, report.is_lost) == (2, 4, False)


def test_an_engine_that_cannot_be_reached_is_lost_and_the_cpu_answers():
    port, clock, engine = opened()
    port.arm("gone", 2)  # the second refuses the reset
    check(engine, "a")
    assert engine.report().is_lost
    assert engine.report().last_fault == "it cannot be reached: SLVERR"
    clock.now_s = 30.0
    check(engine, "a")
    assert (engine.report().n_products, engine.report().is_lost) == (1, False)


def test_a_reset_writes_the_matrix_again():
    port, _, engine = opened()
    port.arm("stops", 1)
    written = port._ddr.copy()
    port._ddr[5000:6000] ^= 0x11  # weights of the first matrix
    port.memory[5000:6000] ^= 0x11
    check(engine, "a")
    assert np.array_equal(port._ddr[4096:8192], written[4096:8192])


def test_a_bit_that_flipped_in_memory_is_noticed_and_written_anew(caplog):
    port, _, engine = opened()
    check(engine, "a")
    port._ddr[4096 + 16 + 30] ^= 0x40
    with caplog.at_level(logging.WARNING):
        check(engine, "a")
    report = engine.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults, report.n_retried) == (2, 0, 1, 1)
    assert "what it computed does not add up" in report.last_fault
    check(engine, "a")
    assert engine.report().n_faults == 1


class WrongPort(GoldenPort):
    """Its engine's results have one word wrong, each time."""

    def wait(self, limit_s):
        is_raised = super().wait(limit_s)
        words = self._ddr[self.y_at :].view("<u4")
        words[8] = self.spoil(words[8])
        return is_raised


@pytest.mark.parametrize(
    "spoil",
    [lambda word: word ^ 1 << 22, lambda _: 0x7F800000, lambda _: 0xFF800000, lambda _: 0xFFFFFFFF],
    ids=["bit", "inf", "-inf", "nan"],
)
def test_an_engine_that_computes_wrong_is_left_for_the_cpu(spoil):
    placement = place(MATRICES, Layout(CONFIG.beat_bits), CONFIG.n_vectors)
    port = WrongPort(CONFIG, np.zeros(placement.memory_bytes, np.uint8))
    port.y_at, port.spoil = placement.y_at, spoil
    engine = FpgaEngine.load(port, MATRICES)
    for _ in range(2):
        check(engine, "a")
        check(engine, "b")
    report = engine.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults) == (0, 4, 4)
    assert report.on_cpu == ("a", "b")


def test_vectors_that_are_no_numbers_are_no_fault_of_the_engine():
    _, _, engine = opened()
    with pytest.raises(BackendStepError, match="a: an activation is not a finite number"):
        engine.multiply("a", np.full((1, 128), np.nan, np.float32))
    assert engine.report().n_faults == 0


def test_a_closed_engine_says_so_and_gives_its_port_back_once():
    closed = []
    _, _, engine = opened(close=lambda: closed.append(True))
    engine.close()
    engine.close()
    assert closed == [True]
    with pytest.raises(BackendStepError, match="closed"):
        engine.multiply("a", vectors("a"))


def test_an_engine_of_another_build_and_too_little_memory_are_refused():
    placement = place(MATRICES, Layout(CONFIG.beat_bits), CONFIG.n_vectors)
    port = GoldenPort(CONFIG, np.zeros(placement.memory_bytes - 4096, np.uint8))
    with pytest.raises(DeviceMemoryError) as caught:
        FpgaEngine.load(port, MATRICES)
    assert caught.value.need_bytes == placement.memory_bytes
    port.write(regs.BUILD, 1)
    with pytest.raises(DeviceMismatchError, match="build"):
        FpgaEngine.load(port, MATRICES)


class DarkPort(GoldenPort):
    """Logic without power or clock while reads_as is not None: every register reads so, and nothing arrives."""

    reads_as = None

    def read(self, offset):
        return super().read(offset) if self.reads_as is None else self.reads_as

    def write(self, offset, value):
        if self.reads_as is None:
            super().write(offset, value)

    def wait(self, limit_s):
        return super().wait(limit_s) if self.reads_as is None else self.reads_as != 0


@pytest.mark.parametrize("reads_as", [0, 0xFFFFFFFF])
def test_logic_without_power_is_lost_as_a_whole_and_all_its_matrices_are_back_later(reads_as):
    clock, placement = Clock(), place(MATRICES, Layout(CONFIG.beat_bits), CONFIG.n_vectors)
    port = DarkPort(CONFIG, np.zeros(placement.memory_bytes, np.uint8))
    engine = FpgaEngine.load(port, MATRICES, now=clock)
    port.reads_as = reads_as
    for _ in range(3):
        check(engine, "a")
        check(engine, "b")
    report = engine.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults, report.on_cpu) == (0, 6, 1, ())
    assert report.is_lost
    port.reads_as, clock.now_s = None, 31.0
    check(engine, "a")
    check(engine, "b")
    assert (engine.report().n_products, engine.report().is_lost) == (2, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (regs.CAPS_BEAT_BYTES, 0),
        (regs.CAPS_BEAT_BYTES, 17),
        (regs.CAPS_PORTS, 0),
        (regs.CAPS_VECTORS, 0),
        (regs.CAPS_VECTORS, 15),
        (regs.CAPS_K_MAX_LOG2, 0),
        (regs.CAPS_K_MAX_LOG2, 31),
    ],
)
def test_capabilities_that_no_engine_has_are_refused(field, value):
    port = GoldenPort(CONFIG, np.zeros(2**20, np.uint8))
    caps = port.read(regs.CAPS) & ~(field[1] << field[0]) | value << field[0]
    port._registers[regs.CAPS] = caps
    with pytest.raises(DeviceMismatchError, match=f"register CAPS is 0x{caps:X}"):
        FpgaEngine.load(port, MATRICES)


class BusyPort(GoldenPort):
    """Left by a process that has died: TAIL is ahead of HEAD. One that does not stop does not reset either."""

    stops = True

    def __post_init__(self):
        super().__post_init__()
        self._registers |= {regs.HEAD: 5, regs.TAIL: 9, regs.STATUS: 1}

    def write(self, offset, value):
        if offset == regs.CTRL and not self.stops:
            self._registers[offset] = value
        else:
            super().write(offset, value)


def test_an_engine_that_another_process_left_at_work_is_stopped_first():
    memory = np.zeros(place(MATRICES, Layout(CONFIG.beat_bits), CONFIG.n_vectors).memory_bytes, np.uint8)
    engine = FpgaEngine.load(BusyPort(CONFIG, memory), MATRICES)
    check(engine, "a")
    assert (engine.report().n_products, engine.report().n_faults) == (1, 0)
    port = BusyPort(CONFIG, memory)
    port.stops = False
    with pytest.raises(DeviceFaultError, match="it does not stop what it was doing"):
        FpgaEngine.load(port, MATRICES)


def test_pauses_of_a_lost_engine_double_up_to_ten_minutes():
    guard, now_s, pauses = Guard(), 0.0, []
    for _ in range(7):
        pauses.append(guard.lose(now_s))
        assert not guard.allows("a", now_s)
        now_s += pauses[-1]
        assert guard.allows("a", now_s)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    guard.find()
    assert guard.lose(0.0) == 30


def test_a_matrix_is_given_back_to_the_engine_an_hour_after_its_last_fault():
    guard = Guard()
    assert guard.strike("a", 0.0) == 1
    assert guard.strike("a", FORGIVE_S) == 1  # the first one counts no more
    assert guard.strike("a", FORGIVE_S + 1) == 2
    assert not guard.allows("a", 2 * FORGIVE_S)
    assert guard.struck_out(2 * FORGIVE_S) == ("a",)
    assert guard.allows("b", 2 * FORGIVE_S)
    assert guard.allows("a", 2 * FORGIVE_S + 1)
    assert guard.struck_out(2 * FORGIVE_S + 1) == ()
