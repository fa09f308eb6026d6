"""A board with the INT4 engine in its programmable logic, reached through the pynq package as it is published.

Nothing here imports pynq before a board is asked for: pynq looks for devices while it is imported, and has pins of its
own. One process has the board at a time.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.base import Reading
from edge_rt.devices.fpga_ring import OTHER_BITSTREAM, Caps, EnginePort, identify
from edge_rt.devices.memory import contiguous_bytes
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import DeviceMemoryError, DeviceMismatchError, DeviceNotFoundError
from edge_rt.regular import read_regular

ENGINE_TYPE = "edge-rt:ip:e4_top:1.0"  # as hw/fpga/vivado/build.tcl packages it
EXTRA = "pynq"
_DEVICE = "the FPGA board"
_LOCK = "\0edge_rt.fpga"  # an abstract socket: it goes with the process that has it
_MAX_HWH_BYTES = 64 * 2**20
_SPINS = 2000  # reads of a register before the processor is given away
_PAUSE_S = 50e-6
_MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look for a device has found; nothing was loaded into it.

    missing     why there is none, "" if there is one; extra: the pip extra that would bring it
    detail      one line for people
    free_bytes  that a model may take, None if unknown
    """

    missing: str = ""
    extra: str = ""
    detail: str = ""
    free_bytes: int | None = None


class Board(Protocol):
    """An engine that is ours until close, its bitstream loaded and known to be this version's."""

    caps: Caps

    def allocate(self, n_bytes: int) -> EnginePort:
        """Give the engine memory, once. Raises DeviceMemoryError."""
        ...

    def close(self) -> None: ...


def look(
    bitstream: str,
    *,
    environ: Mapping[str, str] = os.environ,
    root: SysfsRoot | None = None,
    find_pynq: Callable[[], Any] | None = None,
) -> Seen:
    """Say whether a board can be used, or what to do about it. Imports pynq, which may take long, crash or hang."""
    if find_pynq is None and importlib.util.find_spec("pynq") is None:
        return Seen(missing="pynq, which drives the board, is not installed", extra=EXTRA)
    if not bitstream:
        return Seen(missing="no bitstream is configured: set fpga.bitstream to the e4.bit that hw/fpga/vivado builds")
    try:
        _check_files(Path(bitstream))
        device = _device((find_pynq or _import_pynq)(), environ)
    except DeviceNotFoundError as exc:
        return Seen(missing=f"{exc.reason}; {exc.remedy}")
    free = contiguous_bytes(root)
    memory = "" if free.value is None else f", {free.value / 2**20:.0f} MiB of contiguous memory free"
    return Seen(detail=f"{device}, INT4 engine of {Path(bitstream).name}{memory}", free_bytes=free.value)


def open_board(
    bitstream: str,
    *,
    environ: Mapping[str, str] = os.environ,
    root: SysfsRoot | None = None,
    find_pynq: Callable[[], Any] | None = None,
) -> PynqBoard:
    """Load a bitstream into the board and give its engine.

    Raises DeviceNotFoundError where there is no board, or another process has it, and DeviceMismatchError for another
    engine than this version's.
    """
    path = Path(bitstream)
    _check_files(path)
    pynq = (find_pynq or _import_pynq)()
    _device(pynq, environ)
    lock = _take()
    try:
        try:
            overlay = pynq.Overlay(str(path))
        except Exception as exc:
            reason = f"pynq cannot load {path}: {_words(exc)}"
            remedy = "pynq 4 is for Zynq UltraScale+, 3.1 for Zynq-7000; loading takes root"
            raise DeviceNotFoundError(device=_DEVICE, reason=reason, remedy=remedy) from exc
        return PynqBoard(pynq, overlay, root, lock)
    except BaseException:
        lock.close()
        raise


class PynqBoard:
    """The engine of a loaded overlay."""

    def __init__(self, pynq: Any, overlay: Any, root: SysfsRoot | None, lock: socket.socket | None = None) -> None:
        self._pynq, self._overlay, self._root, self._lock = pynq, overlay, root, lock
        engines = [ip for ip in overlay.ip_dict.values() if ip.get("type") == ENGINE_TYPE]
        if len(engines) != 1:
            raise DeviceMismatchError(
                device=_DEVICE,
                what=f"the number of {ENGINE_TYPE} in the bitstream",
                found=str(len(engines)),
                wanted="1",
                remedy=OTHER_BITSTREAM,
            )
        self._mmio = pynq.MMIO(engines[0]["phys_addr"], engines[0]["addr_range"])
        self.caps = identify(self._mmio, _DEVICE)

    def allocate(self, n_bytes: int) -> PynqPort:
        free = contiguous_bytes(self._root)
        if free.value is not None and free.value < n_bytes:
            raise _too_little(n_bytes, free)
        try:
            buffer = self._pynq.allocate((n_bytes,), np.uint8)
        except Exception as exc:
            raise _too_little(n_bytes, free) from exc
        return PynqPort(self._mmio, buffer)

    def close(self) -> None:
        """Stop the engine and let others have the board; its memory goes with the port's buffer."""
        with suppress(OSError, RuntimeError):
            self._mmio.write(regs.CTRL, 1 << regs.CTRL_RESET[0])
        if self._lock is not None:
            self._lock.close()


