"""A board through pynq, as far as that goes without one: pynq is a fake here; tests/fpga has the real one."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from edge_rt.devices import fpga, fpga_sim
from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga import ENGINE_TYPE, PynqPort, look, open_board
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import DeviceMemoryError, DeviceMismatchError, DeviceNotFoundError
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort


class Buffer(np.ndarray):
    """As PynqBuffer: a view knows where it begins; moved are the flushes and invalidates asked for."""

    def __new__(cls, n_bytes, moved, bo):
        self = np.zeros(n_bytes, np.uint8).view(cls)
        self.device_address, self.moved, self.bo, self.offset = 0x1000, moved, bo, 0
        return self

    def __array_finalize__(self, obj):
        if isinstance(obj, Buffer) and hasattr(obj, "moved"):
            self.moved, self.bo = obj.moved, obj.bo
            self.offset = obj.offset + self.__array_interface__["data"][0] - obj.__array_interface__["data"][0]

    def flush(self):
        self.moved.append(("flush", self.offset, self.nbytes))

    def invalidate(self):
        self.moved.append(("invalidate", self.offset, self.nbytes))


class FakePynq:
    """pynq on a board with the golden model's registers."""

    def __init__(self, *, devices=("KV260",), engines=1, fails="", **registers):
        self.port = GoldenPort(CONFIGS["kv260-gemm"], np.zeros(64, np.uint8))
        self.port._registers |= {getattr(regs, name): value for name, value in registers.items()}
        found = [SimpleNamespace(name=name) for name in devices]
        self.Device = SimpleNamespace(devices=found, active_device=found[0] if found else None)
        self.loaded, self.moved, self.fails, self.engines = [], [], fails, engines

    def Overlay(self, path):
        if self.fails:
            raise TypeError(self.fails)
        self.loaded.append(path)
        engine = {"type": ENGINE_TYPE, "phys_addr": 0xA0000000, "addr_range": 4096}
        ips = {f"e4_{i}": engine for i in range(self.engines)}
        return SimpleNamespace(ip_dict=ips | {"dma": {"type": "xilinx.com:ip:axi_dma:7.1"}, "ps": {}})

    def MMIO(self, base, length):
        assert (base, length) == (0xA0000000, 4096)
        return self.port

    def allocate(self, shape, dtype):
        if shape[0] > 1 << 20:
            raise RuntimeError("BO allocation failed: bad alloc")
        return Buffer(shape[0], self.moved, SimpleNamespace())


@pytest.fixture
def bitstream(tmp_path):
    (tmp_path / "e4.bit").write_bytes(b"\0" * 100)
    (tmp_path / "e4.hwh").write_text(f'<MODULE VLNV="{ENGINE_TYPE}"/>')
    return str(tmp_path / "e4.bit")


def root(tmp_path, free_kib):
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 4000000 kB\nCmaTotal: 1048576 kB\nCmaFree: {free_kib} kB\n")
    return SysfsRoot(tmp_path)


def test_a_board_is_described_with_its_free_memory_and_nothing_is_loaded(bitstream, tmp_path):
    pynq = FakePynq()
    seen = look(bitstream, root=root(tmp_path, 524288), find_pynq=lambda: pynq)
    assert seen == fpga.Seen(
        detail="KV260, INT4 engine of e4.bit, 512 MiB of contiguous memory free", free_bytes=524288 * 1024
    )
    assert pynq.loaded == []


def test_without_pynq_the_extra_is_named():
    seen = look("x.bit")
    if not seen.extra:
        pytest.skip("pynq is installed here")
    assert (seen.extra, "not installed" in seen.missing) == ("pynq", True)


def test_no_bitstream_says_what_to_set():
    assert "set fpga.bitstream to the e4.bit" in look("", find_pynq=FakePynq).missing


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: (p / "e4.bit").unlink(), "fpga.bitstream, .*e4.bit, is no file"),
        (lambda p: (p / "e4.hwh").unlink(), "the hand-off beside fpga.bitstream, .*e4.hwh, is no file"),
        (lambda p: (p / "e4.hwh").write_text("<MODULE/>"), f"describes no {ENGINE_TYPE}; build the bitstream"),
    ],
)
def test_files_that_do_not_fit_are_told_before_pynq_is_asked(bitstream, tmp_path, spoil, says):
    spoil(tmp_path)

    def never():
        raise AssertionError("pynq was imported")

    assert re.search(says, look(bitstream, find_pynq=never).missing)
    with pytest.raises(DeviceNotFoundError, match=says):
        open_board(bitstream, find_pynq=never)


@pytest.mark.parametrize(
    ("environ", "says"),
    [({}, "XILINX_XRT is not set.*source /etc/profile.d/xrt_setup.sh"), ({"XILINX_XRT": "/usr"}, "XRT, and root")],
)
def test_no_device_says_why_pynq_may_not_see_it(bitstream, environ, says):
    seen = look(bitstream, environ=environ, find_pynq=lambda: FakePynq(devices=()))
    assert "pynq finds no device" in seen.missing
    with pytest.raises(DeviceNotFoundError, match=says):
        open_board(bitstream, environ=environ, find_pynq=lambda: FakePynq(devices=()))


