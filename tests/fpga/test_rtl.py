"""The engine's RTL against its golden model, on random work, under faults, and from one run to the next. Simulated."""

import dataclasses
import os
import shutil

import numpy as np
import pytest

from edge_rt.backends.fpga_numbers import ASYMMETRIC_SCALE_MAX, E_MAX, F_ONE, SCALE_MAX, Activations, Weights
from edge_rt.devices import fpga_regs as regs
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.engine import BusError, Setting
from hw.fpga.sim.rig import Rig
from hw.fpga.sim.ring import reset, status, submit

pytestmark = pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator")

# `make test-rtl` asks for all configurations and 2,000 runs of each; mutants.py for the one that a fault is planted in.
N_RUNS = int(os.environ.get("RTL_RUNS", "60"))
NAMES = os.environ.get("RTL_CONFIGS", ",".join(CONFIGS) if N_RUNS > 1000 else "z2-gemv,kv260-gemm").split(",")
LONG = 2_000_000

names = pytest.mark.parametrize("name", NAMES)


def run(rig, **options):
    submit(rig.engine, 0, rig.jobs, **options)
    return rig.engine.run(LONG)


@names
def test_random_runs_are_the_golden_models_bit_for_bit(name, capsys):
    config = CONFIGS[name]
    random = np.random.default_rng(len(name))
    n_groups = 0
    for seed in range(N_RUNS):
        group_log2 = int(random.integers(0, 3))
        unit = 32 << group_log2
        k = unit * int(random.integers(1, 1 + min(40, 2048 // unit)))
        n, m = int(random.integers(1, 50)), int(random.integers(1, config.n_vectors + 1))
        rig = Rig.random(
            name,
            [(n, k)],
            m,
            group_log2=group_log2,
            asymmetric=bool(random.integers(2)),
            block_rows=int(random.choice([4, 8, 16])),
            seed=seed,
            extreme=seed % 10 == 0,
        )
        engine = rig.engine
        engine.set(Setting.SEED, seed)
        engine.set(Setting.LATENCY_CYCLES, int(random.integers(1, 120)))
        engine.set(Setting.STALL_PERMILLE, int(random.choice([0, 100, 500])))
        engine.set(Setting.MILLI_BYTES_PER_CYCLE, int(random.choice([0, 8_000, 14_000, 50_000])))
        engine.set(Setting.FIXED_ARBITER, int(random.integers(2)))
        cycles = run(rig, max_bursts=int(random.integers(1, 17)))
        case = f"{name}: {n} x {k} times {m}, groups of {unit}, seed {seed}, {cycles} cycles, {status(engine)}"
        assert rig.matches() == [True], case
        assert engine.read(regs.HEAD) == 1, case
        n_groups += n * k // 32 * m
        engine.close()
    if N_RUNS > 1000:
        assert n_groups > 100_000
        with capsys.disabled():
            print(f"\n{name}: {N_RUNS:,} runs, {n_groups:,} groups of 32, no mismatch")


@names
@pytest.mark.parametrize("asymmetric", [True, False])
def test_the_largest_sums_of_either_sign_overflow_nowhere(name, asymmetric):
    """The longest row, each number at an end of its range and all products of one sign."""
    config = CONFIGS[name]
    k, n_groups = config.k_max, config.k_max // 32
    ends = [(q, z) for q in (-8, 7) for z in (-128, 127)] if asymmetric else [(q, s) for q in (-8, 7) for s in (-1, 1)]
    q = np.repeat(np.array([[q] for q, _ in ends], np.int8), k, axis=1)
    other = np.repeat(np.array([[end] for _, end in ends], np.int32), n_groups, axis=1)
    weights = Weights(
        q,
        scale=np.full_like(other, ASYMMETRIC_SCALE_MAX) if asymmetric else other * SCALE_MAX,
        z=(other if asymmetric else 0 * other).astype(np.int8),
        row_unit=np.ones(len(ends)),
        group_log2=0,
        asymmetric=asymmetric,
    )
    # Two vectors share a multiplier: each end beside each.
    signs = [-128, -128, 127, -128, -128, 127, 127, 127][: config.n_vectors]
    x = Activations(
        np.repeat(np.array(signs, np.int8)[:, None], k, axis=1),
        f=np.full((len(signs), n_groups), F_ONE - 1, np.uint8),
        e=np.full((len(signs), n_groups), E_MAX, np.uint8),
        unit=np.ones(len(signs)),
    )
    rig = Rig.of(name, [(weights, x)])
    largest = 255 * ASYMMETRIC_SCALE_MAX if asymmetric else 8 * SCALE_MAX
    assert np.abs(rig.products[0].expected()).max() == np.float32(largest * 128 * k * 31 * 2**E_MAX)
    run(rig)
    assert rig.matches() == [True]


@names
def test_a_chain_of_jobs_runs_through_with_one_start(name):
    rig = Rig.random(name, [(64, 576), (32, 1536), (96, 576), (8, 64)], CONFIGS[name].n_vectors)
    run(rig)
    assert rig.matches() == [True] * 4
    assert rig.engine.read(regs.HEAD) == 4
    assert rig.engine.read(regs.TAG) == 3
    assert rig.engine.read(regs.IRQ_STATUS) == 1
    # The ring wraps: four more from place four on.
    rig.clear_results()
    run(rig)
    assert rig.matches() == [True] * 4
    assert rig.engine.read(regs.HEAD) == 8


def test_registers_say_what_was_built_and_refuse_what_is_none():
    rig = Rig.random("z2-gemv", [(4, 32)], 1)
    caps = rig.engine.read(regs.CAPS)
    field = {name: caps >> at[0] & at[1] for name, at in vars(regs).items() if name.startswith("CAPS_")}
    assert field == {
        "CAPS_BEAT_BYTES": 8,
        "CAPS_PORTS": 4,
        "CAPS_VECTORS": 1,
        "CAPS_K_MAX_LOG2": 13,
        "CAPS_ADDR_BITS": 32,
        "CAPS_VERSION": regs.MAP_VERSION,
    }
    assert rig.engine.read(regs.ID) == regs.ENGINE_ID
    assert rig.engine.read(regs.BUILD) == regs.BUILD_HASH
    for offset in (0x64, 0x80, 0xFC):
        with pytest.raises(BusError):
            rig.engine.read(offset)
        with pytest.raises(BusError):
            rig.engine.write(offset, 1)
    with pytest.raises(BusError):
        rig.engine.write(regs.ID, 1)


@names
def test_one_flipped_bit_of_memory_changes_the_result(name):
    """The comparison is not vacuous."""
    rig = Rig.random(name, [(16, 512)], 1)
    address = rig.jobs[0].weights - rig.engine.base
    # A weight of row 2, behind its superblock's scales.
    row_bytes = 512 // 32 * 18
    rig.engine.memory[address + 2 * row_bytes + 40] ^= 4
    run(rig)
    assert rig.matches() == [False]
    wrong = (rig.products[0].found(rig.engine.memory) != rig.products[0].expected()).any(axis=1)
    assert np.flatnonzero(wrong).tolist() == [2]


@names
@pytest.mark.parametrize("what", ["weights", "activations"])
def test_a_refused_read_stops_the_engine_with_its_address(name, what):
    rig = Rig.random(name, [(64, 576), (32, 1536)], CONFIGS[name].n_vectors)
    engine = rig.engine
    beat = CONFIGS[name].beat_bits // 8
    bad = getattr(rig.jobs[1], what) + 40 * beat
    engine.set(Setting.READ_ERROR_FROM, bad)
    engine.set(Setting.READ_ERROR_TO, bad + 1)
    run(rig)
    found = status(engine)
    assert found.read_error
    assert not found.busy
    assert engine.read64(regs.ERR_ADDR_LO) == bad
    assert engine.read(regs.HEAD) == 1
    assert engine.read(regs.IRQ_STATUS) & 2
    engine.set(Setting.READ_ERROR_TO, 0)
    _runs_again(rig)


@names
def test_a_refused_write_stops_the_engine(name):
    rig = Rig.random(name, [(64, 576), (32, 1536)], 1)
    engine = rig.engine
    engine.set(Setting.WRITE_ERROR_FROM, rig.jobs[1].results)
    engine.set(Setting.WRITE_ERROR_TO, rig.jobs[1].results + 1)
    run(rig)
    assert status(engine).write_error
    assert not status(engine).busy
    engine.set(Setting.WRITE_ERROR_TO, 0)
    _runs_again(rig)


@names
def test_a_job_is_not_done_before_memory_has_answered_for_its_last_rows(name):
    rig = Rig.random(name, [(16, 128)], 1)
    engine = rig.engine
    engine.set(Setting.LATENCY_CYCLES, 120)
    last_row = rig.jobs[0].results + 15 * 4
    engine.set(Setting.WRITE_ERROR_FROM, last_row)
    engine.set(Setting.WRITE_ERROR_TO, last_row + 1)
    run(rig)
    engine.run(1_000)
    assert status(engine).write_error
    assert engine.read(regs.HEAD) == 0
    engine.set(Setting.WRITE_ERROR_TO, 0)
    _runs_again(rig)


@names
def test_silent_memory_ends_in_a_timeout_and_no_reset_forgets_what_it_owes(name):
    """Beats that come after a reset would poison the next run, so the reset waits for them."""
    rig = Rig.random(name, [(64, 576), (32, 1536)], 1)
    engine = rig.engine
    engine.set(Setting.SILENT_AFTER_BEATS, 300)
    submit(engine, 0, rig.jobs, timeout_cycles=500)
    engine.run(20_000)
    found = status(engine)
    assert found.timed_out
    assert found.draining
    assert not reset(engine)
    engine.set(Setting.SILENT_AFTER_BEATS, 0)
    _runs_again(rig)


@names
def test_an_abort_at_any_time_leaves_a_clean_engine(name):
    rig = Rig.random(name, [(64, 576), (32, 1536), (96, 576)], CONFIGS[name].n_vectors)
    engine = rig.engine
    random = np.random.default_rng(1)
    for _ in range(max(20, N_RUNS // 4)):
        rig.clear_results()
        engine.set(Setting.STALL_PERMILLE, int(random.integers(0, 400)))
        submit(engine, 0, rig.jobs)
        engine.write(regs.IRQ_ENABLE, 0)
        engine.run(int(random.integers(1, 2500)))
        engine.write(regs.CTRL, 1)
        engine.write(regs.IRQ_ENABLE, 2)
        engine.run(20_000)
        found = status(engine)
        assert found.aborted
        assert not found.busy
        _runs_again(rig)


@names
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"n_vectors": 0}, 2),
        ({"n_vectors": 9}, 2),
        ({"group_log2": 3}, 3),
        ({"n_groups": 0}, 4),
        ({"n_groups": 257}, 4),
        ({"n_groups": 65535}, 4),
        ({"n_groups": 3, "group_log2": 1}, 4),
        ({"n_blocks": 0}, 5),
        ({"n_blocks": 0xFFFFFF}, 5),
        ({"block_log2": 1}, 5),
        ({"block_log2": 5}, 5),
        ({"weights": 0x1000_0040}, 6),
        ({"activations": 0x1000_0008}, 6),
        ({"results": 0x1000_0040}, 6),
        ({"results": 1 << 45}, 6),
    ],
)
def test_a_job_that_the_engine_cannot_do_is_refused_before_any_read(name, change, cause):
    rig = Rig.random(name, [(16, 128)], 1)
    submit(rig.engine, 0, [dataclasses.replace(rig.jobs[0], **change)])
    rig.engine.run(5_000)
    found = status(rig.engine)
    assert found.bad_config
    assert found.cause == cause
    assert rig.engine.read64(regs.BEATS_LO) == 0
    assert regs.CONFIG_CAUSES[cause]
    _runs_again(rig)


def test_garbage_in_the_ring_is_refused():
    rig = Rig.random("z2-gemv", [(16, 128)], 1)
    for cause, word, value in ((1, 0, 0), (7, 15, 1), (7, 0, regs.DESCRIPTOR_MAGIC | 1 << 31)):
        submit(rig.engine, 0, rig.jobs)  # starts; the engine fetches before it can be overwritten
        rig.engine.run(LONG)
        at = regs.DESCRIPTOR_BYTES * 0
        rig.engine.memory[at : at + 64].view("<u4")[word] = value
        rig.engine.write(regs.IRQ_STATUS, 3)
        rig.engine.write(regs.TAIL, rig.engine.read(regs.HEAD) + 1)
        rig.engine.run(5_000)
        assert status(rig.engine).cause == cause
        _runs_again(rig)
        assert reset(rig.engine)


def _runs_again(rig):
    assert reset(rig.engine)
    assert not status(rig.engine).busy
    rig.engine.set(Setting.STALL_PERMILLE, 0)
    rig.clear_results()
    run(rig)
    assert rig.matches() == [True] * len(rig.products)
    assert reset(rig.engine)


@names
@pytest.mark.parametrize(("n", "k"), [(512, 32), (512, 64), (320, 128), (640, 256)])
def test_rows_that_are_computed_faster_than_they_can_be_written_wait(name, n, k):
    """The queues of blocks fill up, and their counters wrap while they do."""
    for n_vectors in {1, CONFIGS[name].n_vectors}:
        rig = Rig.random(name, [(n, k), (n, k)], n_vectors)
        run(rig)
        assert not status(rig.engine).timed_out
        assert rig.matches() == [True, True]