class PynqPort:
    """One engine through pynq: registers by MMIO, memory in one contiguous buffer that only flush and invalidate move.

    xrt  XRT's Python module, which pynq's drivers for boards use; None imports it where the buffer is one of XRT's
    """

    def __init__(
        self,
        mmio: Any,
        buffer: Any,
        *,
        xrt: Any = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._mmio, self._buffer, self._now, self._sleep = mmio, buffer, now, sleep
        self.memory: NDArray[np.uint8] = np.asarray(buffer).view(np.ndarray)
        self.base = int(buffer.device_address)
        # A flush of a part of a buffer flushes all of it with pynq's drivers for boards, 3.1 and 4.0; XRT itself can.
        self._sync = getattr(buffer.bo, "sync", None)
        if self._sync is not None:
            directions = (xrt or import_module("pyxrt")).xclBOSyncDirection
            self._to_device = directions.XCL_BO_SYNC_BO_TO_DEVICE
            self._from_device = directions.XCL_BO_SYNC_BO_FROM_DEVICE

    def read(self, offset: int) -> int:
        try:
            return int(self._mmio.read(offset))
        except Exception as exc:  # PYNQ.remote's RuntimeError, and gRPC's own
            raise OSError(f"register 0x{offset:02X} cannot be read: {_words(exc)}") from exc

    def write(self, offset: int, value: int) -> None:
        try:
            self._mmio.write(offset, value)
        except Exception as exc:
            raise OSError(f"register 0x{offset:02X} cannot be written: {_words(exc)}") from exc

    def flush(self, at: int, n_bytes: int) -> None:
        try:
            if self._sync is not None:
                self._sync(self._to_device, n_bytes, at)
            else:
                self._buffer[at : at + n_bytes].flush()
        except Exception as exc:  # XRT's RuntimeError, too
            raise OSError(f"memory cannot be flushed: {_words(exc)}") from exc

    def invalidate(self, at: int, n_bytes: int) -> None:
        try:
            if self._sync is not None:
                self._sync(self._from_device, n_bytes, at)
            else:
                self._buffer[at : at + n_bytes].invalidate()
        except Exception as exc:
            raise OSError(f"memory cannot be invalidated: {_words(exc)}") from exc

    def wait(self, limit_s: float) -> bool:
        """Poll: pynq's interrupts need an event loop, and a product takes less time than a thread takes to wake."""
        end_s = self._now() + limit_s
        n_reads = 0
        while self.read(regs.IRQ_STATUS) == 0:
            if self._now() > end_s:  # this process may have waited for a core itself: the last look counts
                return self.read(regs.IRQ_STATUS) != 0
            n_reads += 1
            if n_reads > _SPINS:
                self._sleep(_PAUSE_S)
        return True

    def pause(self, seconds: float) -> None:
        self._sleep(seconds)


def _check_files(bitstream: Path) -> None:
    """Look at a bitstream's files. Raises DeviceNotFoundError."""
    hwh = bitstream.with_suffix(".hwh")
    for path, what in ((bitstream, "fpga.bitstream"), (hwh, "the hand-off beside fpga.bitstream")):
        if not path.is_file():
            remedy = "copy both e4.bit and e4.hwh of one build into one folder"
            raise DeviceNotFoundError(device=_DEVICE, reason=f"{what}, {path}, is no file", remedy=remedy)
    try:
        text = read_regular(hwh, _MAX_HWH_BYTES)
    except OSError as exc:
        reason = f"{hwh} cannot be read: {exc.strerror or exc}"
        raise DeviceNotFoundError(device=_DEVICE, reason=reason, remedy="let this user read it") from exc
    if ENGINE_TYPE.encode() not in text:
        reason = f"{hwh} describes no {ENGINE_TYPE}"
        raise DeviceNotFoundError(device=_DEVICE, reason=reason, remedy=OTHER_BITSTREAM)


def _import_pynq() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of every machine that is no board
            return import_module("pynq")
    except Exception as exc:
        remedy = f"install the extra `{EXTRA}` in one pip call with the others"
        reason = f"pynq cannot be imported: {_words(exc)}"
        raise DeviceNotFoundError(device=_DEVICE, reason=reason, remedy=remedy) from exc


def _device(pynq: Any, environ: Mapping[str, str]) -> str:
    """Name the device that pynq uses. Raises DeviceNotFoundError."""
    try:
        devices = pynq.Device.devices
    except Exception as exc:
        reason = f"pynq cannot look for devices: {_words(exc)}"
        raise DeviceNotFoundError(device=_DEVICE, reason=reason, remedy="run it as root, on a board") from exc
    if devices:
        return str(pynq.Device.active_device.name)
    if "XILINX_XRT" not in environ:
        remedy = "on a board run `source /etc/profile.d/xrt_setup.sh` first, or set XILINX_XRT=/usr in the unit"
        reason = "pynq finds no device, and XILINX_XRT is not set, without which it does not look for one"
    else:
        reason, remedy = "pynq finds no device", "it needs a board with XRT, and root"
    raise DeviceNotFoundError(device=_DEVICE, reason=reason, remedy=remedy)


def _take() -> socket.socket:
    """Keep the board for this process. Raises DeviceNotFoundError where another has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(_LOCK)
    except OSError as exc:
        lock.close()
        remedy = "unload the model that uses it: one engine serves one model at a time"
        raise DeviceNotFoundError(device=_DEVICE, reason="another process has it", remedy=remedy) from exc
    return lock


def _too_little(n_bytes: int, free: Reading[int]) -> DeviceMemoryError:
    return DeviceMemoryError(
        device=_DEVICE,
        kind="contiguous memory (CMA)",
        need_bytes=n_bytes,
        free_bytes=-1 if free.value is None else free.value,
        remedy="boot with a larger cma= on the kernel's command line, end what else has it, or take a smaller model",
    )


def _words(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"[:_MAX_REASON]