def test_what_pynq_raises_on_loading_is_told_and_the_board_is_free_again(bitstream):
    pynq = FakePynq(fails="unsupported operand")
    for _ in range(2):
        with pytest.raises(
            DeviceNotFoundError, match=r"pynq cannot load .*TypeError: unsupported operand; pynq 4 is for"
        ):
            open_board(bitstream, find_pynq=lambda: pynq)
    open_board(bitstream, find_pynq=FakePynq).close()


@pytest.mark.parametrize(
    ("change", "what", "found"),
    [
        ({"engines": 0}, f"the number of {ENGINE_TYPE} in the bitstream", "0"),
        ({"ID": 0}, "register ID", "0x0"),
        ({"BUILD": 0xABC}, "build", "0xABC"),
        ({"CAPS": 9 << regs.CAPS_VERSION[0]}, "register map", "0x9"),
    ],
)
def test_a_bitstream_of_another_rtl_is_refused_and_the_board_is_free_again(bitstream, change, what, found):
    for _ in range(2):
        with pytest.raises(DeviceMismatchError) as caught:
            open_board(bitstream, find_pynq=lambda: FakePynq(**change))
        assert (caught.value.what, caught.value.found) == (what, found)


def test_memory_is_counted_before_it_is_asked_for(bitstream, tmp_path):
    board = open_board(bitstream, root=root(tmp_path, 512), find_pynq=FakePynq)
    assert board.caps.n_vectors == 8
    with pytest.raises(DeviceMemoryError, match="cma=") as caught:
        board.allocate(600 * 1024)
    assert (caught.value.need_bytes, caught.value.free_bytes) == (600 * 1024, 512 * 1024)
    assert board.allocate(100_000).memory.nbytes == 100_000
    board.close()
    board = open_board(bitstream, root=root(tmp_path, 1 << 20), find_pynq=FakePynq)
    with pytest.raises(DeviceMemoryError):  # it was free, but not in one piece
        board.allocate(2 << 20)
    board.close()


def test_parts_of_a_buffer_move_alone():
    moved = []
    port = PynqPort(FakePynq().port, Buffer(4096, moved, SimpleNamespace()))
    port.flush(256, 64)
    port.invalidate(1024, 128)
    assert moved == [("flush", 256, 64), ("invalidate", 1024, 128)]
    assert port.base == 0x1000


def test_with_xrt_its_own_call_moves_the_part():
    """pynq's flush of a part flushes the whole buffer with XRT: some hundred megabytes for each product."""
    moved = []
    xrt = SimpleNamespace(
        xclBOSyncDirection=SimpleNamespace(XCL_BO_SYNC_BO_TO_DEVICE="to", XCL_BO_SYNC_BO_FROM_DEVICE="from")
    )
    bo = SimpleNamespace(sync=lambda *call: moved.append(call))
    port = PynqPort(FakePynq().port, Buffer(4096, [], bo), xrt=xrt)
    port.flush(256, 64)
    port.invalidate(1024, 128)
    assert moved == [("to", 64, 256), ("from", 128, 1024)]


class Clock:
    def __init__(self):
        self.now_s, self.n_sleeps = 0.0, 0

    def now(self):
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds):
        self.n_sleeps += 1
        self.now_s += seconds


def test_a_wait_ends_at_its_deadline_and_gives_the_core_away_meanwhile():
    clock = Clock()
    port = PynqPort(FakePynq().port, Buffer(64, [], SimpleNamespace()), now=clock.now, sleep=clock.sleep)
    assert not port.wait(0.1)
    assert 0.1 < clock.now_s < 0.102
    assert 1000 < clock.n_sleeps < 2100


def test_an_interrupt_ends_a_wait_even_one_that_was_overslept():
    clock, pynq = Clock(), FakePynq(IRQ_STATUS=1)
    port = PynqPort(pynq.port, Buffer(64, [], SimpleNamespace()), now=clock.now, sleep=clock.sleep)
    assert port.wait(0.0)
    assert clock.n_sleeps == 0


class OwnError(Exception):
    """As grpc.RpcError: of no kind that Python has."""


@pytest.mark.parametrize("kind", [RuntimeError, OwnError])
def test_whatever_pynq_or_xrt_raises_is_an_os_error(kind):
    def fail(*_):
        raise kind("the channel is closed")

    directions = SimpleNamespace(XCL_BO_SYNC_BO_TO_DEVICE=0, XCL_BO_SYNC_BO_FROM_DEVICE=1)
    registers, xrt = SimpleNamespace(read=fail, write=fail), SimpleNamespace(xclBOSyncDirection=directions)
    port = PynqPort(registers, Buffer(64, [], SimpleNamespace(sync=fail)), xrt=xrt)
    for call, says in (
        (lambda: port.read(regs.STATUS), "register 0x10 cannot be read: .*the channel is closed"),
        (lambda: port.write(regs.CTRL, 1), "register 0x0C cannot be written"),
        (lambda: port.wait(1.0), "register 0x18 cannot be read"),
        (lambda: port.flush(0, 64), "memory cannot be flushed: .*the channel is closed"),
        (lambda: port.invalidate(0, 64), "memory cannot be invalidated"),
    ):
        with pytest.raises(OSError, match=says):
            call()


def test_the_simulator_says_that_it_is_one_or_why_it_is_not_here():
    seen = fpga_sim.look("kv260-gemm")
    assert "simulated" in seen.detail or "verilator" in seen.missing
