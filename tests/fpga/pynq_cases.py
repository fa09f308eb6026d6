"""What must go wrong, and how, when pynq drives the simulated engine; hw.fpga.sim.device runs it

Runs in an environment that has pynq. Prints one line of JSON: for each case null, or how it failed. Over the network,
those are left out that reach behind pynq or need what PYNQ.remote has not got. Simulated.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import grpc
import numpy as np
from pynq import MMIO, Device, Overlay, allocate

from edge_rt.backends.fpga_layout import Layout, pack_activations, pack_weights
from edge_rt.backends.fpga_numbers import GROUP, encode_activations, encode_weights
from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job
from hw.fpga.model.golden import multiply
from hw.fpga.sim.board import RUBBISH, SETTINGS_AT
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.engine import Setting
from hw.fpga.sim.handoff import HandoffError, write_handoff

BIT = sys.argv[1]
REMOTE = "PYNQ_REMOTE_DEVICES" in os.environ
NOWHERE = 0x7000_0000  # a line of memory that the board has not got
BUFFERS = {"weights", "vector", "ring"}


def here_only(case):
    case.here_only = True
    return case


class Bench:
    """The overlay, freshly loaded, with one product in its memory."""

    def __init__(self, cacheable=1):
        self.overlay = Overlay(BIT)
        self.engine = self.overlay.e4
        self.registers = self.engine.register_map
        random = np.random.default_rng(3)
        n, k = 64, 512
        self.k = k
        weights = encode_weights(
            random.integers(-8, 8, (n, k)).astype(np.int8), random.uniform(0.1, 1, (n, k // GROUP)), None
        )
        self.n_vectors = int(self.registers.CAPS.VECTORS)  # all that this engine takes: 1 or 8
        x = encode_activations(random.standard_normal((self.n_vectors, k)))
        self.expected = multiply(weights, x).astype(np.float32)
        layout = Layout(8 * self.registers.CAPS.BEAT_BYTES)
        self.data = {"weights": pack_weights(weights, layout), "vector": pack_activations(x, layout)}
        self.buffers = {name: allocate(data.shape, "u1", cacheable=cacheable) for name, data in self.data.items()}
        self.buffers["ring"] = allocate(64, "u1", cacheable=cacheable)
        self.results = allocate(self.expected.shape, "f4", cacheable=cacheable)
        at = {name: buffer.device_address for name, buffer in self.buffers.items()}
        self.job = {
            "weights": at["weights"],
            "activations": at["vector"],
            "results": self.results.device_address,
            "n_blocks": n // 4,
            "n_groups": k // GROUP,
        }

    def set(self, setting, value):
        """Tell the modelled memory something: over registers, which reach it from wherever pynq runs."""
        MMIO(SETTINGS_AT, 0x1000).write(4 * setting, value)

    def start(self, flushed=BUFFERS, **changes):
        """Write all buffers, flush those named, and hand the job over."""
        shape = {"n_vectors": self.n_vectors, "group_log2": 0, "block_log2": 2, "asymmetric": False}
        job = Job(**{**self.job, **changes}, **shape)
        for name, data in {**self.data, "ring": job.descriptor()}.items():
            self.buffers[name][:] = data
        for name in flushed:
            self.buffers[name].flush()
        self.registers.RING_LO = self.buffers["ring"].device_address
        self.registers.RING_LOG2 = 0
        self.registers.TIMEOUT = 2000
        self.registers.TAIL = (int(self.registers.HEAD) + 1) & 0xFFFF

    def wait(self):
        """Poll until it is done or has stopped, and give STATUS."""
        for _ in range(5000):
            status = self.registers.STATUS
            if int(self.registers.HEAD) == int(self.registers.TAIL) or (int(status) & ~3 and not status.DRAINING):
                return status
        raise AssertionError(f"no end: {self.registers}")

    def run(self, invalidated=True, **options):
        self.results[:] = 0
        self.results.flush()
        self.start(**options)
        status = self.wait()
        assert int(status) == 0, repr(status)
        if invalidated:
            self.results.invalidate()
        return np.array_equal(self.results, self.expected)

    def reset(self):
        self.registers.CTRL.RESET = 1
        return any(int(self.registers.CTRL) == 0 for _ in range(1000))

    def recovers(self):
        """Say whether it resets, and the next run is right."""
        return self.reset() and int(self.registers.STATUS) == 0 and self.run()


def case_clean_runs_are_right_again_and_again():
    bench = Bench()
    assert bench.run()
    assert bench.run()


def case_each_missing_flush_gives_wrong_results():
    for name in ("weights", "vector"):
        bench = Bench()
        assert not bench.run(flushed=BUFFERS - {name}), name
        assert bench.run(), name


def case_a_ring_that_is_not_flushed_is_refused():
    bench = Bench()
    bench.start(flushed=BUFFERS - {"ring"})
    status = bench.wait()
    assert status.ERR_CONFIG, repr(status)
    assert status.ERR_CAUSE == 1, repr(status)  # rubbish is no descriptor
    assert bench.recovers()


def case_a_missing_invalidate_gives_wrong_results():
    bench = Bench()
    assert not bench.run(invalidated=False)
    bench.results.invalidate()
    assert np.array_equal(bench.results, bench.expected)


def case_a_later_change_that_is_not_flushed_is_not_seen():
    bench = Bench()
    assert bench.run()
    bench.data["weights"] = bench.data["weights"] ^ 1
    assert bench.run(flushed=BUFFERS - {"weights"})  # of the old weights, which memory still has
    assert not bench.run()


@here_only
def case_memory_without_a_cache_needs_neither():
    bench = Bench(cacheable=0)
    assert bench.run(flushed=(), invalidated=False)


@here_only
def case_part_of_a_buffer_is_flushed_alone():
    buffer = allocate((4, 1024), "u1")
    address = buffer.device_address
    buffer[:] = 7
    buffer[2].flush()
    assert buffer[2].device_address == address + 2048
    buffer.invalidate()
    assert [int(row[0]) for row in buffer] == [RUBBISH, RUBBISH, 7, RUBBISH]


def case_a_pointer_outside_memory_is_an_error():
    bench = Bench()
    for name in ("weights", "activations"):
        bench.start(**{name: NOWHERE})
        status = bench.wait()
        assert status.ERR_READ, (name, repr(status))
        assert abs(int(bench.registers.ERR_ADDR_LO) - NOWHERE) < 1 << 20, (name, repr(bench.registers))
        assert bench.recovers(), name
    bench.start(results=NOWHERE)
    status = bench.wait()
    assert status.ERR_WRITE, repr(status)
    assert bench.recovers()


def case_a_pointer_that_was_never_set_is_an_error():
    bench = Bench()
    bench.start(weights=0)
    assert bench.wait().ERR_READ
    assert bench.recovers()


def case_silent_memory_times_out():
    bench = Bench()
    bench.set(Setting.SILENT_AFTER_BEATS, 40)
    bench.start()
    for _ in range(5000):
        status = bench.registers.STATUS
        if status.ERR_TIMEOUT:
            break
    assert status.ERR_TIMEOUT, repr(status)
    assert not bench.reset()  # memory still owes beats, and they must not reach the next run
    bench.set(Setting.SILENT_AFTER_BEATS, 0)
    assert bench.recovers()


def case_a_flipped_bit_is_noticed():
    bench = Bench()
    # Activations come before the last weights do, and not every bit of their records means something.
    n_read = bench.data["weights"].nbytes + bench.n_vectors * (bench.k + bench.k // GROUP * 4)
    bench.set(Setting.FLIP_BEAT, n_read // bench.registers.CAPS.BEAT_BYTES)
    assert not bench.run()
    bench.set(Setting.FLIP_BEAT, 0)
    assert bench.run()


def case_after_an_abort_the_next_run_is_clean():
    bench = Bench()
    bench.set(Setting.LATENCY_CYCLES, 400)
    bench.start()
    assert bench.registers.STATUS.BUSY
    bench.registers.CTRL.ABORT = 1
    status = bench.wait()
    assert status.ABORTED, repr(status)
    assert int(bench.registers.HEAD) == 0
    assert bench.recovers()


def case_a_register_that_is_not_there_is_an_error():
    bench = Bench()
    for base, offset in ((bench.engine.mmio.base_addr, regs.GAP_HI + 4), (0x9000_0000, 0)):
        mmio = MMIO(base, 0x1000)
        for access, more in ((mmio.read, ()), (mmio.write, (1,))):
            try:
                access(offset, *more)
            except (OSError, RuntimeError):
                continue
            raise AssertionError(f"0x{base + offset:08X} was answered")


def case_a_wide_counter_is_read_at_once_here_and_by_halves_over_the_network():
    bench = Bench()
    assert bench.run()
    halves = bench.engine.mmio.read(regs.BEATS_LO) | bench.engine.mmio.read(regs.BEATS_HI) << 32
    assert halves == bench.data["weights"].nbytes // bench.registers.CAPS.BEAT_BYTES
    try:
        assert bench.engine.mmio.read(regs.BEATS_LO, 8) == halves
        assert not REMOTE
    except RuntimeError as exc:
        assert REMOTE
        assert "halves" in str(exc)  # noqa: PT017 - pytest is not here


def case_a_load_begins_with_a_fresh_engine():
    bench = Bench()
    assert bench.run()
    assert int(bench.registers.HEAD) == 1
    again = Overlay(BIT)
    assert int(again.e4.register_map.HEAD) == 0
    assert int(again.e4.register_map.CYCLES_LO) == 0


def case_reading_every_register_changes_nothing():
    bench = Bench()
    assert bench.run()
    before = repr(bench.registers)
    assert "CAPS" in before
    assert repr(bench.registers) == before


@here_only
def case_files_that_do_not_belong_together_are_refused():
    folder = Path(BIT).parent / "other"
    name = Device.active_device.board.config_name
    bit = write_handoff(folder, CONFIGS[name])
    Overlay(str(bit))
    hwh = bit.with_suffix(".hwh")
    hwh.write_text(hwh.read_text().replace("TIMEOUT", "TIME_OUT"))
    other = write_handoff(
        folder / "engine", CONFIGS[name.replace("gemv", "gemm") if "gemv" in name else name.replace("gemm", "gemv")]
    )
    plain = folder / "plain.bit"
    plain.write_bytes(b"no bitstream of ours")
    plain.with_suffix(".hwh").write_bytes(hwh.read_bytes())
    for refused in (bit, other, plain):
        try:
            Overlay(str(refused))
        except HandoffError:
            continue
        raise AssertionError(f"{refused} was loaded")


def case_memory_that_is_used_up_says_so_and_comes_back():
    n_bytes = 9 << 20  # of 16 MiB
    first = allocate(n_bytes, "u1")
    first[:] = np.arange(n_bytes, dtype=np.uint32).view(np.uint8)[::4]
    first.flush()
    first[:] = 0
    first.invalidate()
    assert np.array_equal(first[:: n_bytes - 1], [0, (n_bytes - 1) & 255])
    try:
        allocate(n_bytes, "u1")
    except (MemoryError, grpc.RpcError):
        pass
    else:
        raise AssertionError("more memory than there is")
    address = first.device_address
    del first
    assert allocate(n_bytes, "u1").device_address == address


def main():
    found = {}
    for name, case in list(globals().items()):
        if not name.startswith("case_") or (REMOTE and hasattr(case, "here_only")):
            continue
        try:
            case()
        except Exception:  # noqa: BLE001 - whatever it was, the next case is to run
            found[name.removeprefix("case_")] = traceback.format_exc()
        else:
            found[name.removeprefix("case_")] = None
    print(json.dumps(found))


main()
